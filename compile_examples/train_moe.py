"""Train a small byte-level mixture-of-experts transformer on real text, with the step compiled.

    python compile_examples/train_moe.py
    python compile_examples/train_moe.py --text book.txt --steps 2000
    python compile_examples/train_moe.py --check-bits

The text is CPython's own documentation (``pydoc_data.topics``) or ``--text FILE``; its last tenth
is held out. Forward and loss, and so their backward, are one graph of ``torch.compile``; the
optimizer step is another. Writes ``train_moe.png`` and ``train_moe.json`` to ``out``.
``--check-bits`` trains twice from one seed and fails unless every parameter has the same bits.

Needs matplotlib and tqdm (the extra ``examples``). Without a C++ compiler it runs eagerly.
"""

import argparse
import json
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.nn import functional as F
from tqdm import tqdm

from moe_custom_ops.nn import MoE

HEAD_SIZE = 32
REPORTS = 10
CURVE_POINTS = 100
NATS_PER_BIT = math.log(2)

LossFunction = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def option(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": f"{text} (default: {default})"})


@dataclass(frozen=True)
class Config:
    """Each field is an option of the command line."""

    steps: int = option(500, "optimizer steps")
    batch_size: int = option(16, "sequences per step")
    seq_len: int = option(128, "bytes per sequence")
    hidden: int = option(128, f"width, a multiple of {HEAD_SIZE}")
    layers: int = option(2, "transformer blocks")
    experts: int = option(8, "experts per layer")
    topk: int = option(2, "experts per token")
    lr: float = option(3e-3, "highest learning rate")
    seed: int = option(0, "seed of the weights and of the data's order")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.hidden % HEAD_SIZE:
            raise ValueError(f"hidden must be a multiple of {HEAD_SIZE}, got {self.hidden}")
        if self.topk > self.experts:
            raise ValueError(f"topk must be at most experts = {self.experts}, got {self.topk}")


@dataclass
class Run:
    parameters: dict[str, Tensor]
    tokens_per_second: float
    train: dict[str, list[Any]]  # step, bits_per_byte
    validation: dict[str, list[Any]]  # step, bits_per_byte
    expert_load: dict[str, list[Any]]  # step, share [points, layers, experts]


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden
        self.attention_norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.moe_norm = nn.RMSNorm(hidden)
        self.moe = MoE(
            hidden,
            2 * hidden,
            num_experts=config.experts,
            topk=config.topk,
            max_tokens=config.batch_size * config.seq_len,
        )

    def forward(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_SIZE))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [batch, heads, seq, head size]
        attended = F.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True
        )
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        out, aux_loss, tokens_per_expert = self.moe(self.moe_norm(x))
        return x + out, aux_loss, tokens_per_expert


class ByteTransformer(nn.Module):
    """Bytes [batch, seq] to logits of the next byte [batch, seq, 256].

    Also returns the sum of the layers' load-balancing losses, and tokens per expert
    [layers, experts].
    """

    rotation: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, 256, bias=False)
        frequencies = 10_000 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        angles = torch.outer(torch.arange(config.seq_len), frequencies)
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embedding(inputs)
        aux_losses, tokens_per_expert = [], []
        for block in self.blocks:
            x, aux_loss, tokens = block(x, self.rotation)
            aux_losses.append(aux_loss)
            tokens_per_expert.append(tokens)
        logits = self.head(self.norm(x))
        return logits, torch.stack(aux_losses).sum(), torch.stack(tokens_per_expert)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding of [..., seq, HEAD_SIZE]."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def compute_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss to minimise, bits per byte, and each expert's share of its layer's assignments."""
    logits, aux_loss, tokens_per_expert = model(inputs)
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    load = tokens_per_expert / tokens_per_expert.sum(-1, keepdim=True)
    return cross_entropy + aux_loss, cross_entropy.detach() / NATS_PER_BIT, load


def read_text(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc_data.topics: pass --text FILE") from error
    return "\n\n".join(topics.values()).encode()


def split_text(text: bytes, seq_len: int) -> tuple[Tensor, Tensor]:
    """The bytes to train on, and the last tenth, which is held out."""
    shortest = 10 * (seq_len + 1)
    if len(text) < shortest:
        raise ValueError(
            f"the text must have at least {shortest} bytes for --seq-len {seq_len}, got {len(text)}"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = len(text) // 10
    return data[:-held_out], data[-held_out:]


def unigram_entropy(text: bytes) -> float:
    """Bits per byte of the best code that knows the frequencies of bytes and nothing else."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def windows(data: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, seq_len], one window of the text from each start."""
    offsets = torch.arange(seq_len + 1, device=data.device)
    text = data[starts[:, None] + offsets].long()
    return text[:, :-1], text[:, 1:]


def validation_starts(length: int, config: Config) -> Tensor:
    """Evenly spaced starts [batches, batch_size] of windows that cover a text of ``length``.

    Windows overlap a little where that fills the last batch: one shape is one compiled graph.
    """
    batches = math.ceil((length - 1) / (config.seq_len * config.batch_size))
    count, last = batches * config.batch_size, length - config.seq_len - 1
    starts = torch.arange(count) * last // max(1, count - 1)
    return starts.view(batches, config.batch_size)


def evaluate(
    loss_function: LossFunction, model: nn.Module, data: Tensor, starts: Tensor, seq_len: int
) -> float:
    """Bits per byte. Gradients stay enabled, because this is the graph that training compiled."""
    bits = [loss_function(model, *windows(data, batch, seq_len))[1] for batch in starts]
    return torch.stack(bits).mean().item()


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the rate."""
    warmup = max(1, config.steps // 10)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / (config.steps - warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def averages(values: list[Tensor]) -> list[Any]:
    """The mean of each of CURVE_POINTS stretches of ``values``, fewer if there are fewer values."""
    stretches = torch.stack(values).double().cpu().tensor_split(min(CURVE_POINTS, len(values)))
    return [stretch.mean(0).tolist() for stretch in stretches]


def train(
    config: Config, data: tuple[Tensor, Tensor], device: torch.device, compiled: bool, name: str
) -> Run:
    training, held_out = (part.to(device) for part in data)
    # Drawn on the CPU: every device gets the same first weights and the same order of the data.
    torch.manual_seed(config.seed)
    model = ByteTransformer(config).to(device)
    num_starts = len(training) - config.seq_len
    starts = torch.randint(num_starts, (config.steps, config.batch_size)).to(device)
    held_out_starts = validation_starts(len(held_out), config).to(device)

    # As a tensor the rate follows its schedule without a recompile.
    rate = torch.tensor(config.lr, device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), capturable=device.type == "cuda"
    )
    loss_function: LossFunction = compute_loss
    optimizer_step: Callable[[], Any] = optimizer.step
    if compiled:
        loss_function = torch.compile(compute_loss, fullgraph=True, dynamic=False)
        optimizer_step = torch.compile(optimizer.step)

    bits: list[Tensor] = []
    loads: list[Tensor] = []
    validation: dict[int, float] = {}
    report_steps = {max(1, config.steps * i // REPORTS) for i in range(1, REPORTS + 1)}
    seconds = tokens_per_second = 0.0
    clock = time.perf_counter()
    progress = tqdm(range(1, config.steps + 1), desc=name, unit="step", disable=None)
    for step in progress:
        rate.fill_(learning_rate(step, config))
        inputs, targets = windows(training, starts[step - 1], config.seq_len)
        loss, step_bits, load = loss_function(model, inputs, targets)
        loss.backward()
        optimizer_step()
        optimizer.zero_grad()
        bits.append(step_bits)
        loads.append(load)
        if step == 1:
            step_bits.item()  # waits for the device; this step compiled and is not timed
            clock = time.perf_counter()
        if step in report_steps:
            relative = load.cpu() * config.experts
            seconds += time.perf_counter() - clock
            tokens_per_second = (step - 1) * inputs.numel() / seconds
            result = evaluate(loss_function, model, held_out, held_out_starts, config.seq_len)
            if not math.isfinite(result):
                sys.exit(f"train_moe: the loss is {result} at step {step}: try a lower --lr")
            validation[step] = result
            progress.write(
                f"{name}: step {step:4} of {config.steps}, validation {result:.3f} bits per byte, "
                f"{tokens_per_second:,.0f} tokens/s, "
                f"expert load {relative.min():.2f} to {relative.max():.2f} of an even share"
            )
            clock = time.perf_counter()

    steps = averages([torch.tensor(step) for step in range(1, config.steps + 1)])
    return Run(
        parameters={name: p.detach().cpu().clone() for name, p in model.named_parameters()},
        tokens_per_second=tokens_per_second,
        train={"step": steps, "bits_per_byte": averages(bits)},
        validation={"step": [*validation], "bits_per_byte": [*validation.values()]},
        expert_load={"step": steps, "share": averages(loads)},
    )


def different_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in any bit."""

    def raw(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return [name for name in first if not torch.equal(raw(first[name]), raw(second[name]))]


def plot(run: Run, entropy: float, config: Config, path: Path) -> None:
    figure = Figure(figsize=(13, 5), dpi=120, layout="constrained")
    losses, loads = figure.subplots(1, 2)
    losses.plot(*run.train.values(), label="training")
    losses.plot(*run.validation.values(), "o-", label="held-out text", clip_on=False)
    label = f"unigram entropy of the text, {entropy:.2f}"
    losses.axhline(entropy, color="gray", linestyle="--", label=label)
    final = run.validation["bits_per_byte"][-1]
    losses.set_title(f"Loss: {final:.2f} bits per byte on held-out text")
    losses.set(xlabel="step", ylabel="bits per byte", xlim=(0, config.steps))
    losses.set_ylim(bottom=0)
    losses.grid(alpha=0.3)
    losses.legend()

    load = torch.tensor(run.expert_load["share"]).flatten(1).T * config.experts
    extent = (0, config.steps, len(load), 0)
    colors = {"cmap": "RdBu_r", "vmin": 0, "vmax": 2}
    image = loads.imshow(load, aspect="auto", interpolation="nearest", extent=extent, **colors)
    figure.colorbar(image, ax=loads, extend="max", label="share of the assignments (1 = even)")
    for layer in range(1, config.layers):
        loads.axhline(layer * config.experts, color="black", linewidth=1.5)
    centres = [(layer + 0.5) * config.experts for layer in range(config.layers)]
    loads.set_yticks(centres, [f"layer {layer}" for layer in range(config.layers)])
    loads.set(title="Expert load", xlabel="step", ylabel=f"{config.experts} experts of each layer")
    figure.savefig(path)


def has_cpp_compiler() -> bool:
    """Whether Inductor finds the C++ compiler that it would call."""
    try:
        get_cpp_compiler()
    except (OSError, RuntimeError):
        return False
    return True


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level MoE transformer under torch.compile."
    )
    add = parser.add_argument
    for known in fields(Config):
        flag = "--" + known.name.replace("_", "-")
        add(flag, type=type(known.default), default=known.default, help=known.metadata["help"])
    add("--text", type=Path, metavar="FILE", help="text to train on (default: Python's own docs)")
    add("--out", type=Path, default="out", metavar="DIR", help="folder of results (default: out)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    add("--eager", action="store_true", help="do not compile")
    add("--check-bits", action="store_true", help="train twice and compare every bit")
    return parser


def pick_device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that PyTorch can use, and it finds none")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def main(argv: list[str] | None = None) -> None:
    start = time.perf_counter()
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    try:
        config = Config(**{known.name: getattr(arguments, known.name) for known in fields(Config)})
        device = pick_device(arguments.device)
        text = read_text(arguments.text)
        data = split_text(text, config.seq_len)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)
    # PyTorch's own optimizer step opens a profiler range, and compiling it warns of that.
    logging.getLogger("torch._dynamo.variables.ctx_manager").setLevel(logging.ERROR)
    compiled = not arguments.eager and has_cpp_compiler()
    if not compiled and not arguments.eager:
        print("no C++ compiler found (Inductor looks for $CXX, else g++): running eagerly")

    run = train(config, data, device, compiled, "training")
    if arguments.check_bits:
        again = train(config, data, device, compiled, "again")
        if differing := different_bits(run.parameters, again.parameters):
            sys.exit(f"train_moe: two runs differ in the bits of {', '.join(differing)}")
        print(f"same bits in two runs: all {len(run.parameters)} parameters")

    entropy, bits_per_byte = unigram_entropy(text), run.validation["bits_per_byte"][-1]
    picture, report = arguments.out / "train_moe.png", arguments.out / "train_moe.json"
    plot(run, entropy, config, picture)
    results = {
        "config": asdict(config),
        "text": str(arguments.text or "pydoc_data.topics"),
        "text_bytes": len(text),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "compiled": compiled,
        "same_bits": True if arguments.check_bits else None,
        "bits_per_byte": bits_per_byte,
        "unigram_entropy": entropy,
        "tokens_per_second": run.tokens_per_second,
        "seconds": time.perf_counter() - start,
        "train": run.train,
        "validation": run.validation,
        "expert_load": run.expert_load,
    }
    report.write_text(json.dumps(results, allow_nan=False) + "\n")
    print(
        f"held-out text: {bits_per_byte:.3f} bits per byte, {bits_per_byte / entropy:.0%} of the "
        f"unigram entropy of the text, {entropy:.3f}"
    )
    print(f"wrote {picture} and {report} after {results['seconds']:.0f} s")


if __name__ == "__main__":
    main()
