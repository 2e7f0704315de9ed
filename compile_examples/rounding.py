"""How far a bf16 combine is from float64: this package's, and that of installed frameworks.

Every expert multiplies by a power of two, which is exact, so all that rounds is the weighted sum of
a token's rows. Relative error in norm, on the CPU.

Run it: python compile_examples/rounding.py
"""

import warnings
from types import SimpleNamespace

import torch
from torch import Tensor

from moe_custom_ops import expert_permutation, permute, weighted_restore

TOKENS, TOPK, EXPERTS, HIDDEN = 512, 8, 64, 256
FACTORS = 2.0 ** (torch.arange(EXPERTS) % 5 - 2)


def ours(tokens: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    order, _, offsets = expert_permutation(ids, EXPERTS)
    rows = permute(tokens, order, TOPK)
    expert = torch.searchsorted(offsets, torch.arange(len(rows), dtype=torch.int32), right=True)
    return weighted_restore(rows * FACTORS[expert].to(rows)[:, None], scores, order)


def by_transformers(tokens: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    eye = torch.eye(HIDDEN).expand(EXPERTS, -1, -1)
    experts = SimpleNamespace(
        num_experts=EXPERTS,
        has_gate=False,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        _is_expert_parallel=False,
        act_fn=torch.nn.Identity(),
        up_proj=eye.to(tokens).contiguous(),
        down_proj=(eye * FACTORS[:, None, None]).to(tokens),
    )
    return grouped_mm_experts_forward(experts, tokens, ids, scores)


def by_torchtitan(tokens: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    dispatcher = LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK).build()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    rows, counts, metadata = dispatcher.dispatch(tokens, scores, ids, counts)
    factors = FACTORS.repeat_interleave(counts).to(rows)
    return dispatcher.combine(rows * factors[:, None], metadata, tokens)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    scores, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(TOPK)
    tokens = torch.randn(TOKENS, HIDDEN).bfloat16()
    ways = {"moe_custom_ops": ours, "Transformers": by_transformers, "torchtitan": by_torchtitan}
    for dtype in (torch.float32, torch.bfloat16):
        typed = scores.to(dtype)
        weights = (typed.double() * FACTORS[ids]).sum(1, keepdim=True)
        exact = tokens.double() * weights
        for name, combine in ways.items():
            try:
                out = combine(tokens, typed, ids)
            except ImportError as error:
                print(f"{name}: not installed ({error.name})")
                continue
            error_norm = (out.double() - exact).norm() / exact.norm()
            print(f"{name}, {str(dtype)[6:]} scores: {error_norm:.2e}")


if __name__ == "__main__":
    main()
