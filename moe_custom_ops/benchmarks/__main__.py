"""Times of the ops against the same formulas in PyTorch, eager and compiled, and against a copy.

Each row captures many calls in one CUDA graph, over inputs that together exceed the L2. The last
rows are host times of eager calls.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..aux_loss import aux_loss
from ..sequence_aux_loss import sequence_aux_loss
from ..weighted_restore import weighted_restore
from .timing import copy_rate, graph_time, host_times, input_sets

OPS = ("aux_loss", "sequence_aux_loss", "weighted_restore")
AUX_LOSS_SHAPES = [  # (tokens, experts)
    (1024, 64),
    (8192, 128),
    (131072, 8),
    (131072, 64),
    (32768, 256),
    (131072, 128),
    (65536, 512),
]
SEQUENCE_SHAPES = [  # (sequences, tokens of each, experts)
    (8, 4096, 256),
    (32, 4096, 128),
    (16, 4096, 512),
]
RESTORE_SHAPES = [  # (tokens, topk, hidden)
    (32, 8, 7168),
    (256, 8, 2048),
    (8192, 8, 2048),
    (8192, 2, 4096),
    (4096, 8, 7168),
    (8192, 4, 2880),
]
TOPK, COEFF = 8, 1e-2


def eager_aux_loss(probs: Tensor, counts: Tensor) -> Tensor:
    num_tokens, num_experts = probs.shape
    scale = num_experts * COEFF / TOPK / num_tokens**2
    return (probs.sum(0, dtype=torch.float32) * counts).sum() * scale


def our_aux_loss(probs: Tensor, counts: Tensor) -> Tensor:
    return aux_loss(probs, counts, probs.shape[0], probs.shape[1], TOPK, COEFF)


def eager_sequence_aux_loss(probs: Tensor, counts: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    num_sequences, num_experts = counts.shape
    probs = probs.view(num_sequences, -1, num_experts)
    scale = num_experts * COEFF / TOPK / probs.shape[1] ** 2 / num_sequences
    return (probs.sum(1, dtype=torch.float32) * counts).sum() * scale


def our_sequence_aux_loss(probs: Tensor, counts: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return sequence_aux_loss(probs, counts, TOPK, COEFF, cu_seqlens)


def eager_restore(rows: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    """Rows to token order, then the weighted sum over k in float32, as training codes write it."""
    num_tokens, topk = scores.shape
    restored = torch.empty_like(rows).index_copy(0, indices, rows).view(num_tokens, topk, -1)
    return (restored.float() * scores[..., None]).sum(1).to(rows.dtype)


def against_pytorch(
    ours: Callable[..., Any], eager: Callable[..., Any], inputs: list[tuple[Any, ...]]
) -> tuple[float, float, float]:
    """Microseconds of (ours, eager, eager under torch.compile)."""
    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True)
    times = [graph_time(call, inputs, calls=50) for call in (ours, eager, compiled)]
    return times[0], times[1], times[2]


def benchmark_aux_loss(
    num_tokens: int, num_experts: int, device: torch.device
) -> tuple[float, ...]:
    num_bytes = num_tokens * num_experts * 4
    inputs = [
        (
            torch.rand(num_tokens, num_experts, device=device),
            torch.randint(0, 100, (num_experts,), device=device),
        )
        for _ in range(min(input_sets(num_bytes, device), 400))
    ]
    return num_bytes, *against_pytorch(our_aux_loss, eager_aux_loss, inputs)


def benchmark_sequence_aux_loss(
    num_sequences: int, length: int, num_experts: int, packed: bool, device: torch.device
) -> tuple[float, ...]:
    num_tokens = num_sequences * length
    num_bytes = num_tokens * num_experts * 4
    shape = (num_tokens,) if packed else (num_sequences, length)
    cu_seqlens = torch.arange(num_sequences + 1, device=device) * length if packed else None
    inputs = [
        (
            torch.rand(*shape, num_experts, device=device),
            torch.randint(0, 100, (num_sequences, num_experts), device=device),
            cu_seqlens,
        )
        for _ in range(input_sets(num_bytes, device))
    ]
    return num_bytes, *against_pytorch(our_sequence_aux_loss, eager_sequence_aux_loss, inputs)


def benchmark_host(name: str, device: torch.device) -> tuple[float, float]:
    """Host microseconds of forward and backward of a small call: (ours, eager)."""
    num_sequences, length, num_experts = 4, 256, 64
    probs = torch.rand(num_sequences * length, num_experts, device=device)
    counts = torch.randint(0, 100, (num_sequences, num_experts), device=device)
    functions: tuple[Callable[..., Tensor], ...] = our_aux_loss, eager_aux_loss
    arguments: tuple[Tensor | None, ...] = (counts[0],)
    if name == "sequence_aux_loss":
        functions = our_sequence_aux_loss, eager_sequence_aux_loss
        arguments, probs = (counts, None), probs.view(num_sequences, length, num_experts)
    probs.requires_grad_()

    def step(function: Callable[..., Tensor]) -> Callable[[], None]:
        def call() -> None:
            probs.grad = None
            function(probs, *arguments).backward()

        return call

    ours, eager = host_times([step(function) for function in functions])
    return ours, eager


def benchmark_restore(
    num_tokens: int, topk: int, hidden: int, backward: bool, device: torch.device
) -> tuple[float, ...]:
    row_bytes, out_bytes = num_tokens * topk * hidden * 2, num_tokens * hidden * 2
    num_bytes = row_bytes + out_bytes + (2 * row_bytes + out_bytes if backward else 0)
    inputs = []
    for _ in range(min(input_sets(num_bytes, device), 60)):
        ids = torch.rand(num_tokens, max(128, topk), device=device).topk(topk).indices
        rows = torch.randn(num_tokens * topk, hidden, device=device, dtype=torch.bfloat16)
        scores = torch.rand(num_tokens, topk, device=device)
        grad = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
        inputs.append((rows, scores, ids.flatten().argsort(stable=True), grad))

    def timed(function):  # type: ignore[no-untyped-def]
        def call(rows: Tensor, scores: Tensor, indices: Tensor, grad: Tensor) -> None:
            if not backward:
                function(rows, scores, indices)
                return
            leaves = [rows.requires_grad_(), scores.requires_grad_()]
            torch.autograd.grad(function(*leaves, indices), leaves, grad)
            for leaf in leaves:
                leaf.requires_grad_(False)

        return graph_time(call, inputs, calls=20)

    return num_bytes, timed(weighted_restore), timed(eager_restore)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moe_custom_ops.benchmarks", description=__doc__
    )
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(OPS)}; all of them if none is named")
    ops = parser.parse_args().ops or OPS
    if unknown := set(ops) - set(OPS):
        parser.error(f"no such op: {', '.join(sorted(unknown))}; the ops are {', '.join(OPS)}")
    if not torch.cuda.is_available():
        raise SystemExit("these times need an NVIDIA GPU, and none is visible")
    device = torch.device("cuda", torch.cuda.current_device())
    ceiling = copy_rate(device)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"{torch.cuda.get_device_name(device)}, {versions}")
    print(f"copy: {ceiling / 1e3:.0f} GB/s, reads and writes counted")
    header = f"{'us':>8}{'GB/s':>8}{'% copy':>8}{'eager us':>10}{'compiled':>10}{'ratio':>7}"
    print(f"{'':44}{header}")

    def row(name: str, result: tuple[float, ...]) -> None:
        num_bytes, ours, eager, *compiled = result
        rate = num_bytes / ours
        times = f"{eager:10.1f}{compiled[0]:10.1f}" if compiled else f"{eager:10.1f}{'':10}"
        best = min(eager, *compiled)
        print(
            f"{name:44}{ours:8.2f}{rate / 1e3:8.0f}{100 * rate / ceiling:8.0f}{times}"
            f"{best / ours:7.1f}",
            flush=True,
        )

    if "aux_loss" in ops:
        for tokens, experts in AUX_LOSS_SHAPES:
            row(
                f"aux_loss forward T{tokens} E{experts}",
                benchmark_aux_loss(tokens, experts, device),
            )
    if "sequence_aux_loss" in ops:
        for sequences, length, experts in SEQUENCE_SHAPES:
            for packed in (False, True):
                row(
                    f"sequence {'packed' if packed else 'batch'} B{sequences} S{length} E{experts}",
                    benchmark_sequence_aux_loss(sequences, length, experts, packed, device),
                )
    if "weighted_restore" in ops:
        for tokens, topk, hidden in RESTORE_SHAPES:
            for backward in (False, True):
                row(
                    f"restore {'f+b' if backward else 'forward'} T{tokens} K{topk} H{hidden}",
                    benchmark_restore(tokens, topk, hidden, backward, device),
                )
    for op in ("aux_loss", "sequence_aux_loss"):
        if op in ops:
            ours, eager = benchmark_host(op, device)
            print(f"{f'{op} host time, forward and backward':44}{ours:8.0f}{'':16}{eager:10.0f}")


if __name__ == "__main__":
    main()
