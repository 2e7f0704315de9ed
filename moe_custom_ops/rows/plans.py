"""The launches, sizes and allocations of copies of rows and of the sums back."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .. import workspace as workspaces
from ..backend import flat, load_kernels
from ..fixed_order import accumulator_dtype, next_power_of_2
from ..launch import (
    Launch,
    Run,
    allocator,
    cdiv,
    contiguous_stride,
    enough_programs,
    few_programs,
    strides,
    triton_dtype,
)
from ..permutation.plans import invert
from . import arguments
from .reference import ACCUMULATOR_LANES

MAX_BLOCK_H = 1024
MIN_BLOCK_H = 256
# Bytes of each column that a program of the forward has on their way to it.
LOAD_BYTES = 16
# Of a row, what a program takes where most assignments have none: 32 columns of two bytes a thread.
FEW_ROWS_BYTES = 4096
# Assignments of one token that a program of the backward holds, and rows that one zeroes.
MAX_BLOCK_K = 8
ZERO_BLOCK_ROWS = 32
# Scores that one program moves.
SCORES_BLOCK = 256

_kernels = functools.partial(load_kernels, __package__)


def _unit(dtype: torch.dtype, *sizes: int) -> int:
    """Elements of a load of at most 16 bytes that divide all of ``sizes``.

    Sizes reach a kernel in these units: that a size is a multiple of 8, Triton finds out only where
    it is a multiple of 16. Rows of 7176 bfloat16 took 1.7 times as long without.
    """
    return math.gcd(16 // dtype.itemsize, *sizes)


def restore_launch(
    rows: Tensor,
    top_scores: Tensor | None,
    addend: Tensor | None,
    num_tokens: int,
    topk: int,
    num_warps: int = 2,
    block_h: int | None = None,
    few_rows: bool | None = None,
) -> Launch:
    """Of (rows, top_scores, inverse, addend, out, slots), the second and fourth as given here.

    Writes the (weighted) sum of each token's rows to ``out`` [tokens, H], contiguous, and, if they
    are asked for, the inverse to ``slots`` int32 [tokens, K], with -1 for all that is no row.
    """
    num_rows, num_columns = rows.shape
    few_block_h = min(next_power_of_2(num_columns), FEW_ROWS_BYTES // rows.itemsize)
    if few_rows is None:
        # Programs that wide must be more: (T 2048, H 2048) took 1.01 of the time with them, (4096,
        # 2048) 0.92 and (2048, 7168) 0.88 on an H200.
        wide_programs = num_tokens * cdiv(num_columns, few_block_h)
        few_rows = wide_programs >= 3 * enough_programs(rows.device)
        few_rows = few_rows and _has_few_rows(num_rows, num_tokens * topk)
    if block_h is None and few_rows:
        block_h = few_block_h
    elif block_h is None:
        block_h = _columns_per_program(num_tokens, num_columns, rows.device)
    # A width of 0 still has slots to write.
    blocks_h = max(cdiv(num_columns, block_h), 1)
    programs = num_tokens * blocks_h
    stride_rn, stride_rh = rows.stride()
    stride_at, stride_ah = strides(addend, 2)
    unit = _unit(rows.dtype, num_columns, stride_rn, stride_at)
    return Launch(
        _kernels()._weighted_restore_kernel,
        programs,
        rows.device,
        num_rows,
        num_columns // unit,
        stride_rn // unit,
        stride_rh,
        *strides(top_scores, 2),
        stride_at // unit,
        stride_ah,
        UNIT=unit,
        WIDE=max(stride_rn, stride_at) >= 2**31,
        K=topk,
        PADDED_K=next_power_of_2(topk),
        BLOCKS_H=blocks_h,
        BLOCK_H=block_h,
        LOADS=1 if few_rows else LOAD_BYTES // rows.itemsize,
        ACC=triton_dtype(accumulator_dtype(rows.dtype)),
        RUN_AHEAD=programs > few_programs(rows.device),
        num_warps=num_warps,
        # For the loads that are on their way; left alone, the compiler issues two at a time.
        maxnreg=96 if block_h > 256 * num_warps and not few_rows else 64,
        overlap=True,
    )


def permute_launch(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    num_warps: int = 1,
    block_h: int | None = None,
) -> Launch:
    """Of (tokens, token_indices_sorted, slots, rows), the first two as given here.

    Writes each token to the rows of its assignments, and zero to padding: [rows, H], contiguous.
    """
    num_tokens, num_columns = tokens.shape
    (num_rows,) = token_indices_sorted.shape
    if block_h is None:
        block_h = _columns_per_program(num_tokens, num_columns, tokens.device)
    blocks_h = max(cdiv(num_columns, block_h), 1)
    stride_t, stride_h = tokens.stride()
    unit = _unit(tokens.dtype, num_columns, stride_t)
    programs = num_tokens * blocks_h + cdiv(num_rows, ZERO_BLOCK_ROWS)
    return Launch(
        _kernels()._permute_kernel,
        programs,
        tokens.device,
        num_tokens,
        num_rows,
        num_columns // unit,
        num_tokens * topk,
        stride_t // unit,
        stride_h,
        *token_indices_sorted.stride(),
        UNIT=unit,
        WIDE=stride_t >= 2**31,
        K=topk,
        BLOCKS_H=blocks_h,
        BLOCK_H=block_h,
        ZERO_ROWS=ZERO_BLOCK_ROWS,
        RUN_AHEAD=programs > few_programs(tokens.device),
        num_warps=num_warps,
        overlap=True,
    )


def _has_few_rows(num_rows: int, num_assignments: int) -> bool:
    """Whether most assignments have no row, as on one rank of many.

    A load that reads nothing keeps its registers. At 1, 1.5, 2, 2.5 and 3 rows of 8, 4096 tokens
    and 7168 columns on an H200, the forward took 0.77, 0.84, 0.89, 0.93 and 0.97 of the time with
    one row after another and more programs, the backward 0.59, 0.72, 0.87, 0.92 and 0.97 with a
    program that takes a token and moves together what it has. At 4 both took 1.00 to 1.05.
    """
    return 8 * num_rows <= 3 * num_assignments


def _columns_per_program(num_tokens: int, num_columns: int, device: torch.device) -> int:
    """Few tokens are cut finer."""
    block_h, enough = min(next_power_of_2(num_columns), MAX_BLOCK_H), enough_programs(device)
    while block_h > MIN_BLOCK_H and num_tokens * cdiv(num_columns, block_h) < enough:
        block_h //= 2
    return block_h


def restore_backward_launch(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    need_rows: bool,
    block_k: int | None = None,
    few_rows: bool | None = None,
    num_warps: int | None = None,
) -> Launch:
    """Of (grad, rows, top_scores, token_indices_sorted, slots, grad_rows, grad_scores).

    Writes the gradients that are given, both contiguous: [rows, H] and [tokens, K]. Only
    ``grad_scores`` needs ``rows``.
    """
    num_tokens, num_columns = grad.shape
    (num_rows,) = token_indices_sorted.shape
    enough = enough_programs(grad.device)
    if few_rows is None:
        few_rows = num_tokens >= enough and _has_few_rows(num_rows, num_tokens * topk)
    if block_k is None and few_rows:
        # What a token has on average.
        block_k = min(next_power_of_2(cdiv(num_rows, max(num_tokens, 1))), MAX_BLOCK_K)
    elif block_k is None:
        block_k = min(next_power_of_2(topk), MAX_BLOCK_K)
        while block_k > 1 and num_tokens * cdiv(topk, block_k) < enough:
            block_k //= 2
    if num_warps is None and few_rows:
        num_warps = max(block_k // 2, 1)
    elif num_warps is None:
        num_warps = 4 if block_k > 2 else 2
    blocks_k = 1 if few_rows else cdiv(topk, block_k)
    programs = num_tokens * blocks_k
    if need_rows:
        programs += cdiv(num_rows, ZERO_BLOCK_ROWS)
    stride_gt, stride_gh = grad.stride()
    stride_rn, stride_rh = strides(rows, 2)
    unit = _unit(grad.dtype, num_columns, stride_gt, stride_rn)
    return Launch(
        _kernels()._weighted_restore_backward_kernel,
        programs,
        grad.device,
        num_tokens,
        num_rows,
        num_columns // unit,
        num_tokens * topk,
        stride_gt // unit,
        stride_gh,
        stride_rn // unit,
        stride_rh,
        *strides(top_scores, 2),
        *token_indices_sorted.stride(),
        UNIT=unit,
        WIDE=max(stride_gt, stride_rn) >= 2**31,
        K=topk,
        BLOCK_K=block_k,
        PADDED_K=next_power_of_2(topk),
        BLOCKS_K=blocks_k,
        COMPACT=few_rows,
        LANES=ACCUMULATOR_LANES,
        ZERO_ROWS=ZERO_BLOCK_ROWS,
        # Few programs do not fill the memory system by their own loads.
        PREFETCH=num_tokens * blocks_k < few_programs(grad.device),
        COLUMNS=next_power_of_2(num_columns),
        ACC=triton_dtype(accumulator_dtype(grad.dtype)),
        RUN_AHEAD=programs > few_programs(grad.device),
        num_warps=num_warps,
        overlap=True,
    )


def scores_to_rows_launch(top_scores: Tensor, token_indices_sorted: Tensor) -> Launch:
    """Of (top_scores [T, K], token_indices_sorted, slots, row_scores [N])."""
    (num_rows,) = token_indices_sorted.shape
    return Launch(
        _kernels()._scores_to_rows_kernel,
        cdiv(num_rows, SCORES_BLOCK),
        top_scores.device,
        num_rows,
        top_scores.numel(),
        *top_scores.stride(),
        *token_indices_sorted.stride(),
        K=top_scores.shape[1],
        BLOCK=SCORES_BLOCK,
        overlap=True,
    )


def rows_to_scores_launch(row_scores: Tensor, num_assignments: int) -> Launch:
    """Of (row_scores [N], slots, scores): the value of each assignment's row, or zero."""
    return Launch(
        _kernels()._rows_to_scores_kernel,
        cdiv(num_assignments, SCORES_BLOCK),
        row_scores.device,
        row_scores.shape[0],
        num_assignments,
        *row_scores.stride(),
        BLOCK=SCORES_BLOCK,
        overlap=True,
    )


class _Inversion:
    """The launches of an inversion, and where its result goes."""

    def __init__(self, token_indices_sorted: Tensor, shape: tuple[int, ...]) -> None:
        self.device, self.shape, self.stride = (
            token_indices_sorted.device,
            shape,
            contiguous_stride(shape),
        )
        self.launches = invert(token_indices_sorted, math.prod(shape))

    def __call__(self, token_indices_sorted: Tensor, workspace: Tensor | None) -> Tensor:
        """The inverse: in the workspace, flat, or else a new tensor."""
        if workspace is None:
            inverse = allocator(self.device)(self.shape, self.stride, torch.int32)
        else:
            inverse = workspaces.view(workspace, math.prod(self.shape), torch.int32)
        for launch in self.launches:
            launch(token_indices_sorted, inverse)
        return inverse


def restore(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    inverse: Tensor | None,
    workspace: Tensor | None,
    num_tokens: int,
    topk: int,
) -> Run:
    """A plan for (the sum of each token's rows [*, H], slots int32 [*, K]).

    The slots, the row of each assignment or -1, are saved for the backward. To invert again there
    took 2.4 us at 65536 assignments on an H200, half of the backward of a small call, and would
    need scratch as large. Where the inverse is given, that is saved, and there are no slots.
    """
    shape = arguments.shape_of(top_scores, num_tokens, topk)
    given = rows, top_scores, token_indices_sorted
    arguments.check(*given, shape, addend, workspace, inverse)
    device, dtype, topk = rows.device, rows.dtype, shape[-1]
    out_shape = (*shape[:-1], rows.shape[1])
    stride, out_stride = contiguous_stride(shape), contiguous_stride(out_shape)
    invert_into = _Inversion(token_indices_sorted, shape)
    launch = restore_launch(
        rows,
        None if top_scores is None else flat(top_scores),
        None if addend is None else flat(addend),
        math.prod(shape[:-1]),
        topk,
    )

    def run(
        rows: Tensor,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        addend: Tensor | None,
        inverse: Tensor | None,
        workspace: Tensor | None,
        num_tokens: int,
        topk: int,
    ) -> tuple[Tensor, Tensor | None]:
        empty = allocator(device)
        out = empty(out_shape, out_stride, dtype)
        slots = copy = None
        if inverse is not None:
            own = inverse.contiguous()
        elif workspace is None:
            own = slots = invert_into(token_indices_sorted, None)
        else:
            own = invert_into(token_indices_sorted, workspace)
            slots = copy = empty(shape, stride, torch.int32)
        scores = None if top_scores is None else flat(top_scores)
        launch(rows, scores, own, None if addend is None else flat(addend), out, copy)
        return out, slots

    return run


def restore_backward(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
) -> Run:
    """A plan for (gradient of rows, gradient of top_scores), None for the one not needed."""
    arguments.check_backward(grad, rows, top_scores, token_indices_sorted, slots)
    device, dtype, topk = grad.device, grad.dtype, slots.shape[-1]
    rows_shape = (token_indices_sorted.shape[0], grad.shape[-1])
    shape = tuple(slots.shape)
    rows_stride, stride = contiguous_stride(rows_shape), contiguous_stride(shape)
    if top_scores is None:
        launch = permute_launch(flat(grad), token_indices_sorted, topk)
    else:
        launch = restore_backward_launch(
            flat(grad), rows, flat(top_scores), token_indices_sorted, topk, need_rows
        )

    def run(
        grad: Tensor,
        rows: Tensor | None,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        slots: Tensor,
        need_rows: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        empty, flat_grad = allocator(device), flat(grad)
        # A hook on saved tensors may have brought them with other strides.
        slots = slots.contiguous()
        grad_rows = grad_scores = None
        if need_rows:
            grad_rows = empty(rows_shape, rows_stride, dtype)
        if top_scores is None:
            if need_rows:
                launch(flat_grad, token_indices_sorted, slots, grad_rows)
            return grad_rows, None
        if rows is not None:
            grad_scores = empty(shape, stride, top_scores.dtype)
        scores = flat(top_scores)
        launch(flat_grad, rows, scores, token_indices_sorted, slots, grad_rows, grad_scores)
        return grad_rows, grad_scores

    return run


def permute(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    inverse: Tensor | None,
    workspace: Tensor | None,
    topk: int,
) -> Run:
    """A plan for (rows [N, H], slots int32 [T, K]); no slots where the inverse is at hand."""
    arguments.check_permute(tokens, token_indices_sorted, topk, workspace, inverse)
    device, dtype = tokens.device, tokens.dtype
    rows_shape = (token_indices_sorted.shape[0], tokens.shape[1])
    stride = contiguous_stride(rows_shape)
    invert_into = _Inversion(token_indices_sorted, (tokens.shape[0], topk))
    launch = permute_launch(arguments.as_moved(tokens), token_indices_sorted, topk)

    def run(
        tokens: Tensor,
        token_indices_sorted: Tensor,
        inverse: Tensor | None,
        workspace: Tensor | None,
        topk: int,
    ) -> tuple[Tensor, Tensor | None]:
        rows = allocator(device)(rows_shape, stride, dtype)
        slots = None
        if inverse is None:
            inverse = slots = invert_into(token_indices_sorted, workspace)
        else:
            inverse = inverse.contiguous()
        moved = arguments.as_moved(tokens), arguments.as_moved(rows)
        launch(moved[0], token_indices_sorted, inverse, moved[1])
        return rows, slots

    return run


def permute_with_scores(*given: Any) -> Run:
    """No plan, but what is checked once: the parts have plans of their own."""
    arguments.check_permute_with_scores(*given)
    return lambda: None


def scores_to_rows(top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Run:
    """A plan for the score of each row's assignment [N]."""
    arguments.check_scores_to_rows(top_scores, token_indices_sorted, slots)
    device, dtype, shape = top_scores.device, top_scores.dtype, tuple(token_indices_sorted.shape)
    launch = scores_to_rows_launch(flat(top_scores), token_indices_sorted)

    def run(top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
        row_scores = allocator(device)(shape, (1,), dtype)
        launch(flat(top_scores), token_indices_sorted, slots.contiguous(), row_scores)
        return row_scores

    return run


def rows_to_scores(row_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Run:
    """A plan for the value of each assignment's row, in the shape of the slots."""
    arguments.check_rows_to_scores(row_scores, token_indices_sorted, slots)
    device, dtype, shape = row_scores.device, row_scores.dtype, tuple(slots.shape)
    launch, stride = rows_to_scores_launch(row_scores, slots.numel()), contiguous_stride(shape)

    def run(row_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
        scores = allocator(device)(shape, stride, dtype)
        launch(row_scores, slots.contiguous(), scores)
        return scores

    return run
