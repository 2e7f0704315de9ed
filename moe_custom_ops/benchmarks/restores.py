"""The restores against what training codes write in eager PyTorch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..weighted_restore import weighted_restore
from .timing import HostTimes, Row, graph_time, host_times, input_sets

SHAPES = [  # (tokens, topk, hidden)
    (32, 8, 7168),
    (256, 8, 2048),
    (8192, 8, 2048),
    (8192, 2, 4096),
    (4096, 8, 7168),
    (8192, 4, 2880),
    (16384, 8, 2048),
]
INVERSIONS = [256, 2048, 65536]  # assignments
# Widths that are no multiple of a wide load.
ODD_SHAPES = [(8192, 4, 1000), (8192, 4, 2880), (4096, 8, 7176)]
# What one rank of many receives: few of a token's experts are its own.
SPARSE_SHAPE = (16384, 8, 2048)
SPARSE_LOCAL = 1.5


def eager_restore(rows: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    """Rows to token order, then the weighted sum over k in float32, as training codes write it."""
    num_tokens, topk = scores.shape
    restored = torch.empty_like(rows).index_copy(0, indices, rows).view(num_tokens, topk, -1)
    return (restored.float() * scores[..., None]).sum(1).to(rows.dtype)


def make(
    num_tokens: int, topk: int, hidden: int, device: torch.device, local: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, scores, indices, gradient); of a token's assignments ``local`` have a row."""
    ids = torch.rand(num_tokens, max(128, topk), device=device).topk(topk).indices
    indices = ids.flatten().argsort(stable=True)
    if local is not None:
        indices = indices[torch.rand(indices.shape, device=device) < local / topk]
    return (
        torch.randn(indices.shape[0], hidden, device=device, dtype=torch.bfloat16),
        torch.rand(num_tokens, topk, device=device),
        indices,
        torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16),
    )


def make_sets(
    shape: tuple[int, int, int], num_bytes: int, device: torch.device, local: float | None = None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    return [make(*shape, device, local) for _ in range(min(input_sets(num_bytes, device), 60))]


def forward(function: Callable[..., Any]) -> Callable[..., None]:
    def call(rows: Tensor, scores: Tensor, indices: Tensor, grad: Tensor) -> None:
        function(rows, scores, indices)

    return call


def forward_and_backward(function: Callable[..., Any]) -> Callable[..., None]:
    def call(rows: Tensor, scores: Tensor, indices: Tensor, grad: Tensor) -> None:
        leaves = [rows.requires_grad_(), scores.requires_grad_()]
        torch.autograd.grad(function(*leaves, indices), leaves, grad)
        for leaf in leaves:
            leaf.requires_grad_(False)

    return call


def with_addend(rows: Tensor, scores: Tensor, indices: Tensor, grad: Tensor) -> None:
    weighted_restore(rows, scores, indices, grad)


def gather_alone(
    inputs: list[tuple[Tensor, Tensor, Tensor, Tensor]],
) -> tuple[Callable[..., None], list[tuple[Any, ...]]]:
    """The forward's last launch, and its inputs, with the inverse at hand."""
    from ..weighted_restore import kernels

    prepared = []
    for rows, scores, indices, grad in inputs:
        slots = torch.empty(scores.shape, dtype=torch.int32, device=rows.device)
        for launch in kernels.invert(indices, slots.numel()):
            launch(indices, slots)
        gather = kernels.restore(rows, scores, None, *scores.shape)
        prepared.append((gather, rows, scores, slots, torch.empty_like(grad)))

    def call(gather: Any, rows: Tensor, scores: Tensor, slots: Tensor, out: Tensor) -> None:
        gather(rows, scores, slots, None, out, None)

    return call, prepared


def rows(device: torch.device) -> Iterator[Row]:
    yield from inversions(device)
    for shape in SHAPES:
        num_tokens, topk, hidden = shape
        row_bytes, out_bytes = num_tokens * topk * hidden * 2, num_tokens * hidden * 2
        once, both = row_bytes + out_bytes, 3 * row_bytes + 2 * out_bytes
        inputs = make_sets(shape, once, device)
        name = f"T{num_tokens} K{topk} H{hidden}"
        eager = graph_time(forward(eager_restore), inputs, calls=20)
        call, prepared = gather_alone(inputs)
        alone = graph_time(call, prepared, calls=20)
        yield Row(f"restore, inverse at hand {name}", once, alone, eager)
        ours = graph_time(forward(weighted_restore), inputs, calls=20)
        yield Row(f"restore forward {name}", once, ours, eager)
        ours = graph_time(with_addend, inputs, calls=20)
        yield Row(f"restore with addend {name}", once + out_bytes, ours)
        ours, eager = (
            graph_time(forward_and_backward(f), inputs, calls=20)
            for f in (weighted_restore, eager_restore)
        )
        yield Row(f"restore f+b {name}", both, ours, eager)
    for shape in ODD_SHAPES:
        name = "T{} K{} H{}".format(*shape)
        yield from against_bytes(name, shape, make_sets(shape, shape[0] * shape[2] * 2, device))
    name = "{} of K{} T{} H{}".format(SPARSE_LOCAL, SPARSE_SHAPE[1], *SPARSE_SHAPE[::2])
    num_bytes = SPARSE_SHAPE[0] * SPARSE_SHAPE[2] * 4
    inputs = make_sets(SPARSE_SHAPE, num_bytes, device, SPARSE_LOCAL)
    yield from against_bytes(name, SPARSE_SHAPE, inputs)


def against_bytes(
    name: str, shape: tuple[int, int, int], inputs: list[tuple[Tensor, Tensor, Tensor, Tensor]]
) -> Iterator[Row]:
    """Forward, and forward and backward, against the bytes of the rows that exist."""
    num_tokens, _, hidden = shape
    num_rows = sum(rows.shape[0] for rows, *_ in inputs) / len(inputs)
    once = int((num_rows + num_tokens) * hidden * 2)
    both = int((3 * num_rows + 2 * num_tokens) * hidden * 2)
    yield Row(
        f"restore forward {name}", once, graph_time(forward(weighted_restore), inputs, calls=20)
    )
    call = forward_and_backward(weighted_restore)
    yield Row(f"restore f+b {name}", both, graph_time(call, inputs, calls=20))


def inversions(device: torch.device) -> Iterator[Row]:
    """The inversion alone: 8 bytes read and 4 written per assignment."""
    from ..weighted_restore import kernels

    def call(indices: Tensor, inverse: Tensor) -> None:
        for launch in kernels.invert(indices, inverse.numel()):
            launch(indices, inverse)

    for num_assignments in INVERSIONS:
        num_bytes = 12 * num_assignments
        inputs = [
            (
                torch.randperm(num_assignments, device=device),
                torch.empty(num_assignments, dtype=torch.int32, device=device),
            )
            for _ in range(min(input_sets(num_bytes, device), 100))
        ]
        yield Row(f"inversion of {num_assignments}", num_bytes, graph_time(call, inputs, calls=100))


class _BareLaunches(torch.autograd.Function):
    """The launches of a call, made before, in an autograd.Function and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, scores: Tensor, indices: Tensor, launches: tuple[Any, ...]
    ) -> Tensor:
        invert, gather, _ = launches
        slots = torch.empty(scores.shape, dtype=torch.int32, device=rows.device)
        out = torch.empty(scores.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
        for launch in invert:
            launch(indices, slots)
        gather(rows, scores, slots, None, out, None)
        ctx.save_for_backward(rows, scores, indices, slots)
        ctx.launches = launches
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, scores, indices, slots = ctx.saved_tensors
        grad_rows, grad_scores = torch.empty_like(rows), torch.empty_like(scores)
        ctx.launches[2](grad, rows, scores, indices, slots, grad_rows, grad_scores)
        return grad_rows, grad_scores, None, None


def host(device: torch.device) -> HostTimes:
    from ..weighted_restore import kernels

    rows, scores, indices, grad = make(256, 8, 512, device)
    leaves = [rows.requires_grad_(), scores.requires_grad_()]
    launches = (
        kernels.invert(indices, scores.numel()),
        kernels.restore(rows, scores, None, 256, 8),
        kernels.restore_backward(grad, rows, scores, indices, 8, True),
    )

    def step(function: Callable[..., Tensor], *arguments: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*leaves, indices, *arguments), leaves, grad)

    calls = [step(weighted_restore), step(_BareLaunches.apply, launches), step(eager_restore)]
    ours, bare, eager = host_times(calls)
    return HostTimes("weighted_restore", ours, {"bare launches": bare, "eager": eager})


def memory(device: torch.device) -> Iterator[str]:
    """Peak memory beyond the inputs: ours and that of the eager form."""
    for shape in SHAPES[2:]:
        inputs = make(*shape, device)
        peaks = []
        for call in (forward, forward_and_backward):
            for function in (weighted_restore, eager_restore):
                call(function)(*inputs)
                torch.cuda.synchronize(device)
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                call(function)(*inputs)
                peaks.append((torch.cuda.max_memory_allocated(device) - before) / 2**20)
        names = ("forward", "eager", "f+b", "eager")
        yield f"T{shape[0]} K{shape[1]} H{shape[2]}: " + ", ".join(
            f"{name} {peak:.0f} MiB" for name, peak in zip(names, peaks, strict=True)
        )
