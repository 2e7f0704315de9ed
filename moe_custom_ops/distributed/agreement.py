"""Whether the ranks of a group were called alike: a check for debugging, which communicates."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import resolve


def check_agreement(group: "dist.ProcessGroup | None", **values: object) -> None:
    """Raise on every rank of ``group`` where the ranks do not hold equal ``values``.

    Every rank must call, and with values that can be pickled. It waits for the others, and on a GPU
    for the device: use it while debugging. The losses of this package call it themselves under
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, outside of compiled regions.

    Args:
        group: a process group of which this rank is a member; None is the default group.
        values: what to compare, by name; tensors by their elements.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: the ranks disagree; names every value that differs, and the ranks of the job
            that hold each.

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
    values: dict[str, object] = {}
    error = None
    try:
        values = check()
    except Exception as refusal:
        error = refusal
    _compare(op, group, values, error)


def _is_debugging() -> bool:
    # PyTorch documents both names, and lets no type checker see them.
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def _compare(
    op: str, group: "dist.ProcessGroup", values: dict[str, object], error: Exception | None
) -> None:
    values = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in values.items()}
    try:
        pickle.dumps(values)
    except Exception as refusal:
        values, error = {}, error or refusal
    refusal_text = None if error is None else f"{type(error).__name__}: {error}"
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, (refusal_text, values), group=group)
    if error is not None:
        raise error
    # Of the whole job, as launchers and logs number them.
    ranks = dist.get_process_group_ranks(group)
    refused = [
        f"rank {rank}: {text}" for rank, (text, _) in zip(ranks, of_ranks, strict=True) if text
    ]
    if refused:
        raise ValueError(f"{op}: other ranks refused their arguments; {'; '.join(refused)}")
    names = dict.fromkeys(name for _, own in of_ranks for name in own)
    differences = []
    for name in names:
        holders: list[tuple[object, list[int]]] = []
        for rank, (_, own) in zip(ranks, of_ranks, strict=True):
            value = own.get(name, _MISSING)
            same = next((held for seen, held in holders if _equal(seen, value)), None)
            if same is None:
                holders.append((value, [rank]))
            else:
                same.append(rank)
        if len(holders) > 1:
            who = (
                f"{value!r} on rank{'s' * (len(held) > 1)} {' '.join(map(str, held))}"
                for value, held in holders
            )
            differences.append(f"{name} is {', '.join(who)}")
    if differences:
        raise ValueError(f"{op}: the ranks must be called alike, got {'; '.join(differences)}")


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    try:
        # A NaN is like a NaN.
        return bool(a == b) or (a != a and b != b)
    except Exception:
        return pickle.dumps(a) == pickle.dumps(b)
