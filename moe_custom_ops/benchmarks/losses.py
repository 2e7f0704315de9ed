"""The losses against their formulas in PyTorch, eager and compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..aux_loss import aux_loss
from ..sequence_aux_loss import sequence_aux_loss
from .timing import HostTimes, Row, graph_time, host_times, input_sets

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


def against_pytorch(
    ours: Callable[..., Any], eager: Callable[..., Any], inputs: list[tuple[Any, ...]]
) -> tuple[float, float, float]:
    """Microseconds of (ours, eager, eager under torch.compile)."""
    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True)
    times = [graph_time(call, inputs, calls=50) for call in (ours, eager, compiled)]
    return times[0], times[1], times[2]


def counts(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(0, 100, shape, device=device)


def aux_loss_rows(device: torch.device) -> Iterator[Row]:
    for num_tokens, num_experts in AUX_LOSS_SHAPES:
        num_bytes = num_tokens * num_experts * 4
        inputs = [
            (
                torch.rand(num_tokens, num_experts, device=device),
                counts(num_experts, device=device),
            )
            for _ in range(min(input_sets(num_bytes, device), 400))
        ]
        name = f"aux_loss forward T{num_tokens} E{num_experts}"
        yield Row(name, num_bytes, *against_pytorch(our_aux_loss, eager_aux_loss, inputs))


def sequence_rows(device: torch.device) -> Iterator[Row]:
    for num_sequences, length, num_experts in SEQUENCE_SHAPES:
        num_tokens = num_sequences * length
        num_bytes = num_tokens * num_experts * 4
        for packed in (False, True):
            shape = (num_tokens,) if packed else (num_sequences, length)
            ends = torch.arange(num_sequences + 1, device=device) * length if packed else None
            inputs = [
                (
                    torch.rand(*shape, num_experts, device=device),
                    counts(num_sequences, num_experts, device=device),
                    ends,
                )
                for _ in range(input_sets(num_bytes, device))
            ]
            kind = "packed" if packed else "batch"
            name = f"sequence {kind} B{num_sequences} S{length} E{num_experts}"
            times = against_pytorch(our_sequence_aux_loss, eager_sequence_aux_loss, inputs)
            yield Row(name, num_bytes, *times)


def _step(
    function: Callable[..., Tensor], probs: Tensor, *arguments: Tensor | None
) -> Callable[[], None]:
    def call() -> None:
        probs.grad = None
        function(probs, *arguments).backward()

    return call


def aux_loss_host(device: torch.device) -> HostTimes:
    probs = torch.rand(1024, 64, device=device, requires_grad=True)
    arguments = (probs, counts(64, device=device))
    ours, eager = host_times([_step(f, *arguments) for f in (our_aux_loss, eager_aux_loss)])
    return HostTimes("aux_loss", ours, {"eager": eager})


def sequence_host(device: torch.device) -> HostTimes:
    probs = torch.rand(4, 256, 64, device=device, requires_grad=True)
    arguments = (probs, counts(4, 64, device=device), None)
    functions = (our_sequence_aux_loss, eager_sequence_aux_loss)
    ours, eager = host_times([_step(f, *arguments) for f in functions])
    return HostTimes("sequence_aux_loss", ours, {"eager": eager})
