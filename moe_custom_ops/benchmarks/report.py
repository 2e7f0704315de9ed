"""What is printed of rows, written to files, and compared with earlier files."""

import csv
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .rows import COMPILED, EAGER, NOT_ASKED, OURS, Row

COLUMNS = ("us", "GB/s", "% ceiling", "eager", "compiled", "MiB", "eager MiB", "% layer")
NAME_WIDTH = 64


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
    values["ceilings"] = {f"{r}:{w}": round(rate / 1e3, 1) for (r, w), rate in rates.items()}
    return values


def header_lines(values: dict[str, Any]) -> list[str]:
    mixes = ", ".join(f"{mix} {rate:.0f}" for mix, rate in values["ceilings"].items())
    rest = [f"{k}: {v}" for k, v in values.items() if v is not None and k != "ceilings"]
    return [*rest, f"a plain stream, reads : writes, GB/s: {mixes}"]


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

    others = "".join(
        f"  {way} {times[way] / own:.2f}x"
        for way in times
        if own and way not in (OURS, EAGER, COMPILED)
    )
    cells = [
        number(own, 2),
        number(record["gb_per_s"], 0),
        number(record["percent"], 0),
        number(ratio(EAGER), 2, "x"),
        number(ratio(COMPILED), 2, "x"),
        *(number(peaks[way] / 2**20 if way in peaks else None, 0) for way in (OURS, EAGER)),
        number(record["percent_of_layer"], 1),
    ]
    left_out = "".join(
        f"\n    {way}: {why}" for way, why in record["left_out"].items() if why != NOT_ASKED
    )
    return (f"{record['name']:{NAME_WIDTH}}" + "".join(cells) + others).rstrip() + left_out


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
    """One row a line. A run that is stopped leaves the file before or the file after."""
    lines = ",\n".join(json.dumps(record) for record in records)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(f'{{"header": {json.dumps(header)},\n"rows": [\n{lines}\n]}}\n')
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What :func:`write_json` wrote.

    Raises:
        ValueError: it is something else, or not there.
    """
    try:
        result = json.loads(path.read_text())
        times = [row["times"] for row in result["rows"] if row["name"]]
        header = result["header"]
        assert all(isinstance(x, dict) for x in times) and header["device"] and header["mode"]
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is no file that --json wrote: {error!r}") from None
    return dict(result)


def compare(
    records: Sequence[dict[str, Any]], old: dict[str, Any], threshold: float
) -> tuple[list[str], bool]:
    """(a line per row that was timed before, whether one is gone or ``threshold`` per cent slower)

    Rows that this run was not asked for are no matter.
    """
    before = {record["name"]: record["times"].get(OURS) for record in old["rows"]}
    lines, worse = [], False
    for record in records:
        own, was = record["times"].get(OURS), before.get(record["name"])
        if was is None:
            continue
        if own is None:
            lines.append(f"{record['name']:{NAME_WIDTH}}{was:10.2f}{'':20}  not timed now")
            worse = True
            continue
        ratio = own / was
        slower = not ratio <= 1 + threshold / 100
        worse |= slower
        mark = "  slower" if slower else ""
        lines.append(f"{record['name']:{NAME_WIDTH}}{was:10.2f}{own:10.2f}{ratio:10.3f}{mark}")
    return lines, worse
