"""A call of an op as the Python source that makes it."""

import dataclasses
from typing import Any

import torch

from . import tensors
from .properties import INTERPRETED, PACKAGE

_HEADER = """\
import torch
import moe_custom_ops
from moe_custom_ops.testing.fuzz import check, tensors as t
"""
if INTERPRETED:
    _HEADER = "# In a process with TRITON_INTERPRET=1.\n" + _HEADER


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What a broken call raises: ``error``, with a message that names ``argument``.

    ``by_schema`` where ``torch.ops.moe`` need not say the same: a type that its schema converts or
    refuses before the op sees it.
    """

    error: str
    argument: str
    by_schema: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """``sources`` are expressions, one per argument; each may name those before it.

    ``leaves`` are the arguments that require a gradient; ``grads`` the source of each result's
    incoming gradient, or None where it has none. A ``change`` (argument, source) is made last, and
    may name what it replaces. ``workspace_size`` is the source of the bytes that the op needs.
    """

    op: str
    sources: dict[str, str]
    leaves: tuple[str, ...] = ()
    grads: tuple[str | None, ...] = ()
    change: tuple[str, str] | None = None
    refusal: Refusal | None = None
    workspace_size: str | None = None

    def _statements(self) -> list[tuple[str, str]]:
        return [*self.sources.items(), *([self.change] if self.change else [])]

    def build(self) -> dict[str, Any]:
        """What :func:`check` takes, made by the printed source and nothing else."""
        made: dict[str, Any] = {"torch": torch, "moe_custom_ops": PACKAGE, "t": tensors}
        for name, source in self._statements():
            made[name] = eval(source, made)
        return {
            "op": self.op,
            "arguments": {name: made[name] for name, _ in self._statements()},
            "leaves": self.leaves,
            "grads": tuple(None if g is None else eval(g, made) for g in self.grads),
            "refusal": self.refusal,
        }

    def pasteable(self) -> str:
        """A program that makes this call and checks it."""
        lines = [f"{name} = {source}" for name, source in self._statements()]
        arguments = ", ".join(f"{name}={name}" for name in dict(self._statements()))
        options = []
        if self.leaves:
            grads = "".join(f"{grad}, " for grad in self.grads)
            options = [f"leaves={self.leaves!r}", f"grads=({grads})"]
        if self.refusal:
            options.append(f"refusal={dataclasses.astuple(self.refusal)!r}")
        check = ", ".join([repr(self.op), "call", *options])
        return "\n".join(
            [
                _HEADER,
                *lines,
                f"call = dict({arguments})",
                f"check({check})",
                f"# The call by itself: moe_custom_ops.{self.op}(**call)\n",
            ]
        )

    def __repr__(self) -> str:
        return f"\n\n{self.pasteable()}\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it."""
        printer.text(repr(self))
