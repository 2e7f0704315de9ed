"""python -m moe_custom_ops.check: run every op, and compare the bits with those committed here."""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .cases import CASES, Results, digests
from .ranks import OF_RANKS

GOLDEN = Path(__file__).with_name("digests.json")
# How long a rank waits for the others' collectives, and then rank 0 for a rank's outcome.
COLLECTIVE = datetime.timedelta(seconds=60)
OUTCOME = datetime.timedelta(seconds=180)

Digests = dict[str, dict[str, str]]
Findings = dict[str, list[str]]


def _attempt(case: Callable[[], Results]) -> dict[str, str]:
    """The digests, or what was raised: one op that fails is a finding, and hides no other."""
    try:
        return digests(case())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def run(device: torch.device) -> Digests:
    return {name: _attempt(lambda case=case: case(device)) for name, case in CASES.items()}  # type: ignore[misc]


def run_over_ranks(device: torch.device, group: "dist.ProcessGroup") -> Digests:
    """Up to the first case that fails here, as the others may then wait for this rank."""
    results = {}
    for name, case in OF_RANKS.items():
        outcome = _attempt(lambda case=case: case(device, group))  # type: ignore[misc]
        results[f"{name}, over ranks"] = outcome
        if "error" in outcome:
            break
    return results


def findings(results: Digests, golden: Digests) -> Findings:
    """What is wrong in each case, nothing for those that are right."""
    wrong = {}
    for name, own in results.items():
        expected = golden[name.removesuffix(", over ranks")]
        differs = [
            f"{what} is {own.get(what, 'missing')}, must be {value}"
            for what, value in expected.items()
            if own.get(what) != value
        ]
        wrong[name] = [own["error"]] if "error" in own else differs
    return wrong


def report(of_ranks: list[Findings]) -> bool:
    """Print a line per case, and every rank that is not as it must be. Whether all are right."""
    names = dict.fromkeys(name for wrong in of_ranks for name in wrong)
    for name in names:
        missing = ["did not come to it"]
        wrong = {rank: own.get(name, missing) for rank, own in enumerate(of_ranks)}
        bad = [rank for rank, lines in wrong.items() if lines]
        where = f" on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
        print(f"{name:42} {'differs' + where if bad else 'equal'}")
        for rank in bad:
            for line in wrong[rank]:
                print(f"    rank {rank}: {line}")
    sys.stdout.flush()
    return not any(lines for wrong in of_ranks for lines in wrong.values())


def _exchange(store: Any, stage: str, rank: int, size: int, own: Findings) -> bool:
    """Report every rank's findings on rank 0; whether all are right, on all.

    By the store, not by a collective, which a rank that failed in one could not take part in.
    """
    store.set(f"{stage}/{rank}", json.dumps(own))
    if rank == 0:
        of_ranks: list[Findings] = []
        for other in range(size):
            try:
                store.wait([f"{stage}/{other}"], OUTCOME)
                of_ranks.append(json.loads(store.get(f"{stage}/{other}")))
            except Exception:
                of_ranks.append({name: ["did not answer"] for name in own})
        store.set(f"{stage}/verdict", "good" if report(of_ranks) else "bad")
    # Rank 0 waits for each of the others.
    store.wait([f"{stage}/verdict"], OUTCOME * size)
    return bool(store.get(f"{stage}/verdict") == b"good")


def _over_ranks(device: torch.device, golden: Digests) -> bool:
    # An error in place of an abort where a rank waits too long.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE)
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore("moe_custom_ops.check", store)  # type: ignore[attr-defined]
    if rank == 0:
        _print_header(device)
    good = _exchange(store, "local", rank, size, findings(run(device), golden))
    # With wrong bits on one rank, those over ranks are wrong on all.
    if good:
        own = findings(run_over_ranks(device, group), golden)
        good = _exchange(store, "over ranks", rank, size, own)
    if rank == 0:
        _print_verdict(size, good)
    return good


def _print_header(device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}")


def _print_verdict(size: int, good: bool) -> None:
    verdict = "every result has the bits of this package" if good else "NOT all equal"
    print(f"{size} rank{'s' * (size > 1)}: {verdict}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_custom_ops.check", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=default, choices=("cpu", "cuda"), help="default here: %(default)s"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the committed digests by this machine's"
    )
    options: Any = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here")
    launched = [name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if all(launched):
        if options.write:
            parser.error("--write is for one process, without torchrun")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        return 0 if _over_ranks(device, json.loads(GOLDEN.read_text())) else 1
    results = run(device)
    if options.write:
        failed = {name: own["error"] for name, own in results.items() if "error" in own}
        if failed:
            parser.error(f"--write: these failed: {failed}")
        GOLDEN.write_text(json.dumps(results, indent=1) + "\n")
    _print_header(device)
    good = report([findings(results, json.loads(GOLDEN.read_text()))])
    _print_verdict(1, good)
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Past the interpreter's shutdown, which a thread of gloo that still holds a tensor would abort.
    os._exit(code)
