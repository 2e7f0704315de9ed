"""sequence_aux_loss in plain PyTorch, with the order of operations that the kernels have.

Per sequence: the tiles of aux_loss, counted from the sequence's first token, then a tree over them.
Then a tree over the sequences. So a sequence's sum does not depend on where it lies.

A tile's sum lies in a slot of the workspace. Sequence b begins at slot b * tiles for batch-first
probs. In a pack it begins at slot start // tile + b, which leaves room for the tiles of every
sequence before it, whatever their lengths, and needs no prefix sum.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..fixed_order import num_tiles, tile_sums, tile_tokens, tree_sum


def num_slots(num_tokens: int, num_sequences: int, num_columns: int) -> int:
    """Slots for the tiles of any cut of ``num_tokens`` tokens into ``num_sequences``."""
    return num_tokens // tile_tokens(num_columns) + num_sequences


def sequences(
    probs: Tensor, cu_seqlens: Tensor | None, token_mask: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """(first slot, probs [length, experts], mask [length]) of each sequence.

    Bounds outside the pack are clamped to it, and an end before its start makes an empty sequence.
    """
    if cu_seqlens is None:
        tiles = num_tiles(probs.shape[1], probs.shape[2])
        for b in range(probs.shape[0]):
            yield b * tiles, probs[b], None if token_mask is None else token_mask[b]
        return
    num_tokens, num_columns = probs.shape
    bounds = cu_seqlens.clamp(0, num_tokens).tolist()
    for b, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = slice(start, max(start, end))
        first = start // tile_tokens(num_columns) + b
        yield first, probs[own], None if token_mask is None else token_mask[own]


def tile_lengths(length: int, num_columns: int, token_mask: Tensor | None) -> Tensor:
    """Unmasked tokens of each tile of one sequence: int32 [tiles]."""
    counted = torch.ones(length, dtype=torch.int32)
    if token_mask is not None:
        counted = token_mask.to(torch.int32)
    tokens = tile_tokens(num_columns)
    padding = num_tiles(length, num_columns) * tokens - length
    padded = torch.nn.functional.pad(counted, (0, padding))
    return padded.view(-1, tokens).sum(1, dtype=torch.int32)


def loss_from_sums(
    sums: Tensor, lengths: Tensor, num_experts: int, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    """(loss, C [sequences]): C[b] = num_experts * coeff / topk / L / L / (non-empty sequences).

    In float64, in this order, rounded once; 0 for an empty sequence.
    """
    length = lengths.to(torch.float64)
    non_empty = (lengths > 0).sum().to(torch.float64)
    # A Python float over a tensor is a reciprocal times the float, which rounds once more.
    scales = torch.full_like(length, num_experts * coeff / topk) / length / length / non_empty
    scales = torch.where(lengths > 0, scales, 0.0).to(sums.dtype)
    # A sequence without tokens is skipped even where its counts are NaN.
    return tree_sum(torch.where(lengths > 0, scales * sums, 0.0), dim=0), scales


def sequence_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    coeff: float,
    cu_seqlens: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    """The loss by the order that the op has, differentiable by autograd, on the CPU."""
    sums, lengths = [], []
    for b, (_, own, mask) in enumerate(sequences(probs, cu_seqlens, token_mask)):
        sums.append(tree_sum(tile_sums(own, tokens_per_expert[b], mask), dim=0))
        lengths.append(tile_lengths(own.shape[0], own.shape[1], mask).sum())
    return loss_from_sums(torch.stack(sums), torch.stack(lengths), probs.shape[-1], topk, coeff)[0]
