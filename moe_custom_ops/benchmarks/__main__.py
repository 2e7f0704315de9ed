"""Times of the ops against the same formulas in PyTorch, eager and compiled, and against a copy.

Each row captures many calls in one CUDA graph, over inputs that together exceed the L2. The last
rows are host times of eager calls, forward and backward, and peak memory.
"""

import argparse

import torch

from . import layer, losses, permutations, restores
from .timing import HostTimes, Row, copy_rate

ROWS = {
    "aux_loss": losses.aux_loss_rows,
    "sequence_aux_loss": losses.sequence_rows,
    "expert_permutation": permutations.orders,
    "permute": permutations.rows,
    "weighted_restore": restores.rows,
    "layer": layer.rows,
}
HOST = {
    "aux_loss": losses.aux_loss_host,
    "sequence_aux_loss": losses.sequence_host,
    "expert_permutation": permutations.orders_host,
    "permute": permutations.rows_host,
    "weighted_restore": restores.host,
    "layer": layer.host,
}


def format_row(row: Row, ceiling: float) -> str:
    rate = row.num_bytes / row.ours
    others = [f"{time:10.1f}" if time else f"{'':10}" for time in (row.eager, row.compiled)]
    known = [time for time in (row.eager, row.compiled) if time]
    ratio = f"{min(known) / row.ours:7.1f}" if known else ""
    return (
        f"{row.name:48}{row.ours:8.2f}{rate / 1e3:8.0f}{100 * rate / ceiling:8.0f}"
        f"{''.join(others)}{ratio}"
    ).rstrip()


def format_host(times: HostTimes) -> str:
    others = ", ".join(
        f"{name} {other:.0f} us (ours {times.ours / other:.2f} of it)"
        for name, other in times.others.items()
    )
    return f"{times.name}: ours {times.ours:.0f} us, {others}"


def main() -> None:
    prog, choices = "python -m moe_custom_ops.benchmarks", ", ".join(ROWS)
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("ops", nargs="*", help=f"of {choices}; all of them if none is named")
    ops = parser.parse_args().ops or list(ROWS)
    if unknown := set(ops) - set(ROWS):
        parser.error(f"no such op: {', '.join(sorted(unknown))}; the ops are {choices}")
    if not torch.cuda.is_available():
        raise SystemExit("these times need an NVIDIA GPU, and none is visible")
    device = torch.device("cuda", torch.cuda.current_device())
    ceiling = copy_rate(device)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"{torch.cuda.get_device_name(device)}, {versions}")
    print(f"copy: {ceiling / 1e3:.0f} GB/s, reads and writes counted")
    header = f"{'us':>8}{'GB/s':>8}{'% copy':>8}{'eager us':>10}{'compiled':>10}{'ratio':>7}"
    print(f"{'':48}{header}")
    for op in ops:
        for row in ROWS[op](device):
            print(format_row(row, ceiling), flush=True)
    print("\nhost time of an eager call, forward and backward")
    for op in ops:
        print(format_host(HOST[op](device)), flush=True)
    if "weighted_restore" in ops:
        print("\npeak memory of weighted_restore beyond its inputs")
        for line in restores.memory(device):
            print(line, flush=True)


if __name__ == "__main__":
    main()
