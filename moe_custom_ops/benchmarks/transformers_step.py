"""A Transformers training step, stock against the adapter: times, memory, losses, and equal bits.

    python -m moe_custom_ops.benchmarks.transformers_step --out step.json
    python -m moe_custom_ops.benchmarks.transformers_step --plot step.json losses.png

Random weights and the layer sizes of Qwen3-30B-A3B. Each way trains from the same state on the same
batches, twice as it comes, for a quarter of the steps, and twice with PyTorch's deterministic
algorithms, and is timed after the first run of both kinds. In the eager ways every op of a step
runs again on equal inputs, to name those whose bits differ; of the compiled ways the atomic
additions in Inductor's code are counted.
"""

import argparse
import contextlib
import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..integrations.transformers import NAME, register, use_load_balancing_loss
from .step import interval, run_command
from .timing import batch_time

# Of the model's published config; vocabulary, layers and positions are what the command says.
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
BATCHES = 8


class Way(NamedTuple):
    name: str
    implementation: str
    compiled: bool = False


WAYS = (
    Way("stock", "grouped_mm"),
    Way("adapter", NAME),
    Way("stock, compiled", "grouped_mm", compiled=True),
    Way("adapter, compiled", NAME, compiled=True),
)


def make_model(sizes: dict[str, Any], implementation: str, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    register()
    torch.manual_seed(0)
    # Where it is to be, as random numbers for billions of weights take minutes on a CPU.
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**sizes), experts_implementation=implementation, dtype=torch.bfloat16
        )
    return model.train()


def make_batches(vocab: int, length: int, device: torch.device) -> list[Tensor]:
    """Tokens that mostly follow from the one before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    known = min(vocab, 997)
    noise = torch.randint(known, (BATCHES, length), generator=generator)
    jumps = torch.rand(BATCHES, length, generator=generator) < 0.1
    ids = noise.clone()
    for place in range(1, length):
        follows = (3 * ids[:, place - 1] + 7) % known
        ids[:, place] = torch.where(jumps[:, place], noise[:, place], follows)
    return list(ids[:, None].to(device).unbind())


class Trained:
    def __init__(self, sizes: dict[str, Any], way: Way, length: int, device: torch.device) -> None:
        self.model = make_model(sizes, way.implementation, device)
        self.parameters = list(self.model.parameters())
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=fused)
        self.batches = make_batches(sizes["vocab_size"], length, device)
        self.run: Callable[..., Any] = self.model
        if way.compiled:
            self.run = torch.compile(self.model)
        self.place = 0

    def loss_and_gradients(self) -> Tensor:
        ids = self.batches[self.place % BATCHES]
        self.place += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.run(input_ids=ids, labels=ids, output_router_logits=True).loss
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.loss_and_gradients()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return loss

    def digest(self) -> list[int]:
        """Of every parameter's bits, two sums: one of them sees the places."""
        sums = []
        for parameter in self.parameters:
            bits = parameter.detach().flatten().view(torch.int16).long()
            weights = torch.arange(bits.shape[0], device=bits.device) % 8191 + 1
            sums += [bits.sum(), (bits * weights).sum()]
        return torch.stack(sums).tolist()


class Repeated(TorchDispatchMode):
    """Runs each op a few times more on equal inputs; ``differ`` names those whose bits differ."""

    TRIES = 3

    def __init__(self) -> None:
        super().__init__()
        self.differ: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = args, kwargs or {}
        # Memory that nobody has written is no result.
        tries = 0 if "empty" in func.__name__ else self.TRIES
        trials = [_trial(func, inputs) for _ in range(tries)]
        if any(not _same_bits(trials[0], other) for other in trials[1:]):
            self.differ.add(str(func))
        return func(*args, **inputs[1])


def _trial(func: Any, inputs: tuple[Any, Any]) -> list[Tensor]:
    """The tensors that ``func`` returns and those it may have written, of copies of its inputs."""
    if func._schema.is_mutable:
        inputs = tree_map_only(Tensor, torch.clone, inputs)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with torch.random.fork_rng(enabled=draws):
        out = func(*inputs[0], **inputs[1])
    seen = tree_leaves((out, inputs) if func._schema.is_mutable else out)
    # Where nothing is drawn, attention returns the state of the generator unwritten.
    return [
        leaf
        for leaf in seen
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or not draws)
    ]


def _same_bits(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(
        torch.equal(a.view(_bits(a)), b.view(_bits(b))) for a, b in zip(these, those, strict=True)
    )


def _bits(x: Tensor) -> torch.dtype:
    """A dtype of as many bytes in which a NaN equals itself."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return integers[x.element_size()] if x.is_floating_point() else x.dtype


def allocated(device: torch.device) -> int:
    """Bytes in use, from which on :func:`peaked` counts."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peaked(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


class Run(NamedTuple):
    losses: list[float]
    parameters: list[int]
    times: list[float]
    peak_gib: float
    atomic_adds: int
    differ: list[str]


def train(
    sizes: dict[str, Any],
    way: Way,
    length: int,
    steps: int,
    repeats: int,
    device: torch.device,
    examine: bool = False,
) -> Run:
    """``peak_gib`` is a step's, beyond the parameters and the optimizer's state."""
    torch._dynamo.reset()
    trained = Trained(sizes, way, length, device)
    context: Any = contextlib.nullcontext()
    if way.implementation == NAME:
        context = use_load_balancing_loss(trained.model)
    with context:
        # The code that the first step of a compiled way makes is the only place that shows these.
        first, sources = run_and_get_code(trained.step)
        trained.optimizer.zero_grad(set_to_none=True)
        before = allocated(device)
        losses = torch.stack([first, *(trained.step() for _ in range(steps - 1))]).tolist()
        peak = peaked(device) - before
        parameters = trained.digest()
        times = [batch_time(trained.step, 5, device) / 1e3 for _ in range(repeats)]
        differ: set[str] = set()
        if examine:
            with Repeated() as repeated:
                trained.loss_and_gradients()
            differ = repeated.differ
    atomic_adds = sum(source.count("atomic_add(") for source in sources)
    return Run(losses, parameters, times, peak / 2**30, atomic_adds, sorted(differ))


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """PyTorch's own switch, without the filling of fresh memory that comes with it."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    # Not ``warn_only``, with which attention keeps to its fastest way.
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(False)


def measure(
    sizes: dict[str, Any],
    length: int,
    steps: int,
    repeats: int,
    device: torch.device,
    ways: Sequence[Way] = WAYS,
) -> dict[str, Any]:
    """Of each way two runs as it comes, and two longer ones with deterministic algorithms."""
    rows = {}
    for way in ways:
        kinds: dict[str, Any] = {}
        for kind, context, number in (
            ("default", contextlib.nullcontext, max(2, steps // 4)),
            ("deterministic", deterministic_algorithms, steps),
        ):
            with context():
                run = train(sizes, way, length, number, repeats, device, examine=not way.compiled)
                again = train(sizes, way, length, number, 0, device)
            kinds[kind] = {
                "ms": statistics.median(run.times),
                "interval": interval(run.times),
                "peak_gib": run.peak_gib,
                "losses": run.losses,
                "same_bits_again": run.losses == again.losses
                and run.parameters == again.parameters,
                "differ": run.differ,
                "atomic_adds": run.atomic_adds,
            }
            shown = {name: value for name, value in kinds[kind].items() if name != "losses"}
            print(f"{way.name}, {kind}: {shown}", flush=True)
        rows[way.name] = kinds
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "torch": torch.__version__,
        "sizes": sizes,
        "length": length,
        "rows": rows,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    styles = ("-", "--", "-.", ":")
    for style, (name, row) in zip(styles, result["rows"].items(), strict=False):
        axes.plot(row["deterministic"]["losses"], style, label=name, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, with the balancing loss")
    axes.legend()
    sizes = result["sizes"]
    figure.suptitle(
        f"Qwen3-MoE, {sizes['num_hidden_layers']} layers, hidden {sizes['hidden_size']}, "
        f"{sizes['num_experts']} experts, {result['length']} tokens, bf16, {result['device']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def _measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    sizes = QWEN3_30B_A3B | {
        "num_hidden_layers": options.layers,
        "max_position_embeddings": options.length,
    }
    # What cuBLAS must be told before PyTorch calls it deterministic; on Hopper it is the default.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return measure(sizes, options.length, options.steps, options.repeats, device)


def main() -> None:
    integers = {
        "layers": (4, "of the model"),
        "length": (4096, "tokens of a batch"),
        "steps": (200, "of a deterministic run"),
        "repeats": (10, "batches of five steps that are timed"),
    }
    run_command("transformers_step", __doc__, integers, _measure, plot)


if __name__ == "__main__":
    main()
