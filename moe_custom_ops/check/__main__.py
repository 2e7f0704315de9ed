"""python -m moe_custom_ops.check: run every op, and compare the bits with those committed here."""

import argparse
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


def _attempt(case: Callable[[], Results]) -> dict[str, str]:
    """The digests, or what was raised: one op that fails is a finding, and hides no other."""
    try:
        return digests(case())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def run(device: torch.device, group: "dist.ProcessGroup | None") -> dict[str, dict[str, str]]:
    """Digests by case and result, those of the losses over ``group`` included."""
    results = {name: _attempt(lambda case=case: case(device)) for name, case in CASES.items()}  # type: ignore[misc]
    if group is not None:
        for name, case in OF_RANKS.items():
            results[f"{name}, over ranks"] = _attempt(
                lambda case=case: case(device, group)  # type: ignore[misc]
            )
    return results


def findings(
    results: dict[str, dict[str, str]], golden: dict[str, dict[str, str]]
) -> dict[str, list[str]]:
    """What is wrong in each case, "" omitted."""
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


def _report(of_ranks: list[dict[str, list[str]]]) -> bool:
    """Print a line per case, and every rank that is not as it must be. Whether all are right."""
    for name in of_ranks[0]:
        bad = [rank for rank, wrong in enumerate(of_ranks) if wrong[name]]
        where = f" on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
        print(f"{name:42} {'differs' + where if bad else 'equal'}")
        for rank in bad:
            for line in of_ranks[rank][name]:
                print(f"    rank {rank}: {line}")
    good = not any(any(wrong.values()) for wrong in of_ranks)
    ranks = f"{len(of_ranks)} rank{'s' * (len(of_ranks) > 1)}"
    print(f"{ranks}: {'every result has the bits of this package' if good else 'NOT all equal'}")
    return good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_custom_ops.check", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda; default: %(default)s")
    parser.add_argument(
        "--write", action="store_true", help="replace the committed digests by this machine's"
    )
    options = parser.parse_args(arguments)
    if options.write and "RANK" in os.environ:
        parser.error("--write is for one process, without torchrun")
    device, group = torch.device(options.device), None
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = dist.group.WORLD
    results = run(device, group)
    if options.write:
        GOLDEN.write_text(json.dumps(results, indent=1) + "\n")
    wrong = findings(results, json.loads(GOLDEN.read_text()))
    of_ranks: list[Any] = [wrong]
    if group is not None:
        of_ranks = [None] * group.size()
        dist.all_gather_object(of_ranks, wrong)
    good = True
    if group is None or group.rank() == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"torch {torch.__version__}, {name}")
        good = _report(of_ranks)
    if group is not None:
        dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Past the interpreter's shutdown, which a thread of gloo that still holds a tensor would abort.
    os._exit(code)
