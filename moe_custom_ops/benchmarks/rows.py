"""A row: an op for a model and a number of tokens, every way to compute it, checked, then timed."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .models import Model
from .timing import HOST_CALLS, calls_per_batch, input_sets, peak_bytes, time_calls

# What has gradients, and what is handed on as it is.
Inputs = tuple[tuple[Tensor, ...], tuple[Any, ...]]
# Bytes (read, written).
Traffic = tuple[int, int]

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
# A forward whose gradients are recorded, where FORWARD is one without.
RECORDED = "recorded"
KINDS = (FORWARD, BACKWARD, BOTH)
OURS, EAGER, COMPILED = "ours", "eager", "compiled"
OURS_COMPILED = "ours compiled"
NOT_ASKED = "not asked for"

# Of a row, the norm of the difference to the eager form over its norm. bfloat16 keeps 8 bits, and a
# form that adds eight of them in bfloat16 loses one or two more; a row that is zero differs by 1.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
UNIT_ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2
# Elements of two results that are compared at once.
PART = 2**28


class Family(NamedTuple):
    """An op's rows.

    ``rounding`` are the ways that round on the way to a float32 result, or are held against one
    that does: all their results are held to the tolerance of bfloat16. ``ours_compiled`` is whether
    ours are compiled, too, as what stands around the ops then gains; by host time all are.

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
    host_sizes: tuple[str, ...] = ("decode",)
    compiled: tuple[str, ...] = ("decode", "train")
    models: tuple[str, ...] | None = None
    rounding: tuple[str, ...] = ()
    ours_compiled: bool = False


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
        return name_of(self.op, self.kind, self.model, self.tokens)


def name_of(op: str, kind: str, model: str, tokens: int) -> str:
    return f"{op} {kind} {model} T{tokens}"


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
    return backward if kind == BACKWARD else forward


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


def _differentiable(out: Any) -> list[Tensor]:
    return [x for x in _tensors(out) if x.requires_grad]


def forward(function: Callable[..., Any], leaves: Any, others: Any, grads: Any) -> Any:
    with torch.no_grad():
        return function(*leaves, *others)


def recorded(function: Callable[..., Any], leaves: Any, others: Any, grads: Any) -> Any:
    return function(*leaves, *others)


def both(function: Callable[..., Any], leaves: Any, others: Any, grads: Any) -> Any:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = _differentiable(function(*leaves, *others))
    return torch.autograd.grad(out, leaves, grads)


def backward(out: Any, leaves: Any, grads: Any) -> Any:
    return torch.autograd.grad(out, leaves, grads, retain_graph=True)


def results_of(
    function: Callable[..., Any], kind: str, inputs: Inputs, grads: list[Tensor]
) -> list[Tensor | None]:
    """What must agree: every output, and, but for a forward, the gradients that each output gives.

    Each by itself, as those of a loss are lost in the sum with those of a layer's output.
    """
    if kind == FORWARD:
        return list(_tensors(forward(function, *inputs, grads)))
    leaves = [leaf.detach().requires_grad_() for leaf in inputs[0]]
    out = _tensors(function(*leaves, *inputs[1]))
    results: list[Tensor | None] = [x.detach() for x in out]
    pairs = zip((x for x in out if x.requires_grad), grads, strict=True)
    for x, grad in pairs:
        results += torch.autograd.grad(x, leaves, grad, retain_graph=True, allow_unused=True)
    return results


def error_of(these: list[Tensor | None], those: list[Tensor | None], rounding: bool = False) -> str:
    """What is wrong with ``these``, held against the eager form's; nothing if they are right."""
    if len(these) != len(those):
        return f"{len(these)} results, expected {len(those)}"
    for own, expected in zip(these, those, strict=True):
        if own is None or expected is None:
            # No gradient is one of zeros.
            if any(x is not None and x.any() for x in (own, expected)):
                return "a gradient that is missing or should be"
        elif wrong := _error_of_one(own, expected, rounding):
            return wrong
    return ""


def _error_of_one(own: Tensor, expected: Tensor, rounding: bool) -> str:
    if own.shape != expected.shape:
        return f"shape {list(own.shape)}, expected {list(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(own.long(), expected.long()) else "other integers"
    if own.dtype != expected.dtype:
        return f"dtype {own.dtype}, expected {expected.dtype}"
    # Row by row, so that one of many is not lost. Some hold 22 GB: no copies in a wider dtype, and
    # differences of a part at a time.
    wide = own.flatten(0, -2) if own.dim() > 1 else own.reshape(1, -1)
    count = max(PART // max(wide.shape[-1], 1), 1)
    norm = functools.partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    parts = zip(wide.split(count), expected.reshape(wide.shape).split(count), strict=True)
    norms = [(norm(right), norm(part - right)) for part, right in parts]
    sizes, differences = map(torch.cat, zip(*norms, strict=True))
    usual = sizes.square().mean().sqrt() if sizes.numel() else sizes
    tolerance = TOLERANCES[torch.bfloat16 if rounding else expected.dtype]
    # A row of zeros, say of padding, is allowed a hundredth of what a usual row is allowed. Where
    # both forms round, each at its places, more is left in rows that cancel, say a router's of
    # experts that no token took.
    least = 2 * UNIT_ROUNDOFF if rounding else tolerance / 100
    allowed = tolerance * sizes + least * usual
    # Not "greater", as a NaN is not.
    if not (differences <= allowed).all():
        worst = (differences / allowed).nan_to_num(torch.inf).max().item()
        return f"a row whose error is {worst:.3g} times what is allowed"
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
    num_sets = input_sets(read, device) if settings.mode != "host" else 1
    sets = [first, *(family.make(model, num_tokens, device) for _ in range(num_sets - 1))]
    grads = [_gradients(family.ways[EAGER], own) if kind != FORWARD else [] for own in sets]

    ways = dict(family.ways)
    left_out: dict[str, str] = {}
    if settings.compiled:
        ways[COMPILED] = torch.compile(ways[EAGER], fullgraph=True, dynamic=False)
        if family.ours_compiled or settings.mode == "host":
            ways[OURS_COMPILED] = torch.compile(ways[OURS], fullgraph=True, dynamic=False)
    else:
        left_out[COMPILED] = NOT_ASKED

    def check(name: str, inputs: Inputs, grads: list[Tensor], expected: list[Tensor | None]) -> str:
        # Results die here, also where memory runs out: some hold 34 GB that the other ways need.
        results = results_of(ways[name], kind, inputs, grads)
        return error_of(results, expected, name in family.rounding)

    calls: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    # A graph whose backward runs more than once must not give its buffers away.
    with torch._functorch.config.patch(donated_buffer=False):
        # Without it there is nothing to hold the others against.
        expected = results_of(ways[EAGER], kind, sets[0], grads[0])
        for name in ways:
            try:
                if name != EAGER and (wrong := check(name, sets[0], grads[0], expected)):
                    left_out[name] = f"wrong: {wrong}"
                    continue
                call, inputs = calls[name] = _prepare(ways[name], kind, sets, grads, settings)
                peak = peak_bytes(call, inputs[0], device)
                if peak is not None:
                    peaks[name] = peak
            except torch.cuda.OutOfMemoryError:
                left_out[name] = "out of memory"
                calls.pop(name, None)
            except Exception as error:
                if name in (OURS, EAGER):
                    raise
                left_out[name] = _first_line(error)
        del expected
        least = HOST_CALLS if settings.mode == "host" else 1
        number = calls_per_batch(read + written, num_sets, device, least)
        times = time_calls(calls, number, settings.mode, settings.repeats, device, settings.stream)
        del calls
        # Once more, on other inputs: what is right at first only is not timed either.
        expected = results_of(ways[EAGER], kind, sets[-1], grads[-1])
        for name in [way for way in times if way != EAGER]:
            if wrong := check(name, sets[-1], grads[-1], expected):
                left_out[name] = f"wrong: after it was timed, {wrong}"
                del times[name]
    return Row(
        family.op, kind, model.name, num_tokens, read, written, number, times, peaks, left_out
    )


def empty_compiled(settings: Settings) -> float:
    """Microseconds of a compiled call that makes a tensor without elements, and no more."""
    device, mode, repeats, _, stream = settings
    call = torch.compile(lambda x: torch.empty_like(x), fullgraph=True, dynamic=False)
    calls: dict[str, Any] = {COMPILED: (call, [(torch.empty(0, device=device),)])}
    number = calls_per_batch(0, 1, device)
    return time_calls(calls, number, mode, repeats, device, stream)[COMPILED]


def _prepare(
    function: Callable[..., Any],
    kind: str,
    sets: list[Inputs],
    grads: list[list[Tensor]],
    settings: Settings,
) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """A call and its inputs; those of a backward are graphs, made on the stream they run on."""
    if kind != BACKWARD:
        step = {FORWARD: forward, RECORDED: recorded, BOTH: both}[kind]
        if kind == RECORDED:
            sets = [(tuple(x.detach().requires_grad_() for x in own), rest) for own, rest in sets]
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
