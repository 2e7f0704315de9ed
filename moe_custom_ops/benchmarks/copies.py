"""Copies of the tokens into the experts' order, and the (weighted) sums back."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..permutation import expert_permutation, inverse_permutation
from ..rows import permute, permute_with_scores, restore, weighted_restore
from . import peers
from .models import Model
from .orders import eager_inverse, random_ids
from .rows import Family, Inputs, Traffic

DTYPE = torch.bfloat16
# Of a token's eight experts, those of one rank of many.
LOCAL = 1.5


class Order(NamedTuple):
    """An order as this package takes it; int64, with each row's token, as indexing does.

    An assignment without a row has -1 in ``inverse`` and the number of rows in ``inverse64``.
    """

    order: Tensor
    inverse: Tensor
    order64: Tensor
    inverse64: Tensor
    token64: Tensor
    tokens: int
    topk: int


def _made(order: Tensor, num_tokens: int, topk: int) -> Order:
    inverse = inverse_permutation(order, num_tokens, topk)
    wide = order.long()
    places = torch.where(inverse < 0, len(order), inverse).flatten().long()
    return Order(order, inverse, wide, places, wide // topk, num_tokens, topk)


def make_order(model: Model, num_tokens: int, device: torch.device) -> Order:
    ids = random_ids(model, num_tokens, device)
    return _made(expert_permutation(ids, model.experts)[0], num_tokens, model.topk)


def make_sparse_order(model: Model, num_tokens: int, device: torch.device) -> Order:
    """Of the assignments, those that one rank of many holds."""
    whole = make_order(model, num_tokens, device)
    present = torch.rand(whole.order.shape, device=device) < LOCAL / model.topk
    return _made(whole.order[present], num_tokens, model.topk)


def make(
    make_order: Callable[[Model, int, torch.device], Order],
    of_rows: bool,
    with_scores: bool,
    model: Model,
    num_tokens: int,
    device: torch.device,
) -> Inputs:
    """(tokens, or the experts' rows; scores where they are asked for), and the order."""
    order = make_order(model, num_tokens, device)
    shape = len(order.order) if of_rows else num_tokens, model.hidden
    leaves = [torch.randn(shape, device=device, dtype=DTYPE)]
    if with_scores:
        leaves.append(torch.rand(num_tokens, model.topk, device=device))
    return tuple(leaves), (order,)


def our_permute(tokens: Tensor, order: Order) -> Tensor:
    return permute(tokens, order.order, order.topk, inverse=order.inverse)


def _to_tokens(rows: Tensor, inverse: Tensor) -> Tensor:
    """The sum of each token's rows; one that is absent is the row behind the last, of zeros."""
    if len(rows) < inverse.numel():
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    found = rows.index_select(0, inverse.flatten())
    # A sum of bfloat16 is made in float32 and rounded once.
    return found.view(*inverse.shape, *rows.shape[1:]).sum(1) if inverse.shape[1] > 1 else found


class _Permute(torch.autograd.Function):
    """A copy whose gradient is gathered, too, as the way back is known.

    What PyTorch derives adds by index: to add 65536 rows of 2048 to their 8192 tokens, the gradient
    of ``index_select`` took 1.11 ms and that of indexing 0.37 on an H200.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _to_tokens(grad, inverse), None, None


class _Restore(torch.autograd.Function):
    """The adjoint."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _to_tokens(rows, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None


def by_expert(tokens: Tensor, token: Tensor, inverse: Tensor, topk: int) -> Tensor:
    """The token of each row: [N, *]."""
    return _Permute.apply(tokens, token, inverse.view(-1, topk))


def by_token(rows: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:
    """Rows in the order of the tokens, zeros for those that are absent: [T, topk, H]."""
    return _Restore.apply(rows, order, inverse[:, None]).view(-1, topk, rows.shape[1])


def eager_permute(tokens: Tensor, order: Order) -> Tensor:
    return by_expert(tokens, order.token64, order.inverse64, order.topk)


def indexed_permute(tokens: Tensor, order: Order) -> Tensor:
    return tokens[order.token64]


def our_permute_with_scores(tokens: Tensor, scores: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    return permute_with_scores(tokens, scores, order.order, inverse=order.inverse)


def eager_permute_with_scores(
    tokens: Tensor, scores: Tensor, order: Order
) -> tuple[Tensor, Tensor]:
    row_scores = by_expert(scores.flatten(), order.order64, order.inverse64, 1)
    return eager_permute(tokens, order), row_scores


def our_weighted_restore(rows: Tensor, scores: Tensor, order: Order) -> Tensor:
    return weighted_restore(rows, scores, order.order)


def our_weighted_restore_by_inverse(rows: Tensor, scores: Tensor, order: Order) -> Tensor:
    return weighted_restore(rows, scores, order.order, inverse=order.inverse)


def sum_weighted(restored: Tensor, scores: Tensor) -> Tensor:
    """float32 products and sums, as float32 scores make them, and one rounding."""
    return (restored * scores[..., None]).sum(1).to(restored.dtype)


def weighted_sum(rows: Tensor, scores: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return sum_weighted(by_token(rows, order, inverse, scores.shape[1]), scores)


def eager_weighted_restore(rows: Tensor, scores: Tensor, order: Order) -> Tensor:
    inverse = eager_inverse(order.order64, scores.numel())
    return weighted_sum(rows, scores, order.order64, inverse)


def eager_weighted_restore_by_inverse(rows: Tensor, scores: Tensor, order: Order) -> Tensor:
    return weighted_sum(rows, scores, order.order64, order.inverse64)


def indexed_weighted_restore(rows: Tensor, scores: Tensor, order: Order) -> Tensor:
    """Rows go to their places, whose gradient is a gather."""
    make = rows.new_empty if len(rows) == scores.numel() else rows.new_zeros
    restored = make((scores.numel(), rows.shape[1]))
    restored[order.order64] = rows
    return sum_weighted(restored.view(order.tokens, order.topk, -1), scores)


def bmm(rows: Tensor, scores: Tensor, order: Order) -> Tensor:
    """A matrix product, for which the scores are rounded to the rows' dtype."""
    restored = by_token(rows, order.order64, order.inverse64, order.topk)
    return torch.bmm(scores[:, None].to(rows.dtype), restored).flatten(0, 1)


def scatter_add(rows: Tensor, scores: Tensor, order: Order) -> Tensor:
    """torchtitan's form: the product is rounded, and bfloat16 rows are added by atomics."""
    weights = scores.flatten().index_select(0, order.order64)
    weighted = (rows * weights[:, None]).to(rows.dtype)
    token = order.token64[:, None].expand_as(weighted)
    out = torch.zeros(order.tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return out.scatter_add_(0, token, weighted)


def our_restore(rows: Tensor, order: Order) -> Tensor:
    return restore(rows, order.order, order.tokens, order.topk, inverse=order.inverse)


def eager_restore(rows: Tensor, order: Order) -> Tensor:
    return _Restore.apply(rows, order.token64, order.inverse64.view(-1, order.topk))


def _bytes(model: Model, order: Order, scores: bool) -> tuple[int, int, int, int]:
    """Of (the tokens, the rows, the int32 order or its inverse, the float32 scores or none)."""
    num_rows, assignments = len(order.order), order.tokens * order.topk
    width = DTYPE.itemsize * model.hidden
    return order.tokens * width, num_rows * width, 4 * num_rows, 4 * assignments * scores


def traffic_out(model: Model, inputs: Inputs, scores: bool = False) -> tuple[Traffic, Traffic]:
    """permute: tokens to rows. Its backward adds the gradients of the rows of a token."""
    tokens, rows, order, weights = _bytes(model, inputs[1][0], scores)
    return (tokens + order + weights, rows + weights), (rows + order + weights, tokens + weights)


def traffic_back(model: Model, inputs: Inputs, scores: bool = False) -> tuple[Traffic, Traffic]:
    """The restores: rows to tokens. The backward reads the rows again for the scores' gradient."""
    tokens, rows, order, weights = _bytes(model, inputs[1][0], scores)
    backward = tokens + order + weights + rows * scores, rows + weights
    return (rows + order + weights, tokens), backward


FAMILIES = (
    Family(
        "permute(inverse)",
        functools.partial(make, make_order, False, False),
        {"ours": our_permute, "eager": eager_permute, "indexing": indexed_permute},
        traffic_out,
    ),
    Family(
        "permute_with_scores(inverse)",
        functools.partial(make, make_order, False, True),
        {"ours": our_permute_with_scores, "eager": eager_permute_with_scores},
        functools.partial(traffic_out, scores=True),
    ),
    Family(
        "weighted_restore",
        functools.partial(make, make_order, True, True),
        {
            "ours": our_weighted_restore,
            "eager": eager_weighted_restore,
            "indexing": indexed_weighted_restore,
            "scatter_add": scatter_add,
            **peers.weighted_restore(),
        },
        functools.partial(traffic_back, scores=True),
    ),
    Family(
        "weighted_restore(inverse)",
        functools.partial(make, make_order, True, True),
        {
            "ours": our_weighted_restore_by_inverse,
            "eager": eager_weighted_restore_by_inverse,
            "bmm": bmm,
        },
        functools.partial(traffic_back, scores=True),
        rounding=("bmm",),
    ),
    Family(
        "restore(inverse)",
        functools.partial(make, make_order, True, False),
        {"ours": our_restore, "eager": eager_restore},
        traffic_back,
    ),
    Family(
        "permute(inverse, 1.5 of 8 local)",
        functools.partial(make, make_sparse_order, False, False),
        {"ours": our_permute, "eager": eager_permute, "indexing": indexed_permute},
        traffic_out,
        sizes=("train",),
        compiled=(),
        models=("Qwen3-30B-A3B", "DeepSeek-V3"),
    ),
    Family(
        "weighted_restore(1.5 of 8 local)",
        functools.partial(make, make_sparse_order, True, True),
        {
            "ours": our_weighted_restore,
            "eager": eager_weighted_restore,
            "indexing": indexed_weighted_restore,
            "scatter_add": scatter_add,
        },
        functools.partial(traffic_back, scores=True),
        sizes=("train",),
        compiled=(),
        models=("Qwen3-30B-A3B", "DeepSeek-V3"),
    ),
)
