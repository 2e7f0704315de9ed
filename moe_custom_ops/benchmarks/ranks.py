"""The same bits on any number of ranks, and what that costs.

    torchrun --nproc-per-node 8 -m moe_custom_ops.benchmarks.ranks --json ranks.json

For 1, 2, 4, 8 of the ranks, as far as they go: digests of the loss and its gradient of one batch,
by eager, compiled and captured calls; the time of the ordered gather against an all-reduce of the
loss; and steps of an expert-parallel layer by both transports, held against a layer of one rank.
One file takes the runs under several ``NCCL_ALGO``. Exits with 1 where bits or the layer differ.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import aux_loss as one_rank
from .. import distributed
from ..check.cases import counts_of, digest, expert_ids, floats
from ..check.ranks import joined
from ..nn import MoE
from . import report
from .step import captured, share_of_ours
from .timing import batch_time, repeated

SIZES = (1, 2, 4, 8)
COEFF = 1e-2
# Of bfloat16 products that are grouped otherwise.
TOLERANCE = 2e-2


class Scale(NamedTuple):
    """Of the loss: tokens of the whole batch, of which every number of ranks owns whole tiles.

    Of the layer: tokens of a rank, and its sizes.
    """

    batch: int
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int


SCALES = {"cuda": Scale(16384, 4096, 2048, 1024, 64, 8), "cpu": Scale(4096, 64, 64, 32, 16, 4)}


class Rank(NamedTuple):
    """A group that this rank is of."""

    group: "dist.ProcessGroup"
    device: torch.device
    scale: Scale

    @property
    def own(self) -> slice:
        """Whole tiles of the batch."""
        size = self.scale.batch // self.group.size()
        return slice(size * self.group.rank(), size * (self.group.rank() + 1))

    def loss_inputs(self) -> tuple[Tensor, Tensor]:
        """(probs, counts) of this rank's own tokens."""
        scale, own = self.scale, self.own
        probs = floats(scale.batch, scale.experts, seed=1, signed=False)[own]
        ids = expert_ids(scale.batch, scale.experts, scale.topk, seed=2)[own]
        return probs.to(self.device), counts_of(ids, scale.experts).to(self.device)


def modes(device: torch.device) -> tuple[str, ...]:
    return ("eager", "compiled", "captured") if device.type == "cuda" else ("eager", "compiled")


def _loss_step(rank: Rank, mode: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that returns the loss over the ranks and the gradient of this rank's tokens."""
    scale = rank.scale
    probs, counts = rank.loss_inputs()
    leaf = probs.requires_grad_()

    def loss_of(x: Tensor) -> Tensor:
        arguments = len(x), scale.experts, scale.topk, COEFF, rank.group
        return distributed.aux_loss(x, counts, *arguments)

    torch._dynamo.reset()
    function = torch.compile(loss_of, fullgraph=True) if mode == "compiled" else loss_of

    def step() -> tuple[Tensor, Tensor]:
        loss = function(leaf)
        (grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad

    return captured(step) if mode == "captured" else step


def bits(rank: Rank, mode: str) -> dict[str, str]:
    """Digests of the loss and of the whole batch's gradient, which every rank sees alike."""
    loss, grad = _loss_step(rank, mode)()
    losses = sorted({digest(x) for x in joined(loss[None], 0, rank.group)})
    return {"loss": " ".join(losses), "gradient": digest(joined(grad, 0, rank.group))}


def _of_ranks(value: float, rank: Rank) -> Tensor:
    return joined(torch.tensor([value], dtype=torch.float64), 0, rank.group)


def _time(call: Callable[[], Any], rank: Rank, calls: int, repeats: int) -> float:
    """Microseconds of one of ``calls`` in a batch, of the slowest rank: the median of repeats."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier(rank.group)
        times.append(batch_time(call, calls, rank.device))
    return _of_ranks(statistics.median(times[1:]), rank).max().item()


def loss_times(rank: Rank) -> dict[str, float]:
    """Microseconds of a forward: by the gather, of a share, and with an all-reduce of the loss.

    The last is what is usual: counts summed over the ranks, this rank's loss, and a sum of floats.
    On a GPU captured, 20 in a graph.
    """
    scale = rank.scale
    probs, counts = rank.loss_inputs()

    def gathered(reduction: str) -> Tensor:
        arguments = len(probs), scale.experts, scale.topk, COEFF, rank.group
        options: Any = {"reduction": reduction, "max_tokens": scale.batch}
        return distributed.aux_loss(probs, counts, *arguments, **options)

    def all_reduced() -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=rank.group)
        loss = one_rank(probs, total, scale.batch, scale.experts, scale.topk, COEFF)
        dist.all_reduce(loss, group=rank.group)
        return loss

    calls: dict[str, Callable[[], Tensor]] = {
        "ordered gather": lambda: gathered("global"),
        "share": lambda: gathered("partial"),
        "all-reduce": all_reduced,
    }
    times = {}
    for name, call in calls.items():
        number = 20
        if rank.device.type == "cuda":
            times[name] = _time(captured(repeated(call, number)), rank, 5, 10) / number
        else:
            times[name] = _time(call, rank, number, 3)
    return times


class Layer(NamedTuple):
    transport: str
    ms: float
    captured_ms: float | None
    error: float
    dropped: int
    ours: float | None


def _make(rank: Rank, **options: Any) -> MoE:
    scale = rank.scale
    torch.manual_seed(0)
    return MoE(
        scale.hidden,
        scale.intermediate,
        scale.experts,
        scale.topk,
        scale.tokens,
        device=rank.device,
        dtype=torch.bfloat16,
        **options,
    )


@torch.no_grad()
def _part_of(whole: MoE, rank: Rank, capacity: int | None) -> MoE:
    """A layer over the ranks, with this rank's parts of ``whole``."""
    layer = _make(rank, process_group=rank.group, rank_capacity=capacity)
    layer.router.weight.copy_(whole.router.weight)
    for own, parameter in ((layer.up, whole.up), (layer.down, whole.down)):
        first = rank.group.rank() * len(own)
        own.copy_(parameter[first : first + len(own)])
    return layer


def _layer_step(layer: MoE, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    parameters = list(layer.parameters())

    def step() -> Tensor:
        out, loss, _ = layer(x)
        total = (out - target).float().square().mean() + loss
        torch.autograd.grad(total, parameters)
        return out

    return step


def layers(rank: Rank) -> list[Layer]:
    """Forward and backward by each transport, and without one.

    ``error`` is the worst rank's, of the output; ``dropped`` is of all ranks.
    """
    scale = rank.scale
    generator = torch.Generator().manual_seed(rank.group.rank())
    shape = scale.tokens, scale.hidden
    x, target = (
        torch.randn(shape, generator=generator).to(rank.device, torch.bfloat16) for _ in range(2)
    )
    # What a rank sends to another if all are alike, and a quarter more.
    even = scale.tokens * scale.topk // rank.group.size()
    capacity = min(even + even // 4, scale.tokens * scale.topk)
    on_gpu = rank.device.type == "cuda"
    rows: list[Layer] = []
    whole = _make(rank)
    with torch.no_grad():
        expected = whole(x)[0].float()
    made = {
        "one rank": whole,
        "exact": _part_of(whole, rank, None),
        "capacity": _part_of(whole, rank, capacity),
    }
    for name, layer in made.items():
        step = _layer_step(layer, x, target)
        with torch.no_grad():
            out = layer(x)[0].float()
        error = ((out - expected).norm() / expected.norm()).item()
        dropped = 0 if layer.num_dropped is None else layer.num_dropped.item()
        ms = _time(step, rank, 5 if on_gpu else 1, 7 if on_gpu else 2) / 1e3
        captured_ms = None
        # The exact transport reads the numbers of rows on the host.
        if on_gpu and name != "exact":
            captured_ms = _time(captured(step), rank, 5, 7) / 1e3
        ours = share_of_ours(step) if on_gpu else None
        worst, lost = _of_ranks(error, rank).max().item(), int(_of_ranks(dropped, rank).sum())
        rows.append(Layer(name, ms, captured_ms, worst, lost, ours))
    return rows


def measure(device: torch.device) -> dict[str, Any]:
    """Of every number of ranks; ranks beyond a number wait."""
    world = dist.get_world_size()
    scale = SCALES[device.type]
    found: dict[str, Any] = {"bits": {}, "loss us": {}, "layer": {}}
    for size in (n for n in SIZES if n <= world):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            rank = Rank(group, device, scale)
            for mode in modes(device):
                found["bits"].setdefault(mode, {})[str(size)] = bits(rank, mode)
            found["loss us"][str(size)] = loss_times(rank)
            found["layer"][str(size)] = [row._asdict() for row in layers(rank)]
        dist.barrier()
    return found


def faults(found: dict[str, Any]) -> list[str]:
    """What differs that must not."""
    digests = {
        (mode, size): values
        for mode, sizes in found["bits"].items()
        for size, values in sizes.items()
    }
    first = next(iter(digests.values()))
    wrong = [
        f"{mode}, {size} ranks: other bits"
        for (mode, size), values in digests.items()
        if values != first
    ]
    for size, rows in found["layer"].items():
        for row in rows:
            # Of what is dropped all may be missing.
            if not row["error"] <= (1.0 if row["dropped"] else TOLERANCE):
                wrong.append(f"layer, {size} ranks, {row['transport']}: error {row['error']:.1e}")
    return wrong


def show(found: dict[str, Any]) -> None:
    for mode, sizes in found["bits"].items():
        for size, values in sizes.items():
            print(f"{mode}, {size} ranks: loss {values['loss']}, gradient {values['gradient']}")
    for size, times in found["loss us"].items():
        text = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
        print(f"loss, {size} ranks: {text}")
    alone = found["layer"]["1"][0]
    for size, rows in found["layer"].items():
        for row in rows:
            own = f", captured {row['captured_ms']:.2f}" if row["captured_ms"] else ""
            ours = f", {100 * row['ours']:.1f}% ours" if row["ours"] is not None else ""
            print(
                f"layer, {size} ranks, {row['transport']}: {row['ms']:.2f} ms{own}, "
                f"efficiency {100 * alone['ms'] / row['ms']:.0f}%, error {row['error']:.1e}, "
                f"{row['dropped']} dropped{ours}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="torchrun -m moe_custom_ops.benchmarks.ranks", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="add this run to a file")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 -m moe_custom_ops.benchmarks.ranks")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: {options.json.parent} is no folder")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        found = measure(device)
        code = 0
        # The only rank that is of every group.
        if dist.get_rank() == 0:
            show(found)
            wrong = faults(found)
            numbers = ", ".join(found["layer"])
            print("\n".join(wrong) or f"the same bits on {numbers} ranks")
            code = 1 if wrong else 0
            if options.json:
                _add(options.json, device, found)
    finally:
        dist.destroy_process_group()
    return code


def _add(path: Path, device: torch.device, found: dict[str, Any]) -> None:
    whole = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    whole["header"] = report.header(device, "ranks", {})
    whole["runs"][os.environ.get("NCCL_ALGO", "default")] = found
    path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
