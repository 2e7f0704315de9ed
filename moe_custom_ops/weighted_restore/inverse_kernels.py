"""Triton kernels of the inverse permutation, and of scores that it moves to rows and back."""

import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import next_power_of_2
from ..triton_common import Launch, prefetch, wait_for_previous_kernel

# Of 65536 assignments, blocks of 1024 took 2.9 us and of 256 2.4 us on an H200.
INVERT_BLOCK = 256
# Rows or assignments, at most, that are inverted with one launch, and what a program of it owns.
# On an H200 one launch took 0.7 us for 256 of them, 1.2 for 2048, 1.6 for 4096 and 2.8 for 8192;
# two launches took 1.5, 2.3, 2.3 and 2.4.
INVERT_AT_ONCE = 4096
OWN_ASSIGNMENTS = 128
INDICES_PER_LINE = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def _invert_at_once_kernel(
    indices_ptr,
    inverse_ptr,
    num_rows,
    num_assignments,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Both of the kernels below in one: each program looks through all rows for its assignments."""
    rows = tl.arange(0, BLOCK_N).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_A
    if OVERLAP:
        prefetch(indices_ptr + rows * stride, (rows < num_rows) & (rows % INDICES_PER_LINE == 0))
    wait_for_previous_kernel(OVERLAP, True)
    own = first + tl.arange(0, BLOCK_A)
    end = tl.minimum(first + BLOCK_A, num_assignments)
    tl.store(inverse_ptr + own, tl.full([BLOCK_A], -1, tl.int32), mask=own < end)
    index = tl.load(indices_ptr + rows * stride, mask=rows < num_rows, other=-1).to(tl.int64)
    held = (index >= first) & (index < end)
    # The maxima of all threads come behind the stores of all threads.
    tl.debug_barrier()
    tl.atomic_max(inverse_ptr + index, rows.to(tl.int32), mask=held, sem="relaxed")


@triton.jit(do_not_specialize=["num_assignments"])
def _fill_inverse_kernel(
    indices_ptr,
    inverse_ptr,
    num_assignments,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
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
    OVERLAP: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        prefetch(indices_ptr + rows * stride, (rows < num_rows) & (rows % INDICES_PER_LINE == 0))
    wait_for_previous_kernel(OVERLAP, True)
    index = tl.load(indices_ptr + rows * stride, mask=rows < num_rows, other=-1).to(tl.int64)
    held = (index >= 0) & (index < num_assignments)
    # An integer maximum commutes: the highest row wins a duplicate in any order of arrival.
    tl.atomic_max(inverse_ptr + index, rows.to(tl.int32), mask=held, sem="relaxed")


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
                triton.cdiv(num_assignments, OWN_ASSIGNMENTS),
                device,
                num_rows,
                num_assignments,
                stride,
                BLOCK_N=next_power_of_2(num_rows),
                BLOCK_A=OWN_ASSIGNMENTS,
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
            overlap=True,
        ),
    ]


def scores_to_rows(top_scores: Tensor, token_indices_sorted: Tensor) -> Launch:
    """Of (top_scores [T, K], token_indices_sorted, slots, row_scores [N])."""
    (num_rows,) = token_indices_sorted.shape
    return Launch(
        _scores_to_rows_kernel,
        triton.cdiv(num_rows, INVERT_BLOCK),
        top_scores.device,
        num_rows,
        top_scores.numel(),
        *top_scores.stride(),
        *token_indices_sorted.stride(),
        K=top_scores.shape[1],
        BLOCK=INVERT_BLOCK,
        overlap=True,
    )


def rows_to_scores(row_scores: Tensor, num_assignments: int) -> Launch:
    """Of (row_scores [N], slots, scores): the value of each assignment's row, or zero."""
    return Launch(
        _rows_to_scores_kernel,
        triton.cdiv(num_assignments, INVERT_BLOCK),
        row_scores.device,
        row_scores.shape[0],
        num_assignments,
        *row_scores.stride(),
        BLOCK=INVERT_BLOCK,
        overlap=True,
    )
