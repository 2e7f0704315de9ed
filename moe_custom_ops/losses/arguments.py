"""What the losses take: argument checks, and sizes of a workspace."""

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from ..fixed_order import accumulator_dtype
from .reference import max_chunks, num_slots, num_tiles

AUX_LOSS, SEQUENCE_AUX_LOSS = "aux_loss", "sequence_aux_loss"


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
    slots = num_slots(num_tokens, num_sequences, num_experts)
    sums = workspaces.align(slots * max_chunks(num_experts) * accumulator_dtype(dtype).itemsize)
    return sums + workspaces.align(slots * torch.int32.itemsize)


def check_aux_lengths(probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None) -> None:
    num_tokens, num_columns = probs.shape
    description = f"[columns] = [{num_columns}], one count per column of probs"
    checks.same_shape(AUX_LOSS, "tokens_per_expert", tokens_per_expert, [num_columns], description)
    if token_mask is not None:
        description = f"[tokens] = [{num_tokens}]"
        checks.same_shape(AUX_LOSS, "token_mask", token_mask, [num_tokens], description)


def check_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    workspace: Tensor | None,
    token_mask: Tensor | None,
) -> None:
    """Raise unless the arguments are what aux_loss takes."""
    checks.supported_device(AUX_LOSS, "probs", probs)
    checks.dtype(AUX_LOSS, "probs", probs, checks.FLOAT_DTYPES)
    checks.rank(AUX_LOSS, "probs", probs, "[tokens, columns]")
    checks.counts(AUX_LOSS, "tokens_per_expert", tokens_per_expert)
    checks.same_device(AUX_LOSS, "tokens_per_expert", tokens_per_expert, probs, "probs")
    if token_mask is not None:
        checks.dtype(AUX_LOSS, "token_mask", token_mask, (torch.bool,))
        checks.same_device(AUX_LOSS, "token_mask", token_mask, probs, "probs")
    check_aux_lengths(probs, tokens_per_expert, token_mask)
    checks.integer(AUX_LOSS, "num_experts", num_experts, 1)
    checks.integer(AUX_LOSS, "topk", topk, 1)
    checks.shape(
        AUX_LOSS,
        "probs",
        probs,
        f"[tokens, columns] with columns a multiple of num_experts = {num_experts}",
        probs.shape[1] % num_experts == 0,
    )
    if isinstance(total_num_tokens, Tensor):
        checks.dtype(AUX_LOSS, "total_num_tokens", total_num_tokens, checks.COUNT_DTYPES)
        checks.value(
            total_num_tokens.numel() == 1,
            AUX_LOSS,
            "total_num_tokens",
            "a tensor of one element",
            f"shape {list(total_num_tokens.shape)}",
        )
        checks.same_device(AUX_LOSS, "total_num_tokens", total_num_tokens, probs, "probs")
    else:
        # 0 where there may be no token to count; sym_min, as an unbacked size has no ``if``.
        minimum = torch.sym_min(probs.shape[0], 1) if token_mask is None else 0
        checks.integer(AUX_LOSS, "total_num_tokens", total_num_tokens, minimum)
    total = total_num_tokens if isinstance(total_num_tokens, Tensor) else None
    checks.no_forward_tangent(AUX_LOSS, probs, tokens_per_expert, total)
    workspaces.apart(
        AUX_LOSS,
        workspace,
        probs=probs,
        tokens_per_expert=tokens_per_expert,
        total_num_tokens=total,
        token_mask=token_mask,
    )
    size = aux_loss_workspace_size(probs.shape[0], probs.shape[1], probs.dtype)
    workspaces.check(AUX_LOSS, workspace, size, probs)


def num_tokens_of(probs: Tensor) -> int:
    return probs.shape[0] if probs.dim() == 2 else probs.shape[0] * probs.shape[1]


def check_sequence_lengths(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
) -> None:
    layout = "[batch, seq, experts] without cu_seqlens, [tokens, experts] with them"
    rank = 3 if cu_seqlens is None else 2
    checks.shape(SEQUENCE_AUX_LOSS, "probs", probs, layout, probs.dim() == rank)
    if cu_seqlens is None:
        expected = [probs.shape[0], probs.shape[2]]
        description = f"[batch, experts] = {expected}"
        checks.same_shape(
            SEQUENCE_AUX_LOSS, "tokens_per_expert", tokens_per_expert, expected, description
        )
    else:
        checks.shape(
            SEQUENCE_AUX_LOSS,
            "tokens_per_expert",
            tokens_per_expert,
            f"[sequences, experts] with experts = {probs.shape[1]}",
            tokens_per_expert.dim() == 2 and tokens_per_expert.shape[1] == probs.shape[1],
        )
        expected = [tokens_per_expert.shape[0] + 1]
        description = f"[sequences + 1] = {expected}"
        checks.same_shape(SEQUENCE_AUX_LOSS, "cu_seqlens", cu_seqlens, expected, description)
    if token_mask is not None:
        expected = list(probs.shape[:-1])
        description = f"{expected}, that of probs without experts"
        checks.same_shape(SEQUENCE_AUX_LOSS, "token_mask", token_mask, expected, description)


def check_sequence_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    workspace: Tensor | None,
) -> None:
    """Raise unless the arguments are what sequence_aux_loss takes."""
    checks.supported_device(SEQUENCE_AUX_LOSS, "probs", probs)
    checks.dtype(SEQUENCE_AUX_LOSS, "probs", probs, checks.FLOAT_DTYPES)
    checks.counts(SEQUENCE_AUX_LOSS, "tokens_per_expert", tokens_per_expert)
    checks.same_device(SEQUENCE_AUX_LOSS, "tokens_per_expert", tokens_per_expert, probs, "probs")
    if cu_seqlens is not None:
        checks.dtype(SEQUENCE_AUX_LOSS, "cu_seqlens", cu_seqlens, checks.INDEX_DTYPES)
        checks.same_device(SEQUENCE_AUX_LOSS, "cu_seqlens", cu_seqlens, probs, "probs")
    if token_mask is not None:
        checks.dtype(SEQUENCE_AUX_LOSS, "token_mask", token_mask, (torch.bool,))
        checks.same_device(SEQUENCE_AUX_LOSS, "token_mask", token_mask, probs, "probs")
    check_sequence_lengths(probs, tokens_per_expert, cu_seqlens, token_mask)
    checks.integer(SEQUENCE_AUX_LOSS, "topk", topk, 1)
    checks.no_forward_tangent(SEQUENCE_AUX_LOSS, probs, tokens_per_expert)
    workspaces.apart(
        SEQUENCE_AUX_LOSS,
        workspace,
        probs=probs,
        tokens_per_expert=tokens_per_expert,
        cu_seqlens=cu_seqlens,
        token_mask=token_mask,
    )
    size = sequence_aux_loss_workspace_size(
        num_tokens_of(probs), tokens_per_expert.shape[0], probs.shape[-1], probs.dtype
    )
    workspaces.check(SEQUENCE_AUX_LOSS, workspace, size, probs)


def check_sums(sums: Tensor, dtype: torch.dtype) -> None:
    """The sums of all ranks' tiles, in order."""
    checks.dtype(AUX_LOSS, "sums", sums, (dtype,))
    checks.rank(AUX_LOSS, "sums", sums, "[tiles]")
    checks.value(sums.is_contiguous(), AUX_LOSS, "sums", "contiguous", f"strides {sums.stride()}")


def check_size(tiles: int, size: int) -> None:
    """Of a message that has room for the sums of a rank."""
    expected = f"at least {tiles}, the number of tiles"
    checks.value(size >= tiles, AUX_LOSS, "size", expected, size)


def check_sums_of_sequences(
    tokens_per_expert: Tensor, sums: Tensor | None, lengths: Tensor | None, dtype: torch.dtype
) -> None:
    """The sums of all ranks' tiles of each sequence, in order, and numbers of unmasked tokens."""
    op, num_sequences = SEQUENCE_AUX_LOSS, tokens_per_expert.shape[0]
    if sums is not None:
        checks.value(lengths is not None, op, "lengths", "given with sums", None)
        checks.dtype(op, "sums", sums, (dtype,))
        expected = f"[sequences] or [sequences, tiles], with sequences = {num_sequences}"
        rows = sums.dim() in (1, 2) and sums.shape[0] == num_sequences
        checks.shape(op, "sums", sums, expected, rows)
    if lengths is not None:
        checks.dtype(op, "lengths", lengths, (torch.int64,))
        expected = f"[sequences] = [{num_sequences}]"
        checks.same_shape(op, "lengths", lengths, [num_sequences], expected)
