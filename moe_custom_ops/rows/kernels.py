"""Triton kernels of permute and of the restores, and of their backward.

Row offsets are int64 before they are multiplied by a stride: a tensor may hold more than 2^31
elements. Without scores a product is the row itself.
"""

import triton
import triton.language as tl

from ..triton_common import cast, prefetch_tile, tree_sum, wait_for_previous_kernel, widen

ZERO_COLUMNS = tl.constexpr(256)


@triton.jit
def _elements(stride, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """A stride that came in units: it may fit 32 bits only as long as it is in them."""
    if WIDE:
        return stride * tl.full([], UNIT, tl.int64)
    else:
        return stride * UNIT


@triton.jit(do_not_specialize=["num_rows"])
def _weighted_restore_kernel(
    rows_ptr,
    scores_ptr,
    inverse_ptr,
    addend_ptr,
    out_ptr,
    slots_ptr,
    num_rows,
    num_columns,
    stride_rn,
    stride_rh,
    stride_st,
    stride_sk,
    stride_at,
    stride_ah,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCKS_H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LOADS: tl.constexpr,
    ACC: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    num_columns = num_columns * UNIT
    stride_rn, stride_at = _elements(stride_rn, UNIT, WIDE), _elements(stride_at, UNIT, WIDE)
    pid = tl.program_id(0).to(tl.int64)
    token = pid // BLOCKS_H
    first_column = (pid % BLOCKS_H) * BLOCK_H
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    columns = first_column + tl.arange(0, BLOCK_H)
    column_mask = columns < num_columns
    if slots_ptr is not None:  # noqa: SIM102  decided by the compiler
        if pid % BLOCKS_H == 0:
            ks = tl.arange(0, PADDED_K)
            slots = tl.load(inverse_ptr + token * K + ks, mask=ks < K, other=-1)
            slots = tl.where((slots >= 0) & (slots < num_rows), slots, -1)
            tl.store(slots_ptr + token * K + ks, slots, mask=ks < K)
    if addend_ptr is not None:
        acc = tl.load(addend_ptr + token * stride_at + columns * stride_ah, mask=column_mask)
        acc = widen(acc, ACC)
    else:
        acc = tl.zeros([BLOCK_H], ACC)
    zero = token * 0
    # All loads of a group are on their way before the first sum, which took 0.95 of the time of a
    # plain loop at (T 16384, K 8, H 2048) on an H200. What is absent is skipped: where few rows
    # exist, 0.83 of the time of adding zeros.
    for first in tl.static_range(0, K, LOADS):
        rows = ()
        scores = ()
        present = ()
        for k in tl.static_range(first, min(first + LOADS, K)):
            slot = tl.load(inverse_ptr + token * K + k).to(tl.int64)
            present += ((slot >= 0) & (slot < num_rows),)  # type: ignore[assignment]
            row_index = tl.broadcast_to(slot, [BLOCK_H])
            row = tl.load(
                rows_ptr + row_index * stride_rn + columns * stride_rh,
                mask=column_mask & (row_index >= 0) & (row_index < num_rows),
                other=0.0,
            )
            rows += (row,)  # type: ignore[assignment]
            if scores_ptr is not None:
                scores += (tl.load(scores_ptr + token * stride_st + (zero + k) * stride_sk),)  # type: ignore[assignment]
        for j in tl.static_range(min(LOADS, K - first)):
            if present[j]:
                product = widen(rows[j], ACC)
                if scores_ptr is not None:
                    product = widen(scores[j], ACC) * product
                acc = acc + product
            elif addend_ptr is not None:
                # As in the reference, which adds a zero: it turns a negative one positive.
                acc = acc + 0.0
    tl.store(
        out_ptr + token * num_columns + columns,
        cast(acc, out_ptr.dtype.element_ty),
        mask=column_mask,
    )


@triton.jit
def _zero_padding_rows(
    block,
    indices_ptr,
    slots_ptr,
    rows_ptr,
    num_rows,
    num_columns,
    num_assignments,
    stride_i,
    ZERO_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Zero those rows of a block that hold no assignment, or lost it to a higher row."""
    rows = block * ZERO_ROWS + tl.arange(0, ZERO_ROWS)
    index = tl.load(indices_ptr + rows * stride_i, mask=rows < num_rows, other=-1).to(tl.int64)
    in_range = (index >= 0) & (index < num_assignments)
    owner = tl.load(slots_ptr + index, mask=in_range, other=-1)
    padding = (owner != rows) & (rows < num_rows)
    if tl.max(padding.to(tl.int32), axis=0) > 0:
        zeros = tl.zeros([ZERO_ROWS, COLUMNS], rows_ptr.dtype.element_ty)
        for start in range(0, num_columns, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            tl.store(
                rows_ptr + rows[:, None] * num_columns + columns[None, :],
                zeros,
                mask=padding[:, None] & (columns < num_columns)[None, :],
            )


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_assignments"])
def _weighted_restore_backward_kernel(
    grad_ptr,
    rows_ptr,
    scores_ptr,
    indices_ptr,
    slots_ptr,
    grad_rows_ptr,
    grad_scores_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_assignments,
    stride_gt,
    stride_gh,
    stride_rn,
    stride_rh,
    stride_st,
    stride_sk,
    stride_i,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    COMPACT: tl.constexpr,
    LANES: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    PREFETCH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    num_columns = num_columns * UNIT
    stride_gt, stride_rn = _elements(stride_gt, UNIT, WIDE), _elements(stride_rn, UNIT, WIDE)
    pid = tl.program_id(0).to(tl.int64)
    if PREFETCH:
        prefetch_tile(
            grad_ptr,
            pid // BLOCKS_K,
            0,
            num_tokens,
            num_columns,
            stride_gt,
            stride_gh,
            1,
            COLUMNS,
            OVERLAP,
        )
        if grad_scores_ptr is not None:
            prefetch_tile(
                rows_ptr,
                pid * BLOCK_K,
                0,
                num_rows,
                num_columns,
                stride_rn,
                stride_rh,
                BLOCK_K,
                COLUMNS,
                OVERLAP,
            )
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    lanes = tl.arange(0, LANES)
    if pid < num_tokens * BLOCKS_K:
        token = pid // BLOCKS_K
        blocks = 1
        if COMPACT:
            # Rows that exist move up, so that a block is full of them.
            all_ks = tl.arange(0, PADDED_K)
            all_slots = tl.load(slots_ptr + token * K + all_ks, mask=all_ks < K, other=-1)
            present = (all_slots >= 0) & (all_slots < num_rows)
            count = tl.sum(present.to(tl.int32), axis=0)
            rank = tl.where(present, tl.cumsum(present.to(tl.int32), axis=0) - 1, -1)
            blocks = (count + BLOCK_K - 1) // BLOCK_K
            if grad_scores_ptr is not None:
                zeros = tl.zeros([PADDED_K], grad_scores_ptr.dtype.element_ty)
                absent = (all_ks < K) & (rank < 0)
                tl.store(grad_scores_ptr + token * K + all_ks, zeros, mask=absent)
        for block in range(blocks):
            if COMPACT:
                own = block * BLOCK_K + tl.arange(0, BLOCK_K)
                chosen = rank[None, :] == own[:, None]
                ks = tl.max(tl.where(chosen, all_ks[None, :], 0), axis=1)
                slots = tl.max(tl.where(chosen, all_slots[None, :], -1), axis=1).to(tl.int64)
                inside = own < count
            else:
                ks = (pid % BLOCKS_K) * BLOCK_K + tl.arange(0, BLOCK_K)
                inside = ks < K
                slots = tl.load(slots_ptr + token * K + ks, mask=inside, other=-1).to(tl.int64)
            held = ((slots >= 0) & (slots < num_rows))[:, None]
            score = tl.load(
                scores_ptr + token * stride_st + ks.to(tl.int64) * stride_sk, mask=inside, other=0.0
            )
            score = widen(score, ACC)[:, None]
            acc = tl.zeros([BLOCK_K, LANES], ACC)
            if grad_scores_ptr is not None:
                row_ptrs = rows_ptr + slots[:, None] * stride_rn
            # Three stages keep the next loads in flight while a chunk is added and stored: 0.71 of
            # a plain loop's time at (T 8192, K 8, H 2048) and 0.29 at (32, 8, 7168) on an H200.
            for start in tl.range(0, num_columns, LANES, num_stages=3):
                columns = start + lanes.to(tl.int64)
                mask = held & (columns < num_columns)[None, :]
                grad = tl.load(
                    grad_ptr + token * stride_gt + columns * stride_gh,
                    mask=columns < num_columns,
                    other=0,
                )[None, :]
                if grad_scores_ptr is not None:
                    row = tl.load(row_ptrs + columns[None, :] * stride_rh, mask=mask, other=0.0)
                    acc = acc + tl.where(mask, widen(grad, ACC) * widen(row, ACC), 0.0)
                if grad_rows_ptr is not None:
                    products = score * widen(grad, ACC)
                    tl.store(
                        grad_rows_ptr + slots[:, None] * num_columns + columns[None, :],
                        cast(products, grad_rows_ptr.dtype.element_ty),
                        mask=mask,
                    )
            if grad_scores_ptr is not None:
                tl.store(
                    grad_scores_ptr + token * K + ks,
                    cast(tree_sum(acc), grad_scores_ptr.dtype.element_ty),
                    mask=inside,
                )
    elif grad_rows_ptr is not None:
        # As wide as the lanes: the registers that this takes spread few programs evenly. With half
        # the width, (T 256, K 8, H 2048) took 11.2 us forward and backward on an H200, not 9.9.
        _zero_padding_rows(
            pid - num_tokens * BLOCKS_K,
            indices_ptr,
            slots_ptr,
            grad_rows_ptr,
            num_rows,
            num_columns,
            num_assignments,
            stride_i,
            ZERO_ROWS,
            LANES,
        )


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_assignments"])
def _permute_kernel(
    tokens_ptr,
    indices_ptr,
    slots_ptr,
    rows_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_assignments,
    stride_t,
    stride_h,
    stride_i,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    BLOCKS_H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copies, of whatever dtype: the backward of an unweighted restore too."""
    num_columns, stride_t = num_columns * UNIT, _elements(stride_t, UNIT, WIDE)
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    pid = tl.program_id(0).to(tl.int64)
    if pid < num_tokens * BLOCKS_H:
        token = pid // BLOCKS_H
        columns = (pid % BLOCKS_H) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = columns < num_columns
        # Rows are a stream, which should not push tokens out of the L2: with neither policy, 1.02
        # times as long at (T 8192, K 8, H 2048) and (16384, 8, 2048) on an H200.
        row = tl.load(
            tokens_ptr + token * stride_t + columns * stride_h,
            mask=mask,
            other=0,
            eviction_policy="evict_last",
        )
        for k in tl.static_range(K):
            slot = tl.load(slots_ptr + token * K + k).to(tl.int64)
            row_index = tl.broadcast_to(slot, [BLOCK_H])
            held = (row_index >= 0) & (row_index < num_rows)
            tl.store(
                rows_ptr + row_index * num_columns + columns,
                row,
                mask=mask & held,
                eviction_policy="evict_first",
            )
    else:
        _zero_padding_rows(
            pid - num_tokens * BLOCKS_H,
            indices_ptr,
            slots_ptr,
            rows_ptr,
            num_rows,
            num_columns,
            num_assignments,
            stride_i,
            ZERO_ROWS,
            ZERO_COLUMNS,
        )


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def _scores_to_rows_kernel(
    scores_ptr,
    indices_ptr,
    slots_ptr,
    row_scores_ptr,
    num_rows,
    num_assignments,
    stride_t,
    stride_k,
    stride_i,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + rows * stride_i, mask=rows < num_rows, other=-1).to(tl.int64)
    in_range = (index >= 0) & (index < num_assignments)
    held = in_range & (tl.load(slots_ptr + index, mask=in_range, other=-1) == rows)
    scores_ptrs = scores_ptr + index // K * stride_t + index % K * stride_k
    scores = tl.load(scores_ptrs, mask=held, other=0.0)
    tl.store(row_scores_ptr + rows, scores, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def _rows_to_scores_kernel(
    row_scores_ptr,
    slots_ptr,
    scores_ptr,
    num_rows,
    num_assignments,
    stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_assignments
    slots = tl.load(slots_ptr + index, mask=inside, other=-1).to(tl.int64)
    held = (slots >= 0) & (slots < num_rows)
    values = tl.load(row_scores_ptr + slots * stride, mask=held, other=0.0)
    tl.store(scores_ptr + index, values, mask=inside)
