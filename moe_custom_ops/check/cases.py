"""Calls of every op on inputs that are the same everywhere, and the digests of what they return."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import distributed
from ..losses import aux_loss, sequence_aux_loss
from ..permutation import (
    expert_permutation,
    expert_permutation_from_counts,
    expert_permutation_from_map,
    inverse_permutation,
)
from ..rows import permute, permute_with_scores, restore, weighted_restore
from ..testing import canonical_bits

Results = dict[str, Tensor]

TOKENS, EXPERTS, TOPK, HIDDEN, COEFF = 100, 16, 4, 72, 1e-2
# Of the losses: tiles of 128 tokens, the last one not whole.
LOSS_EXPERTS, NUM_TILES = 64, 8
LOSS_TOKENS = NUM_TILES * distributed.tile_tokens(LOSS_EXPERTS) + 37
_MASK = 2**32 - 1


def integers(count: int, seed: int) -> Tensor:
    """int64 [count] in [0, 2**32): a hash of the place, in integer arithmetic on the CPU."""
    x = (torch.arange(count) + (seed << 20)) & _MASK
    # Constants of the 32-bit finalizer of MurmurHash3.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x


def floats(*shape: int, seed: int, signed: bool = True) -> Tensor:
    """float32 with 24 random bits and exponents from -8 to -1: their sums round."""
    hashed = integers(torch.Size(shape).numel(), seed)
    mantissa = ((hashed >> 8) + 1).double() / 2**24
    powers = torch.tensor([0.5**n for n in range(1, 9)], dtype=torch.float64)
    sign = 1 - 2 * ((hashed >> 3) & 1).double() if signed else 1.0
    return (sign * mantissa * powers[hashed & 7]).float().view(shape)


def expert_ids(num_tokens: int, num_experts: int, topk: int, seed: int) -> Tensor:
    """int64 [num_tokens, topk], distinct within a token, uneven over the experts."""
    first = integers(num_tokens, seed) % num_experts * (integers(num_tokens, seed + 1) & 1)
    step = 2 * (integers(num_tokens, seed + 2) % (num_experts // 2)) + 1
    return (first[:, None] + step[:, None] * torch.arange(topk)) % num_experts


def counts_of(ids: Tensor, num_experts: int) -> Tensor:
    """int64 [num_experts]: the assignments of each expert."""
    return torch.bincount(ids.flatten(), minlength=num_experts)


def gradients(outs: Sequence[Tensor], seed: int, **leaves: Tensor) -> Results:
    """Of ``leaves``, where each of ``outs`` has a gradient made from ``seed``."""
    weights = [floats(*x.shape, seed=seed).to(x.device, x.dtype) for x in outs]
    grads = torch.autograd.grad(outs, list(leaves.values()), weights)
    return {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def loss_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(probs [LOSS_TOKENS, LOSS_EXPERTS], expert ids [LOSS_TOKENS, TOPK]) on the CPU."""
    probs = floats(LOSS_TOKENS, LOSS_EXPERTS, seed=1, signed=False).to(dtype)
    return probs, expert_ids(LOSS_TOKENS, LOSS_EXPERTS, TOPK, seed=2)


def _aux_loss(device: torch.device, dtype: torch.dtype, masked: bool) -> Results:
    probs, ids = loss_inputs(dtype)
    mask = integers(LOSS_TOKENS, 3) % 3 > 0 if masked else None
    kept = ids if mask is None else ids[mask]
    leaf = probs.to(device).requires_grad_()
    counts = counts_of(kept, LOSS_EXPERTS).to(device)
    total = torch.tensor(len(kept), device=device) if masked else len(kept)
    place = None if mask is None else mask.to(device)
    loss = aux_loss(leaf, counts, total, LOSS_EXPERTS, TOPK, COEFF, token_mask=place)
    return {"loss": loss, **gradients([loss], 4, probs=leaf)}


def sequence_inputs() -> tuple[Tensor, Tensor]:
    """(probs [2, LOSS_TOKENS, LOSS_EXPERTS], counts of both sequences [2, LOSS_EXPERTS])"""
    probs = floats(2, LOSS_TOKENS, LOSS_EXPERTS, seed=5, signed=False)
    ids = expert_ids(2 * LOSS_TOKENS, LOSS_EXPERTS, TOPK, seed=6).view(2, -1)
    return probs, torch.stack([counts_of(own, LOSS_EXPERTS) for own in ids])


def _sequence_aux_loss(device: torch.device, packed: bool) -> Results:
    probs, counts = sequence_inputs()
    cu_seqlens = None
    if packed:
        probs = probs.flatten(0, 1)
        cu_seqlens = torch.tensor([0, LOSS_TOKENS, 2 * LOSS_TOKENS], device=device)
    leaf = probs.to(device).requires_grad_()
    loss = sequence_aux_loss(leaf, counts.to(device), TOPK, COEFF, cu_seqlens)
    return {"loss": loss, **gradients([loss], 7, probs=leaf)}


def _order(device: torch.device) -> Tensor:
    ids = expert_ids(TOKENS, EXPERTS, TOPK, seed=8).to(device)
    return expert_permutation(ids, EXPERTS, alignment=8)[0]


def _expert_permutation(device: torch.device) -> Results:
    ids = expert_ids(TOKENS, EXPERTS, TOPK, seed=8).to(device)
    order, counts, offsets = expert_permutation(ids, EXPERTS, alignment=8)
    inverse = inverse_permutation(order, TOKENS, TOPK)
    return {"order": order, "counts": counts, "offsets": offsets, "inverse": inverse}


def _from_map(device: torch.device) -> Results:
    routing_map = (integers(TOKENS * EXPERTS, 9) % 4 == 0).view(TOKENS, EXPERTS).to(device)
    results = expert_permutation_from_map(routing_map, TOPK, alignment=4)
    return dict(zip(("order", "counts", "offsets"), results, strict=True))


def _from_counts(device: torch.device) -> Results:
    counts = (integers(4 * EXPERTS, 10) % 9).view(4, EXPERTS).to(device)
    results = expert_permutation_from_counts(counts, 9 * 4 * EXPERTS)
    return dict(zip(("order", "counts", "offsets"), results, strict=True))


def _permute(device: torch.device, dtype: torch.dtype) -> Results:
    tokens = floats(TOKENS, HIDDEN, seed=11).to(device, dtype).requires_grad_()
    rows = permute(tokens, _order(device), TOPK)
    return {"rows": rows, **gradients([rows], 12, tokens=tokens)}


def _permute_with_scores(device: torch.device) -> Results:
    tokens = floats(TOKENS, HIDDEN, seed=11).to(device, torch.bfloat16).requires_grad_()
    scores = floats(TOKENS, TOPK, seed=13, signed=False).to(device).requires_grad_()
    rows, row_scores = permute_with_scores(tokens, scores, _order(device))
    return {
        "rows": rows,
        "row scores": row_scores,
        **gradients([rows, row_scores], 14, tokens=tokens, scores=scores),
    }


def _weighted_restore(device: torch.device, dtype: torch.dtype) -> Results:
    order = _order(device)
    rows = floats(len(order), HIDDEN, seed=15).to(device, dtype).requires_grad_()
    scores = floats(TOKENS, TOPK, seed=16, signed=False).to(device).requires_grad_()
    addend = floats(TOKENS, HIDDEN, seed=17).to(device, dtype).requires_grad_()
    out = weighted_restore(rows, scores, order, addend)
    return {"out": out, **gradients([out], 18, rows=rows, scores=scores, addend=addend)}


def _restore(device: torch.device) -> Results:
    order = _order(device)
    rows = floats(len(order), HIDDEN, seed=15).to(device, torch.bfloat16).requires_grad_()
    out = restore(rows, order, TOKENS, TOPK)
    return {"out": out, **gradients([out], 19, rows=rows)}


CASES: dict[str, Callable[[torch.device], Results]] = {
    "aux_loss, float32": lambda device: _aux_loss(device, torch.float32, False),
    "aux_loss, bfloat16, masked": lambda device: _aux_loss(device, torch.bfloat16, True),
    "aux_loss, float64": lambda device: _aux_loss(device, torch.float64, False),
    "sequence_aux_loss, batch": lambda device: _sequence_aux_loss(device, False),
    "sequence_aux_loss, packed": lambda device: _sequence_aux_loss(device, True),
    "expert_permutation": _expert_permutation,
    "expert_permutation_from_map": _from_map,
    "expert_permutation_from_counts": _from_counts,
    "permute, float32": lambda device: _permute(device, torch.float32),
    "permute, bfloat16": lambda device: _permute(device, torch.bfloat16),
    "permute_with_scores": _permute_with_scores,
    "weighted_restore, float32": lambda device: _weighted_restore(device, torch.float32),
    "weighted_restore, bfloat16": lambda device: _weighted_restore(device, torch.bfloat16),
    "weighted_restore, float16": lambda device: _weighted_restore(device, torch.float16),
    "weighted_restore, float64": lambda device: _weighted_restore(device, torch.float64),
    "restore": _restore,
}


def digest(x: Tensor) -> str:
    """16 hexadecimal digits of dtype, shape and bits, NaNs and zeros made one pattern each."""
    content = canonical_bits(x).reshape(-1).view(torch.uint8)
    text = f"{x.dtype} {list(x.shape)} ".encode() + bytes(content.tolist())
    return hashlib.sha256(text).hexdigest()[:16]


def digests(results: Results) -> dict[str, str]:
    return {name: digest(x) for name, x in results.items()}
