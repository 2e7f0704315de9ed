"""Three clocks, for variants that take turns.

``graph``: many calls captured in one CUDA graph, between one pair of events. ``eager``: a batch of
eager calls between one pair of events; on a CPU, by its clock. ``host``: host time of calls that
the device does not hold up.
"""

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Call = Callable[..., Any]
Inputs = Sequence[tuple[Any, ...]]

# Bytes that one timed batch of calls should move, at least: 0.5 ms at 4 TB/s.
BATCH_BYTES = 2 * 10**9
# Calls of such a batch, at most, and sets of inputs; a CPU takes long, and has no launches to hide.
MAX_CALLS = {"cuda": 120, "cpu": 2}
# Calls of a batch by host time, at least, as the first finds cold caches; few, as the launches of a
# layer that takes the device long would fill its queue.
HOST_CALLS = 10
# Cycles that the device waits before the first event, longer than a launch of a graph takes.
HEAD_START = 200_000


def cache_bytes(device: torch.device) -> int:
    """The L2 of a GPU; for a CPU a guess at its last level, for which PyTorch has no name."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return 32 * 2**20


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """Sets to rotate through, of which a call reads as many bytes, for three times the cache.

    There are no more than 120: what reads less than a 40th of the cache stays in it, as in a model.
    """
    return min(max(2, -(-3 * cache_bytes(device) // max(bytes_per_set, 1))), MAX_CALLS[device.type])


def calls_per_batch(num_bytes: int, num_sets: int, device: torch.device, least: int = 1) -> int:
    """A multiple of the number of sets."""
    calls = min(max(-(-BATCH_BYTES // max(num_bytes, 1)), least), MAX_CALLS[device.type])
    return max(1, -(-calls // num_sets)) * num_sets


def rotate(call: Call, inputs: Inputs, calls: int) -> None:
    for place in range(calls):
        call(*inputs[place % len(inputs)])


def capture(
    call: Call, inputs: Inputs, calls: int, stream: torch.cuda.Stream, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """``calls`` of them in one graph, after a warm-up on its stream.

    Graphs of which nobody reads a result may share a ``pool`` of memory.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rotate(call, inputs, min(len(inputs), 3))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        rotate(call, inputs, calls)
    graph.replay()
    return graph


def event_time(run: Callable[[], None]) -> float:
    """Microseconds between two events, both of which are queued before the device gets there."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def clock_time(run: Callable[[], None]) -> float:
    """Microseconds of the host."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def repeated(call: Callable[[], Any], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def batch_time(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Microseconds of one of ``calls`` in a batch, by events where there is a GPU."""
    clock = event_time if device.type == "cuda" else clock_time
    return clock(repeated(call, calls)) / calls


def orders(names: Sequence[str]) -> Iterator[list[str]]:
    """Orders of turns, without end: the rows of balanced Latin squares (E. J. Williams, 1949).

    In as many as there are names each has each place once. In twice as many (in as many, if that is
    even) each comes, within an order, as often right behind every other.
    """
    size = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(size)]
    for turn in itertools.count():
        order = [names[(place + turn) % size] for place in zigzag]
        yield order[::-1] if turn // max(size, 1) % 2 else order


def take_turns(
    runs: dict[str, Callable[[], Any]], clock: Callable[[Callable[[], Any]], float], repeats: int
) -> dict[str, list[float]]:
    """The times of each; a repeat times every variant once.

    In one order each would always follow the same other, and the clock rate that it left: at its
    power limit an H200 took up to 1.1 times as long for the products of one layer as for the same
    products in another.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for order in itertools.islice(orders(list(runs)), repeats):
        for name in order:
            times[name].append(clock(runs[name]))
    return times


def time_calls(
    calls: dict[str, tuple[Call, Inputs]],
    number: int,
    mode: str,
    repeats: int,
    device: torch.device,
    stream: "torch.cuda.Stream | None",
) -> dict[str, float]:
    """Microseconds of one call of each variant, the median, by the clock that ``mode`` names."""
    runs: dict[str, Callable[[], None]]
    if mode == "graph":
        assert stream is not None
        pool = torch.cuda.graph_pool_handle()
        runs = {
            name: capture(call, inputs, number, stream, pool).replay
            for name, (call, inputs) in calls.items()
        }
    else:
        runs = {
            name: functools.partial(rotate, call, inputs, number)
            for name, (call, inputs) in calls.items()
        }
        for run in runs.values():
            run()
    clock = clock_time
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clock = functools.partial(_unhindered, device) if mode == "host" else event_time
    times = take_turns(runs, clock, repeats)
    return {name: statistics.median(own) / number for name, own in times.items()}


def _unhindered(device: torch.device, run: Callable[[], None]) -> float:
    """Of the host, which a queue that batches have filled would hold up."""
    torch.cuda.synchronize(device)
    return clock_time(run)


def peak_bytes(call: Call, inputs: tuple[Any, ...], device: torch.device) -> int | None:
    """Of one call, beyond what it is given; unknown on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call(*inputs)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def positive(text: str) -> int:
    """An argument of a command that must be a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {value}")
    return value
