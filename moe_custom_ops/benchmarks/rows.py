"""A row: an op for a model and a number of tokens, every way to compute it, checked, then timed."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .models import Model
from .timing import calls_per_batch, input_sets, peak_bytes, time_calls

# What has gradients, and what is handed on as it is.
Inputs = tuple[tuple[Tensor, ...], tuple[Any, ...]]
# Bytes (read, written).
Traffic = tuple[int, int]

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
KINDS = (FORWARD, BACKWARD, BOTH)
OURS, EAGER, COMPILED = "ours", "eager", "compiled"

# Norm of the difference to the eager form over its norm. bfloat16 keeps 8 bits, and a form that
# adds eight of them in bfloat16 loses one or two more; a gradient that is zero differs by 1.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class Family(NamedTuple):
    """An op's rows.

    ``ways`` are functions of (*leaves, *others), "ours" and "eager" among them, that return the
    same tensors. ``traffic`` is of (model, inputs) the bytes that a forward and a backward must
    move: each input read once, each output written once, and for a backward the gradients, too.
    """

    op: str
    make: Callable[[Model, int, torch.device], Inputs]
    ways: dict[str, Callable[..., Any]]
    traffic: Callable[[Model, Inputs], tuple[Traffic, Traffic]]
    kinds: tuple[str, ...] = KINDS
    sizes: tuple[str, ...] = ("decode", "train")
    compiled: tuple[str, ...] = ("train",)
    models: tuple[str, ...] | None = None


class Row(NamedTuple):
    """Microseconds of a call and peak bytes, of each way; ``left_out`` says why one has none."""

    op: str
    kind: str
    model: str
    tokens: int
    read: int
    written: int
    calls: int
    times: dict[str, float]
    peaks: dict[str, int]
    left_out: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.op} {self.kind} {self.model} T{self.tokens}"


class Settings(NamedTuple):
    device: torch.device
    mode: str
    repeats: int
    compiled: bool
    stream: "torch.cuda.Stream | None" = None


def traffic_of(family: Family, kind: str, model: Model, inputs: Inputs) -> Traffic:
    forward, backward = family.traffic(model, inputs)
    if kind == BOTH:
        return forward[0] + backward[0], forward[1] + backward[1]
    return forward if kind == FORWARD else backward


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


def _differentiable(out: Any) -> list[Tensor]:
    return [x for x in _tensors(out) if x.requires_grad]


def forward(function: Callable[..., Any], leaves: Any, others: Any, grads: Any) -> Any:
    with torch.no_grad():
        return function(*leaves, *others)


def both(function: Callable[..., Any], leaves: Any, others: Any, grads: Any) -> Any:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = _differentiable(function(*leaves, *others))
    return torch.autograd.grad(out, leaves, grads)


def backward(out: Any, leaves: Any, grads: Any) -> Any:
    return torch.autograd.grad(out, leaves, grads, retain_graph=True)


def error_of(these: list[Tensor], those: list[Tensor]) -> str:
    """What is wrong with ``these``, held against the eager form's; nothing if it is right."""
    if len(these) != len(those):
        return f"{len(these)} results, expected {len(those)}"
    for own, expected in zip(these, those, strict=True):
        if own.shape != expected.shape:
            return f"shape {list(own.shape)}, expected {list(expected.shape)}"
        if not expected.is_floating_point():
            if not torch.equal(own.long(), expected.long()):
                return "other integers"
            continue
        # No copies in a wider dtype: some of these hold 15 GB.
        size, difference = (
            torch.linalg.vector_norm(x, dtype=torch.float32).item()
            for x in (expected, own - expected)
        )
        # Not "greater", as a NaN is not.
        if not difference <= TOLERANCES[expected.dtype] * size:
            return f"an error of {difference:.1e} where the norm is {size:.1e}"
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"


def _gradients(function: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """Random ones, of what has a gradient."""
    leaves = [leaf.detach().requires_grad_() for leaf in inputs[0]]
    return [torch.randn_like(x) for x in _differentiable(function(*leaves, *inputs[1]))]


def run(family: Family, kind: str, model: Model, num_tokens: int, settings: Settings) -> Row:
    """Check every way and time those that are right, in turn."""
    device = settings.device
    torch.manual_seed(0)
    first = family.make(model, num_tokens, device)
    read, written = traffic_of(family, kind, model, first)
    num_sets = input_sets(read + written, device) if settings.mode != "host" else 1
    sets = [first, *(family.make(model, num_tokens, device) for _ in range(num_sets - 1))]
    grads = [_gradients(family.ways[EAGER], own) if kind != FORWARD else [] for own in sets]

    ways = dict(family.ways)
    if settings.compiled:
        torch._dynamo.reset()
        ways[COMPILED] = torch.compile(ways[EAGER], fullgraph=True, dynamic=False)
    left_out: dict[str, str] = {}
    calls: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    expected: list[Tensor] = []
    whole = functools.partial(forward if kind == FORWARD else both)
    for name in (EAGER, *(way for way in ways if way != EAGER)):
        call = functools.partial(whole, ways[name])
        try:
            results = _tensors(call(*sets[0], grads[0]))
            if not expected:
                expected = results
            if wrong := error_of(results, expected):
                left_out[name] = f"wrong: {wrong}"
                continue
            del results
            peak = peak_bytes(call, (*sets[0], grads[0]), device)
            if peak is not None:
                peaks[name] = peak
            calls[name] = _prepare(ways[name], kind, sets, grads, settings)
        except torch.cuda.OutOfMemoryError:
            left_out[name] = "out of memory"
        except Exception as error:
            if name in (OURS, EAGER):
                raise
            left_out[name] = _first_line(error)
    del expected
    number = calls_per_batch(read + written, num_sets, device)
    ordered = {name: calls[name] for name in ways if name in calls}
    times = time_calls(ordered, number, settings.mode, settings.repeats, device, settings.stream)
    return Row(
        family.op, kind, model.name, num_tokens, read, written, number, times, peaks, left_out
    )


def _prepare(
    function: Callable[..., Any],
    kind: str,
    sets: list[Inputs],
    grads: list[list[Tensor]],
    settings: Settings,
) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """A call and its inputs; those of a backward are graphs, made on the stream they run on."""
    if kind != BACKWARD:
        step = forward if kind == FORWARD else both
        inputs = [(*own, grad) for own, grad in zip(sets, grads, strict=True)]
        return functools.partial(step, function), inputs
    prepared = []
    if settings.stream is not None:
        settings.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(settings.stream):
        for (leaves, others), grad in zip(sets, grads, strict=True):
            own = [leaf.detach().requires_grad_() for leaf in leaves]
            prepared.append((_differentiable(function(*own, *others)), own, grad))
    return backward, prepared
