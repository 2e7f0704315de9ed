"""What holds of every valid call, and of every one that is refused."""

import builtins
import contextlib
import dataclasses
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ... import launch
from ... import op as calls
from ..compare import assert_same_bits, assert_within_budget, budget_of
from . import tensors
from .oracles import ORACLES

PACKAGE = importlib.import_module("moe_custom_ops")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Where ops run by their kernels, if anywhere: interpreted ones take CPU tensors.
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
HAS_KERNELS = INTERPRETED or DEVICE == "cuda"
# Scratch and what is made once per layer: without them the bits are the same.
_OPTIONAL = ("workspace", "inverse")
# Whose dtype sets that of the sums.
_SUMMED = ("probs", "rows", "tokens")


@dataclasses.dataclass
class Seen:
    """What a check saw: kernels launched, comparisons with an oracle, and those of them that a
    result of zero would pass, as its terms cancel or its dtype has nothing so small."""

    launches: int = 0
    compared: int = 0
    blunt: int = 0

    def __add__(self, other: "Seen") -> "Seen":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Seen(*(a + b for a, b in pairs))


class _CountOps(TorchDispatchMode):
    """Counts what runs in place of launches where there are no kernels: the package's inner ops."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.launches += func.namespace == "moe"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def kernels(seen: Seen) -> Iterator[None]:
    """The documented functions reach their kernels, and launches are counted.

    They are cut as for a device that two programs fill, so that most drawn calls are large.
    """
    if not HAS_KERNELS:
        with _CountOps(seen):
            yield
        return
    call = launch.Launch.__call__

    def counted(self: launch.Launch, *first: Any) -> None:
        seen.launches += 1
        call(self, *first)

    with (
        mock.patch.object(launch.Launch, "__call__", counted),
        mock.patch.multiple(
            launch,
            _multiprocessors=lambda device: 1,
            FEW_PER_MULTIPROCESSOR=1,
            ENOUGH_PER_MULTIPROCESSOR=2,
        ),
        mock.patch.object(calls, "CUDA", DEVICE == "cuda"),
    ):
        yield


def check(
    op: str,
    arguments: dict[str, Any],
    leaves: Sequence[str] = (),
    grads: Sequence[Tensor | None] = (),
    refusal: Any = None,
) -> Seen:
    """Raise AssertionError unless the call has the properties of a valid or of a refused one."""
    if refusal is not None:
        fields = refusal if isinstance(refusal, tuple) else dataclasses.astuple(refusal)
        return _check_refused(op, arguments, leaves, *fields)
    return _check_valid(op, arguments, leaves, grads)


def _own(arguments: dict[str, Any], leaves: Sequence[str], device: str) -> dict[str, Any]:
    own = {
        name: tensors.again(x, device) if isinstance(x, Tensor) else x
        for name, x in arguments.items()
    }
    for name in leaves:
        own[name].requires_grad_()
    return own


def _memory(arguments: dict[str, Any], skip_workspace: bool) -> dict[str, Tensor]:
    """All memory that a call may not write: of a workspace, what lies around it."""
    memory = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta:
            memory[name] = tensors.storage(x.detach()).clone()
            if name == "workspace" and skip_workspace:
                memory[name][x.storage_offset() :][: x.numel()] = 0
    return memory


def _assert_untouched(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name, memory in before.items():
        assert torch.equal(memory, after[name]), f"the memory of {name} was written"


def _run(
    function: Any,
    arguments: dict[str, Any],
    leaves: Sequence[str],
    grads: Sequence[Tensor | None],
    device: str,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(results, gradients of the leaves)"""
    own = _own(arguments, leaves, device)
    before = _memory(own, skip_workspace=True)
    out = function(**own)
    results = list(out) if isinstance(out, tuple) else [out]
    addresses = {x.untyped_storage().data_ptr() for x in own.values() if isinstance(x, Tensor)}
    for result in results:
        shared = result.numel() and result.untyped_storage().data_ptr() in addresses
        assert not shared, "a result shares the memory of an argument"
        assert result.is_contiguous(), f"a result has strides {result.stride()}"
    kept = [x.detach().clone() for x in results]
    if own.get("workspace") is not None:
        # It carries nothing from a call to its backward.
        own["workspace"].fill_(85)
    grad_leaves: list[Tensor | None] = []
    if leaves:
        pairs = [
            (result, tensors.again(grad, device))
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        outputs, incoming = [x for x, _ in pairs], [x for _, x in pairs]
        inputs = [own[name] for name in leaves]
        grad_leaves = list(torch.autograd.grad(outputs, inputs, incoming, allow_unused=True))
    for result, copy in zip(results, kept, strict=True):
        assert_same_bits(_moved(result), _moved(copy), "a result after the backward")
    _assert_untouched(before, _memory(own, skip_workspace=True))
    return kept, grad_leaves


def _moved(x: Tensor) -> Tensor:
    """float8 as bytes, which have no other comparison."""
    return x.view(torch.uint8) if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of the same values: contiguous, without scratch and without an inverse."""
    return {
        name: x.contiguous().clone() if isinstance(x, Tensor) else x
        for name, x in arguments.items()
        if name not in _OPTIONAL
    }


def _check_valid(
    op: str, arguments: dict[str, Any], leaves: Sequence[str], grads: Sequence[Tensor | None]
) -> Seen:
    seen = Seen()
    documented = getattr(PACKAGE, op)
    # compose_permutations is plain PyTorch.
    registered = getattr(torch.ops.moe, op, documented)
    expected, expected_grads = _run(registered, _plain(arguments), leaves, grads, "cpu")
    paths = [(documented, "the documented function")]
    if HAS_KERNELS:
        # Elsewhere the documented function calls it as it is.
        paths.append((registered, "torch.ops.moe"))
    if DEVICE == "cuda":
        paths.append((documented, "the documented function, by the plan of its first call"))
    with kernels(seen):
        for function, path in paths:
            actual, actual_grads = _run(function, arguments, leaves, grads, DEVICE)
            for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
                assert_same_bits(_moved(a), _moved(b), f"result {i} of {path}")
            for name, grad, same in zip(leaves, actual_grads, expected_grads, strict=True):
                what = f"gradient of {name} by {path}"
                assert (grad is None) == (same is None), f"{what}: None by one path alone"
                if grad is not None and same is not None:
                    assert_same_bits(grad, same, what)
                    assert grad.dtype == arguments[name].dtype, what
    _check_oracle(op, arguments, leaves, grads, expected, expected_grads, seen)
    return seen


def _oracle(
    op: str,
    arguments: dict[str, Any],
    leaves: Sequence[str],
    grads: Sequence[Tensor | None],
    absolute: bool,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(results, gradients) of the formula in float64, or the sums of its absolute terms."""

    def value(x: Any) -> Any:
        if isinstance(x, Tensor):
            x = _moved(x)
            x = x.to(torch.float64) if x.is_floating_point() else x
        is_float = x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)
        return abs(x) if absolute and is_float else x

    own = {name: value(x) for name, x in _plain(arguments).items()}
    for name in leaves:
        own[name].requires_grad_()
    out = ORACLES[op](**own)
    results = list(out) if isinstance(out, tuple) else [out]
    grad_leaves: list[Tensor | None] = []
    if leaves:
        pairs = [(x, value(g)) for x, g in zip(results, grads, strict=True) if g is not None]
        pairs = [(x, g) for x, g in pairs if x.requires_grad]
        inputs = [own[name] for name in leaves]
        if pairs:
            outputs, incoming = [x for x, _ in pairs], [g for _, g in pairs]
            grad_leaves = list(torch.autograd.grad(outputs, inputs, incoming, allow_unused=True))
        else:
            grad_leaves = [None for _ in leaves]
    return [x.detach() for x in results], grad_leaves


def _levels(n: int) -> int:
    """Of a binary tree over ``n``."""
    return math.ceil(math.log2(max(n, 1)))


def steps(op: str, arguments: dict[str, Any], name: str) -> int:
    """How many roundings of the accumulator a term passes through on its way to a result."""
    if op == "aux_loss" or op == "sequence_aux_loss":
        if name == "probs":
            # The counts, the scale, the number of sequences, two products.
            return 6
        probs = arguments["probs"]
        return 9 + _levels(probs.shape[-1]) + _levels(probs.shape[:-1].numel()) + 6
    if op == "weighted_restore":
        topk = arguments["top_scores"].shape[-1]
        if name == "top_scores":
            # A product, an addition per 512 columns, and a tree over 512 lanes.
            return arguments["rows"].shape[1] // 512 + 12
        return {"rows": 3, "addend": 0}.get(name, topk + 3)
    if op == "restore" and name not in ("rows", "addend"):
        return arguments["topk"] + 2
    if op == "permute" and name == "tokens":
        return arguments["topk"] + 1
    if op == "permute_with_scores" and name == "tokens":
        return arguments["top_scores"].shape[1] + 1
    return 0


def _check_oracle(
    op: str,
    arguments: dict[str, Any],
    leaves: Sequence[str],
    grads: Sequence[Tensor | None],
    actual: list[Tensor],
    actual_grads: list[Tensor | None],
    seen: Seen,
) -> None:
    expected = _oracle(op, arguments, leaves, grads, absolute=False)
    is_float = [x.is_floating_point() and x.dtype.itemsize > 1 for x in actual]
    magnitude = expected
    if any(is_float):
        magnitude = _oracle(op, arguments, leaves, grads, absolute=True)
    dtypes = {arguments[name].dtype for name in _SUMMED if name in arguments}
    inner = torch.finfo(torch.float64 if torch.float64 in dtypes else torch.float32).eps
    for i, (a, b, m) in enumerate(zip(actual, expected[0], magnitude[0], strict=True)):
        if is_float[i]:
            _compare(a, b, m, steps(op, arguments, ""), inner, f"result {i}", seen)
        else:
            assert_same_bits(_moved(a), _moved(b), f"result {i} against the formula")
    for name, grad, *own in zip(leaves, actual_grads, expected[1], magnitude[1], strict=True):
        what = f"gradient of {name}"
        exact, terms = (torch.zeros(arguments[name].shape) if x is None else x for x in own)
        if grad is None:
            assert not exact.any(), f"{what}: none, where the formula has one"
        else:
            _compare(grad, exact, terms, steps(op, arguments, name), inner, what, seen)


def _compare(
    actual: Tensor,
    exact: Tensor,
    magnitude: Tensor,
    count: int,
    inner: float,
    what: str,
    seen: Seen,
) -> None:
    """Within one rounding to the dtype of the result and ``count`` of the accumulator."""
    exact, magnitude = exact.double(), magnitude.double()
    assert actual.shape == exact.shape, f"{what}: {actual.shape} against {exact.shape}"
    eps = torch.finfo(actual.dtype).eps
    roundings = count * inner / eps + (0.51 if count and eps > inner else 0.0)
    # A NaN or an infinity comes out as the formula has it, and so does what the dtype cannot hold.
    exact = torch.where(exact.to(actual.dtype).isinf(), exact.sign() * torch.inf, exact)
    odd = ~exact.isfinite()
    same = actual[odd].to(torch.float64)
    assert ((same == exact[odd]) | (same.isnan() & exact[odd].isnan())).all(), f"{what}: not finite"
    actual, exact, magnitude = actual[~odd], exact[~odd], magnitude[~odd]
    # What is copied has no budget.
    budget = budget_of(actual.dtype, magnitude, roundings) if count else torch.zeros_like(exact)
    assert_within_budget(actual, exact, budget, f"{what} against the formula")
    if (exact != 0).any():
        seen.compared += 1
        seen.blunt += not bool((exact.abs() > budget).any())


def _check_refused(
    op: str,
    arguments: dict[str, Any],
    leaves: Sequence[str],
    error: str,
    argument: str,
    by_schema: bool = False,
) -> Seen:
    seen = Seen()
    functions = [getattr(PACKAGE, op)]
    if not by_schema and hasattr(torch.ops.moe, op):
        functions.append(getattr(torch.ops.moe, op))
    own = _own(arguments, leaves, DEVICE)
    before = _memory(own, skip_workspace=False)
    for function in functions:
        try:
            with kernels(seen):
                function(**own)
        except (TypeError, ValueError) as raised:
            expected = getattr(builtins, error)
            message = str(raised)
            assert type(raised) is expected, f"{error} expected, got {raised!r}"
            start = f"{op}: {argument} must "
            assert message.startswith(start), f"a message '{start}...' expected, got {message!r}"
        else:
            raise AssertionError(f"{error} expected for {argument}, and nothing was raised")
        assert not seen.launches, "a kernel was launched before the call was refused"
        _assert_untouched(before, _memory(own, skip_workspace=False))
    return seen
