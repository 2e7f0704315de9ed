"""Triton kernels of sequence_aux_loss: the tiles, the tree of each sequence, the tree over all.

Bounds in ``cu_seqlens`` are clamped to the pack, so no value of theirs reads outside it.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import accumulator_dtype, next_power_of_2, num_tiles, tile_tokens
from ..triton_common import (
    PREFETCH_FRACTION,
    TRITON_DTYPES,
    Launch,
    few_programs,
    float64_from_bits,
    num_chunks,
    prefetch_tile,
    strides,
    sum_tokens,
    tile_options,
    tree_sum,
    tree_sum_rows,
    wait_for_previous_kernel,
)
from ..triton_common import (
    grad_rows as grad_rows,
)

# Sequence bounds that one step of the search compares, and sums that one step of a tree adds.
SEARCH_BLOCK = 1024
TREE_BLOCK = 1024


@triton.jit
def _bound(cu_seqlens_ptr, index, stride_cu, num_tokens, mask):
    bound = tl.load(cu_seqlens_ptr + index * stride_cu, mask=mask, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(bound, 0), num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def _sequence_tile_sums_kernel(
    probs_ptr,
    tokens_per_expert_ptr,
    cu_seqlens_ptr,
    token_mask_ptr,
    partials_ptr,
    tile_lengths_ptr,
    num_tokens,
    num_sequences,
    num_columns,
    stride_b,
    stride_t,
    stride_c,
    stride_nb,
    stride_n,
    stride_cu,
    stride_mb,
    stride_m,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ACC: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``num_tokens`` is that of the pack, or of each sequence of a batch."""
    pid = tl.program_id(0).to(tl.int64)
    slot = pid // CHUNKS
    first_column = (pid % CHUNKS) * BLOCK_C
    tiles = (num_tokens + BLOCK_T - 1) // BLOCK_T
    # The bounds of a pack may not be read yet; this is near the tokens that they will give.
    near_ptr = probs_ptr if cu_seqlens_ptr is not None else probs_ptr + slot // tiles * stride_b
    near_token = (slot if cu_seqlens_ptr is not None else slot % tiles) * BLOCK_T
    prefetch_tile(
        near_ptr,
        near_token,
        first_column,
        num_tokens,
        num_columns,
        stride_t,
        stride_c,
        BLOCK_T // PREFETCH_FRACTION,
        BLOCK_C,
        OVERLAP,
    )
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    if cu_seqlens_ptr is not None:
        # The sequence whose slots hold this one is the last that begins at it or before it. Its
        # bounds come from the same loads: to load them by its number cost a further latency.
        sequence = slot * 0 - 1
        start = slot * 0
        end = slot * 0 + num_tokens
        for block in range(0, num_sequences + 1, BLOCK_B):
            b = block + tl.arange(0, BLOCK_B).to(tl.int64)
            bounds = _bound(cu_seqlens_ptr, b, stride_cu, num_tokens, b <= num_sequences)
            begun = (bounds // BLOCK_T + b <= slot) & (b < num_sequences)
            later = (begun == 0) & (b <= num_sequences)
            sequence += tl.sum(begun.to(tl.int64), axis=0)
            start = tl.maximum(start, tl.max(tl.where(begun, bounds, 0), axis=0))
            end = tl.minimum(end, tl.min(tl.where(later, bounds, num_tokens), axis=0))
        # Where no sequence begins so early, nothing reads the slot.
        unused = sequence < 0
        sequence = tl.maximum(sequence, 0)
        tile = tl.maximum(slot - (start // BLOCK_T + sequence), 0)
        length = tl.where(unused, 0, end - start)
        first = start
    else:
        sequence = slot // tiles
        tile = slot % tiles
        length = num_tokens
        first = slot * 0
    columns = first_column + tl.arange(0, BLOCK_C)
    column_mask = columns < num_columns
    GROUP_TOKENS: tl.constexpr = BLOCK_T // GROUPS
    tokens = tile * BLOCK_T + tl.arange(0, GROUPS) * GROUP_TOKENS
    own_probs_ptr = probs_ptr + sequence * stride_b + first * stride_t
    ptrs = own_probs_ptr + tokens[:, None] * stride_t + columns[None, :] * stride_c
    own_mask_ptr = token_mask_ptr
    if token_mask_ptr is not None:
        own_mask_ptr = token_mask_ptr + sequence * stride_mb + first * stride_m
    sums = sum_tokens(
        ptrs,
        own_mask_ptr,
        tokens,
        length,
        stride_t,
        stride_m,
        column_mask,
        GROUP_TOKENS,
        ACC,
    )
    counts_ptr = tokens_per_expert_ptr + sequence * stride_nb
    counts = tl.load(counts_ptr + columns * stride_n, mask=column_mask, other=0).to(ACC)
    products = tree_sum_rows(sums) * counts
    tl.store(partials_ptr + pid + tl.arange(0, 1), tree_sum(tl.reshape(products, [1, BLOCK_C])))

    if pid % CHUNKS == 0:
        own_tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        counted = own_tokens < length
        if token_mask_ptr is not None:
            kept = tl.load(own_mask_ptr + own_tokens * stride_m, mask=counted, other=0)
            counted = counted & (kept != 0)
        tl.store(tile_lengths_ptr + slot, tl.sum(counted.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_tokens"])
def _sequence_sums_kernel(
    partials_ptr,
    tile_lengths_ptr,
    cu_seqlens_ptr,
    sums_ptr,
    lengths_ptr,
    num_tokens,
    stride_cu,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    sequence = tl.program_id(0).to(tl.int64)
    if cu_seqlens_ptr is not None:
        start = _bound(cu_seqlens_ptr, sequence, stride_cu, num_tokens, True)
        end = _bound(cu_seqlens_ptr, sequence + 1, stride_cu, num_tokens, True)
        tiles = (tl.maximum(end - start, 0) + BLOCK_T - 1) // BLOCK_T
        slot = start // BLOCK_T + sequence
    else:
        tiles = (num_tokens + BLOCK_T - 1) // BLOCK_T + sequence * 0
        slot = sequence * tiles
    index = tl.arange(0, BLOCK).to(tl.int64)
    blocks = tl.arange(0, MAX_BLOCKS)
    block_sums = tl.zeros([MAX_BLOCKS], ACC)
    length = tl.zeros([BLOCK], tl.int64)
    for block in range(MAX_BLOCKS):
        own = block * BLOCK + index
        mask = own < tiles * CHUNKS
        partials = tl.load(partials_ptr + slot * CHUNKS + own, mask=mask, other=0.0)
        block_sums = tl.where(
            blocks == block, tree_sum(tl.reshape(partials, [1, BLOCK])), block_sums
        )
        length += tl.load(tile_lengths_ptr + slot + own, mask=own < tiles, other=0).to(tl.int64)
    tl.store(
        sums_ptr + sequence + tl.arange(0, 1), tree_sum(tl.reshape(block_sums, [1, MAX_BLOCKS]))
    )
    tl.store(lengths_ptr + sequence, tl.sum(length, axis=0))


@triton.jit(do_not_specialize=["scale_bits", "num_sequences"])
def _sequence_loss_kernel(
    sums_ptr,
    lengths_ptr,
    loss_ptr,
    scales_ptr,
    scale_bits: tl.int64,
    num_sequences,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    index = tl.arange(0, BLOCK).to(tl.int64)
    non_empty = tl.zeros([BLOCK], tl.int64)
    for block in range(MAX_BLOCKS):
        b = block * BLOCK + index
        lengths = tl.load(lengths_ptr + b, mask=b < num_sequences, other=0)
        non_empty += (lengths > 0).to(tl.int64)
    count = tl.sum(non_empty, axis=0).to(tl.float64)
    numerator = float64_from_bits(scale_bits)
    blocks = tl.arange(0, MAX_BLOCKS)
    block_sums = tl.zeros([MAX_BLOCKS], ACC)
    for block in range(MAX_BLOCKS):
        b = block * BLOCK + index
        length = tl.load(lengths_ptr + b, mask=b < num_sequences, other=0).to(tl.float64)
        scales = tl.where(length > 0.0, numerator / length / length / count, 0.0).to(ACC)
        sums = tl.load(sums_ptr + b, mask=b < num_sequences, other=0.0)
        tl.store(scales_ptr + b, scales, mask=b < num_sequences)
        # A sequence without tokens is skipped even where its counts are NaN.
        terms = tl.where(length > 0.0, scales * sums, 0.0)
        block_sums = tl.where(blocks == block, tree_sum(tl.reshape(terms, [1, BLOCK])), block_sums)
    tl.store(loss_ptr + tl.arange(0, 1), tree_sum(tl.reshape(block_sums, [1, MAX_BLOCKS])))


def _blocks(count: int) -> tuple[int, int]:
    """(leaves per step, steps) of a tree over ``count`` leaves, both powers of two."""
    block = min(next_power_of_2(count), TREE_BLOCK)
    return block, next_power_of_2(triton.cdiv(count, block))


def tile_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    num_slots: int,
    num_warps: int | None = None,
) -> Launch:
    """Of (probs, tokens_per_expert, cu_seqlens, token_mask as bytes, partials, tile_lengths).

    Writes each slot's weighted sums to ``partials``, its number of tokens to ``tile_lengths``.
    """
    num_tokens, num_columns = probs.shape[-2:]
    num_sequences = tokens_per_expert.shape[0]
    slots = num_slots if num_sequences else 0
    if cu_seqlens is None:
        slots = num_sequences * num_tiles(num_tokens, num_columns)
    chunks = num_chunks(num_slots, num_columns)
    block_t, block_c = tile_tokens(num_columns), next_power_of_2(num_columns) // chunks
    few = slots * chunks <= few_programs(probs.device)
    return Launch(
        _sequence_tile_sums_kernel,
        slots * chunks,
        probs.device,
        num_tokens,
        num_sequences,
        num_columns,
        *(0, *probs.stride())[-3:],
        *tokens_per_expert.stride(),
        *strides(cu_seqlens, 1),
        *(0, *strides(token_mask, 2))[-2:],
        CHUNKS=chunks,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        BLOCK_B=min(next_power_of_2(num_sequences + 1), SEARCH_BLOCK),
        ACC=TRITON_DTYPES[accumulator_dtype(probs.dtype)],
        RUN_AHEAD=not few,
        overlap=True,
        **tile_options(block_t, block_c, probs, few, num_warps),
    )


def loss_from_tile_sums(
    probs: Tensor, tokens_per_expert: Tensor, cu_seqlens: Tensor | None, num_slots: int
) -> tuple[Launch, Launch]:
    """The first of (partials, tile_lengths, cu_seqlens, sums, lengths) adds the slots of each
    sequence: the weighted ones to ``sums`` [sequences], the numbers of tokens to ``lengths`` int64.

    The second of (sums, lengths, loss, scales, bits of num_experts * coeff / topk as a float64)
    adds the sequences, and writes the loss and the scale [sequences] of each, which may replace the
    sums.
    """
    num_tokens, num_columns = probs.shape[-2:]
    num_sequences = tokens_per_expert.shape[0]
    acc = TRITON_DTYPES[accumulator_dtype(probs.dtype)]
    chunks = num_chunks(num_slots, num_columns)
    block, steps = _blocks(num_tiles(num_tokens, num_columns) * chunks)
    add_slots = Launch(
        _sequence_sums_kernel,
        num_sequences,
        probs.device,
        num_tokens,
        *strides(cu_seqlens, 1),
        CHUNKS=chunks,
        BLOCK_T=tile_tokens(num_columns),
        BLOCK=block,
        MAX_BLOCKS=steps,
        ACC=acc,
        num_warps=4,
        overlap=True,
    )
    block, steps = _blocks(num_sequences)
    add_sequences = Launch(
        _sequence_loss_kernel,
        1,
        probs.device,
        num_sequences,
        BLOCK=block,
        MAX_BLOCKS=steps,
        ACC=acc,
        num_warps=4,
        overlap=True,
    )
    return add_slots, add_sequences
