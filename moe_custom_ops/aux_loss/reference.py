"""aux_loss in plain PyTorch, with the order of operations that the kernels have.

Tokens are cut into tiles. Per tile: sum over its tokens, times the counts, sum over the columns;
then sum over the tiles. Every sum is a binary tree of adjacent pairs, so any aligned power-of-two
group of leaves can be summed on its own without changing a bit.
"""

import torch
from torch import Tensor

from ..fixed_order import tile_sums, tree_sum


def loss_from_tile_sums(
    sums: Tensor, total_num_tokens: Tensor | int, num_experts: int, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    """(loss, C): C = num_experts * coeff / topk / total / total in float64, rounded once.

    Both are 0 where the total is 0.
    """
    total = torch.as_tensor(total_num_tokens, device=sums.device).reshape(()).to(torch.float64)
    # A Python float over a tensor is a reciprocal times the float, which rounds once more.
    scale = torch.full_like(total, num_experts * coeff / topk) / total / total
    zero = sums.new_zeros(())
    scale = torch.where(total == 0, zero, scale.to(sums.dtype))
    return torch.where(total == 0, zero, scale * tree_sum(sums, dim=0)), scale


def aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    token_mask: Tensor | None = None,
) -> Tensor:
    """The loss by the order that the op has, differentiable by autograd, on any device."""
    sums = tile_sums(probs, tokens_per_expert, token_mask)
    return loss_from_tile_sums(sums, total_num_tokens, num_experts, topk, coeff)[0]
