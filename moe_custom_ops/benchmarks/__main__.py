"""Times of the ops against the same formulas in eager PyTorch, and against a copy.

Each row captures many calls in one CUDA graph, over inputs that together exceed the L2.
"""

import torch
from torch import Tensor

from ..aux_loss import aux_loss
from ..sequence_aux_loss import sequence_aux_loss
from ..weighted_restore import weighted_restore
from .timing import copy_rate, graph_time, input_sets

AUX_LOSS_SHAPES = [  # (tokens, experts)
    (1024, 64),
    (8192, 128),
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
    ours = graph_time(our_aux_loss, inputs, calls=50)
    return num_bytes / ours, ours, graph_time(eager_aux_loss, inputs, calls=50)


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
    ours = graph_time(our_sequence_aux_loss, inputs, calls=50)
    return num_bytes / ours, ours, graph_time(eager_sequence_aux_loss, inputs, calls=50)


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

    ours = timed(weighted_restore)
    return num_bytes / ours, ours, timed(eager_restore)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("these times need an NVIDIA GPU, and none is visible")
    device = torch.device("cuda", torch.cuda.current_device())
    ceiling = copy_rate(device)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"{torch.cuda.get_device_name(device)}, {versions}")
    print(f"copy: {ceiling / 1e3:.0f} GB/s, reads and writes counted")
    print(f"{'':44}{'us':>8}{'GB/s':>8}{'% copy':>8}{'eager us':>10}{'ratio':>7}")

    def row(name: str, result: tuple[float, ...]) -> None:
        rate, ours, eager = result
        print(
            f"{name:44}{ours:8.1f}{rate / 1e3:8.0f}{100 * rate / ceiling:8.0f}{eager:10.1f}"
            f"{eager / ours:7.1f}",
            flush=True,
        )

    for tokens, experts in AUX_LOSS_SHAPES:
        row(
            f"aux_loss forward T{tokens} E{experts}",
            benchmark_aux_loss(tokens, experts, device),
        )
    for sequences, length, experts in SEQUENCE_SHAPES:
        for packed in (False, True):
            row(
                f"sequence {'packed' if packed else 'batch'} B{sequences} S{length} E{experts}",
                benchmark_sequence_aux_loss(sequences, length, experts, packed, device),
            )
    for tokens, topk, hidden in RESTORE_SHAPES:
        for backward in (False, True):
            row(
                f"restore {'f+b' if backward else 'forward'} T{tokens} K{topk} H{hidden}",
                benchmark_restore(tokens, topk, hidden, backward, device),
            )


if __name__ == "__main__":
    main()
