"""The losses: each gradient is one row per sequence, repeated, so a backward writes no more."""

import torch
from torch import Tensor

from ..losses import aux_loss, sequence_aux_loss
from . import peers
from .models import Model
from .rows import Family, Inputs, Traffic

COEFF = 1e-2
SEQUENCE_TOKENS = 4096


def make(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    probs = torch.randn(num_tokens, model.experts, device=device).softmax(-1)
    counts = torch.bincount(probs.topk(model.topk).indices.flatten(), minlength=model.experts)
    return (probs,), (counts, model.topk)


def make_sequences(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    (probs,), _ = make(model, num_tokens, device)
    probs = probs.view(-1, min(num_tokens, SEQUENCE_TOKENS), model.experts)
    ids = probs.topk(model.topk).indices.flatten(1)
    counts = torch.zeros(len(probs), model.experts, dtype=torch.int64, device=device)
    return (probs,), (counts.scatter_add_(1, ids, torch.ones_like(ids)), model.topk)


def ours(probs: Tensor, counts: Tensor, topk: int) -> Tensor:
    return aux_loss(probs, counts, probs.shape[0], probs.shape[1], topk, COEFF)


def eager(probs: Tensor, counts: Tensor, topk: int) -> Tensor:
    num_tokens, num_experts = probs.shape
    scale = num_experts * COEFF / topk / num_tokens**2
    return (probs.sum(0, dtype=torch.float32) * counts).sum() * scale


def our_sequences(probs: Tensor, counts: Tensor, topk: int) -> Tensor:
    return sequence_aux_loss(probs, counts, topk, COEFF)


def eager_sequences(probs: Tensor, counts: Tensor, topk: int) -> Tensor:
    num_sequences, length, num_experts = probs.shape
    scale = num_experts * COEFF / topk / length**2 / num_sequences
    return (probs.sum(1, dtype=torch.float32) * counts).sum() * scale


def traffic(model: Model, inputs: Inputs) -> tuple[Traffic, Traffic]:
    """Forward: float32 probs, int64 counts, a float32 loss. Backward: counts, a float32 row."""
    probs, counts = inputs[0][0], inputs[1][0]
    forward = 4 * probs.numel() + 8 * counts.numel(), 4
    return forward, (8 * counts.numel() + 4, 4 * counts.numel())


FAMILIES = (
    Family(
        "aux_loss",
        make,
        {"ours": ours, "eager": eager, **peers.aux_loss(COEFF)},
        traffic,
        sizes=("decode", "train", "long"),
    ),
    Family(
        "sequence_aux_loss",
        make_sequences,
        {"ours": our_sequences, "eager": eager_sequences},
        traffic,
        sizes=("train", "long"),
    ),
)
