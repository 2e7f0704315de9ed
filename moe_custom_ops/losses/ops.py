"""Registration of ``torch.ops.moe.aux_loss`` and ``sequence_aux_loss``.

Each public name is a composite over one inner op, which returns the loss and its scales. Those are
saved for the gradient, never the workspace: two calls in one graph may share that.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks, op
from ..fixed_order import accumulator_dtype, cast, tree_sum
from ..launch import Run
from ..workspace import overlap
from . import arguments, plans, reference


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=accumulator_dtype(like.dtype))


def _aux_loss_cpu(
    probs: Tensor,
    tokens_per_expert: Tensor,
    token_mask: Tensor | None,
    total: Tensor | None,
    sums: Tensor | None,
    workspace: Tensor | None,
    num_experts: int,
    topk: int,
    coeff: float,
    total_int: int,
) -> tuple[Tensor, Tensor]:
    given = probs, tokens_per_expert, 1 if total is None else total
    arguments.check_aux_loss(*given, num_experts, topk, workspace, token_mask)
    if sums is None:
        sums = reference.tile_sums(probs, tokens_per_expert, token_mask)
    arguments.check_sums(sums, accumulator_dtype(probs.dtype))
    total_num_tokens = total_int if total is None else total
    return reference.loss_from_tile_sums(sums, total_num_tokens, num_experts, topk, coeff)


_run_aux_loss = op.define_with_workspace(
    "aux_loss_forward",
    "(Tensor probs, Tensor tokens_per_expert, Tensor? token_mask, Tensor? total, Tensor? sums, "
    "Tensor(a!) workspace, int num_experts, int topk, float coeff, SymInt total_int) "
    "-> (Tensor, Tensor)",
    _aux_loss_cpu,
    op.registered(plans.aux_loss, 6, 3),
    lambda probs, *_: (_empty(probs), _empty(probs)),
)


def grad_rows(
    grad: Tensor, scales: Tensor, tokens_per_expert: Tensor, dtype: torch.dtype
) -> Tensor:
    """The row that the gradient of probs repeats for every token: [columns], or one per sequence.

    Plain PyTorch, so that Inductor fuses it into the router's backward and autograd can
    differentiate it again.
    """
    rows = (grad * scales)[..., None] * tokens_per_expert.to(scales.dtype)
    # A scale of 0 gives a gradient of 0 whatever the counts and the incoming gradient hold.
    return cast(torch.where(scales[..., None] == 0, torch.zeros_like(rows), rows), dtype)


def _expand_rows(
    rows: Tensor, shape: torch.Size, cu_seqlens: Tensor | None, token_mask: Tensor | None
) -> Tensor:
    """The gradient of probs: the rows expanded over the tokens, or gathered by a pack's."""
    if cu_seqlens is not None:
        tokens = torch.arange(shape[0], device=rows.device, dtype=cu_seqlens.dtype)
        # A token's sequence is the last that begins at it or before it. Tokens of none take the
        # row of zeros: -1 before the first, B behind the last. The clamp, which the forward has
        # too, is also what makes the bounds a buffer of their own: on CUDA, Inductor of torch 2.11
        # searched a slice from the beginning of the tensor that it was cut from.
        bounds = cu_seqlens.clamp(0, shape[0])
        sequence = torch.searchsorted(bounds, tokens, right=True) - 1
        grad_probs = torch.nn.functional.pad(rows, (0, 0, 0, 1))[sequence]
    else:
        grad_probs = rows.unsqueeze(-2).expand(shape)
    if token_mask is not None:
        grad_probs = torch.where(token_mask[..., None], grad_probs, 0.0)
    return grad_probs


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, run: Run, saved: tuple[Any, ...], rest: tuple[Any, ...]
    ) -> Tensor:
        loss, scales = run(probs, *rest)
        ctx.save_for_backward(scales, *saved)
        ctx.probs = probs.shape, probs.dtype
        ctx.set_materialize_grads(False)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        scales, tokens_per_expert, cu_seqlens, token_mask = ctx.saved_tensors
        shape, dtype = ctx.probs
        repeated = cu_seqlens is None and token_mask is None
        given = grad, scales, tokens_per_expert
        run = op.backward_plan(plans.grad_rows, given, (shape, dtype, repeated))
        rows = grad_rows(*given, dtype) if run is None else run(*given)
        # Where they are repeated, a plan allocates the rows as the gradient.
        if rows.dim() < len(shape) or not repeated:
            rows = _expand_rows(rows, shape, cu_seqlens, token_mask)
        return rows, None, None, None


_apply = op.apply_of(_Loss)


def _loss(apply: Run, run: Run, saved: tuple[Any, ...], probs: Tensor, *rest: Any) -> Tensor:
    if probs.requires_grad and torch.is_grad_enabled():
        return apply(probs, run, saved, rest)
    return run(probs, *rest)[0]


def _aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None = None,
    token_mask: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    counts, numbers = checks.constant(tokens_per_expert), (num_experts, topk)
    arguments.check_aux_loss(
        probs, tokens_per_expert, total_num_tokens, *numbers, workspace, token_mask
    )
    total, total_int = None, total_num_tokens
    if isinstance(total_num_tokens, Tensor):
        total, total_int = checks.constant(total_num_tokens), 0
    rest = counts, token_mask, total, sums, workspace, *numbers, coeff, total_int
    return _loss(_Loss.apply, _run_aux_loss, (counts, None, token_mask), probs, *rest)


def _aux_loss_past(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    token_mask: Tensor | None,
) -> Tensor | None:
    # Numbers of other types are for the dispatcher and the checks, and so is a total of no token.
    if not (type(num_experts) is type(topk) is int):
        return None
    number = op.plain_float(coeff)
    if number is None or probs is None or tokens_per_expert is None:
        return None
    total: Any = total_num_tokens
    total_int = 0
    if type(total) is int:
        if not 0 < total < 2**63:
            return None
        total, total_int = None, total
    elif total is None:
        return None
    tensors = probs, tokens_per_expert, token_mask, total, None, workspace
    run = op.plan(plans.aux_loss, tensors, (num_experts, topk, number))
    if run is None or overlap(workspace, probs, tokens_per_expert, total, token_mask):
        return None
    counts = checks.constant(tokens_per_expert)
    rest = counts, token_mask, total, None, workspace, num_experts, topk, number, total_int
    return _loss(_apply, run, (counts, None, token_mask), probs, *rest)


for _overload, _total in (("aux_loss", "Tensor"), ("aux_loss.int", "SymInt")):
    op.compose(
        _overload,
        f"(Tensor probs, Tensor tokens_per_expert, {_total} total_num_tokens, int num_experts, "
        "int topk, float coeff, Tensor(a!)? workspace=None, Tensor? token_mask=None) -> Tensor",
        _aux_loss,
        vmap=True,
    )
AUX_LOSS = op.Public("aux_loss", _aux_loss_past)


def _sequence_aux_loss_cpu(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    sums: Tensor | None,
    lengths: Tensor | None,
    workspace: Tensor | None,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    given = probs, tokens_per_expert, topk, cu_seqlens, token_mask, workspace
    arguments.check_sequence_aux_loss(*given)
    dtype = accumulator_dtype(probs.dtype)
    arguments.check_sums_of_sequences(tokens_per_expert, sums, lengths, dtype)
    if sums is None:
        sums = _empty(probs, tokens_per_expert.shape[0])
        own_lengths = torch.zeros_like(sums, dtype=torch.int64)
        for b, (_, own, mask) in enumerate(reference.sequences(probs, cu_seqlens, token_mask)):
            sums[b] = tree_sum(reference.tile_sums(own, tokens_per_expert[b], mask), dim=0)
            own_lengths[b] = own.shape[0] if mask is None else mask.sum()
        lengths = own_lengths if lengths is None else lengths
    elif sums.dim() == 2:
        sums = tree_sum(sums, dim=1)
    assert lengths is not None
    num_experts = tokens_per_expert.shape[1]
    loss, scales = reference.loss_from_sums(sums, lengths, num_experts, topk, coeff)
    # A view returned here could not be changed in place by the caller.
    return loss.clone(), scales


_run_sequence_aux_loss = op.define_with_workspace(
    "sequence_aux_loss_forward",
    "(Tensor probs, Tensor tokens_per_expert, Tensor? cu_seqlens, Tensor? token_mask, "
    "Tensor? sums, Tensor? lengths, Tensor(a!) workspace, int topk, float coeff) "
    "-> (Tensor, Tensor)",
    _sequence_aux_loss_cpu,
    op.registered(plans.sequence_aux_loss, 7, 2),
    lambda probs, counts, *_: (_empty(probs), _empty(probs, counts.shape[0])),
)


def _sequence_aux_loss_of_rank(
    probs: Tensor,
    tokens_per_expert: Tensor,
    lengths: Tensor | None,
    topk: int,
    coeff: float,
    cu_seqlens: Tensor | None = None,
    token_mask: Tensor | None = None,
    workspace: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """The loss of the ``sums`` and ``lengths`` of all ranks, or of this rank's own."""
    given = probs, tokens_per_expert, topk, cu_seqlens, token_mask, workspace
    arguments.check_sequence_aux_loss(*given)
    counts = checks.constant(tokens_per_expert)
    rest = counts, cu_seqlens, token_mask, sums, lengths, workspace, topk, coeff
    saved = counts, cu_seqlens, token_mask
    return _loss(_Loss.apply, _run_sequence_aux_loss, saved, probs, *rest)


def _sequence_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, *rest: Any, **options: Any
) -> Tensor:
    return _sequence_aux_loss_of_rank(probs, tokens_per_expert, None, *rest, **options)


def _sequence_aux_loss_past(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    coeff: float,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    workspace: Tensor | None,
) -> Tensor | None:
    number = op.plain_float(coeff)
    if type(topk) is not int or number is None or probs is None or tokens_per_expert is None:
        return None
    tensors = probs, tokens_per_expert, cu_seqlens, token_mask, None, None, workspace
    run = op.plan(plans.sequence_aux_loss, tensors, (topk, number))
    if run is None or overlap(workspace, probs, tokens_per_expert, cu_seqlens, token_mask):
        return None
    counts = checks.constant(tokens_per_expert)
    rest = counts, cu_seqlens, token_mask, None, None, workspace, topk, number
    return _loss(_apply, run, (counts, cu_seqlens, token_mask), probs, *rest)


op.compose(
    "sequence_aux_loss",
    "(Tensor probs, Tensor tokens_per_expert, int topk, float coeff, Tensor? cu_seqlens=None, "
    "Tensor? token_mask=None, Tensor(a!)? workspace=None) -> Tensor",
    _sequence_aux_loss,
    vmap=True,
)
SEQUENCE_AUX_LOSS = op.Public("sequence_aux_loss", _sequence_aux_loss_past)

# Of tokens that are spread over ranks: ``moe_custom_ops.distributed`` calls these.
op.compose(
    "aux_loss_of_rank",
    "(Tensor probs, Tensor tokens_per_expert, Tensor total_num_tokens, int num_experts, int topk, "
    "float coeff, Tensor(a!)? workspace, Tensor? token_mask, Tensor sums) -> Tensor",
    _aux_loss,
)
op.compose(
    "sequence_aux_loss_of_rank",
    "(Tensor probs, Tensor tokens_per_expert, Tensor lengths, int topk, float coeff, "
    "Tensor? cu_seqlens=None, Tensor? token_mask=None, Tensor(a!)? workspace=None, "
    "Tensor? sums=None) -> Tensor",
    _sequence_aux_loss_of_rank,
)


def _sums_cpu(
    probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None, size: int
) -> Tensor:
    arguments.check_aux_loss(probs, tokens_per_expert, 1, 1, 1, None, token_mask)
    return plans.padded(reference.tile_sums(probs, tokens_per_expert, token_mask), size)


op.define(
    "aux_loss_sums_of_rank",
    "(Tensor probs, Tensor tokens_per_expert, Tensor? token_mask, SymInt size) -> Tensor",
    _sums_cpu,
    op.registered(plans.aux_loss_sums, 3),
    lambda probs, counts, mask, size: _empty(probs, size),
)


def _sequence_sums_cpu(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    size: int,
) -> Tensor:
    arguments.check_sequence_aux_loss(probs, tokens_per_expert, 1, cu_seqlens, token_mask, None)
    result = _empty(probs, tokens_per_expert.shape[0], size).zero_()
    for b, (_, own, mask) in enumerate(reference.sequences(probs, cu_seqlens, token_mask)):
        sums = reference.tile_sums(own, tokens_per_expert[b], mask)[:size]
        result[b, : sums.shape[0]] = sums
    return result


op.define(
    "sequence_aux_loss_sums_of_rank",
    "(Tensor probs, Tensor tokens_per_expert, Tensor? cu_seqlens, Tensor? token_mask, "
    "SymInt size) -> Tensor",
    _sequence_sums_cpu,
    op.registered(plans.sequence_aux_loss_sums, 4),
    lambda probs, counts, cu_seqlens, mask, size: _empty(probs, counts.shape[0], size),
)
