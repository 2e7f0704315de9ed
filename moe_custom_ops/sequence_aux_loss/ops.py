"""Registration of ``torch.ops.moe.sequence_aux_loss``: schema, fake, autograd, dispatch.

A composite over two ops, as aux_loss is. ``sequence_aux_loss_tile_sums`` writes the workspace;
``sequence_aux_loss_from_tile_sums`` reads it, has the gradient, and saves inputs and its scales.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from ..backend import as_bytes, float64_bits, load_kernels
from ..batching import register_vmap
from ..fixed_order import (
    accumulator_dtype,
    cast,
    max_chunks,
    num_tiles,
    tile_sums,
    tile_tokens,
    tree_sum,
)
from . import reference

OP = "sequence_aux_loss"


def sequence_aux_loss_workspace_size(
    num_tokens: int, num_sequences: int, num_experts: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of workspace that :func:`sequence_aux_loss` needs.

    The size for a maximum of tokens and sequences serves all smaller numbers.

    Args:
        num_tokens: tokens of all sequences together, at least 0.
        num_sequences: number of sequences, empty ones included, at least 0.
        num_experts: experts of the layer, at least 0.
        dtype: dtype of ``probs``.

    Returns:
        Size in bytes, for :func:`make_workspace`.

    Raises:
        TypeError: a size is not an int, or ``dtype`` is not one that the op takes.
        ValueError: a size is negative.
    """
    name = "sequence_aux_loss_workspace_size"
    checks.integer(name, "num_tokens", num_tokens, 0)
    checks.integer(name, "num_sequences", num_sequences, 0)
    checks.integer(name, "num_experts", num_experts, 0)
    checks.is_float_dtype(name, "dtype", dtype)
    slots = reference.num_slots(num_tokens, num_sequences, num_experts)
    sums = workspaces.align(slots * max_chunks(num_experts) * accumulator_dtype(dtype).itemsize)
    return sums + workspaces.align(slots * torch.int32.itemsize)


def _num_tokens(probs: Tensor) -> int:
    return probs.shape[0] if probs.dim() == 2 else probs.shape[0] * probs.shape[1]


def _check_lengths(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
) -> None:
    layout = "[batch, seq, experts] without cu_seqlens, [tokens, experts] with them"
    rank = 3 if cu_seqlens is None else 2
    checks.shape(OP, "probs", probs, layout, probs.dim() == rank)
    if cu_seqlens is None:
        expected = [probs.shape[0], probs.shape[2]]
        description = f"[batch, experts] = {expected}"
        checks.same_shape(OP, "tokens_per_expert", tokens_per_expert, expected, description)
    else:
        checks.shape(
            OP,
            "tokens_per_expert",
            tokens_per_expert,
            f"[sequences, experts] with experts = {probs.shape[1]}",
            tokens_per_expert.dim() == 2 and tokens_per_expert.shape[1] == probs.shape[1],
        )
        expected = [tokens_per_expert.shape[0] + 1]
        description = f"[sequences + 1] = {expected}"
        checks.same_shape(OP, "cu_seqlens", cu_seqlens, expected, description)
    if token_mask is not None:
        expected = list(probs.shape[:-1])
        description = f"{expected}, that of probs without experts"
        checks.same_shape(OP, "token_mask", token_mask, expected, description)


def check(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    workspace: Tensor | None,
) -> Tensor:
    """The workspace, once all arguments are what the op takes."""
    checks.supported_device(OP, "probs", probs)
    checks.dtype(OP, "probs", probs, checks.FLOAT_DTYPES)
    checks.counts(OP, "tokens_per_expert", tokens_per_expert)
    checks.same_device(OP, "tokens_per_expert", tokens_per_expert, probs, "probs")
    if cu_seqlens is not None:
        checks.dtype(OP, "cu_seqlens", cu_seqlens, checks.INDEX_DTYPES)
        checks.same_device(OP, "cu_seqlens", cu_seqlens, probs, "probs")
    if token_mask is not None:
        checks.dtype(OP, "token_mask", token_mask, (torch.bool,))
        checks.same_device(OP, "token_mask", token_mask, probs, "probs")
    _check_lengths(probs, tokens_per_expert, cu_seqlens, token_mask)
    checks.integer(OP, "topk", topk, 1)
    checks.no_forward_tangent(OP, probs, tokens_per_expert)
    workspaces.apart(
        OP,
        workspace,
        probs=probs,
        tokens_per_expert=tokens_per_expert,
        cu_seqlens=cu_seqlens,
        token_mask=token_mask,
    )
    size = sequence_aux_loss_workspace_size(
        _num_tokens(probs), tokens_per_expert.shape[0], probs.shape[-1], probs.dtype
    )
    return workspaces.resolve(OP, workspace, size, probs)


def scratch(probs: Tensor, tokens_per_expert: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """(sums [slots, at most max_chunks], tile lengths int32 [slots]) in the workspace."""
    num_experts = probs.shape[-1]
    slots = reference.num_slots(_num_tokens(probs), tokens_per_expert.shape[0], num_experts)
    dtype = accumulator_dtype(probs.dtype)
    num_sums = slots * max_chunks(num_experts)
    sums = workspaces.scratch(OP, workspace, num_sums, dtype)
    offset = workspaces.align(num_sums * dtype.itemsize)
    size = offset + workspaces.align(slots * torch.int32.itemsize)
    whole = workspaces.scratch(OP, workspace, size, torch.uint8)
    lengths = whole[offset : offset + slots * torch.int32.itemsize].view(torch.int32)
    return sums, lengths


@torch.library.custom_op(
    "moe::sequence_aux_loss_tile_sums", mutates_args={"workspace"}, device_types="cpu"
)
def sequence_aux_loss_tile_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    workspace: Tensor,
) -> None:
    """Write each tile's weighted sum and number of unmasked tokens to its slot of ``workspace``."""
    sums, lengths = scratch(probs, tokens_per_expert, workspace)
    for b, (slot, own, mask) in enumerate(reference.sequences(probs, cu_seqlens, token_mask)):
        own_sums = tile_sums(own, tokens_per_expert[b], mask)
        slots = slice(slot, slot + own_sums.shape[0])
        sums[slots] = own_sums
        lengths[slots] = reference.tile_lengths(own.shape[0], own.shape[1], mask)


@sequence_aux_loss_tile_sums.register_kernel("cuda")
def _sequence_aux_loss_tile_sums_cuda(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    workspace: Tensor,
) -> None:
    _check_lengths(probs, tokens_per_expert, cu_seqlens, token_mask)
    sums, lengths = scratch(probs, tokens_per_expert, workspace)
    launch = load_kernels(__package__).tile_sums(
        probs, tokens_per_expert, cu_seqlens, token_mask, lengths.shape[0]
    )
    launch(probs, tokens_per_expert, cu_seqlens, as_bytes(token_mask), sums, lengths)


@sequence_aux_loss_tile_sums.register_fake
def _(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    workspace: Tensor,
) -> None:
    return None


def padded(
    partials: Tensor, probs: Tensor, tokens_per_expert: Tensor, cu_seqlens: Tensor | None, size: int
) -> Tensor:
    """[sequences, size]: the sums of each sequence's tiles, of ``partials`` [slots, X], then zeros.

    A sequence of more tiles loses those beyond: ``size`` is to be enough for all the tokens.
    """
    starts, lengths = spans(probs, cu_seqlens)
    tokens = tile_tokens(probs.shape[-1])
    sequences = torch.arange(tokens_per_expert.shape[0], device=probs.device)
    first = starts // tokens + sequences
    if cu_seqlens is None:
        first = sequences * num_tiles(probs.shape[1], probs.shape[2])
    tiles = (lengths + tokens - 1) // tokens
    place = torch.arange(size, device=probs.device)
    sums = tree_sum(partials, dim=1)
    if not sums.shape[0]:
        return sums.new_zeros(tokens_per_expert.shape[0], size)
    slots = (first[:, None] + place).clamp(max=sums.shape[0] - 1)
    return torch.where(place < tiles[:, None], sums[slots], 0.0)


def spans(probs: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(first token, number of tokens) int64 of each sequence, masked ones included."""
    if cu_seqlens is None:
        starts = torch.zeros(probs.shape[0], dtype=torch.int64, device=probs.device)
        return starts, torch.full_like(starts, probs.shape[1])
    bounds = cu_seqlens.long().clamp(0, probs.shape[0])
    return bounds[:-1], (bounds[1:] - bounds[:-1]).clamp(min=0)


@torch.library.custom_op("moe::sequence_aux_loss_padded_sums", mutates_args=(), device_types="cpu")
def sequence_aux_loss_padded_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    workspace: Tensor,
    size: int,
) -> Tensor:
    """The tile sums of each sequence in ``workspace``, then zeros [sequences, size]."""
    sums, _ = scratch(probs, tokens_per_expert, workspace)
    slots = sums.shape[0] // max_chunks(probs.shape[-1])
    return padded(sums[:slots, None], probs, tokens_per_expert, cu_seqlens, size)


@sequence_aux_loss_padded_sums.register_kernel("cuda")
def _sequence_aux_loss_padded_sums_cuda(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    workspace: Tensor,
    size: int,
) -> Tensor:
    _check_lengths(probs, tokens_per_expert, cu_seqlens, None)
    sums, tile_lengths = scratch(probs, tokens_per_expert, workspace)
    slots = tile_lengths.shape[0]
    chunks = load_kernels(__package__).num_chunks(slots, probs.shape[-1])
    partials = sums[: slots * chunks].view(slots, chunks)
    return padded(partials, probs, tokens_per_expert, cu_seqlens, size)


@sequence_aux_loss_padded_sums.register_fake
def _(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    workspace: Tensor,
    size: int,
) -> Tensor:
    dtype = accumulator_dtype(probs.dtype)
    return probs.new_empty(tokens_per_expert.shape[0], size, dtype=dtype)


def _of_sequences(
    probs: Tensor, tokens_per_expert: Tensor, cu_seqlens: Tensor | None, workspace: Tensor
) -> tuple[Tensor, Tensor]:
    """(sums, numbers of unmasked tokens) of the sequences, from what ``workspace`` holds."""
    tile_sums, tile_lengths = scratch(probs, tokens_per_expert, workspace)
    num_sequences = tokens_per_expert.shape[0]
    sums = tile_sums.new_zeros(num_sequences)
    lengths = torch.zeros(num_sequences, dtype=torch.int64)
    for b, (slot, own, _) in enumerate(reference.sequences(probs, cu_seqlens, None)):
        slots = slice(slot, slot + num_tiles(*own.shape))
        sums[b] = tree_sum(tile_sums[slots], dim=0)
        lengths[b] = tile_lengths[slots].sum()
    return sums, lengths


def _given(
    tokens_per_expert: Tensor, sums: Tensor, lengths: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(sums, lengths) of the sequences, checked, the sums of all ranks' tiles added up."""
    checks.value(lengths is not None, OP, "lengths", "given with sums", None)
    assert lengths is not None
    num_sequences = tokens_per_expert.shape[0]
    checks.dtype(OP, "sums", sums, (dtype,))
    expected = f"[sequences] or [sequences, tiles], with sequences = {num_sequences}"
    rows = sums.dim() in (1, 2) and sums.shape[0] == num_sequences
    checks.shape(OP, "sums", sums, expected, rows)
    checks.dtype(OP, "lengths", lengths, (torch.int64,))
    expected = f"[sequences] = [{num_sequences}]"
    checks.same_shape(OP, "lengths", lengths, [num_sequences], expected)
    sums = tree_sum(sums, dim=1) if sums.dim() == 2 else sums
    return sums.contiguous(), lengths.contiguous()


@torch.library.custom_op(
    "moe::sequence_aux_loss_from_tile_sums", mutates_args=(), device_types="cpu"
)
def sequence_aux_loss_from_tile_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    sums: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, C [sequences]) from what ``workspace`` holds.

    Where the sequences have tokens on other ranks too, ``lengths`` int64 [sequences] and the
    ``sums`` of all tiles in order [sequences, tiles] take the place of its own.
    """
    if sums is None:
        checks.value(workspace is not None, OP, "workspace", "given without sums", None)
        assert workspace is not None
        sums, own_lengths = _of_sequences(probs, tokens_per_expert, cu_seqlens, workspace)
        lengths = own_lengths if lengths is None else lengths
    sums, lengths = _given(tokens_per_expert, sums, lengths, accumulator_dtype(probs.dtype))
    results = _empty_results(probs, tokens_per_expert)
    num_experts = tokens_per_expert.shape[1]
    computed = reference.loss_from_sums(sums, lengths, num_experts, topk, coeff)
    # Into fresh tensors: a view returned here could not be changed in place by the caller.
    for result, value in zip(results, computed, strict=True):
        result.copy_(value)
    return results


@sequence_aux_loss_from_tile_sums.register_kernel("cuda")
def _sequence_aux_loss_from_tile_sums_cuda(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    sums: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_lengths(probs, tokens_per_expert, cu_seqlens, token_mask)
    num_experts = tokens_per_expert.shape[1]
    loss, scales = _empty_results(probs, tokens_per_expert)
    num_slots = reference.num_slots(_num_tokens(probs), *tokens_per_expert.shape)
    add_slots, add_sequences = load_kernels(__package__).loss_from_tile_sums(
        probs, tokens_per_expert, cu_seqlens, num_slots
    )
    if sums is None:
        checks.value(workspace is not None, OP, "workspace", "given without sums", None)
        assert workspace is not None
        partials, tile_lengths = scratch(probs, tokens_per_expert, workspace)
        sums, own_lengths = torch.empty_like(scales), torch.empty_like(scales, dtype=torch.int64)
        add_slots(partials, tile_lengths, cu_seqlens, sums, own_lengths)
        lengths = own_lengths if lengths is None else lengths
    sums, lengths = _given(tokens_per_expert, sums, lengths, scales.dtype)
    add_sequences(sums, lengths, loss, scales, float64_bits(num_experts * coeff / topk))
    return loss, scales


@sequence_aux_loss_from_tile_sums.register_fake
def _(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    topk: int,
    coeff: float,
    workspace: Tensor | None,
    sums: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _empty_results(probs, tokens_per_expert)


def _empty_results(probs: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor, Tensor]:
    dtype = accumulator_dtype(probs.dtype)
    loss = probs.new_empty((), dtype=dtype)
    return loss, probs.new_empty(tokens_per_expert.shape[0], dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    probs, tokens_per_expert, cu_seqlens, token_mask = inputs[:4]
    _, scales = output
    ctx.save_for_backward(tokens_per_expert, cu_seqlens, token_mask, scales)
    ctx.probs_shape = probs.shape
    ctx.probs_dtype = probs.dtype
    ctx.mark_non_differentiable(scales)
    ctx.set_materialize_grads(False)


def grad_rows(
    grad: Tensor, scales: Tensor, tokens_per_expert: Tensor, dtype: torch.dtype
) -> Tensor:
    """The row that the gradient of probs repeats for every token of a sequence: [B, experts].

    Plain PyTorch, so that Inductor fuses it into the router's backward and autograd can
    differentiate it again.
    """
    rows = (grad * scales)[:, None] * tokens_per_expert.to(scales.dtype)
    # A sequence without tokens gives zero whatever its counts and the incoming gradient hold.
    return cast(torch.where(scales[:, None] == 0, torch.zeros_like(rows), rows), dtype)


def expand_rows(
    rows: Tensor, shape: torch.Size, cu_seqlens: Tensor | None, token_mask: Tensor | None
) -> Tensor:
    """The gradient of probs: the rows expanded over a batch's tokens, or gathered by a pack's."""
    if cu_seqlens is None:
        grad_probs = rows[:, None, :].expand(shape)
    else:
        tokens = torch.arange(shape[0], device=rows.device, dtype=cu_seqlens.dtype)
        # A token's sequence is the last that begins at it or before it. Tokens of none take the
        # row of zeros: -1 before the first, B behind the last. The clamp, which the forward has
        # too, is also what makes the bounds a buffer of their own: on CUDA, Inductor of torch 2.11
        # searched a slice from the beginning of the tensor that it was cut from.
        bounds = cu_seqlens.clamp(0, shape[0])
        sequence = torch.searchsorted(bounds, tokens, right=True) - 1
        grad_probs = torch.nn.functional.pad(rows, (0, 0, 0, 1))[sequence]
    if token_mask is not None:
        grad_probs = torch.where(token_mask[..., None], grad_probs, 0.0)
    return grad_probs


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None or not ctx.needs_input_grad[0]:
        return (None,) * 9
    tokens_per_expert, cu_seqlens, token_mask, scales = ctx.saved_tensors
    rows = grad_rows(grad, scales, tokens_per_expert, ctx.probs_dtype)
    return expand_rows(rows, ctx.probs_shape, cu_seqlens, token_mask), *(None,) * 8


sequence_aux_loss_from_tile_sums.register_autograd(_backward, setup_context=_setup_context)


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
    workspace = check(probs, tokens_per_expert, topk, cu_seqlens, token_mask, workspace)
    inputs = probs, checks.constant(tokens_per_expert), cu_seqlens, token_mask
    if sums is None:
        torch.ops.moe.sequence_aux_loss_tile_sums(*inputs, workspace)
    loss, _ = torch.ops.moe.sequence_aux_loss_from_tile_sums(
        *inputs, topk, coeff, workspace, sums, lengths
    )
    return loss


def _sequence_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, *rest: Any, **options: Any
) -> Tensor:
    return _sequence_aux_loss_of_rank(probs, tokens_per_expert, None, *rest, **options)


torch.library.define(
    "moe::sequence_aux_loss",
    "(Tensor probs, Tensor tokens_per_expert, int topk, float coeff, Tensor? cu_seqlens=None, "
    "Tensor? token_mask=None, Tensor(a!)? workspace=None) -> Tensor",
)
torch.library.impl("moe::sequence_aux_loss", "CompositeImplicitAutograd", _sequence_aux_loss)
register_vmap("sequence_aux_loss")


def _sequence_aux_loss_sums_of_rank(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    size: int,
    cu_seqlens: Tensor | None = None,
    token_mask: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """The sums [sequences, size] of this rank's tiles of each sequence, zeros behind them."""
    workspace = check(probs, tokens_per_expert, topk, cu_seqlens, token_mask, workspace)
    inputs = probs, tokens_per_expert, cu_seqlens
    torch.ops.moe.sequence_aux_loss_tile_sums(*inputs, token_mask, workspace)
    return torch.ops.moe.sequence_aux_loss_padded_sums(*inputs, workspace, size)


torch.library.define(
    "moe::sequence_aux_loss_sums_of_rank",
    "(Tensor probs, Tensor tokens_per_expert, int topk, SymInt size, Tensor? cu_seqlens=None, "
    "Tensor? token_mask=None, Tensor(a!)? workspace=None) -> Tensor",
)
torch.library.impl(
    "moe::sequence_aux_loss_sums_of_rank",
    "CompositeImplicitAutograd",
    _sequence_aux_loss_sums_of_rank,
)
torch.library.define(
    "moe::sequence_aux_loss_of_rank",
    "(Tensor probs, Tensor tokens_per_expert, Tensor lengths, int topk, float coeff, "
    "Tensor? cu_seqlens=None, Tensor? token_mask=None, Tensor(a!)? workspace=None, "
    "Tensor? sums=None) -> Tensor",
)
torch.library.impl(
    "moe::sequence_aux_loss_of_rank", "CompositeImplicitAutograd", _sequence_aux_loss_of_rank
)
