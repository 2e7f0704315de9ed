"""Checks that need several processes: all of a module's in one start of them.

Starting processes takes seconds, so one start runs every check, and the tests read the outcomes.
"""

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.poison import poison

TIMEOUT = datetime.timedelta(seconds=120)


def _run(
    rank: int,
    world_size: int,
    backend: str,
    folder: str,
    checks: list[Callable],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    poison()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    for check in checks:
        try:
            check(dist.group.WORLD)
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        Path(folder, f"{check.__name__}.{rank}").write_text(outcome)
        # A rank that failed in the middle of its collectives cannot take part in another check.
        if outcome:
            break
    dist.destroy_process_group()


def run_checks(
    world_size: int, checks: list[Callable], backend: str = "gloo", **environment: str
) -> dict[str, str]:
    """What each check raised, "" for nothing; one that did not come to its end is not there."""
    with tempfile.TemporaryDirectory() as folder:
        # Its processes are forks of one that has imported, and holds no GPU.
        multiprocessing.set_forkserver_preload(["moe_custom_ops.nn", "tests.compiling"])
        context = mp.start_processes(
            _run,
            (world_size, backend, folder, checks, environment),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        )
        end = time.monotonic() + 420
        with contextlib.suppress(Exception):
            # It returns as soon as one of them has ended.
            while not context.join(timeout=1) and time.monotonic() < end:
                pass
        for process in context.processes:
            process.kill()
        outcomes: dict[str, str] = {}
        for check in checks:
            files = [Path(folder, f"{check.__name__}.{rank}") for rank in range(world_size)]
            if all(file.exists() for file in files):
                outcomes[check.__name__] = "\n".join(filter(None, (f.read_text() for f in files)))
            elif any(file.exists() for file in files):
                outcomes[check.__name__] = "\n".join(f.read_text() for f in files if f.exists())
                outcomes[check.__name__] += "\na rank did not come to its end"
        return outcomes
