"""What this package's ops take on this machine, against eager and compiled PyTorch and a stream.

    python -m moe_custom_ops.benchmarks --quick
    python -m moe_custom_ops.benchmarks --json rows.json --plot charts
    python -m moe_custom_ops.benchmarks --filter "weighted_restore both" --compare rows.json

Needs the ``bench`` extra: pip install 'moe-custom-ops[bench]'. Every way is checked against the
eager form first; one that is wrong is named and not timed. "x" columns say how many times as long
as ours another way takes; rates are of the bytes that an op must move, held against a plain kernel
that reads and writes in the same proportion.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from . import ceilings, copies, layer, losses, orders, report
from .models import MODELS, Model
from .rows import BACKWARD, OURS, Family, Row, Settings, run
from .timing import memory_bytes

FAMILIES = (*losses.FAMILIES, *orders.FAMILIES, *copies.FAMILIES, *layer.FAMILIES)
MODES = ("graph", "eager", "host")
# A CPU takes a second for what takes a GPU a tenth of a millisecond.
SIZES = {
    "cuda": {"decode": 64, "train": 8192, "long": 131072},
    "cpu": {"decode": 64, "train": 512, "long": 4096},
}
QUICK_MODEL = "Qwen3-30B-A3B"

Case = tuple[Family, str, Model, int, bool]


def cases(device_type: str, pattern: str, quick: bool) -> Iterator[Case]:
    """(family, kind, model, tokens, whether the eager form is compiled, too)"""
    for family in FAMILIES:
        for model in MODELS:
            if (family.models and model.name not in family.models) or (
                quick and model.name != QUICK_MODEL
            ):
                continue
            for size in family.sizes:
                tokens = SIZES[device_type][size]
                for kind in family.kinds:
                    if quick and (kind == BACKWARD or size == "long"):
                        continue
                    # Compiled code frees what a backward has read, so it runs once only.
                    compiled = size in family.compiled and kind != BACKWARD and not quick
                    name = Row(family.op, kind, model.name, tokens, 0, 0, 0, {}, {}, {}).name
                    if re.search(pattern, name):
                        yield family, kind, model, tokens, compiled


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moe_custom_ops.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--filter", default="", help="a regular expression; rows it is found in")
    parser.add_argument("--quick", action="store_true", help="one model, under a minute")
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="calls in a captured CUDA graph, batches of eager calls, or host time",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--csv", type=Path, help="write the rows there")
    parser.add_argument("--plot", type=Path, help="a folder for the charts")
    parser.add_argument("--compare", type=Path, help="an earlier --json; exit 1 if a row is slower")
    parser.add_argument("--threshold", type=float, default=5.0, help="per cent, for --compare")
    options = parser.parse_args(arguments)
    try:
        re.compile(options.filter)
    except re.error as error:
        parser.error(f"--filter: {error}")
    options.device = torch.device(
        options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if options.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device: no NVIDIA GPU is visible")
        options.device = torch.device("cuda", options.device.index or torch.cuda.current_device())
    options.mode = options.mode or ("graph" if options.device.type == "cuda" else "eager")
    if options.mode == "graph" and options.device.type != "cuda":
        parser.error("--mode graph: a CUDA graph needs an NVIDIA GPU; take --mode eager")
    if options.repeats < 1:
        parser.error(f"--repeats: expected a positive integer, got {options.repeats}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        from tqdm import tqdm
    except ImportError:
        raise SystemExit("tqdm is missing: pip install 'moe-custom-ops[bench]'") from None
    device, old = options.device, None
    if options.compare:
        old = json.loads(options.compare.read_text())
    chosen = list(cases(device.type, options.filter, options.quick))
    if not chosen:
        raise SystemExit(f"no row matches --filter {options.filter!r}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    repeats = min(options.repeats, 3) if options.quick else options.repeats
    rates = ceilings.measure(
        device, "eager" if options.mode == "host" else options.mode, repeats, stream
    )
    rate = ceilings.ceiling(rates)
    header = report.header(device, options.mode, rates)
    for name, value in header.items():
        if value is not None:
            print(f"{name}: {value}")
    print(f"\n{report.title()}")

    rows: list[Row] = []
    wrong = False
    with tqdm(total=len(chosen), disable=None, leave=False, unit="row") as bar:
        for family, kind, model, tokens, compiled in chosen:
            settings = Settings(
                device, options.mode, repeats, compiled and not options.no_compile, stream
            )
            try:
                row = run(family, kind, model, tokens, settings)
            except (MemoryError, torch.cuda.OutOfMemoryError) as error:
                why = str(error) if isinstance(error, MemoryError) else "out of memory"
                row = Row(family.op, kind, model.name, tokens, 0, 0, 0, {}, {}, {"all": why})
            rows.append(row)
            wrong |= row.left_out.get(OURS, "").startswith("wrong")
            bar.write(report.line(report.as_records(rows, rate)[-1]), file=sys.stdout)
            bar.update()
            if options.json:
                # After every row: a run that is stopped has not been for nothing.
                report.write_json(header, report.as_records(rows, rate), options.json)
            if device.type == "cuda" and 2 * torch.cuda.memory_reserved() > memory_bytes(device):
                torch.cuda.empty_cache()
    records = report.as_records(rows, rate)
    if options.csv:
        report.write_csv(records, options.csv)
    if options.plot:
        from . import plots

        options.plot.mkdir(parents=True, exist_ok=True)
        result = {"header": header, "rows": records}
        plots.roofline(result, options.plot / "roofline.png")
        plots.speedups(result, options.plot / "speedups.png")
    slower = False
    if old is not None:
        lines, slower = report.compare(records, old, options.threshold)
        print(f"\n{'':{report.NAME_WIDTH}}{'was us':>10}{'is us':>10}{'ratio':>10}")
        print("\n".join(lines))
        if old["header"]["device"] != header["device"]:
            print(f"{options.compare} is of another device: {old['header']['device']}")
    return 1 if wrong or slower else 0


if __name__ == "__main__":
    sys.exit(main())
