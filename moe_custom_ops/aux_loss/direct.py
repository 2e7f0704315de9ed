"""aux_loss past the dispatcher: two launches forward, one over the columns backward."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, direct
from .. import workspace as workspaces
from ..backend import as_bytes, float64_bits, float64_of, load_kernels
from ..fixed_order import accumulator_dtype
from . import ops


class _Plan:
    """Launches and sizes of the calls of one signature."""

    def __init__(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        token_mask: Tensor | None,
        numerator: float,
    ) -> None:
        kernels = load_kernels(__package__)
        self.shape, self.dtype, self.device = probs.shape, probs.dtype, probs.device
        self.loss_dtype = accumulator_dtype(probs.dtype)
        self.numerator, self.numerator_bits = numerator, float64_bits(numerator)
        _, self.num_partials = kernels.num_partials(*probs.shape)
        self.tile_sums = kernels.tile_sums(probs, tokens_per_expert, token_mask)
        self.loss_from_tile_sums = kernels.loss_from_tile_sums(
            self.num_partials, self.loss_dtype, probs.device
        )
        self.grad_rows = kernels.grad_rows(tokens_per_expert)
        self.counts_layout = direct.layout(tokens_per_expert)
        # Where nothing is to be masked, the row is allocated as the gradient that repeats it.
        num_tokens, num_columns = probs.shape
        repeated = token_mask is None and num_tokens > 0
        self.grad_shape = (num_tokens, num_columns) if repeated else (num_columns,)
        self.grad_stride = (0, 1) if repeated else (1,)

    def forward(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        total: Tensor | int,
        token_mask: Tensor | None,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, int]:
        """(loss, C where the total is a tensor, the bits of C as a float64 where it is not)"""
        dtype, empty = self.loss_dtype, direct.allocator(self.device)
        if workspace is None:
            partials = empty((self.num_partials,), (1,), dtype)
        else:
            partials = workspaces.scratch(ops.OP, workspace, self.num_partials, dtype)
        loss = empty((), (), dtype)
        self.tile_sums(probs, tokens_per_expert, as_bytes(token_mask), partials)
        if isinstance(total, int):
            bits = float64_bits(self.numerator / total / total)
            self.loss_from_tile_sums(partials, None, loss, None, bits)
            return loss, None, bits
        scale = empty((), (), dtype)
        self.loss_from_tile_sums(partials, total, loss, scale, self.numerator_bits)
        return loss, scale, 0

    def backward(
        self, grad: Tensor, scale: Tensor | None, scale_bits: int, tokens_per_expert: Tensor
    ) -> Tensor:
        empty = direct.allocator(self.device)
        row = empty(self.grad_shape, self.grad_stride, self.dtype)
        self.grad_rows(grad, scale, tokens_per_expert, row, scale_bits)
        return row


_PLANS: direct.Plans[_Plan] = direct.Plans()


class _AuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, plan: _Plan, constants: tuple[Any, ...]) -> Tensor:
        tokens_per_expert, _, token_mask, _ = constants
        loss, scale, scale_bits = plan.forward(probs, *constants)
        ctx.save_for_backward(tokens_per_expert, token_mask, scale)
        ctx.call = plan, scale_bits, tokens_per_expert, tokens_per_expert.data_ptr(), scale
        ctx.set_materialize_grads(False)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        tokens_per_expert, token_mask, scale = ctx.saved_tensors
        plan, scale_bits, own_counts, address, own_scale = ctx.call
        # A hook on saved tensors may have brought others, and ``.data = ...`` is not watched.
        if (
            tokens_per_expert is own_counts
            and scale is own_scale
            and tokens_per_expert.data_ptr() == address
            and direct.layout(tokens_per_expert) == plan.counts_layout
            and direct.is_plain(grad)
        ):
            row = plan.backward(grad, scale, scale_bits, tokens_per_expert)
            if row.dim() == 2:
                return row, None, None
        else:
            if scale is None:
                scale = torch.full_like(grad, float64_of(scale_bits))
            row = ops.grad_row(grad, scale, tokens_per_expert, plan.dtype)
        return ops.expand_row(row, plan.shape, token_mask), None, None


_APPLY = direct.apply_of(_AuxLoss)


def aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    token_mask: Tensor | None,
) -> Tensor | None:
    """The loss, or None where the call is for the dispatcher."""
    # Numbers of other types are for the dispatcher and the checks, and so is a total of no token.
    if not (type(num_experts) is type(topk) is int and type(coeff) is float):
        return None
    # -0.0 has the key of 0.0 and another result.
    if not coeff and math.copysign(1.0, coeff) < 0.0:
        return None
    total: Tensor | None = None
    if type(total_num_tokens) is not int:
        total = total_num_tokens  # type: ignore[assignment]
        if total is None:
            return None
    elif not 0 < total_num_tokens < 2**63:
        return None
    tensors = direct.signature(probs, tokens_per_expert, total, workspace, token_mask)
    if tensors is None or probs is None or tokens_per_expert is None:
        return None
    if workspaces.overlap(workspace, probs, tokens_per_expert, total, token_mask):
        return None
    key = (*tensors, num_experts, topk, coeff)
    plan = _PLANS.get(key)
    if plan is None:
        ops.check(
            probs, tokens_per_expert, total_num_tokens, num_experts, topk, workspace, token_mask
        )
        numerator = num_experts * coeff / topk
        plan = _Plan(probs, tokens_per_expert, token_mask, numerator)
        _PLANS.add(key, plan)
    constants = (
        checks.constant(tokens_per_expert),
        total_num_tokens,
        token_mask,
        workspace,
    )
    if probs.requires_grad and torch.is_grad_enabled():
        return _APPLY(probs, plan, constants)
    return plan.forward(probs, *constants)[0]
