"""Whether the ranks of a group were called alike: a check for debugging, which communicates."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .collectives import resolve


def check_agreement(group: "dist.ProcessGroup | None", **values: object) -> None:
    """Raise on every rank of ``group`` where the ranks do not hold equal ``values``.

    Every rank must call, and with values that can be pickled. It waits for the others, and on a GPU
    for the device: use it while debugging. The losses of this package call it themselves under
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, outside of compiled regions.

    Args:
        group: a process group of which this rank is a member; None is the default group.
        values: what to compare, by name.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: the ranks disagree; names every value that differs, and who holds what.

    Example:
        >>> check_agreement(group, num_experts=64, dtype=probs.dtype)  # doctest: +SKIP
    """
    _compare("check_agreement", resolve("check_agreement", group), values, None)


def checked(op: str, group: "dist.ProcessGroup", check: Callable[[], dict[str, object]]) -> None:
    """Run a rank's own ``check``, and under the detailed debug level compare what it returns.

    There, a rank that refuses its arguments makes every rank raise, instead of leaving the others
    in a collective.
    """
    if torch.compiler.is_compiling() or not _is_debugging():
        check()
        return
    values, error = {}, None
    try:
        values = check()
    except (TypeError, ValueError) as refusal:
        error = refusal
    _compare(op, group, values, error)


def _is_debugging() -> bool:
    # PyTorch documents both names, and lets no type checker see them.
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def _compare(
    op: str, group: "dist.ProcessGroup", values: dict[str, object], error: Exception | None
) -> None:
    of_ranks: list[Any] = [None] * group.size()
    refusal = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(of_ranks, (refusal, values), group=group)
    if error is not None:
        raise error
    refusals = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(of_ranks) if text]
    if refusals:
        raise ValueError(f"{op}: other ranks refused their arguments; {'; '.join(refusals)}")
    differences = []
    for name in values:
        holders: dict[str, list[str]] = {}
        for rank, (_, others) in enumerate(of_ranks):
            holders.setdefault(repr(others.get(name)), []).append(str(rank))
        if len(holders) > 1:
            differences.append(
                f"{name} is "
                + ", ".join(
                    f"{value} on rank{'s' * (len(ranks) > 1)} {' '.join(ranks)}"
                    for value, ranks in holders.items()
                )
            )
    if differences:
        raise ValueError(f"{op}: the ranks must be called alike, got {'; '.join(differences)}")
