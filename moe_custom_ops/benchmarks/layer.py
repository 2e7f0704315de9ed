"""The whole non-GEMM path of a layer, forward and backward, against the same in eager PyTorch.

Loss, order, copies into it and the weighted sums back: everything but router and experts, which
here are the identity.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..aux_loss import aux_loss
from ..expert_permutation import expert_permutation
from ..weighted_restore import inverse_permutation, permute, weighted_restore
from .losses import COEFF
from .permutations import eager_order
from .restores import eager_restore
from .timing import HostTimes, Row, graph_time, host_times, input_sets

LAYERS = [  # (tokens, topk, hidden, experts)
    (256, 8, 2048, 128),
    (8192, 8, 2048, 128),
    (8192, 2, 4096, 8),
    (4096, 8, 7168, 256),
]


def our_path(tokens: Tensor, scores: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    (num_tokens, topk), num_experts = ids.shape, probs.shape[1]
    order, counts, _ = expert_permutation(ids, num_experts)
    inverse = inverse_permutation(order, num_tokens, topk)
    rows = permute(tokens, order, topk, inverse=inverse)
    out = weighted_restore(rows, scores, order, inverse=inverse)
    return out, aux_loss(probs, counts, num_tokens, num_experts, topk, COEFF)


def eager_path(tokens: Tensor, scores: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    (num_tokens, topk), num_experts = ids.shape, probs.shape[1]
    order, _, counts = eager_order(ids, num_experts)
    out = eager_restore(tokens[order // topk], scores, order)
    scale = num_experts * COEFF / topk / num_tokens**2
    return out, (probs.sum(0, dtype=torch.float32) * counts).sum() * scale


def step(path: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of tokens, scores and probs."""

    def call(tokens: Tensor, scores: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        leaves = [tokens.requires_grad_(), scores.requires_grad_(), probs.requires_grad_()]
        out, loss = path(*leaves, ids)
        return torch.autograd.grad([out, loss], leaves, [tokens.detach(), torch.ones_like(loss)])

    return call


def make(
    num_tokens: int, topk: int, hidden: int, num_experts: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, scores, probs, ids)"""
    probs = torch.rand(num_tokens, num_experts, device=device).softmax(-1)
    scores, ids = probs.topk(topk)
    tokens = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
    return tokens, scores, probs, ids


def rows(device: torch.device) -> Iterator[Row]:
    for shape in LAYERS:
        num_tokens, topk, hidden, num_experts = shape
        # Copies and sums, forward and backward, and what the losses read.
        elements = num_tokens * hidden * (2 * (topk + 1) + 3 * topk + 2)
        num_bytes = 2 * elements + 4 * num_tokens * num_experts
        sets = input_sets(2 * num_tokens * hidden * topk, device)
        inputs = [make(*shape, device) for _ in range(sets)]
        torch._dynamo.reset()
        compiled = torch.compile(eager_path, fullgraph=True)
        paths: tuple[Callable[..., Any], ...] = (our_path, eager_path, compiled)
        times = [graph_time(step(path), inputs, calls=10) for path in paths]
        yield Row("layer f+b T{} K{} H{} E{}".format(*shape), num_bytes, *times)


def host(device: torch.device) -> HostTimes:
    inputs = make(*LAYERS[0], device)
    steps = [functools.partial(step(path), *inputs) for path in (our_path, eager_path)]
    ours, eager = host_times(steps)
    return HostTimes("layer", ours, {"eager": eager})
