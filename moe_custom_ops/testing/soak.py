"""python -m moe_custom_ops.testing.soak: many steps of changing sizes, in which nothing may move.

Every result and gradient of an input has the bits of a plain CPU call each time it comes by, memory
is where it was after the first rounds, and nothing is compiled or cached any more.
"""

import argparse
import gc
import hashlib
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ..losses import aux_loss, sequence_aux_loss
from ..permutation import expert_permutation
from ..rows import permute, restore, weighted_restore
from .compare import canonical_bits
from .inputs import make_probs

EXPERTS, TOPK, HIDDEN = 16, 4, 32
TOKEN_COUNTS = (0, 1, 2, 3, 17, 64, 65, 100, 255, 256)
SEEDS = 4
# Beyond what an allocator may still take for itself; a leak of a tensor a step is far more.
HOST_BYTES, PYTHON_BLOCKS = 2**25, 5000

Key = tuple[int, int]
Results = list[Tensor]


def draw(num_tokens: int, seed: int) -> Results:
    """[tokens, scores, probs, the same probs, expert_ids], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    probs, _ = make_probs(num_tokens, EXPERTS, seed=seed)
    scores, ids = probs.topk(TOPK)
    tokens = torch.randn(num_tokens, HIDDEN, generator=generator)
    return [tokens, scores, probs, probs.clone(), ids]


def forward(
    tokens: Tensor,
    scores: Tensor,
    probs: Tensor,
    other_probs: Tensor,
    ids: Tensor,
    total: Tensor,
    ends: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every kind of op of a layer.

    Each loss has probs of its own: Inductor would fuse their two gradients into one sum, and round
    it in another way.
    """
    order, counts, _ = expert_permutation(ids, EXPERTS, 8)
    rows = permute(tokens, order, TOPK)
    out = weighted_restore(rows, scores, order, restore(rows, order, tokens.shape[0], TOPK))
    loss = aux_loss(probs, counts, total, EXPERTS, TOPK, 1e-2, None, mask)
    return out, loss, sequence_aux_loss(other_probs, counts[None], TOPK, 1e-2, ends)


def step(function: Callable[..., Any], inputs: Results) -> Results:
    """Results and gradients, the latter of leaves that are made here."""
    leaves = [x.detach().requires_grad_() for x in inputs[:4]]
    results = function(*leaves, *inputs[4:])
    grads = torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])
    return [*(x.detach() for x in results), *grads]


def with_lengths(inputs: Results, num_tokens: int) -> Results:
    device, capacity = inputs[0].device, inputs[0].shape[0]
    total = torch.tensor(num_tokens, device=device)
    ends = torch.tensor([0, num_tokens], device=device)
    return [*inputs, total, ends, torch.arange(capacity, device=device) < num_tokens]


def digest(results: Results) -> str:
    state = hashlib.sha256()
    for x in results:
        state.update(f"{x.dtype} {list(x.shape)}".encode())
        state.update(canonical_bits(x).numpy().tobytes())
    return state.hexdigest()


def compiled(device: torch.device, backend: str) -> Callable[[Key], Results]:
    """A step of as many tokens as the key says, by one graph of dynamic sizes."""
    torch._dynamo.reset()
    counters.clear()
    function = torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)

    def run(key: Key) -> Results:
        inputs = [x.to(device) for x in draw(*key)]
        return step(function, with_lengths(inputs, key[0]))

    return run


def captured(device: torch.device) -> Callable[[Key], Results]:
    """A replay of one graph for the most tokens; what a key has less is masked and not routed."""
    capacity = max(TOKEN_COUNTS)
    static = with_lengths([x.to(device) for x in draw(capacity, 0)], capacity)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step(forward, static)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(forward, static)

    def run(key: Key) -> Results:
        num_tokens = key[0]
        inputs = draw(*key)
        for buffer, new in zip(static[:5], inputs, strict=True):
            # NaN and no expert: what is masked is not read.
            buffer.fill_(-1 if buffer is static[4] else torch.nan)[:num_tokens].copy_(new)
        static[5].fill_(num_tokens)
        static[6][1].fill_(num_tokens)
        static[7].fill_(False)[:num_tokens].fill_(True)
        graph.replay()
        return [x[:num_tokens] if x.dim() else x for x in results]

    return run


def caches() -> dict[str, int]:
    """How much has been compiled and planned in this process."""
    sizes = {"graphs": counters["stats"]["unique_graphs"], "kernels": 0, "plans": 0}
    for name, module in list(sys.modules.items()):
        if name.startswith("moe_custom_ops."):
            for thing in vars(module).values():
                for of_device in getattr(thing, "device_caches", {}).values():
                    sizes["kernels"] += len(of_device[0])
                if type(thing).__name__ == "Plans":
                    sizes["plans"] += len(thing)
    return sizes


def memory(device: torch.device) -> dict[str, int]:
    gc.collect()
    on_device = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return {"device": on_device, "host": resident, "Python blocks": sys.getallocatedblocks()}


def drive(what: str, run: Callable[[Key], Results], num_steps: int, device: torch.device) -> int:
    """Print how ``num_steps`` calls of ``run`` went, and return how many things were wrong."""
    keys = [(n, seed) for n in TOKEN_COUNTS for seed in range(SEEDS)]
    expected = {key: digest(step(forward, with_lengths(draw(*key), key[0]))) for key in keys}
    for key in 2 * keys:
        run(key)
    before, cached = memory(device), caches()
    choice = random.Random(0)
    different = set()
    for _ in range(num_steps):
        key = choice.choice(keys)
        if digest(run(key)) != expected[key]:
            different.add(key)
    after = memory(device)
    grown = {name: after[name] - size for name, size in before.items()}
    wrong = [f"other bits than on the CPU for {key}" for key in sorted(different)]
    allowed = {"device": 0, "host": HOST_BYTES, "Python blocks": PYTHON_BLOCKS}
    wrong += [f"{n} memory grew by {grown[n]}" for n, most in allowed.items() if grown[n] > most]
    if caches() != cached:
        wrong.append(f"caches grew from {cached} to {caches()}")
    print(f"{what}: {num_steps} steps on {device}, {len(keys)} inputs of {len(TOKEN_COUNTS)} sizes")
    print(f"  cached {cached}; grown by {grown}")
    for line in wrong or ["the same bits, memory and caches"]:
        print(f"  {line}")
    return len(wrong)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moe_custom_ops.testing.soak", description=__doc__
    )
    parser.add_argument("--captured", type=int, default=10_000, help="steps of the CUDA graph")
    parser.add_argument("--compiled", type=int, default=2_000, help="steps of torch.compile")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    wrong = drive("compiled", compiled(device, options.backend), options.compiled, device)
    if has_gpu:
        wrong += drive("captured", captured(device), options.captured, device)
    else:
        print(f"captured: {options.captured} steps skipped, which need an NVIDIA GPU")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
