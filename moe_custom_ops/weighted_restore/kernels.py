"""Triton kernels of weighted_restore and restore, and of their backward.

Row offsets are int64 before they are multiplied by a stride: a tensor may hold more than 2^31
elements. Without scores a product is the row itself.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import accumulator_dtype, next_power_of_2
from ..triton_common import (
    FEW_PROGRAMS,
    TRITON_DTYPES,
    Launch,
    cast,
    strides,
    tree_sum,
    wait_for_previous_kernel,
    widen,
)
from .reference import ACCUMULATOR_LANES

INVERT_BLOCK = 1024
# Rows or assignments, at most, that one program inverts alone.
INVERT_AT_ONCE = 8192
MAX_BLOCK_H = 1024
MIN_BLOCK_H = 256
# Assignments of one token that a program of the backward holds, and rows that one zeroes.
MAX_BLOCK_K = 8
ZERO_BLOCK_ROWS = 32


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def _invert_at_once_kernel(
    indices_ptr,
    inverse_ptr,
    num_rows,
    num_assignments,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Both of the kernels below, for one program."""
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    offsets = tl.arange(0, BLOCK_A)
    tl.store(
        inverse_ptr + offsets, tl.full([BLOCK_A], -1, tl.int32), mask=offsets < num_assignments
    )
    rows = tl.arange(0, BLOCK_N).to(tl.int64)
    index = tl.load(indices_ptr + rows * stride, mask=rows < num_rows, other=-1).to(tl.int64)
    held = (index >= 0) & (index < num_assignments)
    # The maxima of all threads come behind the stores of all threads.
    tl.debug_barrier()
    tl.atomic_max(inverse_ptr + index, rows.to(tl.int32), mask=held, sem="relaxed")


@triton.jit(do_not_specialize=["num_assignments"])
def _fill_inverse_kernel(
    indices_ptr,
    inverse_ptr,
    num_assignments,
    BLOCK: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(inverse_ptr + offsets, tl.full([BLOCK], -1, tl.int32), mask=offsets < num_assignments)


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def _invert_kernel(
    indices_ptr,
    inverse_ptr,
    num_rows,
    num_assignments,
    stride,
    BLOCK: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + rows * stride, mask=rows < num_rows, other=-1).to(tl.int64)
    held = (index >= 0) & (index < num_assignments)
    # An integer maximum commutes: the highest row wins a duplicate in any order of arrival.
    tl.atomic_max(inverse_ptr + index, rows.to(tl.int32), mask=held, sem="relaxed")


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
    stride_ot,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCKS_H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    pid = tl.program_id(0).to(tl.int64)
    token = pid // BLOCKS_H
    columns = (pid % BLOCKS_H) * BLOCK_H + tl.arange(0, BLOCK_H)
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
    for k in tl.static_range(K):
        slot = tl.load(inverse_ptr + token * K + k).to(tl.int64)
        row_index = tl.broadcast_to(slot, [BLOCK_H])
        held = (row_index >= 0) & (row_index < num_rows)
        row = tl.load(
            rows_ptr + row_index * stride_rn + columns * stride_rh,
            mask=column_mask & held,
            other=0.0,
        )
        product = widen(row, ACC)
        if scores_ptr is not None:
            score = widen(tl.load(scores_ptr + token * stride_st + k * stride_sk), ACC)
            product = score * product
        acc = acc + tl.where(held, product, 0.0)
    tl.store(
        out_ptr + token * stride_ot + columns, cast(acc, out_ptr.dtype.element_ty), mask=column_mask
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
    stride_on,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    LANES: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    ACC: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    if pid < num_tokens * BLOCKS_K:
        token = pid // BLOCKS_K
        ks = (pid % BLOCKS_K) * BLOCK_K + tl.arange(0, BLOCK_K)
        slots = tl.load(slots_ptr + token * K + ks, mask=ks < K, other=-1).to(tl.int64)
        held = ((slots >= 0) & (slots < num_rows))[:, None]
        if scores_ptr is not None:
            score = tl.load(scores_ptr + token * stride_st + ks * stride_sk, mask=ks < K, other=0.0)
            score = widen(score, ACC)[:, None]
        acc = tl.zeros([BLOCK_K, LANES], ACC)
        if grad_scores_ptr is not None:
            row_ptrs = rows_ptr + slots[:, None] * stride_rn
        # Three stages keep the next loads in flight while a chunk is added and stored: 0.71 of a
        # plain loop's time at (T 8192, K 8, H 2048) and 0.29 at (32, 8, 7168) on an H200.
        for start in tl.range(0, num_columns, LANES, num_stages=3):
            columns = start + lanes.to(tl.int64)
            mask = held & (columns < num_columns)[None, :]
            grad = tl.load(
                grad_ptr + token * stride_gt + columns * stride_gh,
                mask=columns < num_columns,
                other=0.0,
            )
            grad = widen(grad, ACC)[None, :]
            if grad_scores_ptr is not None:
                row = tl.load(row_ptrs + columns[None, :] * stride_rh, mask=mask, other=0.0)
                acc = acc + tl.where(mask, grad * widen(row, ACC), 0.0)
            if grad_rows_ptr is not None:
                product = tl.broadcast_to(grad, [BLOCK_K, LANES])
                if scores_ptr is not None:
                    product = score * grad
                tl.store(
                    grad_rows_ptr + slots[:, None] * stride_on + columns[None, :],
                    cast(product, grad_rows_ptr.dtype.element_ty),
                    mask=mask,
                )
        if grad_scores_ptr is not None:
            tl.store(
                grad_scores_ptr + token * K + ks,
                cast(tree_sum(acc), grad_scores_ptr.dtype.element_ty),
                mask=ks < K,
            )
    elif grad_rows_ptr is not None:
        # Rows that hold no assignment, or lost it to a higher row, get a zero gradient.
        rows = (pid - num_tokens * BLOCKS_K) * ZERO_ROWS + tl.arange(0, ZERO_ROWS)
        index = tl.load(indices_ptr + rows * stride_i, mask=rows < num_rows, other=-1).to(tl.int64)
        in_range = (index >= 0) & (index < num_assignments)
        owner = tl.load(slots_ptr + index, mask=in_range, other=-1)
        padding = (owner != rows) & (rows < num_rows)
        if tl.max(padding.to(tl.int32), axis=0) > 0:
            zeros = tl.zeros([ZERO_ROWS, LANES], grad_rows_ptr.dtype.element_ty)
            for start in range(0, num_columns, LANES):
                columns = start + lanes
                tl.store(
                    grad_rows_ptr + rows[:, None] * stride_on + columns[None, :],
                    zeros,
                    mask=padding[:, None] & (columns < num_columns)[None, :],
                )


def invert(token_indices_sorted: Tensor, num_assignments: int) -> list[Launch]:
    """Each of (token_indices_sorted, inverse), in order.

    They write the row of each assignment, or -1, to ``inverse`` int32 [num_assignments].
    """
    num_rows, device = token_indices_sorted.shape[0], token_indices_sorted.device
    stride = token_indices_sorted.stride(0)
    if max(num_rows, num_assignments) <= INVERT_AT_ONCE:
        return [
            Launch(
                _invert_at_once_kernel,
                1 if num_assignments else 0,
                device,
                num_rows,
                num_assignments,
                stride,
                BLOCK_N=next_power_of_2(num_rows),
                BLOCK_A=next_power_of_2(num_assignments),
                RUN_AHEAD=False,
                num_warps=16,
                overlap=True,
            )
        ]
    return [
        Launch(
            _fill_inverse_kernel,
            triton.cdiv(num_assignments, INVERT_BLOCK),
            device,
            num_assignments,
            BLOCK=INVERT_BLOCK,
            RUN_AHEAD=False,
            overlap=True,
        ),
        Launch(
            _invert_kernel,
            triton.cdiv(num_rows, INVERT_BLOCK),
            device,
            num_rows,
            num_assignments,
            stride,
            BLOCK=INVERT_BLOCK,
            RUN_AHEAD=False,
            overlap=True,
        ),
    ]


def restore(
    rows: Tensor,
    top_scores: Tensor | None,
    addend: Tensor | None,
    num_tokens: int,
    topk: int,
    num_warps: int = 4,
    block_h: int | None = None,
) -> Launch:
    """Of (rows, top_scores, inverse, addend, out, slots), the second and fourth as given here.

    Writes the (weighted) sum of each token's rows to ``out`` [tokens, H], contiguous, and, if they
    are asked for, the inverse to ``slots`` int32 [tokens, K], with -1 for all that is no row.
    """
    num_rows, num_columns = rows.shape
    if block_h is None:
        block_h = min(next_power_of_2(num_columns), MAX_BLOCK_H)
        # Few tokens are cut finer: 512 columns a program took 0.77 of 1024 at (T 256, K 8, H 2048).
        while block_h > MIN_BLOCK_H and num_tokens * triton.cdiv(num_columns, block_h) < 1024:
            block_h //= 2
    # A width of 0 still has slots to write.
    blocks_h = max(triton.cdiv(num_columns, block_h), 1)
    programs = num_tokens * blocks_h
    return Launch(
        _weighted_restore_kernel,
        programs,
        rows.device,
        num_rows,
        num_columns,
        *rows.stride(),
        *strides(top_scores, 2),
        *strides(addend, 2),
        num_columns,
        K=topk,
        PADDED_K=next_power_of_2(topk),
        BLOCKS_H=blocks_h,
        BLOCK_H=block_h,
        ACC=TRITON_DTYPES[accumulator_dtype(rows.dtype)],
        RUN_AHEAD=programs > FEW_PROGRAMS,
        num_warps=num_warps,
        overlap=True,
    )


def restore_backward(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    topk: int,
    need_rows: bool,
    num_warps: int | None = None,
    block_k: int | None = None,
) -> Launch:
    """Of (grad, rows, top_scores, token_indices_sorted, slots, grad_rows, grad_scores).

    Writes the gradients that are given, both contiguous: [rows, H] and [tokens, K]. Only
    ``grad_scores`` needs ``rows``.
    """
    num_tokens, num_columns = grad.shape
    (num_rows,) = token_indices_sorted.shape
    if block_k is None:
        block_k = min(next_power_of_2(topk), MAX_BLOCK_K)
        # Few tokens are cut finer.
        while block_k > 1 and num_tokens * triton.cdiv(topk, block_k) < FEW_PROGRAMS:
            block_k //= 2
    blocks_k = triton.cdiv(topk, block_k)
    programs = num_tokens * blocks_k
    if need_rows:
        programs += triton.cdiv(num_rows, ZERO_BLOCK_ROWS)
    return Launch(
        _weighted_restore_backward_kernel,
        programs,
        grad.device,
        num_tokens,
        num_rows,
        num_columns,
        num_tokens * topk,
        *grad.stride(),
        *strides(rows, 2),
        *strides(top_scores, 2),
        *token_indices_sorted.stride(),
        num_columns,
        K=topk,
        BLOCK_K=block_k,
        BLOCKS_K=blocks_k,
        LANES=ACCUMULATOR_LANES,
        ZERO_ROWS=ZERO_BLOCK_ROWS,
        ACC=TRITON_DTYPES[accumulator_dtype(grad.dtype)],
        RUN_AHEAD=programs > FEW_PROGRAMS,
        num_warps=num_warps or (4 if block_k > 2 else 2),
        overlap=True,
    )
