"""Registration of ``permute``, ``permute_with_scores``, ``weighted_restore`` and ``restore``.

Each public name is a composite over inner ops. A restore returns the result and the slots, which
are the inverse permutation; it saves those and inputs for its gradient, or the inverse that the
caller has, never the workspace: two calls in one graph may share that. The backward is an op of its
own. Without scores the two are each other's adjoint: ``permute`` is the backward of ``restore``,
and the other way round. With scores the backward has a backward in plain PyTorch.
"""

from typing import Any

import torch
from torch import Tensor

from .. import op
from ..backend import flat
from ..fixed_order import accumulator_dtype, cast
from ..launch import Run
from ..permutation.ops import inverse_past
from ..permutation.reference import invert
from ..workspace import overlap
from . import arguments, plans, reference

moe = torch.ops.moe


def _bounded(slots: Tensor, token_indices_sorted: Tensor) -> Tensor:
    """A given inverse may hold anything: an entry outside the rows means that no row holds it."""
    return torch.where((slots < 0) | (slots >= token_indices_sorted.shape[0]), -1, slots)


def _empty_restored(
    rows: Tensor, top_scores: Tensor | None, num_tokens: int, topk: int
) -> tuple[Tensor, Tensor]:
    shape = arguments.shape_of(top_scores, num_tokens, topk)
    out = rows.new_empty([*shape[:-1], rows.shape[1]])
    return out, rows.new_empty(shape, dtype=torch.int32)


def _restore_cpu(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    inverse: Tensor | None,
    workspace: Tensor | None,
    num_tokens: int,
    topk: int,
) -> tuple[Tensor, Tensor | None]:
    shape = arguments.shape_of(top_scores, num_tokens, topk)
    given = rows, top_scores, token_indices_sorted
    arguments.check(*given, shape, addend, workspace, inverse)
    out, slots = _empty_restored(rows, top_scores, num_tokens, topk)
    own = inverse
    if own is None:
        own = slots.copy_(invert(token_indices_sorted, slots.numel()).view(shape))
    own = _bounded(own, token_indices_sorted)
    scores = None if top_scores is None else flat(top_scores)
    flat_addend = None if addend is None else flat(addend)
    # Into a fresh tensor: a view returned here could not be changed in place by the caller.
    flat(out).copy_(reference.weighted_restore(rows, scores, flat(own).long(), flat_addend))
    return out, slots if inverse is None else None


def _at_hand(function: Run) -> Run:
    """A restore of the inverse at hand alone."""
    return lambda *given: function(*given[:5], None, *given[5:])[0]


def _not_at_hand(function: Run) -> Run:
    return lambda *given: function(*given[:4], None, *given[4:])


_restore_cuda = op.registered(plans.restore, 6, 2)
op.define(
    "restore_of_inverse",
    "(Tensor rows, Tensor? top_scores, Tensor token_indices_sorted, Tensor? addend, "
    "Tensor inverse, SymInt num_tokens, int topk) -> Tensor",
    _at_hand(_restore_cpu),
    _at_hand(_restore_cuda),
    lambda rows, top_scores, order, addend, inverse, num_tokens, topk: _empty_restored(
        rows, top_scores, num_tokens, topk
    )[0],
)
_run_inverting = op.define_with_workspace(
    "restore_forward",
    "(Tensor rows, Tensor? top_scores, Tensor token_indices_sorted, Tensor? addend, "
    "Tensor(a!) workspace, SymInt num_tokens, int topk) -> (Tensor, Tensor)",
    _not_at_hand(_restore_cpu),
    _not_at_hand(_restore_cuda),
    lambda rows, top_scores, order, addend, workspace, num_tokens, topk: _empty_restored(
        rows, top_scores, num_tokens, topk
    ),
)


def _run_restore(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    inverse: Tensor | None,
    workspace: Tensor | None,
    *shape: int,
) -> tuple[Tensor, Tensor | None]:
    given = rows, top_scores, token_indices_sorted, addend
    if inverse is None:
        return _run_inverting(*given, workspace, *shape)
    return moe.restore_of_inverse(*given, inverse, *shape), None


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        top_scores: Tensor | None,
        addend: Tensor | None,
        run: Run,
        rest: tuple[Any, ...],
    ) -> Tensor:
        token_indices_sorted, inverse, *others = rest
        out, slots = run(rows, top_scores, token_indices_sorted, addend, inverse, *others)
        need_rows, need_scores = ctx.needs_input_grad[:2]
        if need_rows or need_scores:
            # Only the gradient of the scores reads the rows: a frozen router does not keep them.
            kept = rows if need_scores else None
            own = inverse if slots is None else slots
            ctx.save_for_backward(kept, top_scores, token_indices_sorted, own)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        need_rows, need_scores, need_addend = ctx.needs_input_grad[:3]
        grad_rows = grad_scores = None
        if grad is not None and (need_rows or need_scores):
            given = grad, *ctx.saved_tensors
            run = op.backward_plan(plans.restore_backward, given, (need_rows,))
            run = moe.restore_backward if run is None else run
            grad_rows, grad_scores = run(*given, need_rows)
        return (
            grad_rows if need_rows else None,
            grad_scores if need_scores else None,
            grad if need_addend else None,
            None,
            None,
        )


def _restored(
    apply: Run,
    run: Run,
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    *rest: Any,
) -> Tensor:
    if torch.is_grad_enabled() and (
        rows.requires_grad
        or (top_scores is not None and top_scores.requires_grad)
        or (addend is not None and addend.requires_grad)
    ):
        return apply(rows, top_scores, addend, run, (token_indices_sorted, *rest))
    return run(rows, top_scores, token_indices_sorted, addend, *rest)[0]


def _weighted_restore(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
    num_tokens: int = 0,
    topk: int = 0,
) -> Tensor:
    shape = arguments.shape_of(top_scores, num_tokens, topk)
    given = rows, top_scores, token_indices_sorted
    arguments.check(*given, shape, addend, workspace, inverse)
    rest = inverse, workspace, num_tokens, topk
    return _restored(_Restore.apply, _run_restore, *given, addend, *rest)


def _restore(
    rows: Tensor,
    token_indices_sorted: Tensor,
    num_tokens: int,
    topk: int,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    given = rows, None, token_indices_sorted, addend, workspace, inverse
    return _weighted_restore(*given, num_tokens, topk)


_apply_restore = op.apply_of(_Restore)


def _weighted_restore_past(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor | None,
    inverse: Tensor | None,
    num_tokens: int = 0,
    topk: int = 0,
) -> Tensor | None:
    # The scores are None where there are sizes instead.
    if rows is None or token_indices_sorted is None or (top_scores is None and not topk):
        return None
    given = rows, top_scores, token_indices_sorted, addend, inverse, workspace
    run = op.plan(plans.restore, given, (num_tokens, topk))
    if run is None or overlap(workspace, *given[:4]):
        return None
    return _restored(_apply_restore, run, *given, num_tokens, topk)


def _restore_past(
    rows: Tensor,
    token_indices_sorted: Tensor,
    num_tokens: int,
    topk: int,
    addend: Tensor | None,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> Tensor | None:
    if not op.plain_ints(num_tokens, topk):
        return None
    given = rows, None, token_indices_sorted, addend, workspace, inverse
    return _weighted_restore_past(*given, num_tokens, topk)


def _restore_backward_cpu(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
) -> tuple[Tensor | None, Tensor | None]:
    given = grad, rows, top_scores, token_indices_sorted, slots
    arguments.check_backward(*given)
    grads = _empty_grads(*given, need_rows)
    flat_slots = _bounded(flat(slots).long(), token_indices_sorted)
    scores = None if top_scores is None else flat(top_scores)
    if need_rows:
        assignments = reference.row_assignments(flat_slots, token_indices_sorted)
        grads[0].copy_(reference.grad_rows(flat(grad), scores, flat_slots, assignments))
    if rows is not None:
        sums = reference.grad_scores(flat(grad), rows, flat_slots, grads[1].dtype)
        flat(grads[1]).copy_(sums)
    return grads


def _restore_backward_cuda(*given: Any) -> tuple[Tensor, Tensor]:
    grad_rows, grad_scores = _planned_backward(*given)
    if grad_rows is None or grad_scores is None:
        grad, _, top_scores, token_indices_sorted, slots, _ = given
        empty = _empty_grads(grad, None, top_scores, token_indices_sorted, slots, False)
        grad_rows = empty[0] if grad_rows is None else grad_rows
        grad_scores = empty[1] if grad_scores is None else grad_scores
    return grad_rows, grad_scores


_planned_backward = op.registered(plans.restore_backward, 5, 1)


def _empty_grads(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
) -> tuple[Tensor, Tensor]:
    """The one that is not needed is of size 0. Only the gradient of the scores takes rows."""
    shape = (token_indices_sorted.shape[0], grad.shape[-1]) if need_rows else (0,)
    dtype = grad.dtype if top_scores is None else top_scores.dtype
    need_scores = rows is not None
    return grad.new_empty(shape), grad.new_empty(slots.shape if need_scores else (0,), dtype=dtype)


_BACKWARD = (
    "(Tensor grad, Tensor? rows, Tensor? top_scores, Tensor token_indices_sorted, Tensor slots, "
    "bool need_rows) -> (Tensor, Tensor)"
)
op.define("restore_grads", _BACKWARD, _restore_backward_cpu, _restore_backward_cuda, _empty_grads)


class _RestoreBackward(torch.autograd.Function):
    """Differentiable to any order: without scores by the gather, else in plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*given[:5])
        ctx.has_rows = given[5]
        ctx.set_materialize_grads(False)
        return moe.restore_grads(*given)

    @staticmethod
    def backward(
        ctx: Any, grad_grad_rows: Tensor | None, grad_grad_scores: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """With u = grad_grad_rows and v = grad_grad_scores:

        grad[t]          += sum_k top_scores[t, k] * u[slot] + v[t, k] * rows[slot]
        rows[slot]       += v[t, k] * grad[t]
        top_scores[t, k] += sum_h grad[t, h] * u[slot, h]
        """
        grad, rows, top_scores, token_indices_sorted, slots = ctx.saved_tensors
        need_grad, need_rows, need_scores = ctx.needs_input_grad[:3]
        if top_scores is None:
            d_grad = None
            if grad_grad_rows is not None and ctx.has_rows and need_grad:
                d_grad = moe.restore_gather(grad_grad_rows, token_indices_sorted, slots)
            return d_grad, None, None, None, None, None
        dtype = accumulator_dtype(grad.dtype)
        flat_grad, shape = flat(grad).to(dtype), slots.shape
        slots = _bounded(flat(slots).long(), token_indices_sorted)
        held = (slots >= 0)[..., None]
        terms, d_rows, d_scores = [], None, None
        if grad_grad_rows is not None and ctx.has_rows:
            u = reference.with_zero_row(grad_grad_rows)[slots].to(dtype)  # [T, K, H]
            if need_grad:
                weighted = flat(top_scores).to(dtype)[..., None] * u
                terms.append(torch.where(held, weighted, 0.0))
            if need_scores:
                products = torch.where(held, flat_grad[:, None, :] * u, 0.0)
                d_scores = cast(products.sum(-1), top_scores.dtype).view(shape)
        if grad_grad_scores is not None and rows is not None:
            v = flat(grad_grad_scores).to(dtype)
            if need_grad:
                gathered = reference.with_zero_row(rows)[slots].to(dtype)
                terms.append(torch.where(held, v[..., None] * gathered, 0.0))
            if need_rows:
                assignments = reference.row_assignments(slots, token_indices_sorted)
                d_rows = reference.grad_rows(cast(flat_grad, rows.dtype), v, slots, assignments)
        d_grad = (
            cast(torch.stack(terms).sum((0, 2)), grad.dtype).view(grad.shape) if terms else None
        )
        return d_grad, d_rows, d_scores, None, None, None


def _restore_backward(*given: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given[:3]):
        return _RestoreBackward.apply(*given)
    return moe.restore_grads(*given)


op.compose("restore_backward", _BACKWARD, _restore_backward)


def _restore_gather(rows: Tensor, token_indices_sorted: Tensor, inverse: Tensor) -> Tensor:
    out = _weighted_restore(
        rows, None, token_indices_sorted, None, None, flat(inverse), *flat(inverse).shape
    )
    return out.view(*inverse.shape[:-1], rows.shape[1])


# A restore that ``is_grads_batched`` can batch: of a schema that mutates nothing.
op.compose(
    "restore_gather",
    "(Tensor rows, Tensor token_indices_sorted, Tensor inverse) -> Tensor",
    _restore_gather,
)


def _permute_cpu(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    inverse: Tensor | None,
    workspace: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor | None]:
    arguments.check_permute(tokens, token_indices_sorted, topk, workspace, inverse)
    shape, slots = (tokens.shape[0], topk), None
    if inverse is None:
        inverse = invert(token_indices_sorted, tokens.shape[0] * topk).view(shape)
        inverse = slots = inverse.to(torch.int32)
    flat_slots = _bounded(inverse.long(), token_indices_sorted)
    assignments = reference.row_assignments(flat_slots, token_indices_sorted)
    rows = reference.grad_rows(arguments.as_moved(tokens), None, flat_slots, assignments)
    # A view returned here could not be changed in place by the caller.
    result = torch.empty_like(rows, dtype=tokens.dtype)
    arguments.as_moved(result).copy_(rows)
    return result, slots


def _empty_permuted(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    inverse: Tensor | None,
    workspace: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor]:
    rows = tokens.new_empty(token_indices_sorted.shape[0], tokens.shape[1])
    return rows, tokens.new_empty(tokens.shape[0], topk, dtype=torch.int32)


def _of_inverse(function: Run) -> Run:
    return lambda tokens, order, inverse, topk: function(tokens, order, inverse, None, topk)[0]


def _in_workspace(function: Run) -> Run:
    return lambda tokens, order, workspace, topk: function(tokens, order, None, workspace, topk)[0]


def _alone(function: Run) -> Run:
    return lambda tokens, order, topk: function(tokens, order, None, None, topk)


_permute_cuda = op.registered(plans.permute, 4, 1)
for _name, _more, _results, _form in (
    ("permute_of_inverse", "Tensor inverse, ", "Tensor", _of_inverse),
    ("permute_in", "Tensor(a!) workspace, ", "Tensor", _in_workspace),
    ("permute_forward", "", "(Tensor, Tensor)", _alone),
):
    op.define(
        _name,
        f"(Tensor tokens, Tensor token_indices_sorted, {_more}int topk) -> {_results}",
        *map(_form, (_permute_cpu, _permute_cuda, _empty_permuted)),
    )


def _run_permute(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    inverse: Tensor | None,
    workspace: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor | None]:
    if inverse is not None:
        return moe.permute_of_inverse(tokens, token_indices_sorted, inverse, topk), None
    if workspace is not None:
        return moe.permute_in(tokens, token_indices_sorted, workspace, topk), None
    return moe.permute_forward(tokens, token_indices_sorted, topk)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        run: Run,
        token_indices_sorted: Tensor,
        inverse: Tensor | None,
        topk: int,
    ) -> Tensor:
        # No workspace: the slots are kept.
        rows, slots = run(tokens, token_indices_sorted, inverse, None, topk)
        ctx.save_for_backward(token_indices_sorted, inverse if slots is None else slots)
        ctx.set_materialize_grads(False)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_tokens = None
        if grad is not None:
            order, slots = ctx.saved_tensors
            given = grad, None, order, None, slots, None
            run = op.backward_plan(plans.restore, given, tuple(slots.shape))
            if run is None:
                grad_tokens = moe.restore_gather(grad, order, slots)
            else:
                grad_tokens = run(*given, *slots.shape)[0]
        return grad_tokens, None, None, None, None


def _permuted(
    apply: Run,
    run: Run,
    tokens: Tensor,
    token_indices_sorted: Tensor,
    inverse: Tensor | None,
    workspace: Tensor | None,
    topk: int,
) -> Tensor:
    if arguments.is_recorded(tokens):
        return apply(tokens, run, token_indices_sorted, inverse, topk)
    return run(tokens, token_indices_sorted, inverse, workspace, topk)[0]


def _permute(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    arguments.check_permute(tokens, token_indices_sorted, topk, workspace, inverse)
    given = tokens, token_indices_sorted, inverse, workspace, topk
    return _permuted(_Permute.apply, _run_permute, *given)


_apply_permute = op.apply_of(_Permute)


def _permute_past(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> Tensor | None:
    if tokens is None or token_indices_sorted is None or type(topk) is not int:
        return None
    given = tokens, token_indices_sorted, inverse, workspace
    run = op.plan(plans.permute, given, (topk,))
    if run is None or overlap(workspace, *given[:2]):
        return None
    if arguments.is_recorded(tokens) and tokens.dtype in arguments.MOVED_DTYPES:
        return None
    return _permuted(_apply_permute, run, *given, topk)


def _scores_to_rows_cpu(top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    arguments.check_scores_to_rows(top_scores, token_indices_sorted, slots)
    assignments = reference.row_assignments(slots, token_indices_sorted)
    return reference.scores_to_rows(top_scores, assignments)


def _rows_to_scores_cpu(row_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    arguments.check_rows_to_scores(row_scores, token_indices_sorted, slots)
    return reference.rows_to_scores(row_scores, slots)


class _ScoresToRows(torch.autograd.Function):
    """The score of each row's assignment, zero at padding rows: [N]."""

    @staticmethod
    def forward(ctx: Any, top_scores: Tensor, run: Run, *order: Tensor) -> Tensor:
        ctx.save_for_backward(*order)
        ctx.set_materialize_grads(False)
        return run(top_scores, *order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        given = grad, *ctx.saved_tensors
        run = op.backward_plan(plans.rows_to_scores, given)
        return (moe.rows_to_scores if run is None else run)(*given), None, None, None


class _RowsToScores(torch.autograd.Function):
    """The value of each assignment's row, zero where no row holds it: the adjoint."""

    @staticmethod
    def forward(ctx: Any, row_scores: Tensor, run: Run, *order: Tensor) -> Tensor:
        ctx.save_for_backward(*order)
        ctx.set_materialize_grads(False)
        return run(row_scores, *order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        return moe.scores_to_rows(grad, *ctx.saved_tensors), None, None, None


def _moved_scores(apply: Run, run: Run, scores: Tensor, *order: Tensor | None) -> Tensor:
    if scores.requires_grad and torch.is_grad_enabled():
        return apply(scores, run, *order)
    return run(scores, *order)


def _adjoint(function: type[torch.autograd.Function], inner: str) -> Run:
    return lambda *given: _moved_scores(function.apply, getattr(moe, inner), *given)


for _name, _first, _cpu, _make, _like, _function in (
    (
        "scores_to_rows",
        "top_scores",
        _scores_to_rows_cpu,
        plans.scores_to_rows,
        lambda scores, order, slots: scores.new_empty(order.shape),
        _ScoresToRows,
    ),
    (
        "rows_to_scores",
        "row_scores",
        _rows_to_scores_cpu,
        plans.rows_to_scores,
        lambda scores, order, slots: scores.new_empty(slots.shape),
        _RowsToScores,
    ),
):
    _schema = f"(Tensor {_first}, Tensor token_indices_sorted, Tensor slots) -> Tensor"
    op.define(f"{_name}_forward", _schema, _cpu, op.registered(_make, 3), _like)
    op.compose(_name, _schema, _adjoint(_function, f"{_name}_forward"))


def _permute_with_scores(
    tokens: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    arguments.check_permute_with_scores(
        tokens, top_scores, token_indices_sorted, workspace, inverse
    )
    if inverse is None:
        inverse = moe.inverse(token_indices_sorted, *top_scores.shape)
    rows = _permute(tokens, token_indices_sorted, top_scores.shape[1], None, inverse)
    return rows, moe.scores_to_rows(top_scores, token_indices_sorted, inverse)


_apply_scores = op.apply_of(_ScoresToRows)


def _permute_with_scores_past(
    tokens: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    given = tokens, top_scores, token_indices_sorted, workspace, inverse
    if any(x is None for x in given[:3]) or op.plan(plans.permute_with_scores, given) is None:
        return None
    if overlap(workspace, *given[:3]):
        return None
    if inverse is None:
        inverse = inverse_past(token_indices_sorted, *top_scores.shape)
    rows = _permute_past(tokens, token_indices_sorted, top_scores.shape[1], None, inverse)
    scores = top_scores, token_indices_sorted, inverse
    run = op.plan(plans.scores_to_rows, scores)
    if rows is None or run is None:
        return None
    return rows, _moved_scores(_apply_scores, run, *scores)


_INVERSION = "Tensor(a!)? workspace=None, Tensor? inverse=None"
for _name, _arguments, _composite in (
    (
        "weighted_restore",
        "Tensor rows, Tensor top_scores, Tensor token_indices_sorted, Tensor? addend=None, "
        + _INVERSION,
        _weighted_restore,
    ),
    (
        "restore",
        "Tensor rows, Tensor token_indices_sorted, SymInt num_tokens, int topk, "
        "Tensor? addend=None, " + _INVERSION,
        _restore,
    ),
    (
        "permute",
        "Tensor tokens, Tensor token_indices_sorted, int topk, " + _INVERSION,
        _permute,
    ),
    (
        "permute_with_scores",
        "Tensor tokens, Tensor top_scores, Tensor token_indices_sorted, " + _INVERSION,
        _permute_with_scores,
    ),
):
    _results = "(Tensor, Tensor)" if _name == "permute_with_scores" else "Tensor"
    op.compose(_name, f"({_arguments}) -> {_results}", _composite, vmap=True)

WEIGHTED_RESTORE = op.Public("weighted_restore", _weighted_restore_past)
RESTORE = op.Public("restore", _restore_past)
PERMUTE = op.Public("permute", _permute_past)
PERMUTE_WITH_SCORES = op.Public("permute_with_scores", _permute_with_scores_past)
