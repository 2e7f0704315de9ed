"""How this project times: many calls in one captured CUDA graph, over inputs larger than the L2.

Host times are those of eager calls in turn, with what they are compared to.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """Microseconds of one call, and of the same formula in PyTorch where it was timed."""

    name: str
    num_bytes: int
    ours: float
    eager: float | None = None
    compiled: float | None = None


class HostTimes(NamedTuple):
    """Host microseconds of one call, and of what it is compared to, by name."""

    name: str
    ours: float
    others: dict[str, float]


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """Input sets to rotate through so that none of them is in the L2 when its turn comes."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-3 * l2_bytes // max(bytes_per_set, 1)))


def graph_time(
    call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int = 0, repeats: int = 20
) -> float:
    """Microseconds per call: the median over replays of one graph that holds at least ``calls``."""
    rounds = max(1, -(-calls // len(inputs)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in inputs[:3]:
            call(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for arguments in inputs:
                call(*arguments)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(inputs)))
    return statistics.median(times)


def copy_rate(device: torch.device, num_bytes: int = 2**30) -> float:
    """Bytes per microsecond of a device-to-device copy, reads and writes counted."""
    source, out = (torch.rand(num_bytes // 4, device=device) for _ in range(2))
    # A kernel that reads and writes each byte once: a captured copy_ becomes a memcpy node, which
    # reached 2.76 TB/s on an H200 where kernels reach 4.2.
    return 2 * num_bytes / graph_time(lambda x: torch.neg(x, out=out), [(source,)], calls=8)


def host_times(
    calls: Sequence[Callable[[], Any]], repeats: int = 15, loops: int = 200
) -> list[float]:
    """Host microseconds of each call: the medians of rounds that take the calls in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, own in zip(calls, times, strict=True):
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(loops):
                call()
            own.append((time.perf_counter() - start) * 1e6 / loops)
    return [statistics.median(own) for own in times]
