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


def _on_cpu(mix: tuple[int, int], sources: Tensor, outs: Tensor) -> Any:
    if mix == (0, 1):
        return outs[0].fill_(1.0)
    if mix == (1, 1):
        return torch.neg(sources[0], out=outs[0])
    if mix == (2, 1):
        return torch.add(sources[0], sources[1], out=outs[0])
    return sources.sum()


def _stream(mix: tuple[int, int], sources: Tensor, outs: Tensor) -> Any:
    if sources.is_cuda:
        from .kernels import stream

        return stream(*mix, sources, outs)
    return _on_cpu(mix, sources, outs)


def measure(
    device: torch.device, mode: str, repeats: int, cuda_stream: "torch.cuda.Stream | None"
) -> dict[tuple[int, int], float]:
    """Bytes per microsecond of each mix, over buffers of together 16 times the cache."""
    total = 16 * cache_bytes(device)
    rates = {}
    for reads, writes in MIXES if device.type == "cuda" else CPU_MIXES:
        length = total // (reads + writes) // 4
        sources = torch.rand(reads, length, device=device)
        # A reduction has room for one value of each block.
        outs = torch.empty(max(writes, 1), length, device=device)
        call = functools.partial(_stream, (reads, writes))
        num_bytes = (reads + writes) * length * 4
        number = calls_per_batch(num_bytes, 1, device)
        inputs = [(sources, outs)]
        times = time_calls({"": (call, inputs)}, number, mode, repeats, device, cuda_stream)
        rates[reads, writes] = num_bytes / times[""]
    return rates


def ceiling(rates: dict[tuple[int, int], float]) -> Callable[[int, int], float]:
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
