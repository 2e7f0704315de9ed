"""Two charts of a file of rows: rates under the ceilings, and speed-ups."""

from pathlib import Path
from typing import Any

from .rows import BOTH, COMPILED, EAGER, FORWARD, OURS

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:cyan")


def _caption(header: dict[str, Any]) -> str:
    return (
        f"{header['device']}, torch {header['torch']}, commit {header['commit']}, {header['mode']}"
    )


def roofline(result: dict[str, Any], path: Path) -> None:
    """Every row's rate by the bytes it must move: what is small is bound by its launches."""
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["percent"] is not None]
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    ops = list(dict.fromkeys(row["op"].split("(")[0] for row in rows))
    for place, op in enumerate(ops):
        own = [row for row in rows if row["op"].split("(")[0] == op]
        axes.scatter(
            [row["read"] + row["written"] for row in own],
            [row["gb_per_s"] for row in own],
            s=18,
            label=op,
            color=COLOURS[place % len(COLOURS)],
            marker="ox^sD"[place // len(COLOURS)],
        )
    ceilings = result["header"]["ceilings"]
    for mix, name, style in (("1:1", "copy", "-"), ("0:1", "fill", ":"), ("1:0", "read", "--")):
        axes.axhline(ceilings[mix], color="black", linestyle=style, linewidth=0.8, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes that a call must move")
    axes.set_ylabel("GB/s")
    axes.legend(fontsize=7, ncols=2)
    figure.suptitle(_caption(result["header"]), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def speedups(result: dict[str, Any], path: Path) -> None:
    """How many times as long the eager and the compiled form take, at the most tokens of a hidden
    size; forward and backward, or forward where there is no gradient."""
    import matplotlib.pyplot as plt

    widest = {"aux_loss", "sequence_aux_loss"}
    tokens = max(row["tokens"] for row in result["rows"] if row["op"] not in widest)
    kinds: dict[tuple[str, str], str] = {}
    for row in result["rows"]:
        key = row["op"], row["model"]
        if kinds.get(key) != BOTH and row["kind"] in (BOTH, FORWARD):
            kinds[key] = row["kind"]
    rows = [
        row
        for row in result["rows"]
        if row["tokens"] == tokens
        and kinds.get((row["op"], row["model"])) == row["kind"]
        and OURS in row["times"]
        and EAGER in row["times"]
    ][::-1]
    figure, axes = plt.subplots(figsize=(7.5, 0.6 + 0.2 * len(rows)), layout="constrained")
    for shift, way, colour in ((0.2, EAGER, "tab:gray"), (-0.2, COMPILED, "tab:blue")):
        places = [place for place, row in enumerate(rows) if way in row["times"]]
        ratios = [rows[place]["times"][way] / rows[place]["times"][OURS] for place in places]
        axes.barh([place + shift for place in places], ratios, 0.4, label=way, color=colour)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['op']} {row['model']}" for row in rows], fontsize=6)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set_xlabel(f"time over ours, {tokens} tokens")
    axes.legend(fontsize=8, loc="lower right")
    figure.suptitle(_caption(result["header"]), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
