"""What is printed of rows, written to files, and compared with earlier files."""

import csv
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .rows import EAGER, OURS, Row

COLUMNS = ("us", "GB/s", "% ceiling", "eager", "compiled", "others", "MiB", "eager MiB", "% layer")
NAME_WIDTH = 52


def header(device: torch.device, mode: str, rates: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Where and with what the rows were made; clocks as they are found, in MHz."""
    here = str(Path(__file__).parent)
    values: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "driver": None,
        "clocks": None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "commit": _output("git", "-C", here, "describe", "--always", "--dirty"),
        "mode": mode,
    }
    if device.type == "cuda":
        values["device"] = torch.cuda.get_device_name(device)
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm"
        index = str(torch.cuda.get_device_properties(device).uuid)
        found = _output(
            "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", f"GPU-{index}"
        )
        if found:
            values["driver"], *clocks = found.split(", ")
            values["clocks"] = dict(zip(("sm", "memory", "max sm"), clocks, strict=True))
    else:
        values["threads"] = torch.get_num_threads()
    values["ceilings"] = {f"{r}:{w}": rate / 1e3 for (r, w), rate in rates.items()}
    return values


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def as_records(rows: Sequence[Row], rate: Callable[[int, int], float]) -> list[dict[str, Any]]:
    """Rows with their rates: GB/s, per cent of the ceiling, and of the layer's time."""
    layers = {
        (row.kind, row.model, row.tokens): row.times[OURS]
        for row in rows
        if row.op == "layer" and OURS in row.times
    }
    records = []
    for row in rows:
        record: dict[str, Any] = {"name": row.name} | row._asdict()
        own = row.times.get(OURS)
        layer = layers.get((row.kind, row.model, row.tokens))
        record["gb_per_s"] = record["percent"] = record["percent_of_layer"] = None
        if own:
            reached = (row.read + row.written) / own
            record["gb_per_s"] = reached / 1e3
            # A layer is bound by its products, not by what it is given.
            if row.op != "layer":
                record["percent"] = 100 * reached / rate(row.read, row.written)
                record["percent_of_layer"] = 100 * own / layer if layer else None
        records.append(record)
    return records


def title() -> str:
    return f"{'':{NAME_WIDTH}}" + "".join(f"{column:>10}" for column in COLUMNS)


def line(record: dict[str, Any]) -> str:
    """Of the other ways, how many times as long as ours they take."""
    times, peaks = record["times"], record["peaks"]
    own = times.get(OURS)

    def number(value: float | None, digits: int, suffix: str = "") -> str:
        return f"{'' if value is None else f'{value:.{digits}f}{suffix}':>10}"

    def ratio(way: str) -> float | None:
        return times[way] / own if own and way in times else None

    others = [ratio(way) for way in times if way not in (OURS, EAGER, "compiled")]
    known = [other for other in others if other]
    cells = [
        number(own, 2),
        number(record["gb_per_s"], 0),
        number(record["percent"], 0),
        number(ratio(EAGER), 2, "x"),
        number(ratio("compiled"), 2, "x"),
        number(min(known, default=None), 2, "x"),
        *(number(peaks[way] / 2**20 if way in peaks else None, 0) for way in (OURS, EAGER)),
        number(record["percent_of_layer"], 1),
    ]
    left_out = "".join(f"\n    {way}: {why}" for way, why in record["left_out"].items())
    return (f"{record['name']:{NAME_WIDTH}}" + "".join(cells)).rstrip() + left_out


def write_csv(records: Sequence[dict[str, Any]], path: Path) -> None:
    ways = sorted({way for record in records for way in record["times"]})
    plain = (
        "op",
        "kind",
        "model",
        "tokens",
        "read",
        "written",
        "gb_per_s",
        "percent",
        "percent_of_layer",
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*plain, *(f"us {way}" for way in ways), *(f"bytes {way}" for way in ways)])
        for record in records:
            values = [record[name] for name in plain]
            values += [record["times"].get(way) for way in ways]
            writer.writerow(values + [record["peaks"].get(way) for way in ways])


def write_json(header: dict[str, Any], records: Sequence[dict[str, Any]], path: Path) -> None:
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f'{{"header": {json.dumps(header)},\n"rows": [\n{lines}\n]}}\n')


def compare(
    records: Sequence[dict[str, Any]], old: dict[str, Any], threshold: float
) -> tuple[list[str], bool]:
    """(a line for each row of both, whether one takes more than ``threshold`` per cent longer)"""
    before = {record["name"]: record["times"].get(OURS) for record in old["rows"]}
    lines, slower = [], False
    for record in records:
        own, was = record["times"].get(OURS), before.get(record["name"])
        if own is None or was is None:
            continue
        ratio = own / was
        worse = ratio > 1 + threshold / 100
        slower |= worse
        mark = "  slower" if worse else ""
        lines.append(f"{record['name']:{NAME_WIDTH}}{was:10.2f}{own:10.2f}{ratio:10.3f}{mark}")
    return lines, slower
