"""The losses in plain PyTorch, with the order of operations that the kernels have.

Tokens are cut into tiles. Per tile: sum over its tokens, times the counts, sum over the columns;
then sum over the tiles. Every sum is a binary tree of adjacent pairs, so any aligned power-of-two
group of leaves can be summed on its own without changing a bit.

Of sequences, the tiles are counted from each sequence's first token, with a tree over them, then a
tree over the sequences: a sequence's sum does not depend on where it lies. A tile's sum lies in a
slot of the scratch. Sequence b begins at slot b * tiles for batch-first probs. In a pack it begins
at slot start // tile + b, which leaves room for the tiles of every sequence before it, whatever
their lengths, and needs no prefix sum.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..fixed_order import accumulator_dtype, tree_sum

MAX_TILE_TOKENS = 512
MIN_TILE_TOKENS = 8
TILE_ELEMENTS = 8192
# The finest chunk of columns that a kernel cuts a tile into; it bounds the workspace.
MIN_CHUNK_COLUMNS = 64


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


def max_chunks(num_columns: int) -> int:
    """The most chunks, a power of two, that a kernel cuts the columns of a tile into."""
    chunks = 1
    while chunks * MIN_CHUNK_COLUMNS < num_columns:
        chunks *= 2
    return chunks


def tile_sums(probs: Tensor, counts: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """sum_c counts[c] * sum_{t in tile} probs[t, c] for each tile of [T, columns]: [tiles].

    A sum over the tokens of the tile, times the counts, then a sum over the columns. Masked tokens
    keep their place in the tile and add zero, whatever they hold.
    """
    num_tokens, num_columns = probs.shape
    dtype = accumulator_dtype(probs.dtype)
    tiles, tokens = num_tiles(num_tokens, num_columns), tile_tokens(num_columns)
    if token_mask is not None:
        probs = torch.where(token_mask[:, None], probs, 0.0)
    x = torch.nn.functional.pad(probs.to(dtype), (0, 0, 0, tiles * tokens - num_tokens))
    column_sums = tree_sum(x.view(tiles, tokens, num_columns), dim=1)
    return tree_sum(column_sums * counts.to(dtype), dim=1)


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


def padded_sequences(
    partials: Tensor, probs: Tensor, tokens_per_expert: Tensor, cu_seqlens: Tensor | None, size: int
) -> Tensor:
    """[sequences, size]: the sums of each sequence's tiles, of ``partials`` [slots, X], then zeros.

    A sequence of more tiles loses those beyond: ``size`` is to be enough for all the tokens.
    """
    starts, lengths = spans(probs, cu_seqlens)
    tokens = tile_tokens(probs.shape[-1])
    sequences = torch.arange(tokens_per_expert.shape[0], device=probs.device)
    first = starts // tokens + sequences
    if cu_seqlens is None:
        first = sequences * num_tiles(probs.shape[1], probs.shape[2])
    tiles = (lengths + tokens - 1) // tokens
    place = torch.arange(size, device=probs.device)
    sums = tree_sum(partials, dim=1)
    if not sums.shape[0]:
        return sums.new_zeros(tokens_per_expert.shape[0], size)
    slots = (first[:, None] + place).clamp(max=sums.shape[0] - 1)
    return torch.where(place < tiles[:, None], sums[slots], 0.0)


def spans(probs: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(first token, number of tokens) int64 of each sequence, masked ones included."""
    if cu_seqlens is None:
        starts = torch.zeros(probs.shape[0], dtype=torch.int64, device=probs.device)
        return starts, torch.full_like(starts, probs.shape[1])
    bounds = cu_seqlens.long().clamp(0, probs.shape[0])
    return bounds[:-1], (bounds[1:] - bounds[:-1]).clamp(min=0)
