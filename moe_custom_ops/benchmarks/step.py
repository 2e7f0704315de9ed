"""Step time of a stack of transformer blocks by the ways to combine and to run, on a GPU.

    python -m moe_custom_ops.benchmarks.step --out step.json
    python -m moe_custom_ops.benchmarks.step --plot step.json docs/step_time.png

A step is forward, backward, clipping and a fused optimizer. The ways take turns: one repeat times a
batch of steps of each between one pair of events, so that a drift of the machine meets all alike.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..nn import MoE
from . import report
from .timing import batch_time, positive, take_turns

Result = TypeVar("Result")


class Config(NamedTuple):
    layers: int = 4
    batch: int = 2
    length: int = 4096
    hidden: int = 2048
    heads: int = 16
    intermediate: int = 1024
    experts: int = 64
    topk: int = 8


class Way(NamedTuple):
    name: str
    combine_impl: str
    compiled: bool = False
    captured: bool = False


WAYS = (
    Way("eager combine", "weighted_sum"),
    Way("fused", "fused_weighted_sum"),
    Way("eager combine, compiled", "weighted_sum", compiled=True),
    Way("fused, compiled", "fused_weighted_sum", compiled=True),
    Way("fused, captured", "fused_weighted_sum", captured=True),
    Way("fused, compiled and captured", "fused_weighted_sum", compiled=True, captured=True),
)


class Block(nn.Module):
    def __init__(self, config: Config, combine_impl: str, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        hidden = config.hidden
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(hidden, **options)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, **options)
        self.attention_out = nn.Linear(hidden, hidden, bias=False, **options)
        self.moe_norm = nn.RMSNorm(hidden, **options)
        self.moe = MoE(
            hidden,
            config.intermediate,
            config.experts,
            config.topk,
            config.batch * config.length,
            combine_impl=combine_impl,
            **options,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        out, loss, _ = self.moe(self.moe_norm(x))
        return x + out, loss


class Stack(nn.Module):
    def __init__(self, config: Config, combine_impl: str, device: torch.device) -> None:
        super().__init__()
        blocks = (Block(config, combine_impl, device) for _ in range(config.layers))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        total = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return (x - target).float().square().mean() + total


def on_side_stream(step: Callable[[], Any], times: int) -> None:
    """Where a warm-up must run: autograd's accumulators of the gradients stay on its stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            step()
    torch.cuda.current_stream().wait_stream(side)


def captured(step: Callable[[], Result]) -> Callable[[], Result]:
    """``step`` after a warm-up, in a graph: a replay writes what the capture returned."""
    on_side_stream(step, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Result:
        graph.replay()
        return out

    return replay


class Trained:
    """A stack, its optimizer and a batch."""

    def __init__(self, combine_impl: str, config: Config, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Stack(config, combine_impl, device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True, capturable=True)
        shape = config.batch, config.length, config.hidden
        self.batch = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]

    def step(self, run: Callable[..., Tensor]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = run(*self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach()


def make_step(way: Way, trained: Trained) -> Callable[[], Tensor]:
    run = trained.model
    if way.compiled:
        run = torch.compile(trained.model, fullgraph=True)  # type: ignore[assignment]
    step = functools.partial(trained.step, run)
    if way.captured:
        return captured(step)
    on_side_stream(step, 3)
    return step


def interval(times: list[float], resamples: int = 2000) -> tuple[float, float]:
    """The bootstrap's 95% interval of the median."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(times, dtype=torch.float64)
    picks = torch.randint(len(times), (resamples, len(times)), generator=generator)
    medians = values[picks].median(dim=1).values
    low, high = torch.quantile(medians, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def share_of_ours(step: Callable[[], Tensor]) -> float:
    """The part of a step's kernel time that is this package's."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    ours = total = 0.0
    for event in profile.key_averages():
        total += event.self_device_time_total
        # Inductor's begin with "triton_", those of libraries end otherwise.
        if event.key.startswith("_") and event.key.endswith("_kernel"):
            ours += event.self_device_time_total
    return ours / total


def measure(config: Config, device: torch.device, repeats: int, steps: int) -> dict[str, Any]:
    """Peaks are those beyond parameters and the optimizer's state, which the ways share."""
    made: dict[str, Callable[[], Tensor]] = {}
    trained: dict[str, Trained] = {}
    peaks = {}
    for way in WAYS:
        if way.combine_impl not in trained:
            trained[way.combine_impl] = own = Trained(way.combine_impl, config, device)
            on_side_stream(functools.partial(own.step, own.model), 1)
        own = trained[way.combine_impl]
        own.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        made[way.name] = make_step(way, own)
        made[way.name]()
        torch.cuda.synchronize()
        peaks[way.name] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    times = take_turns(made, lambda step: batch_time(step, steps, device) / 1e3, repeats)
    rows = [
        {
            "way": name,
            "ms": statistics.median(own),
            "interval": interval(own),
            "peak_gib": peaks[name],
        }
        for name, own in times.items()
    ]
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "config": config._asdict(),
        "repeats": repeats,
        "steps": steps,
        "share": {way.name: share_of_ours(made[way.name]) for way in WAYS if not way.captured},
        "rows": rows,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    rows = result["rows"][::-1]
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    medians = [row["ms"] for row in rows]
    spans = [
        [row["ms"] - row["interval"][0] for row in rows],
        [row["interval"][1] - row["ms"] for row in rows],
    ]
    colours = ["tab:blue" if "fused" in row["way"] else "tab:gray" for row in rows]
    axes.barh([row["way"] for row in rows], medians, xerr=spans, color=colours, capsize=3)
    for place, row in enumerate(rows):
        text = f"  {row['ms']:.1f} ms, {row['peak_gib']:.1f} GiB"
        axes.text(row["ms"], place, text, va="center")
    axes.set_xlim(0, 1.4 * max(medians))
    axes.set_xlabel("ms a step, median and 95% interval")
    config = result["config"]
    figure.suptitle(
        f"{config['layers']} blocks, hidden {config['hidden']}, {config['experts']} experts, "
        f"top-{config['topk']}, {config['batch']} x {config['length']} tokens, bf16, "
        f"{result['device']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def run_command(
    name: str,
    doc: str,
    integers: dict[str, tuple[int, str]],
    measure: Callable[[argparse.Namespace, torch.device], dict[str, Any]],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """The command of a benchmark that a GPU takes: measure, or draw what was measured.

    ``integers`` are its options: the default and the help of each.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m moe_custom_ops.benchmarks.{name}", description=doc.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"))
    for option, (default, text) in integers.items():
        parser.add_argument(f"--{option}", type=positive, default=default, help=text)
    options = parser.parse_args()
    if options.plot:
        source, target = options.plot
        try:
            result = json.loads(source.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--plot: {source}: {error}")
        if not target.parent.is_dir():
            parser.error(f"--plot: {target.parent} is no folder")
        try:
            plot(result, target)
        except (AttributeError, KeyError, TypeError):
            parser.error(f"--plot: {source} is no file that --out wrote")
        return
    if not torch.cuda.is_available():
        raise SystemExit("these times need an NVIDIA GPU, and none is visible")
    device = torch.device("cuda", torch.cuda.current_device())
    result = {"header": report.header(device, name, {}), **measure(options, device)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def main() -> None:
    run_command(
        "step",
        __doc__,
        {"repeats": (15, "batches of each way"), "steps": (5, "steps timed together")},
        lambda options, device: measure(Config(), device, options.repeats, options.steps),
        plot,
    )


if __name__ == "__main__":
    main()
