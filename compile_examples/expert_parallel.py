"""Experts spread over two processes, by both transports, one rank without tokens, compiled too.

``rank_capacity=None`` sends every row and reads their numbers on the host; an int sends as many
from each rank to each and drops the rest, which ``num_dropped`` counts.

Run it: python compile_examples/expert_parallel.py
"""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from moe_custom_ops.nn import MoE

RANKS, HIDDEN, EXPERTS, TOPK, TOLERANCE = 2, 32, 4, 2, 1e-5
TOKENS = (96, 0)  # of each rank
ENOUGH, TOO_LITTLE = TOKENS[0] * TOPK, 64


def make_layer(rank_capacity: int | None, whole: MoE) -> MoE:
    """A rank's part of ``whole``: its router, and the rank's consecutive experts."""
    group = dist.group.WORLD
    layer = MoE(
        HIDDEN,
        64,
        EXPERTS,
        TOPK,
        max_tokens=TOKENS[0],
        process_group=group,
        rank_capacity=rank_capacity,
    )
    layer.router.load_state_dict(whole.router.state_dict())
    with torch.no_grad():
        layer.up.copy_(whole.up.chunk(RANKS)[dist.get_rank()])
        layer.down.copy_(whole.down.chunk(RANKS)[dist.get_rank()])
    return layer


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> Tensor:
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if b.numel()]
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max()


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    # Of the exact transport the compiler then takes the numbers of rows as symbols.
    torch._dynamo.config.capture_scalar_outputs = True
    torch.manual_seed(0)
    whole = MoE(HIDDEN, 64, EXPERTS, TOPK, max_tokens=TOKENS[0])
    x = torch.randn(TOKENS[0], HIDDEN)
    out, _, counts = whole(x)
    out.square().sum().backward()
    assert whole.up.grad is not None and whole.down.grad is not None
    # Rank 0 has all tokens, so it has the whole layer's output.
    own = slice(TOKENS[rank])
    of_whole = whole.up.grad.chunk(RANKS), whole.down.grad.chunk(RANKS)
    expected = [out[own], of_whole[0][rank], of_whole[1][rank]]

    errors = []
    for rank_capacity in (None, ENOUGH):
        for compiled in (False, True):
            layer = make_layer(rank_capacity, whole)
            function: Callable[..., tuple[Tensor, ...]] = layer
            if compiled:
                # One graph as for Inductor, the default, whose C++ would take most of a minute.
                function = torch.compile(layer, fullgraph=True, backend="aot_eager")
            out, _, _ = function(x[own])
            out.square().sum().backward()
            assert layer.up.grad is not None and layer.down.grad is not None
            errors.append(largest_error([out, layer.up.grad, layer.down.grad], expected))
    error = torch.stack(errors).max()
    dist.all_reduce(error, dist.ReduceOp.MAX)

    layer = make_layer(TOO_LITTLE, whole)
    with torch.no_grad():
        layer(x[own])
    assert layer.num_dropped is not None
    dropped = layer.num_dropped.clone()
    dist.all_reduce(dropped)
    beyond = (counts.view(RANKS, -1).sum(1) - TOO_LITTLE).clamp(min=0).sum()
    ok = error.item() <= TOLERANCE, bool(dropped == beyond > 0)
    dist.destroy_process_group()
    if rank == 0:
        print(
            f"outputs and gradients of both transports, eager and compiled, as of one process "
            f"within {TOLERANCE:.0e}: {ok[0]}, {error:.1e}"
        )
        print(f"room for {TOO_LITTLE} rows a rank drops the {beyond} beyond: {ok[1]}", flush=True)
    if not all(ok):
        raise SystemExit(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Its processes end without the shutdown at which a thread of gloo may abort one.
        start_processes(work, (f"{folder}/store",), nprocs=RANKS, start_method="forkserver")


if __name__ == "__main__":
    main()
