"""Collectives that add integers and move floats, and never add a float.

PyTorch's functional collectives, which keep one graph under a compiler, are imported at their first
use: they bring triton.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks


def resolve(op: str, group: "dist.ProcessGroup | None") -> "dist.ProcessGroup":
    """``group``, checked, or the default group."""
    if group is None:
        world = dist.group.WORLD
        checks.value(world is not None, op, "group", "given without a default group", None)
        assert world is not None
        return world
    checks.process_group(op, "group", group)
    return group


def sum_integers(parts: list[Tensor], group: "dist.ProcessGroup") -> list[Tensor]:
    """The sums over the group of int64 tensors, which stay as they are: one collective for all."""
    from torch.distributed import _functional_collectives as collectives

    flat = torch.cat([*(part.reshape(-1) for part in parts), *_distinct(parts[0])])
    # What a functional collective returns is read only once it has been waited for.
    summed = collectives.wait_tensor(collectives.all_reduce(flat, "sum", group))
    sizes = [part.numel() for part in parts]
    pieces = summed[: sum(sizes)].split(sizes)
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _distinct(like: Tensor) -> list[Tensor]:
    """In a compiled graph, an element that no other message has and nobody reads.

    A compiler makes one collective of two with equal messages. Where they are equal on one rank
    alone, say because it has no tokens, the ranks would wait for different collectives. What it
    never takes for equal are two uninitialised tensors.
    """
    if not torch.compiler.is_compiling():
        return []
    return [torch.empty(1, dtype=like.dtype, device=like.device)]


def of_rank(part: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """[ranks, *]: ``part`` at this rank's place, zeros at the others, for :func:`sum_integers`."""
    places = torch.arange(group.size(), device=part.device) == group.rank()
    return places.view(-1, *[1] * part.dim()) * part


def gather(x: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """``x`` [*] of every rank in turn: [ranks, *]."""
    from torch.distributed import _functional_collectives as collectives

    # Torch 2.13 renamed it.
    name = "all_gather_single" if hasattr(collectives, "all_gather_single") else "all_gather_tensor"
    gathered = getattr(collectives, name)(x.reshape(-1), 0, group)
    return collectives.wait_tensor(gathered).view(group.size(), *x.shape)


def in_order(gathered: Tensor, counts: Tensor) -> Tensor:
    """The first ``counts`` [ranks, X] of every rank's ``gathered`` [ranks, X, M], rank by rank.

    [X, ranks * M], zeros behind them.
    """
    num_ranks, num_rows, size = gathered.shape
    starts = counts.cumsum(0) - counts
    own = torch.arange(size, device=gathered.device)
    # What does not count goes behind the end, which is cut off.
    end = num_ranks * size
    places = torch.where(own < counts[..., None], starts[..., None] + own, end)
    flat, to = (x.transpose(0, 1).reshape(num_rows, end) for x in (gathered, places))
    return gathered.new_zeros(num_rows, end + 1).scatter(1, to, flat)[:, :-1].contiguous()
