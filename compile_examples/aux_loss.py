"""aux_loss in a compiled router: one graph for every token count, no workspace allocation per step.

Run it: python compile_examples/aux_loss.py
"""

import torch

from moe_custom_ops import aux_loss, aux_loss_workspace_size, make_workspace

NUM_EXPERTS, TOPK, COEFF, MAX_TOKENS = 64, 8, 1e-2, 4096


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    workspace = make_workspace(aux_loss_workspace_size(MAX_TOKENS, NUM_EXPERTS), device)

    @torch.compile(fullgraph=True, dynamic=True)
    def router_loss(logits: torch.Tensor) -> torch.Tensor:
        probs = logits.softmax(-1)
        expert_ids = probs.topk(TOPK).indices
        experts = torch.arange(NUM_EXPERTS, device=logits.device)
        tokens_per_expert = (expert_ids.reshape(-1, 1) == experts).sum(0)
        num_tokens = logits.shape[0]
        return aux_loss(probs, tokens_per_expert, num_tokens, NUM_EXPERTS, TOPK, COEFF, workspace)

    for num_tokens in (4096, 1000, 37):
        logits = torch.randn(num_tokens, NUM_EXPERTS, device=device, requires_grad=True)
        loss = router_loss(logits)
        loss.backward()
        print(
            f"{num_tokens:5d} tokens: loss {loss.item():.6f}, |gradient| {logits.grad.norm():.3e}"
        )
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"compiled graphs: {graphs}")


if __name__ == "__main__":
    main()
