"""Triton kernels of the losses: sums of tiles, trees over them, and rows of the gradient.

Bounds in ``cu_seqlens`` are clamped to the pack, so no value of theirs reads outside it.
"""

import triton
import triton.language as tl

from ..triton_common import (
    cast,
    float64_from_bits,
    prefetch_tile,
    tree_sum,
    tree_sum_rows,
    wait_for_previous_kernel,
    widen,
)

# The part of a tile that is prefetched: what the DRAM delivers until the previous kernel has ended.
# On an H200 half of a tile made the kernel slower.
PREFETCH_FRACTION = tl.constexpr(8)


@triton.jit
def sum_tokens(
    ptrs,
    token_mask_ptr,
    tokens,
    num_tokens,
    stride_t,
    stride_m,
    column_mask,
    COUNT: tl.constexpr,
    ACC: tl.constexpr,
):
    """Tree over ``COUNT`` consecutive tokens of each group, in registers: [GROUPS, BLOCK_C].

    ``ptrs`` and ``tokens`` are those of the groups' first tokens. A masked token is not read.
    """
    if COUNT == 1:
        token_mask = tokens < num_tokens
        if token_mask_ptr is not None:
            kept = tl.load(token_mask_ptr + tokens * stride_m, mask=token_mask, other=0) != 0
            token_mask = token_mask & kept
        mask = token_mask[:, None] & column_mask[None, :]
        # Each value is read once.
        probs = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
        return widen(probs, ACC)
    else:
        HALF: tl.constexpr = COUNT // 2
        left = sum_tokens(
            ptrs,
            token_mask_ptr,
            tokens,
            num_tokens,
            stride_t,
            stride_m,
            column_mask,
            HALF,
            ACC,
        )
        ptrs += HALF * stride_t
        right = sum_tokens(
            ptrs,
            token_mask_ptr,
            tokens + HALF,
            num_tokens,
            stride_t,
            stride_m,
            column_mask,
            HALF,
            ACC,
        )
        return left + right


@triton.jit(do_not_specialize=["num_tokens"])
def _aux_loss_tile_sums_kernel(
    probs_ptr,
    tokens_per_expert_ptr,
    token_mask_ptr,
    partials_ptr,
    num_tokens,
    num_columns,
    stride_t,
    stride_c,
    stride_n,
    stride_m,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    first_token = (pid // CHUNKS) * BLOCK_T
    first_column = (pid % CHUNKS) * BLOCK_C
    prefetch_tile(
        probs_ptr,
        first_token,
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
    columns = first_column + tl.arange(0, BLOCK_C)
    column_mask = columns < num_columns
    # Each thread adds the tokens of its own group; only the groups are added across threads.
    GROUP_TOKENS: tl.constexpr = BLOCK_T // GROUPS
    tokens = first_token + tl.arange(0, GROUPS) * GROUP_TOKENS
    ptrs = probs_ptr + tokens[:, None] * stride_t + columns[None, :] * stride_c
    sums = sum_tokens(
        ptrs,
        token_mask_ptr,
        tokens,
        num_tokens,
        stride_t,
        stride_m,
        column_mask,
        GROUP_TOKENS,
        ACC,
    )
    # Loaded after the tokens: loaded first, its conversion held their loads up, and the kernel took
    # 1.1 to 1.7 times as long on an H200.
    counts = tl.load(tokens_per_expert_ptr + columns * stride_n, mask=column_mask, other=0).to(ACC)
    products = tree_sum_rows(sums) * counts
    tl.store(partials_ptr + pid + tl.arange(0, 1), tree_sum(tl.reshape(products, [1, BLOCK_C])))


@triton.jit(do_not_specialize=["scale_bits", "num_partials", "num_blocks"])
def _aux_loss_from_tile_sums_kernel(
    partials_ptr,
    total_ptr,
    loss_ptr,
    scale_ptr,
    scale_bits: tl.int64,
    num_partials,
    num_blocks,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    slots = tl.arange(0, MAX_BLOCKS)
    block_sums = tl.zeros([MAX_BLOCKS], ACC)
    for block in range(num_blocks):
        index = block * BLOCK + offsets
        partials = tl.load(partials_ptr + index, mask=index < num_partials, other=0.0)
        block_sums = tl.where(
            slots == block, tree_sum(tl.reshape(partials, [1, BLOCK])), block_sums
        )
    total_sum = tree_sum(tl.reshape(block_sums, [1, MAX_BLOCKS]))  # [1]

    scale = float64_from_bits(scale_bits)
    if total_ptr is not None:
        total = tl.load(total_ptr).to(tl.float64)
        scale = tl.where(total == 0.0, 0.0, scale / total / total).to(ACC)
        loss = tl.where(total == 0.0, 0.0, scale * total_sum)
    else:
        scale = scale.to(ACC)
        loss = scale * total_sum
    tl.store(scale_ptr, scale)
    tl.store(loss_ptr + tl.arange(0, 1), loss)


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


@triton.jit(do_not_specialize_on_alignment=["grad_ptr"])
def _grad_rows_kernel(
    grad_ptr,
    scales_ptr,
    counts_ptr,
    rows_ptr,
    num_columns,
    stride_nb,
    stride_n,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    pid = tl.program_id(0).to(tl.int64)
    sequence = pid // BLOCKS
    columns = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    grad = tl.load(grad_ptr)
    scale = tl.load(scales_ptr + sequence)
    counts = tl.load(counts_ptr + sequence * stride_nb + columns * stride_n, mask=mask, other=0)
    rows = (grad * scale) * counts.to(grad.dtype)
    # Where no token counts, whatever the counts and the incoming gradient hold.
    rows = tl.where(scale == 0.0, 0.0, rows)
    rows_ptrs = rows_ptr + sequence * num_columns + columns
    tl.store(rows_ptrs, cast(rows, rows_ptr.dtype.element_ty), mask=mask)
