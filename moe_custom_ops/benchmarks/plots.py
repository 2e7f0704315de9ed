"""Two charts of a file of rows: rates under the ceilings, and speed-ups."""

import math
from pathlib import Path
from typing import Any

from .rows import BOTH, COMPILED, EAGER, FORWARD, OURS, OURS_COMPILED

COLOURS = [
    f"tab:{name}" for name in ("blue", "orange", "green", "red", "purple", "brown", "cyan", "pink")
]
# In the order of their marks, by which a way looks alike in every chart.
WAYS = (
    EAGER,
    COMPILED,
    OURS_COMPILED,
    "indexing",
    "scatter_add",
    "bmm",
    "DeepSpeed",
    "TransformerEngine",
)
MARKERS = "osD^vPX*"
LABELS = {EAGER: "eager PyTorch", COMPILED: "torch.compile of it"}


def _caption(header: dict[str, Any]) -> str:
    return (
        f"{header['device']}, torch {header['torch']}, commit {header['commit']}, {header['mode']}"
    )


def _ratio_ticks(ratios: list[float]) -> list[float]:
    """1, 2, 5, 10 and so on around the ratios; the powers of ten alone of many."""
    low, high = min(0.5, *ratios), max(2.0, *ratios)
    ticks = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low / 2 < tick < 2 * high]
    return ticks if len(ticks) < 12 else [x for x in ticks if math.log10(x).is_integer()]


def roofline(result: dict[str, Any], path: Path) -> bool:
    """Every row's rate by the bytes it must move: what is small is bound by its launches.

    Whether it was drawn: not of rows without a rate, as of layers.
    """
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["percent"] is not None]
    if not rows:
        return False
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
    return True


def speedups(result: dict[str, Any], path: Path) -> bool:
    """How many times as long other ways take as ours, a mark for each model.

    At the most tokens of the ops that copy hidden states, or of all where there are none; forward
    and backward, or forward where there is no gradient. Whether it was drawn: not without such rows
    of ours and another way.
    """
    import matplotlib.pyplot as plt

    timed = [row for row in result["rows"] if OURS in row["times"] and len(row["times"]) > 1]
    losses = {"aux_loss", "sequence_aux_loss"}
    wide = [row for row in timed if row["op"] not in losses]
    tokens = max((row["tokens"] for row in wide or timed), default=0)
    rows = [row for row in timed if row["tokens"] == tokens]
    with_both = {row["op"] for row in rows if row["kind"] == BOTH}
    rows = [row for row in rows if row["kind"] == (BOTH if row["op"] in with_both else FORWARD)]
    if not rows:
        return False
    ops = list(dict.fromkeys(row["op"] for row in rows))[::-1]
    figure, axes = plt.subplots(figsize=(7.5, 1.7 + 0.3 * len(ops)), layout="constrained")
    height: dict[tuple[str, str], float] = {}
    for line, op in enumerate(ops):
        taken = {way for row in rows if row["op"] == op for way in row["times"]}
        ways = [way for way in WAYS if way in taken]
        for place, way in enumerate(ways):
            step = min(0.2, 0.8 / len(ways))
            height[op, way] = line - step * (place - (len(ways) - 1) / 2)
    for way, colour, marker in zip(WAYS, COLOURS, MARKERS, strict=True):
        own = [row for row in rows if way in row["times"]]
        if not own:
            continue
        axes.scatter(
            [row["times"][way] / row["times"][OURS] for row in own],
            [height[row["op"], way] for row in own],
            s=14,
            label=LABELS.get(way, way),
            color=colour,
            marker=marker,
            alpha=0.8,
        )
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(-0.5, len(ops) - 0.5)
    for place in range(1, len(ops)):
        axes.axhline(place - 0.5, color="tab:gray", linewidth=0.3)
    names = [op if op in with_both else f"{op}, forward" for op in ops]
    axes.set_yticks(range(len(ops)), names, fontsize=8)
    axes.set_xscale("log")
    ratios = [row["times"][way] / row["times"][OURS] for row in rows for way in row["times"]]
    ticks = _ratio_ticks(ratios)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_xlabel(f"time over ours, {tokens} tokens, forward and backward; a mark per model")
    figure.legend(fontsize=7, loc="outside lower center", ncols=4)
    figure.suptitle(_caption(result["header"]), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
