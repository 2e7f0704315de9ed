"""weighted_restore and restore past the dispatcher: an inversion, a gather, one backward launch."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import direct
from .. import workspace as workspaces
from ..backend import load_kernels
from . import ops


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, math.prod(shape[i + 1 :])) for i in range(len(shape)))


class _Plan:
    """Launches and sizes of the calls of one signature."""

    def __init__(
        self,
        rows: Tensor,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        addend: Tensor | None,
        shape: tuple[int, ...],
        op: str,
        parts: list[Any],
    ) -> None:
        self.op = op
        self.kernels = load_kernels(__package__)
        self.device, self.dtype = rows.device, rows.dtype
        self.shape, self.stride = shape, _contiguous(shape)
        self.out_shape = (*shape[:-1], rows.shape[1])
        self.out_stride = _contiguous(self.out_shape)
        self.rows_shape = tuple(rows.shape)
        self.rows_stride = _contiguous(self.rows_shape)
        self.scores_dtype = None if top_scores is None else top_scores.dtype
        self.num_assignments, self.topk = math.prod(shape), shape[-1]
        self.saved = *parts[:3], direct.fresh(shape, self.stride, torch.int32, rows)
        self.invert = self.kernels.invert(token_indices_sorted, self.num_assignments)
        self.restore = self.kernels.restore(
            rows,
            None if top_scores is None else ops.flat(top_scores),
            None if addend is None else ops.flat(addend),
            math.prod(shape[:-1]),
            self.topk,
        )
        self.restore_backward: direct.Plans[Any] = direct.Plans()

    def forward(
        self,
        rows: Tensor,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        addend: Tensor | None,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(result, slots)"""
        empty = direct.allocator(self.device)
        out = empty(self.out_shape, self.out_stride, self.dtype)
        slots = empty(self.shape, self.stride, torch.int32)
        inverse, copy = slots, None
        if workspace is not None:
            inverse = workspaces.scratch(self.op, workspace, self.num_assignments, torch.int32)
            copy = slots
        for launch in self.invert:
            launch(token_indices_sorted, inverse)
        scores = None if top_scores is None else ops.flat(top_scores)
        self.restore(rows, scores, inverse, None if addend is None else ops.flat(addend), out, copy)
        return out, slots

    def backward(
        self,
        grad_part: Any,
        grad: Tensor,
        rows: Tensor | None,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        slots: Tensor,
        need_rows: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        grad = ops.flat(grad)
        scores = None if top_scores is None else ops.flat(top_scores)
        key = (grad_part, rows is None, need_rows)
        launch = self.restore_backward.get(key)
        if launch is None:
            launch = self.kernels.restore_backward(
                grad, rows, scores, token_indices_sorted, self.topk, need_rows
            )
            self.restore_backward.add(key, launch)
        empty = direct.allocator(self.device)
        grad_rows = grad_scores = None
        if need_rows:
            grad_rows = empty(self.rows_shape, self.rows_stride, self.dtype)
        if rows is not None and self.scores_dtype is not None:
            grad_scores = empty(self.shape, self.stride, self.scores_dtype)
        launch(grad, rows, scores, token_indices_sorted, slots, grad_rows, grad_scores)
        return grad_rows, grad_scores


_PLANS: direct.Plans[_Plan] = direct.Plans()


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        top_scores: Tensor | None,
        addend: Tensor | None,
        plan: _Plan,
        token_indices_sorted: Tensor,
        workspace: Tensor | None,
    ) -> Tensor:
        out, slots = plan.forward(rows, top_scores, token_indices_sorted, addend, workspace)
        need_rows, need_scores = ctx.needs_input_grad[:2]
        if need_rows or need_scores:
            kept = rows if need_scores else None
            ctx.save_for_backward(kept, top_scores, token_indices_sorted, slots)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        need_rows, need_scores, need_addend = ctx.needs_input_grad[:3]
        grad_rows = grad_scores = None
        if grad is not None and (need_rows or need_scores):
            saved = ctx.saved_tensors
            plan: _Plan = ctx.plan
            parts = direct.signature(grad, *saved)
            if (
                parts is None
                or torch.is_grad_enabled()
                or not direct.unchanged(parts[1:], plan.saved)
            ):
                backward = torch.ops.moe.restore_backward
                grad_rows, grad_scores = backward(grad, *saved, need_rows)
            else:
                rows, top_scores, token_indices_sorted, slots = saved
                grad_rows, grad_scores = plan.backward(
                    parts[0], grad, rows, top_scores, token_indices_sorted, slots, need_rows
                )
        return (
            grad_rows if need_rows else None,
            grad_scores if need_scores else None,
            grad if need_addend else None,
            None,
            None,
            None,
        )


def weighted_restore(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor | None,
) -> Tensor | None:
    """The result, or None where the call is for the dispatcher."""
    if top_scores is None:
        return None
    return _call(ops.OP, rows, top_scores, token_indices_sorted, None, None, addend, workspace)


def restore(
    rows: Tensor,
    token_indices_sorted: Tensor,
    num_tokens: int,
    topk: int,
    addend: Tensor | None,
    workspace: Tensor | None,
) -> Tensor | None:
    """The result, or None where the call is for the dispatcher."""
    # Numbers of other types are for the dispatcher and the checks.
    if not (type(num_tokens) is type(topk) is int):
        return None
    if not (0 <= num_tokens < 2**63 and 1 <= topk < 2**63):
        return None
    return _call("restore", rows, None, token_indices_sorted, num_tokens, topk, addend, workspace)


def _call(
    op: str,
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    num_tokens: int | None,
    topk: int | None,
    addend: Tensor | None,
    workspace: Tensor | None,
) -> Tensor | None:
    tensors = direct.signature(rows, top_scores, token_indices_sorted, addend, workspace)
    if tensors is None or rows is None or token_indices_sorted is None:
        return None
    key = (*tensors, num_tokens, topk)
    plan = _PLANS.get(key)
    if plan is None:
        if top_scores is not None:
            ops.check_scores(top_scores)
            shape = tuple(top_scores.shape)
        else:
            assert num_tokens is not None and topk is not None
            shape = (num_tokens, topk)
        ops.check(
            op, rows, top_scores, token_indices_sorted, shape[:-1], shape[-1], addend, workspace
        )
        plan = _Plan(rows, top_scores, token_indices_sorted, addend, shape, op, tensors)
        _PLANS.add(key, plan)
    if torch.is_grad_enabled() and (
        rows.requires_grad
        or (top_scores is not None and top_scores.requires_grad)
        or (addend is not None and addend.requires_grad)
    ):
        return direct.apply(
            _Restore, rows, top_scores, addend, plan, token_indices_sorted, workspace
        )
    return plan.forward(rows, top_scores, token_indices_sorted, addend, workspace)[0]
