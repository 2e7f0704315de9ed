"""The ways to bring the experts' rows back to the tokens, and which of them go together."""

import torch
from torch import Tensor

from .. import checks
from ..backend import load_kernels
from ..rows import restore, weighted_restore

FUSED, EAGER, BMM = IMPLS = ("fused_weighted_sum", "weighted_sum", "legacy_bmm")
POST, PRE, ACTIVATION = APPLIES = ("post", "pre", "activation")


def check_choice(combine_impl: str, score_apply: str) -> None:
    """Refuse what is no choice, and what ``combine_impl`` cannot honour, before anything runs."""
    for name, value, known in (
        ("combine_impl", combine_impl, IMPLS),
        ("score_apply", score_apply, APPLIES),
    ):
        expected = ", ".join(map(repr, known[:-1])) + f" or {known[-1]!r}"
        checks.value(value in known, "MoE", name, expected, repr(value))
    if combine_impl == FUSED and score_apply == PRE:
        raise ValueError(
            "MoE: combine_impl='fused_weighted_sum' must have score_apply='post' or 'activation', "
            "got 'pre': scores that the tokens already carry leave no weighted sum; use "
            "combine_impl='weighted_sum', or score_apply='activation'"
        )
    if combine_impl == BMM and score_apply != POST:
        raise ValueError(
            f"MoE: combine_impl='legacy_bmm' must have score_apply='post', got {score_apply!r}: "
            "a batched product has no scores to multiply by; use combine_impl='weighted_sum'"
        )


def check_support(device_type: str, dtype: torch.dtype) -> None:
    """Refuse a device, dtype or build that lacks the kernels."""
    if device_type not in checks.DEVICE_TYPES:
        raise ValueError(
            f"MoE: device must be on a CPU or CUDA device, got {device_type!r}, which has no "
            "kernels of this package; move the layer to one of them"
        )
    if dtype not in checks.FLOAT_DTYPES:
        raise TypeError(
            f"MoE: its experts must be of {checks.one_of(checks.FLOAT_DTYPES)}, got "
            f"{checks.dtype_name(dtype)}, which no combine_impl takes"
        )
    # A compiled layer runs expert_permutation, which refuses the same, before its collectives.
    if device_type == "cuda" and not torch.compiler.is_compiling():
        load_kernels("moe_custom_ops.rows")


def combine(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    inverse: Tensor,
    addend: Tensor | None,
    combine_impl: str,
    score_apply: str,
) -> Tensor:
    """The sum of each token's rows [T, H], weighted unless the scores were applied before."""
    num_tokens, topk = top_scores.shape
    if combine_impl == FUSED:
        if score_apply == POST:
            return weighted_restore(rows, top_scores, token_indices_sorted, addend, inverse=inverse)
        return restore(rows, token_indices_sorted, num_tokens, topk, addend, inverse=inverse)
    # [T, K, H], zero where no row exists.
    slots = inverse.clamp(min=0).long()
    found = torch.where((inverse >= 0)[..., None], rows[slots], 0).float()
    if combine_impl == BMM:
        out = torch.bmm(top_scores[:, None].float(), found)[:, 0]
    elif score_apply == POST:
        out = (found * top_scores[..., None]).sum(1)
    else:
        out = found.sum(1)
    out = out.to(rows.dtype)
    return out if addend is None else out + addend
