"""What other packages have for the same, where they are installed; imported at the first call."""

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

Ways = dict[str, Callable[..., Any]]


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def aux_loss(coeff: float) -> Ways:
    if not _has("transformer_engine"):
        return {}

    def transformer_engine(probs: Tensor, counts: Tensor, topk: int) -> Any:
        from transformer_engine.pytorch.router import fused_moe_aux_loss

        num_tokens, num_experts = probs.shape
        return fused_moe_aux_loss(probs, counts, num_tokens, num_experts, topk, coeff)

    return {"TransformerEngine": transformer_engine}


def weighted_restore() -> Ways:
    if not _has("deepspeed"):
        return {}

    def deepspeed(rows: Tensor, scores: Tensor, order: Any) -> Any:
        from deepspeed.ops.triton_ops.autoep_fused_token_ops import fused_weighted_restore

        shape = (1, order.tokens, rows.shape[1])
        out = fused_weighted_restore(rows, scores, order.order64, order.topk, shape)
        return out.view(order.tokens, -1)

    return {"DeepSpeed": deepspeed}
