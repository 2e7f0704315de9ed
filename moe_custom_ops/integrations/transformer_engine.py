"""TransformerEngine's names: change the import, keep the calls.

    from moe_custom_ops.integrations.transformer_engine import (
        fused_moe_aux_loss, moe_permute, moe_unpermute,
    )

TransformerEngine itself is not needed.
"""

import torch
from torch import Tensor

from .. import checks
from ..losses import aux_loss
from ..permutation import expert_permutation, inverse_permutation
from ..rows import permute, restore, weighted_restore

_COUNTS_TO_WIDEN = (torch.bfloat16, torch.float16)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    deterministic: bool = True,
) -> Tensor:
    """TransformerEngine's ``fused_moe_aux_loss`` by :func:`moe_custom_ops.aux_loss`.

    Args:
        probs: [tokens, columns].
        tokens_per_expert: [columns]; a half type is taken as there, though it holds counts exactly
            only up to 256 (bfloat16) or 2048 (float16).
        total_num_tokens: an int, or a one-element tensor on the device of ``probs``.
        num_experts, topk, coeff: as of :func:`moe_custom_ops.aux_loss`.
        deterministic: taken, and always honoured: the bits depend on the inputs alone.

    Returns:
        0-dim tensor in the dtype of ``probs``: the float32 loss, rounded once.
    """
    checks.is_tensor("fused_moe_aux_loss", "tokens_per_expert", tokens_per_expert)
    if tokens_per_expert.dtype in _COUNTS_TO_WIDEN:
        tokens_per_expert = tokens_per_expert.float()
    checks.is_number("fused_moe_aux_loss", "coeff", coeff)
    loss = aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, float(coeff))
    return loss.to(probs.dtype)


def _only_index_map(op: str, map_type: str) -> None:
    if map_type != "index":
        raise ValueError(
            f"{op}: map_type must be 'index', got {map_type!r}; the row_id_map of a mask is "
            "TransformerEngine's own: use moe_custom_ops.expert_permutation_from_map with permute "
            "and weighted_restore"
        )


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
    num_experts: int | None = None,
) -> tuple[Tensor, Tensor]:
    """TransformerEngine's ``moe_permute`` for the index map.

    Args:
        inp: [T, H].
        routing_map: int32 or int64 [T, topk], the experts of each token; those outside of the
            layer's, negative ones included, are dropped.
        num_out_tokens: rows of the result; those beyond are dropped. T * topk if not above 0.
        max_token_num: taken and not used: nothing is cached.
        map_type: must be "index".
        num_experts: experts of the layer. None reads the highest id on the host; give it inside a
            compiled region or a CUDA graph.

    Returns:
        (rows in expert-major order [num_out_tokens, H], row_id_map int32 [T, topk]: the row of each
        assignment, -1 if none has it)
    """
    _only_index_map("moe_permute", map_type)
    checks.is_tensor("moe_permute", "routing_map", routing_map)
    checks.rank("moe_permute", "routing_map", routing_map, "[tokens, topk]")
    checks.is_integer("moe_permute", "num_out_tokens", num_out_tokens)
    if num_experts is None:
        num_experts = max(int(routing_map.max()) + 1, 1) if routing_map.numel() else 1
    checks.integer("moe_permute", "num_experts", num_experts, 1)
    num_rows = num_out_tokens if num_out_tokens > 0 else None
    order, _, _ = expert_permutation(routing_map, num_experts, num_rows=num_rows)
    topk = routing_map.shape[1]
    row_id_map = inverse_permutation(order, routing_map.shape[0], topk)
    return permute(inp, order, topk, inverse=row_id_map), row_id_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
) -> Tensor:
    """TransformerEngine's ``moe_unpermute`` for the index map.

    Rows are multiplied and added in float32 and rounded once, without atomics.

    Args:
        inp: rows in expert-major order [N, H].
        row_id_map: what :func:`moe_permute` returned, [T, topk].
        merging_probs: optional weights [T, topk].
        restore_shape: taken and not used: the map has it.
        map_type: must be "index".
        probs: the older name of ``merging_probs``.

    Returns:
        [T, H] in the dtype of ``inp``.
    """
    _only_index_map("moe_unpermute", map_type)
    checks.is_tensor("moe_unpermute", "inp", inp)
    checks.is_tensor("moe_unpermute", "row_id_map", row_id_map)
    checks.rank("moe_unpermute", "row_id_map", row_id_map, "[tokens, topk]")
    checks.dtype("moe_unpermute", "row_id_map", row_id_map, (torch.int32,))
    both = merging_probs is not None and probs is not None
    checks.value(not both, "moe_unpermute", "probs", "None beside merging_probs", "both")
    weights = probs if merging_probs is None else merging_probs
    num_tokens, topk = row_id_map.shape
    if weights is not None:
        checks.is_tensor("moe_unpermute", "merging_probs", weights)
        expected = [num_tokens, topk]
        checks.same_shape("moe_unpermute", "merging_probs", weights, expected, f"{expected}")
    order = _order_of(row_id_map, inp.shape[0])
    if weights is None:
        return restore(inp, order, num_tokens, topk, inverse=row_id_map)
    return weighted_restore(inp, weights, order, inverse=row_id_map)


def _order_of(inverse: Tensor, num_rows: int) -> Tensor:
    """int32 [num_rows]: the assignment of each row, from the row of each assignment."""
    rows = inverse.reshape(-1).long()
    # What has no row goes behind the last one.
    rows = torch.where((rows >= 0) & (rows < num_rows), rows, num_rows)
    assignments = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    order = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=rows.device)
    return order.scatter(0, rows, assignments)[:num_rows]
