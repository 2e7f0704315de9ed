"""A Transformers training step, stock against the adapter: times, memory, losses, and equal bits.

    python -m moe_custom_ops.benchmarks.transformers_step --out step.json
    python -m moe_custom_ops.benchmarks.transformers_step --plot step.json losses.png

Random weights and the layer sizes of Qwen3-30B-A3B. Each way trains twice from the same state on
the same batches, and is timed after each.
"""

import argparse
import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..integrations.transformers import NAME, register, use_load_balancing_loss
from .step import batch_time, interval

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

    def step(self) -> Tensor:
        ids = self.batches[self.place % BATCHES]
        self.place += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.run(input_ids=ids, labels=ids, output_router_logits=True).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach()

    def digest(self) -> list[int]:
        """Of every parameter's bits, two sums: one of them sees the places."""
        sums = []
        for parameter in self.parameters:
            bits = parameter.detach().flatten().view(torch.int16).long()
            weights = torch.arange(bits.shape[0], device=bits.device) % 8191 + 1
            sums += [bits.sum(), (bits * weights).sum()]
        return torch.stack(sums).tolist()


def nondeterministic_ops(trained: Trained) -> list[str]:
    """What PyTorch says of a step's ops that have no deterministic form in use."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained.step()
    finally:
        torch.use_deterministic_algorithms(False)
    texts = {str(warning.message).split(".")[0] for warning in caught}
    return sorted(text for text in texts if "deterministic" in text)


def step_time(trained: Trained, steps: int, device: torch.device) -> float:
    """Milliseconds of a step."""
    if device.type == "cuda":
        return batch_time(trained.step, steps)
    start = time.perf_counter()
    for _ in range(steps):
        trained.step()
    return (time.perf_counter() - start) / steps * 1e3


def allocated(device: torch.device) -> int:
    """Bytes in use, from which on :func:`peaked` counts."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peaked(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure(
    sizes: dict[str, Any], length: int, steps: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    rows = {}
    for way in WAYS:
        runs = []
        for _ in range(2):
            torch._dynamo.reset()
            trained = Trained(sizes, way, length, device)
            before = allocated(device)
            context: Any = contextlib.nullcontext()
            if way.implementation == NAME:
                context = use_load_balancing_loss(trained.model)
            with context:
                losses = torch.stack([trained.step() for _ in range(steps)]).tolist()
                peak = peaked(device) - before
                digest = trained.digest()
                times = [step_time(trained, 5, device) for _ in range(repeats)]
                ops = nondeterministic_ops(trained)
            runs.append((losses, digest, times, peak, ops))
            del trained
        (losses, digest, times, peak, ops), again = runs
        rows[way.name] = {
            "ms": statistics.median(times + again[2]),
            "interval": interval(times + again[2]),
            "peak_gib": peak / 2**30,
            "losses": losses,
            "same_losses_again": losses == again[0],
            "same_parameters_again": digest == again[1],
            "not_deterministic": ops,
        }
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
        axes.plot(row["losses"], style, label=name, linewidth=1.2)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moe_custom_ops.benchmarks.transformers_step",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.plot[0].read_text()), options.plot[1])
        return
    if not torch.cuda.is_available():
        raise SystemExit("these times need an NVIDIA GPU, and none is visible")
    sizes = QWEN3_30B_A3B | {
        "num_hidden_layers": options.layers,
        "max_position_embeddings": options.length,
    }
    device = torch.device("cuda", torch.cuda.current_device())
    result = measure(sizes, options.length, options.steps, options.repeats, device)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
