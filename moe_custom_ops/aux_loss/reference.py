"""aux_loss in plain PyTorch, with the order of operations that the kernels have.

Tokens are cut into tiles. Per tile: sum over its tokens, times the counts, sum over the columns;
then sum over the tiles. Every sum is a binary tree of adjacent pairs, so any aligned power-of-two
group of leaves can be summed on its own without changing a bit.
"""

import torch
from torch import Tensor

from ..fixed_order import accumulator_dtype, tree_sum

MAX_TILE_TOKENS = 512
MIN_TILE_TOKENS = 8
TILE_ELEMENTS = 8192


def tile_tokens(num_columns: int) -> int:
    """Tokens per tile: a power of two that depends on the number of columns alone.

    Written as comparisons so that a symbolic number of columns is bounded, not fixed, by it.
    """
    tokens = MAX_TILE_TOKENS
    while tokens > MIN_TILE_TOKENS and tokens * num_columns > TILE_ELEMENTS:
        tokens //= 2
    return tokens


def num_tiles(num_tokens: int, num_columns: int) -> int:
    tokens = tile_tokens(num_columns)
    return (num_tokens + tokens - 1) // tokens


def tile_sums(probs: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """sum_c tokens_per_expert[c] * sum_{t in tile} probs[t, c] for each tile: [tiles]."""
    num_tokens, num_columns = probs.shape
    dtype = accumulator_dtype(probs.dtype)
    tiles = num_tiles(num_tokens, num_columns)
    tokens = tile_tokens(num_columns)
    padding = tiles * tokens - num_tokens
    x = torch.nn.functional.pad(probs.to(dtype), (0, 0, 0, padding))
    column_sums = tree_sum(x.view(tiles, tokens, num_columns), dim=1)
    return tree_sum(column_sums * tokens_per_expert.to(dtype), dim=1)


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
) -> Tensor:
    """The loss by the order that the op has, differentiable by autograd, on any device."""
    sums = tile_sums(probs, tokens_per_expert)
    return loss_from_tile_sums(sums, total_num_tokens, num_experts, topk, coeff)[0]
