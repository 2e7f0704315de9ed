"""Registration of ``torch.ops.moe.aux_loss``: schema, fake, autograd, dispatch.

The public name is a composite over two ops. ``aux_loss_tile_sums`` writes the workspace and returns
nothing; ``aux_loss_from_tile_sums`` reads it and returns the loss. Only the second has a gradient,
and it saves inputs and its scale, never the workspace: two calls in one graph may share that.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from ..backend import as_bytes, float64_bits, load_kernels
from ..batching import register_vmap
from ..fixed_order import accumulator_dtype, cast, max_chunks, num_tiles, tile_sums, tree_sum
from . import reference

OP = "aux_loss"


def aux_loss_workspace_size(
    num_tokens: int, num_columns: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of workspace that :func:`aux_loss` needs for ``probs`` [num_tokens, num_columns].

    The size for a maximum of tokens serves every smaller number.

    Args:
        num_tokens: number of tokens, at least 0.
        num_columns: columns of ``probs``, at least 0.
        dtype: dtype of ``probs``.

    Returns:
        Size in bytes, for :func:`make_workspace`.

    Raises:
        TypeError: a size is not an int, or ``dtype`` is not one that :func:`aux_loss` takes.
        ValueError: a size is negative.
    """
    checks.integer("aux_loss_workspace_size", "num_tokens", num_tokens, 0)
    checks.integer("aux_loss_workspace_size", "num_columns", num_columns, 0)
    checks.is_float_dtype("aux_loss_workspace_size", "dtype", dtype)
    partials = num_tiles(num_tokens, num_columns) * max_chunks(num_columns)
    return workspaces.align(partials * accumulator_dtype(dtype).itemsize)


def _check_lengths(probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None) -> None:
    num_tokens, num_columns = probs.shape
    description = f"[columns] = [{num_columns}], one count per column of probs"
    checks.same_shape(OP, "tokens_per_expert", tokens_per_expert, [num_columns], description)
    if token_mask is not None:
        description = f"[tokens] = [{num_tokens}]"
        checks.same_shape(OP, "token_mask", token_mask, [num_tokens], description)


def check(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    workspace: Tensor | None,
    token_mask: Tensor | None,
) -> Tensor:
    """The workspace, once all arguments are what the op takes."""
    checks.supported_device(OP, "probs", probs)
    checks.dtype(OP, "probs", probs, checks.FLOAT_DTYPES)
    checks.rank(OP, "probs", probs, "[tokens, columns]")
    checks.counts(OP, "tokens_per_expert", tokens_per_expert)
    checks.same_device(OP, "tokens_per_expert", tokens_per_expert, probs, "probs")
    if token_mask is not None:
        checks.dtype(OP, "token_mask", token_mask, (torch.bool,))
        checks.same_device(OP, "token_mask", token_mask, probs, "probs")
    _check_lengths(probs, tokens_per_expert, token_mask)
    checks.integer(OP, "num_experts", num_experts, 1)
    checks.integer(OP, "topk", topk, 1)
    checks.shape(
        OP,
        "probs",
        probs,
        f"[tokens, columns] with columns a multiple of num_experts = {num_experts}",
        probs.shape[1] % num_experts == 0,
    )
    if isinstance(total_num_tokens, Tensor):
        checks.dtype(OP, "total_num_tokens", total_num_tokens, checks.COUNT_DTYPES)
        checks.value(
            total_num_tokens.numel() == 1,
            OP,
            "total_num_tokens",
            "a tensor of one element",
            f"shape {list(total_num_tokens.shape)}",
        )
        checks.same_device(OP, "total_num_tokens", total_num_tokens, probs, "probs")
    else:
        # 0 where there may be no token to count; sym_min, as an unbacked size has no ``if``.
        minimum = torch.sym_min(probs.shape[0], 1) if token_mask is None else 0
        checks.integer(OP, "total_num_tokens", total_num_tokens, minimum)
    total = total_num_tokens if isinstance(total_num_tokens, Tensor) else None
    checks.no_forward_tangent(OP, probs, tokens_per_expert, total)
    workspaces.apart(
        OP,
        workspace,
        probs=probs,
        tokens_per_expert=tokens_per_expert,
        total_num_tokens=total,
        token_mask=token_mask,
    )
    size = aux_loss_workspace_size(probs.shape[0], probs.shape[1], probs.dtype)
    return workspaces.resolve(OP, workspace, size, probs)


@torch.library.custom_op("moe::aux_loss_tile_sums", mutates_args={"workspace"}, device_types="cpu")
def aux_loss_tile_sums(
    probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None, workspace: Tensor
) -> None:
    """Write each tile's weighted sum to ``workspace``."""
    sums = tile_sums(probs, tokens_per_expert, token_mask)
    workspaces.scratch(OP, workspace, sums.shape[0], sums.dtype).copy_(sums)


@aux_loss_tile_sums.register_kernel("cuda")
def _aux_loss_tile_sums_cuda(
    probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None, workspace: Tensor
) -> None:
    _check_lengths(probs, tokens_per_expert, token_mask)
    kernels = load_kernels(__package__)
    _, count = kernels.num_partials(*probs.shape)
    partials = workspaces.scratch(OP, workspace, count, accumulator_dtype(probs.dtype))
    launch = kernels.tile_sums(probs, tokens_per_expert, token_mask)
    launch(probs, tokens_per_expert, as_bytes(token_mask), partials)


@aux_loss_tile_sums.register_fake
def _(
    probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None, workspace: Tensor
) -> None:
    return None


def _padded(partials: Tensor, tiles: int, size: int) -> Tensor:
    """[size]: the sum of each tile's partial sums, then zeros."""
    checks.value(size >= tiles, OP, "size", f"at least {tiles}, the number of tiles", size)
    sums = partials.new_zeros(size)
    sums[:tiles] = tree_sum(partials.view(tiles, -1), dim=1) if tiles else 0.0
    return sums


@torch.library.custom_op("moe::aux_loss_padded_sums", mutates_args=(), device_types="cpu")
def aux_loss_padded_sums(probs: Tensor, workspace: Tensor, size: int) -> Tensor:
    """The tile sums in ``workspace`` and zeros behind them [size], for other ranks."""
    tiles = num_tiles(*probs.shape)
    dtype = accumulator_dtype(probs.dtype)
    return _padded(workspaces.scratch(OP, workspace, tiles, dtype), tiles, size)


@aux_loss_padded_sums.register_kernel("cuda")
def _aux_loss_padded_sums_cuda(probs: Tensor, workspace: Tensor, size: int) -> Tensor:
    _, count = load_kernels(__package__).num_partials(*probs.shape)
    partials = workspaces.scratch(OP, workspace, count, accumulator_dtype(probs.dtype))
    return _padded(partials, num_tiles(*probs.shape), size)


@aux_loss_padded_sums.register_fake
def _(probs: Tensor, workspace: Tensor, size: int) -> Tensor:
    return probs.new_empty(size, dtype=accumulator_dtype(probs.dtype))


def _sums(sums: Tensor | None, workspace: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    if sums is None:
        checks.value(workspace is not None, OP, "workspace", "given without sums", None)
        assert workspace is not None
        return workspaces.scratch(OP, workspace, count, dtype)
    checks.dtype(OP, "sums", sums, (dtype,))
    checks.rank(OP, "sums", sums, "[tiles]")
    checks.value(sums.is_contiguous(), OP, "sums", "contiguous", f"strides {sums.stride()}")
    return sums


@torch.library.custom_op("moe::aux_loss_from_tile_sums", mutates_args=(), device_types="cpu")
def aux_loss_from_tile_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    token_mask: Tensor | None,
    total: Tensor | None,
    total_int: int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, C) from the tile sums in ``workspace``, or from the ``sums`` of all ranks' tiles.

    The total is ``total_int`` if no tensor.
    """
    dtype = accumulator_dtype(probs.dtype)
    sums = _sums(sums, workspace, num_tiles(*probs.shape), dtype)
    return reference.loss_from_tile_sums(
        sums, total_int if total is None else total, num_experts, topk, coeff
    )


@aux_loss_from_tile_sums.register_kernel("cuda")
def _aux_loss_from_tile_sums_cuda(
    probs: Tensor,
    tokens_per_expert: Tensor,
    token_mask: Tensor | None,
    total: Tensor | None,
    total_int: int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    kernels = load_kernels(__package__)
    dtype = accumulator_dtype(probs.dtype)
    sums = _sums(sums, workspace, kernels.num_partials(*probs.shape)[1], dtype)
    loss = probs.new_empty((), dtype=dtype)
    loss_scale = probs.new_empty((), dtype=dtype)
    scale = num_experts * coeff / topk
    if total is None:
        if total_int == 0:
            return loss.zero_(), loss_scale.zero_()
        scale = scale / total_int / total_int
    launch = kernels.loss_from_tile_sums(sums.shape[0], dtype, probs.device)
    launch(sums, total, loss, loss_scale, float64_bits(scale))
    return loss, loss_scale


@aux_loss_from_tile_sums.register_fake
def _(
    probs: Tensor,
    tokens_per_expert: Tensor,
    token_mask: Tensor | None,
    total: Tensor | None,
    total_int: int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = accumulator_dtype(probs.dtype)
    return probs.new_empty((), dtype=dtype), probs.new_empty((), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    probs, tokens_per_expert, token_mask = inputs[:3]
    _, scale = output
    ctx.save_for_backward(tokens_per_expert, token_mask, scale)
    ctx.probs_shape = probs.shape
    ctx.probs_dtype = probs.dtype
    ctx.mark_non_differentiable(scale)
    ctx.set_materialize_grads(False)


def grad_row(grad: Tensor, scale: Tensor, tokens_per_expert: Tensor, dtype: torch.dtype) -> Tensor:
    """The row that the gradient of probs repeats for every token: [columns].

    Plain PyTorch, so that Inductor fuses it into the router's backward and autograd can
    differentiate it again.
    """
    row = (grad * scale) * tokens_per_expert.to(scale.dtype)
    # A total of 0 gives a gradient of 0 whatever the counts and the incoming gradient hold.
    return cast(torch.where(scale == 0, torch.zeros_like(row), row), dtype)


def expand_row(row: Tensor, shape: torch.Size, token_mask: Tensor | None) -> Tensor:
    """The gradient of probs: without a mask it is a view of the row."""
    grad_probs = row.expand(*shape)
    if token_mask is None:
        return grad_probs
    return torch.where(token_mask[:, None], grad_probs, 0.0)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None or not ctx.needs_input_grad[0]:
        return (None,) * 10
    tokens_per_expert, token_mask, scale = ctx.saved_tensors
    row = grad_row(grad, scale, tokens_per_expert, ctx.probs_dtype)
    return expand_row(row, ctx.probs_shape, token_mask), *(None,) * 9


aux_loss_from_tile_sums.register_autograd(_backward, setup_context=_setup_context)


def _aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    workspace = check(
        probs, tokens_per_expert, total_num_tokens, num_experts, topk, workspace, token_mask
    )
    tokens_per_expert = checks.constant(tokens_per_expert)
    total, total_int = (
        (checks.constant(total_num_tokens), 0)
        if isinstance(total_num_tokens, Tensor)
        else (None, total_num_tokens)
    )
    torch.ops.moe.aux_loss_tile_sums(probs, tokens_per_expert, token_mask, workspace)
    loss, _ = torch.ops.moe.aux_loss_from_tile_sums(
        probs, tokens_per_expert, token_mask, total, total_int, num_experts, topk, coeff, workspace
    )
    return loss


for _overload, _total in (("aux_loss", "Tensor"), ("aux_loss.int", "SymInt")):
    torch.library.define(
        f"moe::{_overload}",
        f"(Tensor probs, Tensor tokens_per_expert, {_total} total_num_tokens, int num_experts, "
        "int topk, float coeff, Tensor(a!)? workspace=None, Tensor? token_mask=None) -> Tensor",
    )
    torch.library.impl(f"moe::{_overload}", "CompositeImplicitAutograd", _aux_loss)
    register_vmap(_overload)


def _aux_loss_sums_of_rank(
    probs: Tensor,
    tokens_per_expert: Tensor,
    num_experts: int,
    topk: int,
    size: int,
    workspace: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    """The sums [size] of this rank's tiles, zeros behind them."""
    total = tokens_per_expert.new_zeros(())
    arguments = probs, tokens_per_expert, total, num_experts, topk, workspace, token_mask
    workspace = check(*arguments)
    torch.ops.moe.aux_loss_tile_sums(probs, tokens_per_expert, token_mask, workspace)
    return torch.ops.moe.aux_loss_padded_sums(probs, workspace, size)


torch.library.define(
    "moe::aux_loss_sums_of_rank",
    "(Tensor probs, Tensor tokens_per_expert, int num_experts, int topk, SymInt size, "
    "Tensor(a!)? workspace=None, Tensor? token_mask=None) -> Tensor",
)
torch.library.impl(
    "moe::aux_loss_sums_of_rank", "CompositeImplicitAutograd", _aux_loss_sums_of_rank
)
