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
    """How many times as long other ways take as ours, a mark for each model.

    At the most tokens of the ops that copy hidden states; forward and backward, or forward where
    there is no gradient.
    """
    import matplotlib.pyplot as plt

    timed = [row for row in result["rows"] if OURS in row["times"]]
    losses = {"aux_loss", "sequence_aux_loss"}
    tokens = max((row["tokens"] for row in timed if row["op"] not in losses), default=0)
    rows = [row for row in timed if row["tokens"] == tokens]
    with_both = {row["op"] for row in rows if row["kind"] == BOTH}
    rows = [row for row in rows if row["kind"] == (BOTH if row["op"] in with_both else FORWARD)]
    ops = list(dict.fromkeys(row["op"] for row in rows))[::-1]
    ways = list(dict.fromkeys(way for row in rows for way in row["times"] if way != OURS))
    figure, axes = plt.subplots(figsize=(7.5, 1.6 + 0.26 * len(ops)), layout="constrained")
    for place, way in enumerate(ways):
        own = [row for row in rows if way in row["times"]]
        axes.scatter(
            [row["times"][way] / row["times"][OURS] for row in own],
            [ops.index(row["op"]) + 0.12 * (place - len(ways) / 2) for row in own],
            s=16,
            label={EAGER: "eager PyTorch", COMPILED: "torch.compile of it"}.get(way, way),
            color=COLOURS[place % len(COLOURS)],
            marker="osD^v"[place % 5],
            alpha=0.8,
        )
    axes.axvline(1.0, color="black", linewidth=0.8)
    names = [op if op in with_both else f"{op}, forward" for op in ops]
    axes.set_yticks(range(len(ops)), names, fontsize=8)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_xlabel(f"time over ours, forward and backward, {tokens} tokens; a mark per model")
    figure.legend(fontsize=7, loc="outside lower center", ncols=max(len(ways), 1))
    figure.suptitle(_caption(result["header"]), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
