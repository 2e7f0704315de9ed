"""DeepSpeed AutoEP: its fused combine, by the ops of this package.

from moe_custom_ops.integrations.deepspeed import select

select(layer)       # an AutoEPMoELayer; from then on combine_impl="fused_weighted_sum" is ours
"""

import sys
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..rows import weighted_restore
from .versions import require

FUSED = "fused_weighted_sum"
_LIBRARY_OPS = "fused_token_ops"


def fused_weighted_restore(
    combined_rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    top_k: int,
    shape: tuple[int, int, int],
) -> Tensor:
    """DeepSpeed's ``fused_weighted_restore`` by :func:`moe_custom_ops.weighted_restore`.

    Args:
        combined_rows: expert outputs [N, H], in the order of ``token_indices_sorted``.
        top_scores: [batch * seq, top_k], or [batch, seq, top_k].
        token_indices_sorted: the assignment of each row [N].
        top_k: experts per token.
        shape: (batch, seq, H).

    Returns:
        [batch, seq, H] in the dtype of the rows: float32 products and sums, one rounding. Of an
        assignment that two rows hold the higher row wins, and of one that no row holds nothing is
        added; both have gradients that agree with that.
    """
    op = "fused_weighted_restore"
    checks.is_tensor(op, "combined_rows", combined_rows)
    checks.is_tensor(op, "top_scores", top_scores)
    checks.integer(op, "top_k", top_k, 1)
    sizes = shape if isinstance(shape, list | tuple) else ()
    is_shape = len(sizes) == 3 and all(isinstance(n, int) and n >= 0 for n in sizes)
    checks.value(is_shape, op, "shape", "(batch, seq, hidden)", shape)
    batch, seq, hidden = shape
    expected = f"of {batch} * {seq} * {top_k} scores"
    checks.value(
        top_scores.numel() == batch * seq * top_k, op, "top_scores", expected, top_scores.numel()
    )
    same = combined_rows.dim() == 2 and combined_rows.shape[1] == hidden
    checks.shape(op, "combined_rows", combined_rows, f"[N, {hidden}]", same)
    scores = top_scores.reshape(batch, seq, top_k)
    return weighted_restore(combined_rows, scores, token_indices_sorted)


def check_config(
    score_apply: str = "post",
    combine_impl: str = "auto",
    tensor_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 1,
    comm_backend: str = "comm",
) -> None:
    """Refuse what the fused combine cannot honour: before any process group is made.

    Every reason is in the message, so that none hides another.

    Args:
        score_apply: when scores multiply, resolved; the fused combine is the "post" one.
        combine_impl: what the config asks for; another one than the fused is not overruled.
        tensor_parallel_size: folded tensor parallelism (``tensor_parallel.autotp_size``).
        expert_tensor_parallel_size: tensor parallelism within the experts.
        comm_backend: "deepep" reduces the rows itself.

    Raises:
        ValueError: with all reasons.
    """
    sizes = (
        ("tensor_parallel.autotp_size", tensor_parallel_size),
        ("expert_tensor_parallel_size", expert_tensor_parallel_size),
    )
    known = ("comm", "deepep")
    refusals = [
        *(
            (not isinstance(size, int) or size < 1, f"{name} must be an int of 1, got {size!r}")
            for name, size in sizes
        ),
        (
            comm_backend not in known,
            f"comm_backend must be 'comm', got {comm_backend!r}, which is not known",
        ),
        (
            score_apply != "post",
            f"score_apply must be 'post', got {score_apply!r}: use combine_impl='weighted_sum'",
        ),
        (
            combine_impl not in ("auto", FUSED),
            f"combine_impl must be 'auto' or {FUSED!r}, got {combine_impl!r}: it asks for another",
        ),
        (
            isinstance(tensor_parallel_size, int) and tensor_parallel_size > 1,
            f"tensor_parallel.autotp_size must be 1, got {tensor_parallel_size}: folded tensor "
            "parallelism restores tokens from its own metadata",
        ),
        (
            isinstance(expert_tensor_parallel_size, int) and expert_tensor_parallel_size > 1,
            f"expert_tensor_parallel_size must be 1, got {expert_tensor_parallel_size}",
        ),
        (comm_backend == "deepep", "comm_backend must be 'comm', got 'deepep', which reduces"),
    ]
    reasons = [text for refused, text in refusals if refused]
    if reasons:
        raise ValueError("deepspeed.check_config: " + "; ".join(reasons))


def select(layer: Any, **config: Any) -> None:
    """Let ``layer``, an AutoEP layer, combine by :func:`fused_weighted_restore` of here.

    Its ``combine_impl`` becomes "fused_weighted_sum". In the library's module of layers the fused
    op and its check of support are replaced, for all layers that ask for it: they then run on
    CPUs and in float64 too.

    Args:
        layer: has ``combine_impl`` and ``score_apply``. Its "weighted_sum" is taken for the default
            that "auto" resolves to, which it cannot be told from.
        **config: as of :func:`check_config`, where the layer does not know.

    Raises:
        ValueError: as :func:`check_config`; or the layer is none of AutoEP's.

    Another version of DeepSpeed than a tested one gives one warning.
    """
    modules = [sys.modules.get(cls.__module__) for cls in type(layer).__mro__]
    module = next((module for module in modules if hasattr(module, _LIBRARY_OPS)), None)
    is_layer = module is not None and hasattr(layer, "combine_impl")
    checks.value(is_layer, "select", "layer", "a layer of AutoEP", type(layer).__name__)
    assert module is not None
    if module.__name__.startswith("deepspeed"):
        require("deepspeed", "deepspeed", "0.19", "0.20")
    ops = getattr(module, _LIBRARY_OPS)
    folding = getattr(getattr(layer, "folding_group_handles", None), "spec", None)
    # Of one rank nothing is exchanged, by any backend.
    backend = getattr(layer, "comm_backend", "comm") if getattr(layer, "ep_size", 2) > 1 else "comm"
    known = {
        "score_apply": layer.score_apply,
        "combine_impl": "auto" if layer.combine_impl == "weighted_sum" else layer.combine_impl,
        "tensor_parallel_size": getattr(folding, "tp_size", 1),
        "comm_backend": backend,
    }
    check_config(**{**known, **config})
    ops.fused_weighted_restore = fused_weighted_restore
    ops.assert_supported = _assert_supported
    layer.combine_impl = FUSED


def _assert_supported(rows: Tensor, *, score_apply: str) -> None:
    """As the library's, for what this package has; the op itself refuses ROCm by name."""
    check_config(score_apply=score_apply)
    checks.dtype("fused_weighted_restore", "rows", rows, checks.FLOAT_DTYPES)
    checks.supported_device("fused_weighted_restore", "rows", rows)
    if rows.is_cuda and torch.version.hip is not None:
        raise ValueError("fused_weighted_restore: no ROCm; use combine_impl='weighted_sum'")
