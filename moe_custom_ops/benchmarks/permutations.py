"""expert_permutation and permute against what training codes write in eager PyTorch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..expert_permutation import (
    expert_permutation,
    expert_permutation_from_counts,
    expert_permutation_from_map,
)
from ..weighted_restore import inverse_permutation, permute
from .restores import SHAPES, SPARSE_LOCAL, SPARSE_SHAPE, make
from .timing import HostTimes, Row, graph_time, host_times, input_sets

RECEIVED = [(8, 16, 65536), (64, 4, 65536)]  # (ranks, local experts, rows)
ORDERS = [(256, 8, 128), (8192, 8, 128), (4096, 8, 256), (8192, 2, 8)]  # (tokens, topk, experts)


def eager_order(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order, inverse and counts by a stable sort."""
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=flat.device)
    )
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return order, inverse, counts.scatter_add_(0, flat, torch.ones_like(flat))


def orders(device: torch.device) -> Iterator[Row]:
    """Bytes of the ids, 8 each, and of the order, 4 each."""
    for num_tokens, topk, num_experts in ORDERS:
        num_bytes = 12 * num_tokens * topk
        inputs = [
            (torch.rand(num_tokens, num_experts, device=device).topk(topk).indices, num_experts)
            for _ in range(min(input_sets(num_bytes, device), 60))
        ]
        ours, eager = (graph_time(f, inputs, calls=60) for f in (expert_permutation, eager_order))
        name = f"T{num_tokens} K{topk} E{num_experts}"
        yield Row(f"expert_permutation {name}", num_bytes, ours, eager)
        maps = [
            (
                torch.zeros(num_tokens, e, dtype=torch.bool, device=device).scatter_(1, ids, True),
                topk,
            )
            for ids, e in inputs
        ]
        ours = graph_time(expert_permutation_from_map, maps, calls=60)
        yield Row(f"expert_permutation_from_map {name}", num_bytes, ours)
    for num_ranks, num_experts, num_rows in RECEIVED:
        counts = [
            (
                torch.randint(
                    0,
                    2 * num_rows // num_ranks // num_experts,
                    (num_ranks, num_experts),
                    device=device,
                ),
                num_rows,
            )
            for _ in range(60)
        ]
        ours = graph_time(expert_permutation_from_counts, counts, calls=60)
        name = f"expert_permutation_from_counts R{num_ranks} E{num_experts} N{num_rows}"
        yield Row(name, 4 * num_rows, ours)


def rows(device: torch.device) -> Iterator[Row]:
    """permute, with the inverse at hand and without, and the same kernel in order: a stream.

    In order, PyTorch repeats the tokens.
    """
    for num_tokens, topk, hidden in SHAPES:
        num_bytes = num_tokens * (topk + 1) * hidden * 2
        inputs = []
        for _ in range(min(input_sets(num_bytes, device), 60)):
            _, _, indices, tokens = make(num_tokens, topk, hidden, device)
            inverse = inverse_permutation(indices, num_tokens, topk)
            inputs.append((tokens, indices, inverse, indices // topk))
        name = f"T{num_tokens} K{topk} H{hidden}"
        given = graph_time(
            lambda x, i, inv, _, k=topk: permute(x, i, k, None, inv), inputs, calls=20
        )
        eager = graph_time(lambda x, i, inv, index: x[index], inputs, calls=20)
        yield Row(f"permute, inverse at hand {name}", num_bytes, given, eager)
        ours = graph_time(lambda x, i, inv, _, k=topk: permute(x, i, k), inputs, calls=20)
        eager = graph_time(lambda x, i, inv, _, k=topk: x[i // k], inputs, calls=20)
        yield Row(f"permute {name}", num_bytes, ours, eager)
        order = torch.arange(num_tokens * topk, device=device)
        inverse = inverse_permutation(order, num_tokens, topk)
        stream = graph_time(
            lambda x, i, inv, _, k=topk: permute(x, order, k, None, inverse),  # noqa: B023
            inputs,
            calls=20,
        )
        repeated = graph_time(
            lambda x, i, inv, _, k=topk: x.repeat_interleave(k, 0, output_size=k * len(x)),
            inputs,
            calls=20,
        )
        yield Row(f"in order {name}", num_bytes, stream, repeated)
    yield from sparse_rows(device)


def sparse_rows(device: torch.device) -> Iterator[Row]:
    """permute of what one rank of many receives, with as many rows as exist and with the default.

    Bytes are those of the tokens and of the rows that are written, padding included.
    """
    num_tokens, topk, hidden = SPARSE_SHAPE
    inputs = []
    for _ in range(2):
        _, _, indices, tokens = make(*SPARSE_SHAPE, device, SPARSE_LOCAL)
        padding = indices.new_full((num_tokens * topk - len(indices),), -1)
        inputs.append((tokens, indices, torch.cat([indices, padding])))
    exist = graph_time(lambda x, i, _: permute(x, i, topk), inputs, calls=20)
    eager = graph_time(lambda x, i, _: x[i // topk], inputs, calls=20)
    name = f"{SPARSE_LOCAL} of K{topk} T{num_tokens} H{hidden}"
    row_bytes = hidden * 2
    num_rows = len(inputs[0][1])
    yield Row(f"permute {name}", (num_tokens + num_rows) * row_bytes, exist, eager)
    worst = graph_time(lambda x, _, i: permute(x, i, topk), inputs, calls=20)
    yield Row(f"permute {name}, default rows", num_tokens * (topk + 1) * row_bytes, worst)


def orders_host(device: torch.device) -> HostTimes:
    ids = torch.rand(256, 128, device=device).topk(8).indices
    calls = [lambda: expert_permutation(ids, 128), lambda: eager_order(ids, 128)]
    ours, eager = host_times(calls)
    return HostTimes("expert_permutation", ours, {"eager": eager})


def rows_host(device: torch.device) -> HostTimes:
    _, _, indices, tokens = make(256, 8, 512, device)
    copies = torch.randn(2048, 512, device=device, dtype=tokens.dtype)
    tokens.requires_grad_()

    def ours() -> object:
        return torch.autograd.grad(permute(tokens, indices, 8), tokens, copies)

    def eager() -> object:
        return torch.autograd.grad(tokens[indices // 8], tokens, copies)

    own, other = host_times([ours, eager])
    return HostTimes("permute", own, {"eager": other})
