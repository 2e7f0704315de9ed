"""The documented functions: losses whose tokens are spread over a process group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..losses import api, arguments, ops, reference
from .agreement import checked
from .collectives import gather, in_order, of_rank, resolve, sum_integers

GLOBAL, PARTIAL = REDUCTIONS = ("global", "partial")
# Sums that a rank sends unless it is told how many tokens there may be.
MESSAGE_SUMS = 4096


def tile_tokens(num_columns: int) -> int:
    """Tokens of a tile: what a rank must own a multiple of for the bits of one rank.

    The last rank with tokens may own any number. A power of two from 8 to 512.

    Args:
        num_columns: columns of ``probs``: the number of experts, at least 0.

    Raises:
        TypeError: ``num_columns`` is not an int.
        ValueError: ``num_columns`` is negative.

    Example:
        >>> [tile_tokens(n) for n in (8, 64, 128, 256, 2048)]
        [512, 128, 64, 32, 8]
    """
    checks.integer("tile_tokens", "num_columns", num_columns, 0)
    return reference.tile_tokens(num_columns)


def aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    group: "dist.ProcessGroup | None",
    workspace: Tensor | None = None,
    reduction: str = "global",
    token_mask: Tensor | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    r"""Load-balancing loss of the tokens of all ranks of a group: :func:`moe_custom_ops.aux_loss`.

    .. math::
        \text{loss} = C \sum_c n_c \sum_r \sum_t p^{(r)}_{t,c}, \qquad
        n = \sum_r n^{(r)}, \quad \text{total} = \sum_r \text{total}^{(r)}

    with :math:`C` of the summed total. The tokens of rank 0 come first, then those of rank 1, and
    so on; ranks may own different numbers of them, and none.

    **One answer.** Collectives add integers and move floats, and never add a float: whatever the
    backend, its algorithm and the placement of the ranks, the bits are the same. With
    ``reduction="global"`` they are those of one rank with all the tokens, where every rank but the
    last one with tokens owns whole tiles, a multiple of :func:`tile_tokens`. Where one does not,
    the result is as deterministic, but that of tiles cut at the ranks' borders.

    **Gradient.** In both reductions a rank's gradient is its slice of the one-rank gradient, bit
    for bit, where the incoming gradient is the same on all ranks. No collective runs in the
    backward. So the gradient of a parameter is that of one process once it is *summed* over the
    ranks. DDP and FSDP average instead: there give ``coeff * group.size()`` for the same weight.
    Ranks that hold copies of the same tokens (tensor parallelism without sequence parallelism) do
    not belong in the group, those that hold different tokens of one batch (data, context and
    sequence parallelism) do. A loss scale multiplies the incoming gradient, as of any loss.

    Under ``torch.compile(fullgraph=True)`` it is one graph for all token counts from 2 on, and with
    NCCL it can be captured in a CUDA graph: no number is read on the host. Every rank of the group
    must call it, one without tokens too. Arguments are checked before any collective. Whether the
    ranks agree is checked under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (:func:`check_agreement`).

    Args:
        probs: this rank's router probabilities [tokens, columns]; float32, bfloat16, float16 or
            float64, any strides. 0 tokens are allowed.
        tokens_per_expert: this rank's own assignments per column [columns]; int32 or int64, as
            integers are added over the ranks. It is not written.
        total_num_tokens: this rank's own number of tokens: an int, or a one-element int32 or int64
            tensor on the device of ``probs``.
        num_experts, topk, coeff: as of :func:`moe_custom_ops.aux_loss`, equal on all ranks.
        group: the ranks; None is the default group.
        workspace: as of :func:`moe_custom_ops.aux_loss`, for this rank's tokens. With "global"
            it is checked, but not needed: the sums are a message of their own.
        reduction: "global" returns the loss of all tokens, the same on every rank: a sum of
            integers over the ranks, then a gather of tile sums. "partial" returns this rank's
            share, of which the sum over the ranks is the loss: the sum of integers alone, enough
            for training.
        token_mask: optional bool [tokens], True for the tokens that count.
        max_tokens: for "global", the most tokens that a rank may have, equal on all ranks: it sizes
            the message, 4 bytes per tile (8 for float64). None is room for 4096 tiles.

    Returns:
        0-dim tensor: float64 for float64 ``probs``, else float32. The gradient of ``probs`` is as
        of :func:`moe_custom_ops.aux_loss`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or there are more tokens than
            ``max_tokens`` has room for.
        NotImplementedError: forward-mode AD, or a CUDA tensor on a ROCm build.

    Example:
        >>> own = probs.chunk(dist.get_world_size())[dist.get_rank()]  # doctest: +SKIP
        >>> counts = torch.bincount(own.topk(2).indices.flatten(), minlength=64)  # doctest: +SKIP
        >>> loss = aux_loss(own, counts, len(own), 64, 2, 1e-2, None)  # doctest: +SKIP
    """
    given = (
        probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, workspace, token_mask
    )  # fmt: skip
    group = resolve("aux_loss", group)
    _check_aux_loss("aux_loss", group, given, reduction, max_tokens)
    sums = _sums_of_ranks(probs, tokens_per_expert, total_num_tokens, group, reduction)
    return _aux_loss(given, *sums, group, max_tokens)


def running_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    group: "dist.ProcessGroup | None",
    running_counts: Tensor,
    num_steps: Tensor | int,
    workspace: Tensor | None = None,
    reduction: str = "global",
    token_mask: Tensor | None = None,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    r""":func:`aux_loss` with the mean counts of the accumulation steps so far.

    .. math::
        n = \frac{\text{running\_counts} + \sum_r n^{(r)}}{\text{num\_steps} + 1}

    takes the place of the counts, in float64 and rounded once: Megatron-Core's "global" loss over
    accumulation steps (``global_aux_loss``), whose total, as here, is that of this step's tokens.
    The counts stay integers, so the mean has the same bits for any number of ranks.

    The state is the caller's, so that a recomputed forward counts nothing twice:

        loss, running = running_aux_loss(..., running, step)    # in the step
        running.zero_()                                         # once the optimizer has stepped

    Args:
        running_counts: int64 [columns], sums over the group and the earlier steps: zeros at first,
            then what the last call returned. It is not written.
        num_steps: how many steps ``running_counts`` has: an int of at least 0, or a one-element
            int32 or int64 tensor on the device of ``probs``, which may change between replays.
        probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, group, workspace,
        reduction, token_mask, max_tokens: as of :func:`aux_loss`.

    Returns:
        (the loss, as of :func:`aux_loss`; the running counts with this step's, int64 [columns])

    Raises:
        As :func:`aux_loss`.
    """
    given = (
        probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, workspace, token_mask
    )  # fmt: skip
    op = "running_aux_loss"
    group = resolve(op, group)
    _check_aux_loss(op, group, given, reduction, max_tokens, (running_counts, num_steps))
    sums = _sums_of_ranks(probs, tokens_per_expert, total_num_tokens, group, reduction)
    counts = running_counts + sums[0]
    steps = num_steps if isinstance(num_steps, Tensor) else counts.new_full((), num_steps)
    mean = counts.double() / (steps.reshape(()).double() + 1)
    return _aux_loss(given, mean, *sums[1:], group, max_tokens), counts


def sequence_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    coeff: float,
    group: "dist.ProcessGroup | None",
    cu_seqlens: Tensor | None = None,
    token_mask: Tensor | None = None,
    workspace: Tensor | None = None,
    reduction: str = "global",
    max_tokens: int | None = None,
) -> Tensor:
    r""":func:`moe_custom_ops.sequence_aux_loss` of sequences whose tokens are spread over a group.

    Every rank gives the same number of sequences, and holds some tokens of each, those of rank 0
    first: context parallelism. A rank may hold none of a sequence. So it serves data parallelism
    too, as a pack in which each rank leaves the others' sequences empty.

    What :func:`aux_loss` says of the bits, the gradient, the group and the execution modes holds
    here. For the bits of one rank, each rank owns whole tiles *of each sequence*, but for the last
    rank that has tokens of it. A sequence that lies on one rank always has them.

    Args:
        probs: this rank's router probabilities, batch-first [B, S, E], S of its own; or packed
            [T, E] with ``cu_seqlens``.
        tokens_per_expert: this rank's own assignments [B, E] of each sequence; int32 or int64. It
            is not written.
        topk, coeff: as of :func:`moe_custom_ops.sequence_aux_loss`, equal on all ranks.
        group: the ranks; None is the default group.
        cu_seqlens: for a pack, the bounds [B + 1] of this rank's part of each sequence.
        token_mask: optional bool [B, S] or [T], True for the tokens that count.
        workspace: as of :func:`moe_custom_ops.sequence_aux_loss`, for this rank's tokens. With
            "global" it is checked, but not needed: the sums are a message of their own.
        reduction: "global" or "partial", as of :func:`aux_loss`.
        max_tokens: for "global", the most tokens of one sequence that a rank may have (of a pack:
            the most tokens of the pack), equal on all ranks: it sizes the message, 4 bytes per tile
            of each sequence (8 for float64). None is room for 4096 tiles, in equal parts.

    Returns:
        0-dim tensor: float64 for float64 ``probs``, else float32; 0 if every sequence is empty.

    Raises:
        As :func:`aux_loss`.
    """
    op = arguments.SEQUENCE_AUX_LOSS
    group = resolve(op, group)
    given = probs, tokens_per_expert, topk, coeff, cu_seqlens, token_mask, workspace

    def check() -> dict[str, object]:
        ops.SEQUENCE_AUX_LOSS.check_types(*given)
        if torch.compiler.is_compiling():
            expected = "[batch, seq, experts]" if cu_seqlens is None else "[tokens, experts]"
            _check_axes(op, "probs", probs, expected)
            _check_axes(op, "tokens_per_expert", tokens_per_expert, "[sequences, experts]")
        else:
            arguments.check_sequence_aux_loss(probs, tokens_per_expert, topk, *given[4:])
        _check_integers(op, tokens_per_expert)
        length = probs.shape[-2]
        _check_message(op, reduction, length, max_tokens, tokens_per_expert.shape)
        return {
            "num_sequences": tokens_per_expert.shape[0],
            "num_experts": tokens_per_expert.shape[1],
            **_values(probs, topk, coeff, reduction, max_tokens),
        }

    checked(op, group, check)
    probs_value, own_counts = probs.detach(), tokens_per_expert.detach()
    starts, spans = reference.spans(probs_value, cu_seqlens)
    parts = [own_counts.long(), _unmasked(starts, spans, cu_seqlens, token_mask)]
    num_sequences, num_experts = own_counts.shape
    if reduction == PARTIAL:
        counts, lengths = sum_integers(parts, group)
        return torch.ops.moe.sequence_aux_loss_of_rank(
            probs, counts, lengths, topk, coeff, cu_seqlens, token_mask, workspace
        )
    tokens = reference.tile_tokens(num_experts)
    parts.append(of_rank((spans + tokens - 1) // tokens, group))
    counts, lengths, tiles = sum_integers(parts, group)
    size = _message_tiles(max_tokens, num_experts, num_sequences)
    own_sums = torch.ops.moe.sequence_aux_loss_sums_of_rank(
        probs_value, counts, cu_seqlens, token_mask, size
    )
    sums = in_order(gather(own_sums, group), tiles)
    return torch.ops.moe.sequence_aux_loss_of_rank(
        probs, counts, lengths, topk, coeff, cu_seqlens, token_mask, workspace, sums
    )


def _unmasked(
    starts: Tensor, spans: Tensor, cu_seqlens: Tensor | None, token_mask: Tensor | None
) -> Tensor:
    """Number of unmasked tokens of each sequence: int64 [B]."""
    if token_mask is None:
        return spans
    if cu_seqlens is None:
        return token_mask.sum(1)
    before = torch.nn.functional.pad(token_mask.cumsum(0), (1, 0))
    return before[starts + spans] - before[starts]


def _aux_loss(
    given: tuple[Any, ...],
    counts: Tensor,
    total: Tensor,
    tiles: Tensor | None,
    group: "dist.ProcessGroup",
    max_tokens: int | None,
) -> Tensor:
    """The loss of this rank's arguments with the counts and the total of all ranks."""
    probs, _, _, num_experts, topk, coeff, workspace, token_mask = given
    numbers = num_experts, topk, coeff
    if tiles is None:
        return api.aux_loss(probs, counts, total, *numbers, workspace, token_mask)
    size = _message_tiles(max_tokens, probs.shape[1])
    own_sums = torch.ops.moe.aux_loss_sums_of_rank(probs.detach(), counts, token_mask, size)
    sums = in_order(gather(own_sums[None], group), tiles)[0]
    return torch.ops.moe.aux_loss_of_rank(
        probs, counts, total, *numbers, workspace, token_mask, sums
    )


def _sums_of_ranks(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total: Tensor | int,
    group: "dist.ProcessGroup",
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(counts [columns], total [], tiles [ranks, 1] for "global"), int64, of the group."""
    counts = tokens_per_expert.detach().long()
    if not isinstance(total, Tensor):
        total = counts.new_full((), total)
    parts = [counts, total.detach().reshape(()).long()]
    if reduction == PARTIAL:
        counts, total = sum_integers(parts, group)
        return counts, total, None
    tiles = counts.new_full((1,), reference.num_tiles(*probs.shape))
    counts, total, tiles = sum_integers([*parts, of_rank(tiles, group)], group)
    return counts, total, tiles


def _check_aux_loss(
    op: str,
    group: "dist.ProcessGroup",
    given: tuple[Any, ...],
    reduction: str,
    max_tokens: int | None,
    state: tuple[Any, ...] = (),
) -> None:
    def check() -> dict[str, object]:
        ops.AUX_LOSS.check_types(*given)
        probs, tokens_per_expert, total, num_experts, topk, coeff, workspace, mask = given
        numbers = num_experts, topk
        if torch.compiler.is_compiling():
            # Nothing traces the rest, which the ops check later, but before anything has run.
            _check_axes(op, "probs", probs, "[tokens, columns]")
            if not isinstance(total, Tensor):
                # No text takes a symbolic number.
                least = 1 if mask is None and probs.shape[0] > 0 else 0
                if total < least:
                    raise ValueError(
                        f"{op}: total_num_tokens must be at least {least}, got a lower number"
                    )
        else:
            arguments.check_aux_loss(probs, tokens_per_expert, total, *numbers, workspace, mask)
        _check_integers(op, tokens_per_expert)
        if isinstance(total, Tensor):
            note = _INTEGERS_NOTE if total.is_floating_point() else ""
            checks.dtype(op, "total_num_tokens", total, checks.INDEX_DTYPES, note)
        _check_message(op, reduction, probs.shape[0], max_tokens, (1, probs.shape[1]))
        columns = {"columns of probs": probs.shape[1], "num_experts": num_experts}
        values = columns | _values(probs, topk, coeff, reduction, max_tokens)
        if state:
            _check_state(op, probs, *state)
            values |= dict(zip(("running_counts", "num_steps"), state, strict=True))
        return values

    checked(op, group, check)


_INTEGERS_NOTE = ": over ranks only integers are added, which is exact in any order"


def _check_axes(op: str, argument: str, tensor: Tensor, expected: str) -> None:
    """``checks.rank`` for a compiler, in whose messages no symbolic size may stand."""
    axes = tensor.dim()
    is_right = axes == expected.count(",") + 1
    checks.value(is_right, op, argument, f"of shape {expected}", f"{axes} axes")


def _check_integers(op: str, tokens_per_expert: Tensor) -> None:
    note = _INTEGERS_NOTE if tokens_per_expert.is_floating_point() else ""
    checks.dtype(op, "tokens_per_expert", tokens_per_expert, checks.INDEX_DTYPES, note)


def _check_message(
    op: str, reduction: str, num_tokens: int, max_tokens: int | None, shape: Sequence[int]
) -> None:
    expected = " or ".join(map(repr, REDUCTIONS))
    checks.value(reduction in REDUCTIONS, op, "reduction", expected, repr(reduction))
    if reduction == PARTIAL:
        return
    num_sequences, num_columns = shape
    room = _message_tiles(None, num_columns, num_sequences) * reference.tile_tokens(num_columns)
    if max_tokens is not None:
        checks.integer(op, "max_tokens", max_tokens, 0)
        if max_tokens >= 2**31:
            raise ValueError(f"{op}: max_tokens must be less than 2**31, got a larger number")
        room = max_tokens
    # Written into a text, a symbolic number becomes a constant.
    if num_tokens > room:
        got = f"None, which has room for {room}" if max_tokens is None else max_tokens
        raise ValueError(
            f"{op}: max_tokens must be at least {num_tokens}, the tokens of this rank, got {got}"
        )


def _check_state(op: str, probs: Tensor, counts: object, steps: object) -> None:
    checks.is_tensor(op, "running_counts", counts)
    assert isinstance(counts, Tensor)
    checks.dtype(op, "running_counts", counts, (torch.int64,))
    expected = "[columns], with the columns of probs"
    checks.same_shape(op, "running_counts", counts, [probs.shape[1]], expected)
    checks.same_device(op, "running_counts", counts, probs, "probs")
    if isinstance(steps, Tensor):
        checks.dtype(op, "num_steps", steps, checks.INDEX_DTYPES)
        checks.shape(op, "num_steps", steps, "[] or [1]", steps.numel() == 1)
        checks.same_device(op, "num_steps", steps, probs, "probs")
    else:
        checks.integer(op, "num_steps", steps, 0)


def _values(
    probs: Tensor, topk: int, coeff: float, reduction: str, max_tokens: int | None
) -> dict[str, object]:
    return {
        "topk": topk,
        "coeff": coeff,
        "dtype": probs.dtype,
        "reduction": reduction,
        "max_tokens": max_tokens,
    }


def _message_tiles(max_tokens: int | None, num_columns: int, num_sequences: int = 1) -> int:
    """Sums that a rank sends of each sequence."""
    if max_tokens is None:
        return max(MESSAGE_SUMS // max(num_sequences, 1), 1)
    return max(reference.num_tiles(max_tokens, num_columns), 1)
