"""What this package's ops take on this machine, against eager and compiled PyTorch and a stream.

    python -m moe_custom_ops.benchmarks --quick
    python -m moe_custom_ops.benchmarks --json rows.json --plot charts
    python -m moe_custom_ops.benchmarks --filter "weighted_restore both" --compare rows.json
    python -m moe_custom_ops.benchmarks --mode host --filter Qwen3

Needs the ``bench`` extra: pip install 'moe-custom-ops[bench]'. Every way is checked against the
eager form first; one that is wrong is named and not timed. "x" columns say how many times as long
as ours another way takes; rates are of the bytes that an op must move, held against a plain kernel
that reads and writes in the same proportion.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import ceilings, copies, layer, losses, orders, report
from .models import MODELS, Model
from .rows import (
    BACKWARD,
    BOTH,
    OURS,
    RECORDED,
    Family,
    Row,
    Settings,
    empty_compiled,
    name_of,
    run,
)
from .timing import memory_bytes, positive

# The layer first: of its time the others' lines print their share.
FAMILIES = (*layer.FAMILIES, *losses.FAMILIES, *orders.FAMILIES, *copies.FAMILIES)
MODES = ("graph", "eager", "host")
# A CPU takes a second for what takes a GPU a tenth of a millisecond.
SIZES = {
    "cuda": {"decode": 64, "batch": 1024, "train": 8192, "long": 131072},
    "cpu": {"decode": 64, "batch": 1024, "train": 512, "long": 4096},
}
QUICK_MODEL = "Qwen3-30B-A3B"

Case = tuple[Family, Model, int, str, bool]


def cases(device_type: str, pattern: str, quick: bool, host: bool = False) -> Iterator[Case]:
    """(family, model, tokens, kind, whether the eager form is compiled, too)

    By ``host`` time only of few tokens, as many let the device hold the host up.
    """
    for family in FAMILIES:
        kinds = (*family.kinds, RECORDED) if host and BOTH in family.kinds else family.kinds
        # A second's work on a GPU, and minutes on a CPU.
        if quick and device_type == "cpu" and family.op == "layer":
            continue
        for model in MODELS:
            if (family.models and model.name not in family.models) or (
                quick and model.name != QUICK_MODEL
            ):
                continue
            for size in family.host_sizes if host else family.sizes:
                for kind in kinds:
                    if quick and (kind == BACKWARD or size == "long"):
                        continue
                    compiled = (host or size in family.compiled) and not quick
                    tokens = SIZES[device_type][size]
                    name = name_of(family.op, kind, model.name, tokens)
                    if pattern == name or re.search(pattern, name):
                        yield family, model, tokens, kind, compiled


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moe_custom_ops.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--filter", default="", help="a regular expression that names hold, or a row's name"
    )
    parser.add_argument("--quick", action="store_true", help="one model, under a minute")
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="calls in a captured CUDA graph, batches of eager calls, or host time of few tokens",
    )
    parser.add_argument(
        "--repeats", type=positive, default=15, help="batches of each way; at most 3 for --quick"
    )
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
    except (re.error, OverflowError) as error:
        parser.error(f"--filter: {error}")
    if not 0 <= options.threshold < float("inf"):
        parser.error(f"--threshold: expected per cent from 0, got {options.threshold}")
    for name in ("json", "csv"):
        path = getattr(options, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"--{name}: {path} is no file in a folder that exists")
    if options.json and options.csv and options.json.resolve() == options.csv.resolve():
        parser.error(f"--csv: {options.csv} is what --json writes")
    if options.plot is not None:
        if options.plot.exists() and not options.plot.is_dir():
            parser.error(f"--plot: {options.plot} is no folder")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot: matplotlib is missing: pip install 'moe-custom-ops[bench]'")
    if importlib.util.find_spec("tqdm") is None:
        parser.error("tqdm is missing: pip install 'moe-custom-ops[bench]'")
    options.old = None
    if options.compare:
        try:
            options.old = report.read_json(options.compare)
        except ValueError as error:
            parser.error(f"--compare: {error}")
    options.device = _device(options.device, parser)
    options.mode = options.mode or ("graph" if options.device.type == "cuda" else "eager")
    if options.mode == "graph" and options.device.type != "cuda":
        parser.error("--mode graph: a CUDA graph needs an NVIDIA GPU; take --mode eager")
    return options


def _device(name: str | None, parser: argparse.ArgumentParser) -> torch.device:
    count = torch.cuda.device_count()
    name = name or ("cuda" if count else "cpu")
    if name == "cuda" and count:
        name = f"cuda:{torch.cuda.current_device()}"
    known = ["cpu", *(f"cuda:{index}" for index in range(count))]
    if name not in known:
        parser.error(f"--device: expected one of {', '.join(known)}, got {name}")
    return torch.device(name)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, old, host = options.device, options.old, options.mode == "host"
    chosen = list(cases(device.type, options.filter, options.quick, host))
    if not chosen:
        where = f"{device.type} with --quick" if options.quick else device.type
        raise SystemExit(f"no row matches --filter {options.filter!r} on {where}")
    stream = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
    repeats = min(options.repeats, 3) if options.quick else options.repeats
    streamed = "eager" if host else options.mode
    rates = ceilings.measure(device, streamed, repeats, stream)
    rate = ceilings.ceiling(rates)
    header = {**report.header(device, options.mode, rates), "repeats": repeats}
    if old is not None:
        for key in ("device", "mode"):
            if old["header"][key] != header[key]:
                was, now = old["header"][key], header[key]
                raise SystemExit(f"--compare: {options.compare} is of {key} {was}, this is {now}")
    settings = Settings(device, options.mode, repeats, False, stream)
    if host and not (options.quick or options.no_compile):
        header["empty_compiled_us"] = round(empty_compiled(settings), 2)
    print("\n".join(report.header_lines(header)))
    print(f"\n{report.title()}")
    rows: list[Row] = []
    code = 0
    try:
        _run(chosen, settings, options, rows, rate, header)
    except KeyboardInterrupt:
        code = 130
    records = report.as_records(rows, rate)
    if options.csv:
        report.write_csv(records, options.csv)
    if options.plot and records:
        from . import plots

        options.plot.mkdir(parents=True, exist_ok=True)
        result = {"header": header, "rows": records}
        for draw in (plots.roofline, plots.speedups):
            path = options.plot / f"{draw.__name__}.png"
            if not draw(result, path):
                print(f"{path} is not drawn: no row for it")
    wrong = any(row.left_out.get(OURS, "").startswith("wrong") for row in rows)
    if old is not None:
        lines, worse = report.compare(records, old, options.threshold)
        print(f"\n{'':{report.NAME_WIDTH}}{'was us':>10}{'is us':>10}{'ratio':>10}")
        print("\n".join(lines) or f"no row of {options.compare} is among these")
        wrong |= worse or not lines
    return code or int(wrong)


def _run(
    chosen: list[Case],
    settings: Settings,
    options: argparse.Namespace,
    rows: list[Row],
    rate: ceilings.Rate,
    header: dict[str, Any],
) -> None:
    """Add to ``rows``, to the terminal and to the file as they are made."""
    from tqdm import tqdm

    device, last = settings.device, None
    with tqdm(total=len(chosen), disable=None, leave=False, unit="row") as bar:
        for family, model, tokens, kind, compiled in chosen:
            # What is compiled of a family serves its kinds.
            if last != (family.op, model, tokens):
                last = family.op, model, tokens
                torch._dynamo.reset()
            compiled = compiled and not options.no_compile
            try:
                row = run(family, kind, model, tokens, settings._replace(compiled=compiled))
            except (MemoryError, torch.cuda.OutOfMemoryError) as error:
                why = str(error) if isinstance(error, MemoryError) else "out of memory"
                row = Row(family.op, kind, model.name, tokens, 0, 0, 0, {}, {}, {"all": why})
            rows.append(row)
            records = report.as_records(rows, rate)
            bar.write(report.line(records[-1]), file=sys.stdout)
            bar.update()
            if options.json:
                report.write_json(header, records, options.json)
            if device.type == "cuda" and 2 * torch.cuda.memory_reserved() > memory_bytes(device):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
