"""What every op needs to be called: through the dispatcher, or past it.

An op is called in two ways. Under a compiler, a mode, a transform or a trace, with subclasses and
on other devices, a documented function calls ``torch.ops.moe``: a composite, which checks its
arguments and calls an inner op. Where the dispatcher would find nothing but autograd and CUDA, it
goes past. Both ways record one ``autograd.Function``, so that both save the same tensors, and both
run a plan.

A plan is what an op's launches, sizes and allocations are for one signature: what checks and
launches read of the arguments. ``make(*tensors, *numbers)`` checks them and returns the plan, a
function of the same arguments; every plan of every op is in ``PLANS``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _get_function_stack_at,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._device import DeviceContext

from . import checks
from .batching import register_vmap
from .launch import Run

LIBRARY = torch.library.Library("moe", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)

MAX_PLANS = 4096
# False under the interpreter, which takes CPU tensors.
CUDA = True
_TENSORS = (Tensor, torch.nn.Parameter)


class Plans(dict[tuple[Any, ...], Run]):
    """Plans by signature, of bounded number."""

    def add(self, key: tuple[Any, ...], plan: Run) -> Run:
        if len(self) >= MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan


PLANS = Plans()


def _is_plain_mode() -> bool:
    """Questions that take about 0.1 us each; those for dispatch keys are fewer, but took 2 us."""
    return not (
        # First of all, as Dynamo knows none of the rest.
        is_compiling()
        or (_len_torch_function_stack() and _has_function_mode())
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    )


def _has_function_mode() -> bool:
    """Other than a default device, which changes nothing here: every tensor made names its own."""
    modes = map(_get_function_stack_at, range(_len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def signature(tensors: Sequence[Any]) -> list[Any] | None:
    """What checks and launches read of ``tensors``, or None unless all are plain CUDA tensors.

    Any of them may be None.
    """
    if not _is_plain_mode():
        return None
    parts: list[Any] = []
    try:
        for x in tensors:
            if x is None:
                parts.append(None)
            elif type(x) in _TENSORS and x.is_cuda is CUDA and not x.is_neg():
                address = x.data_ptr()
                if not address and x.numel():
                    return None
                parts.append((x.shape, x.stride(), x.dtype, x.device, address % 16))
            else:
                return None
    except RuntimeError:  # no storage: a sparse tensor, or a gradient under is_grads_batched
        return None
    return parts


def plan(make: Run, tensors: Sequence[Any], numbers: tuple[Any, ...] = ()) -> Run | None:
    """The plan of a call past the dispatcher, or None where the call is for the dispatcher.

    The types of ``numbers`` are the caller's to look at: 2.0 has the key of 2. So has -0.0 that of
    0.0: what a plan makes of a float it makes anew at each run.
    """
    parts = signature(tensors)
    if parts is None:
        return None
    key = make, *parts, *numbers
    return PLANS.get(key) or PLANS.add(key, make(*tensors, *numbers))


def plain_ints(*numbers: object) -> bool:
    """Numbers of other types are for the dispatcher and the checks."""
    # A list, which takes half the time of a generator.
    return all([type(number) is int for number in numbers])  # noqa: C419


def plain_float(number: object) -> float | None:
    """What the dispatcher makes of a number for a float, or None where it may refuse it."""
    if type(number) is float:
        return number
    if isinstance(number, float) or (type(number) is int and abs(number) < 2**63):
        return float(number)
    return None


def backward_plan(make: Run, tensors: Sequence[Any], numbers: tuple[Any, ...] = ()) -> Run | None:
    """:func:`plan`, for a backward that nothing records.

    Its plan is of the tensors that are there: a hook may have brought others than were saved.
    """
    return None if torch.is_grad_enabled() else plan(make, tensors, numbers)


def registered(make: Run, num_tensors: int, num_numbers: int = 0) -> Run:
    """The CUDA implementation of an op, by its plans.

    It takes tensors, then numbers that a plan is made for, then numbers that it is not made for.
    """
    end = num_tensors + num_numbers

    def run(*arguments: Any) -> Any:
        parts = [
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
            for x in arguments[:num_tensors]
        ]
        key = make, *parts, *arguments[num_tensors:end]
        found = PLANS.get(key) or PLANS.add(key, make(*arguments[:end]))
        return found(*arguments)

    return run


def apply_of(function: type[torch.autograd.Function]) -> Run:
    """``function.apply`` after :func:`plan`, which has looked for functorch as it would."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def define(name: str, schema: str, cpu: Run, cuda: Run, fake: Run) -> None:
    """An inner op ``moe::<name>``. What records it is the function that calls it."""
    LIBRARY.define(name + schema, tags=_TAGS)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"moe::{name}", fake, lib=LIBRARY)


def define_with_workspace(name: str, schema: str, cpu: Run, cuda: Run, fake: Run) -> Run:
    """Two inner ops: ``moe::<name>``, and ``moe::<name>_in`` of a ``schema`` with a workspace.

    An op that mutates an argument which may be None is more than Inductor takes. The functions, and
    what is returned to call either op, take a workspace or None.
    """
    mutated = "Tensor(a!) workspace, "
    place = schema[: schema.index(mutated)].count(",")

    def without(function: Run) -> Run:
        return lambda *given: function(*given[:place], None, *given[place:])

    functions = cpu, cuda, fake
    define(name, schema.replace(mutated, ""), *map(without, functions))
    define(f"{name}_in", schema, *functions)
    plain, given_one = (getattr(torch.ops.moe, n).default for n in (name, f"{name}_in"))

    def call(*given: Any) -> Any:
        if given[place] is None:
            return plain(*given[:place], *given[place + 1 :])
        return given_one(*given)

    return call


def compose(name: str, schema: str, function: Run, vmap: bool = False) -> None:
    """``moe::<name>``: a function that calls other ops, and that exported graphs may hold whole."""
    LIBRARY.define(name + schema, tags=_TAGS)
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    if vmap:
        register_vmap(name)


class Public:
    """The way of a documented function to its op ``moe::<name>``.

    ``past`` takes its arguments and goes past the dispatcher, or returns None.
    """

    def __init__(self, name: str, past: Run) -> None:
        self.name, self.past, self.op = name, past, getattr(torch.ops.moe, name)
        kinds: dict[str, set[str]] = {}
        for overload in self.op.overloads():
            for argument in getattr(self.op, overload)._schema.arguments:
                kinds.setdefault(argument.name, set()).add(str(argument.type))
        _KINDS[name] = tuple(kinds.items())

    def __call__(self, *arguments: Any) -> Any:
        if not is_compiling():
            result = self.past(*arguments)
            if result is not None:
                return result
        self.check_types(*arguments)
        return self.op(*arguments)

    def check_types(self, *arguments: Any) -> None:
        """Refuse by name what the schema would."""
        refusal = _refusal(self.name, *[type(x) for x in arguments])
        if refusal is not None:
            raise TypeError(refusal)
        for place, given in enumerate(arguments):
            if isinstance(given, int) and not -(2**63) <= given < 2**63:
                argument, _ = _KINDS[self.name][place]
                raise ValueError(f"{self.name}: {argument} must fit 64 bits, got {given}")


_KINDS: dict[str, tuple[tuple[str, set[str]], ...]] = {}
_INTEGERS = int, torch.SymInt
_NUMBERS = (*_INTEGERS, float, torch.SymFloat)


# A compiler that traced this would guard what it reads: for permute 45 guards, which took 3 us of
# the host's time at each call.
def _refusal(name: str, *types: type) -> str | None:
    for (argument, kinds), given in zip(_KINDS[name], types, strict=True):
        allowed: tuple[type, ...] = (type(None),) if any("Optional" in k for k in kinds) else ()
        expected: list[str] = []
        for kind in sorted(kinds):
            if "Tensor" in kind:
                allowed, expected = (*allowed, Tensor), [*expected, "a Tensor"]
            elif "float" in kind:
                allowed, expected = (*allowed, *_NUMBERS), [*expected, "a number"]
            else:
                optional = " or None" if "Optional" in kind else ""
                allowed, expected = (*allowed, *_INTEGERS), [*expected, f"an int{optional}"]
        if given is bool or not issubclass(given, allowed):
            wanted, got = " or ".join(expected), checks.name_of(given)
            return f"{name}: {argument} must be {wanted}, got {got}"
    return None


# What ``torch._dynamo.assume_constant_result`` does, whose import takes Triton along.
_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
