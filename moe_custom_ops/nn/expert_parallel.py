"""Rows to the ranks that hold their experts, and back: two transports over one process group.

Both send rows in expert-major order, so each rank's are consecutive. *Exact* sends as many as there
are, whose numbers the host must read: one read per layer. *Capacity* sends a fixed number to every
rank and drops what is beyond it, with no sync: its shapes are static, so it can be captured.

PyTorch's functional collectives, which keep one graph under a compiler, are imported at their first
use: they bring triton.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..permutation import expert_permutation_from_counts


class Group(NamedTuple):
    """What a layer keeps of a process group: unlike the group, it can be copied and pickled."""

    name: Any  # A str, of a type of its own since torch 2.13.
    # Their number is a constant to a compiler, which an int is not where all sizes are dynamic.
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_of(process_group: "dist.ProcessGroup") -> Group:
    ranks = tuple(range(process_group.size()))
    return Group(process_group.group_name, ranks, process_group.rank())


class Route(NamedTuple):
    """How many rows to send to and to take from each rank; the local experts' order of the latter.

    The numbers are None where all are equal.
    """

    send_splits: list[int] | None
    receive_splits: list[int] | None
    num_received: int
    order: Tensor
    offsets: Tensor


def _all_to_all(
    x: Tensor, receive: list[int] | None, send: list[int] | None, group: Group
) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    # What a functional collective returns is read only once it has been waited for.
    return collectives.wait_tensor(
        collectives.all_to_all_single_autograd(x.contiguous(), receive, send, group.name)
    )


def _exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """[ranks, local experts] to send, as [ranks, local experts] to receive."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(
        collectives.all_to_all_single(counts.contiguous(), None, None, group.name)
    )


def send(rows: Tensor, route: Route, group: Group) -> Tensor:
    """Rows for each rank in turn [N, ...] to the rows from each rank in turn."""
    return _all_to_all(rows, route.receive_splits, route.send_splits, group)


def send_back(rows: Tensor, route: Route, group: Group) -> Tensor:
    """The way back of :func:`send`."""
    return _all_to_all(rows, route.send_splits, route.receive_splits, group)


def exact_route(tokens_per_expert: Tensor, num_rows: int, group: Group) -> Route:
    """For all ``num_rows`` rows, of ``tokens_per_expert`` [E]. Reads the splits on the host."""
    counts = tokens_per_expert.view(group.size, -1)
    received = _exchange_counts(counts, group)
    send_splits, receive_splits = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    if torch.compiler.is_compiling():
        for split in (*send_splits, *receive_splits):
            torch._check(split >= 0)
        torch._check(sum(send_splits) == num_rows)
        # Bounds that the checks of what follows then need not ask for.
        torch._check(sum(receive_splits) >= 0)
        torch._check(sum(receive_splits) < 2**31)
    num_received = sum(receive_splits)
    order, _, offsets = expert_permutation_from_counts(received, num_received)
    return Route(send_splits, receive_splits, num_received, order, offsets)


def capacity_route(
    token_indices_sorted: Tensor, tokens_per_expert: Tensor, capacity: int, group: Group
) -> tuple[Tensor, Route, Tensor]:
    """(order [ranks * capacity] of what is sent, route, number of assignments dropped).

    Of the rows for each rank the first ``capacity`` are sent, by expert and then by token.
    """
    counts = tokens_per_expert.view(group.size, -1)
    ends = tokens_per_expert.cumsum(0).view(group.size, -1)
    starts = ends - counts
    first = starts[:, :1]
    places = torch.arange(capacity, device=counts.device)
    index = first + places
    kept = places < counts.sum(1, keepdim=True)
    # A place past the last row has no rank that keeps it.
    last = max(token_indices_sorted.shape[0] - 1, 0)
    order = torch.nn.functional.pad(token_indices_sorted, (0, 1), value=-1)
    send_order = torch.where(kept, order[index.clamp(max=last)], -1).flatten()
    sent = (ends - first).clamp(max=capacity) - (starts - first).clamp(max=capacity)
    dropped = tokens_per_expert.sum() - sent.sum()

    received = _exchange_counts(sent, group)
    num_received = group.size * capacity
    packed, _, offsets = expert_permutation_from_counts(received, num_received)
    # From places in rows that lie without gaps to places in what comes.
    of_rank = received.sum(1)
    rank_ends = of_rank.cumsum(0)
    place = torch.arange(num_received, device=counts.device)
    rank = torch.searchsorted(rank_ends, place, right=True).clamp(max=group.size - 1)
    with_gaps = (place - (rank_ends - of_rank)[rank] + rank * capacity).int()
    local_order = torch.where(packed >= 0, with_gaps[packed.clamp(min=0).long()], -1)
    return send_order, Route(None, None, num_received, local_order, offsets), dropped
