"""sequence_aux_loss past the dispatcher: three launches forward, one over the counts backward."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, direct
from .. import workspace as workspaces
from ..backend import as_bytes, float64_bits, load_kernels
from ..fixed_order import accumulator_dtype
from . import ops


class _Plan:
    """Launches and sizes of the calls of one signature."""

    def __init__(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        cu_seqlens: Tensor | None,
        token_mask: Tensor | None,
        workspace: Tensor,
        numerator: float,
    ) -> None:
        kernels = load_kernels(__package__)
        self.shape, self.dtype, self.device = probs.shape, probs.dtype, probs.device
        self.counts_shape = tokens_per_expert.shape
        self.loss_dtype = accumulator_dtype(probs.dtype)
        self.numerator_bits = float64_bits(numerator)
        partials, tile_lengths = ops.scratch(probs, tokens_per_expert, workspace)
        self.num_partials, self.num_slots = partials.shape[0], tile_lengths.shape[0]
        inputs = probs, tokens_per_expert, cu_seqlens
        self.tile_sums = kernels.tile_sums(*inputs, token_mask, self.num_slots)
        launches = kernels.loss_from_tile_sums(*inputs, self.num_slots)
        self.add_slots, self.add_sequences = launches
        self.grad_rows = kernels.grad_rows(tokens_per_expert)
        self.counts_layout = direct.layout(tokens_per_expert)
        # Where nothing is to be masked or gathered, the rows of a batch are allocated as the
        # gradient that repeats them.
        num_sequences, num_experts = tokens_per_expert.shape
        repeated = cu_seqlens is None and token_mask is None and probs.numel() > 0
        self.grad_shape = tuple(probs.shape) if repeated else (num_sequences, num_experts)
        self.grad_stride = (num_experts, 0, 1) if repeated else (num_experts, 1)

    def forward(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        cu_seqlens: Tensor | None,
        token_mask: Tensor | None,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(loss, C [sequences])"""
        dtype, num_sequences = self.loss_dtype, self.counts_shape[0]
        empty = direct.allocator(self.device)
        if workspace is None:
            partials = empty((self.num_partials,), (1,), dtype)
            tile_lengths = empty((self.num_slots,), (1,), torch.int32)
        else:
            partials, tile_lengths = ops.scratch(probs, tokens_per_expert, workspace)
        sums = empty((num_sequences,), (1,), dtype)
        lengths = empty((num_sequences,), (1,), torch.int64)
        loss = empty((), (), dtype)
        mask = as_bytes(token_mask)
        self.tile_sums(probs, tokens_per_expert, cu_seqlens, mask, partials, tile_lengths)
        self.add_slots(partials, tile_lengths, cu_seqlens, sums, lengths)
        self.add_sequences(sums, lengths, loss, sums, self.numerator_bits)
        return loss, sums

    def backward(self, grad: Tensor, scales: Tensor, tokens_per_expert: Tensor) -> Tensor:
        empty = direct.allocator(self.device)
        rows = empty(self.grad_shape, self.grad_stride, self.dtype)
        self.grad_rows(grad, scales, tokens_per_expert, rows, 0)
        return rows


_PLANS: direct.Plans[_Plan] = direct.Plans()


class _SequenceAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, plan: _Plan, constants: tuple[Any, ...]) -> Tensor:
        tokens_per_expert, cu_seqlens, token_mask, _ = constants
        loss, scales = plan.forward(probs, *constants)
        ctx.save_for_backward(tokens_per_expert, cu_seqlens, token_mask, scales)
        ctx.call = plan, tokens_per_expert, tokens_per_expert.data_ptr(), scales
        ctx.set_materialize_grads(False)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        tokens_per_expert, cu_seqlens, token_mask, scales = ctx.saved_tensors
        plan, own_counts, address, own_scales = ctx.call
        # A hook on saved tensors may have brought others, and ``.data = ...`` is not watched.
        if (
            tokens_per_expert is own_counts
            and scales is own_scales
            and tokens_per_expert.data_ptr() == address
            and direct.layout(tokens_per_expert) == plan.counts_layout
            and direct.is_plain(grad)
        ):
            rows = plan.backward(grad, scales, tokens_per_expert)
            if rows.dim() == 3:
                return rows, None, None
        else:
            rows = ops.grad_rows(grad, scales, tokens_per_expert, plan.dtype)
        return ops.expand_rows(rows, plan.shape, cu_seqlens, token_mask), None, None


_APPLY = direct.apply_of(_SequenceAuxLoss)


def sequence_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    coeff: float,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    workspace: Tensor | None,
) -> Tensor | None:
    """The loss, or None where the call is for the dispatcher."""
    # Numbers of other types are for the dispatcher and the checks.
    if not (type(topk) is int and type(coeff) is float):
        return None
    # -0.0 has the key of 0.0 and another result.
    if not coeff and math.copysign(1.0, coeff) < 0.0:
        return None
    tensors = direct.signature(probs, tokens_per_expert, cu_seqlens, token_mask, workspace)
    if tensors is None or probs is None or tokens_per_expert is None:
        return None
    if workspaces.overlap(workspace, probs, tokens_per_expert, cu_seqlens, token_mask):
        return None
    key = (*tensors, topk, coeff)
    plan = _PLANS.get(key)
    if plan is None:
        scratch = ops.check(probs, tokens_per_expert, topk, cu_seqlens, token_mask, workspace)
        numerator = probs.shape[-1] * coeff / topk
        inputs = probs, tokens_per_expert, cu_seqlens, token_mask
        plan = _Plan(*inputs, scratch, numerator)
        _PLANS.add(key, plan)
    constants = (checks.constant(tokens_per_expert), cu_seqlens, token_mask, workspace)
    if probs.requires_grad and torch.is_grad_enabled():
        return _APPLY(probs, plan, constants)
    return plan.forward(probs, *constants)[0]
