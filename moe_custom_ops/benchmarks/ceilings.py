"""How fast the device streams: the rate against which a row's bytes are held.

Reads and writes have rates of their own. A plain kernel that reads R buffers and writes W is timed
for several R : W, and a row is held against the mix of its own bytes, between the two next to it.
"""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .timing import cache_bytes, calls_per_batch, time_calls

# (buffers read, buffers written): a fill, the copies of top-8, a copy, sums of two and of eight,
# and reads alone.
MIXES = ((0, 1), (1, 8), (1, 1), (2, 1), (8, 1), (1, 0))
# What a CPU does with one op of PyTorch.
CPU_MIXES = ((0, 1), (1, 1), (2, 1), (1, 0))
# Elements of a block; of these the fastest is the ceiling.
BLOCKS = (512, 1024, 2048)


def _on_cpu(mix: tuple[int, int], sources: Tensor, outs: Tensor) -> Any:
    if mix == (0, 1):
        return outs.fill_(1.0)
    if mix == (1, 1):
        return torch.neg(sources, out=outs)
    if mix == (2, 1):
        return torch.add(*sources.chunk(2), out=outs)
    return sources.sum()


def measure(
    device: torch.device, mode: str, repeats: int, cuda_stream: "torch.cuda.Stream | None"
) -> dict[tuple[int, int], float]:
    """Bytes per microsecond of each mix, over 16 times the cache."""
    elements = 16 * cache_bytes(device) // 4
    on_gpu = device.type == "cuda"
    rates = {}
    for reads, writes in MIXES if on_gpu else CPU_MIXES:
        # As many as every block divides.
        unit = elements // (reads + writes) // max(BLOCKS) * max(BLOCKS)
        sources = torch.rand(reads * unit, device=device)
        outs = torch.empty(max(writes, 1) * unit, device=device)
        num_bytes = (reads + writes) * unit * 4
        calls: dict[str, Any] = {}
        if on_gpu:
            from .kernels import stream

            for block in BLOCKS:
                calls[str(block)] = functools.partial(stream, (reads, writes), block)
        else:
            calls[""] = functools.partial(_on_cpu, (reads, writes))
        variants: Any = {name: (call, [(sources, outs)]) for name, call in calls.items()}
        number = calls_per_batch(num_bytes, 1, device)
        times = time_calls(variants, number, mode, repeats, device, cuda_stream)
        rates[reads, writes] = num_bytes / min(times.values())
    return rates


Rate = Callable[[int, int], float]


def ceiling(rates: dict[tuple[int, int], float]) -> Rate:
    """Of (bytes read, bytes written): the rate of their mix, bytes per microsecond.

    The time of a byte is taken as linear in the share of reads between two mixes that were timed.
    """
    points = sorted((reads / (reads + writes), 1 / rate) for (reads, writes), rate in rates.items())
    shares = [share for share, _ in points]

    def rate(read: int, written: int) -> float:
        share = read / (read + written)
        place = min(max(bisect.bisect_left(shares, share), 1), len(points) - 1)
        (low, slow), (high, fast) = points[place - 1], points[place]
        return 1 / (slow + (fast - slow) * (share - low) / (high - low))

    return rate
