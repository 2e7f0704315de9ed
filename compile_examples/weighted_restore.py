"""weighted_restore as the combine step of a layer: expert-major rows back to [batch, seq, hidden].

Run it: python compile_examples/weighted_restore.py
"""

import torch

from moe_custom_ops import expert_permutation, permute, weighted_restore

BATCH, SEQ, HIDDEN, NUM_EXPERTS, TOPK = 4, 128, 256, 16, 4


@torch.compile(fullgraph=True)
def combine(
    expert_rows: torch.Tensor,
    top_scores: torch.Tensor,
    token_indices_sorted: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    return weighted_restore(expert_rows, top_scores, token_indices_sorted, addend=residual)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    logits = torch.randn(BATCH, SEQ, NUM_EXPERTS, device=device)
    top_scores, expert_ids = logits.softmax(-1).topk(TOPK)
    top_scores.requires_grad_()
    # Row i of the expert-major order holds the flat assignment token * TOPK + k.
    token_indices_sorted, _, _ = expert_permutation(expert_ids, NUM_EXPERTS)

    tokens = torch.randn(BATCH, SEQ, HIDDEN, device=device)
    rows = permute(tokens.flatten(0, 1), token_indices_sorted, TOPK).requires_grad_()
    out = combine(rows, top_scores, token_indices_sorted, tokens)
    out.square().mean().backward()

    # The experts here are the identity, so the layer scales each token by 1 + its scores' sum.
    expected = tokens * (1 + top_scores.sum(-1, keepdim=True))
    error = (out - expected).abs().max() / expected.abs().max()
    print(f"result {list(out.shape)}, relative error against the closed form {error:.1e}")
    print(f"gradients: rows {list(rows.grad.shape)}, scores {list(top_scores.grad.shape)}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
