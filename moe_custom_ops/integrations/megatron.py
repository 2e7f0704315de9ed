"""Megatron-Core: router, token dispatchers, and the three functions of its MoE utilities.

    from moe_custom_ops.integrations.megatron import convert

    convert(model)      # once the model is built

or, where a layer is specified: ``MoESubmodules(router=TopKRouter, ...)``, and a dispatcher in place
of ``layer.token_dispatcher``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..losses import aux_loss
from ..permutation import (
    expert_permutation_from_counts,
    expert_permutation_from_map,
    inverse_permutation,
)
from ..rows import permute as permute_rows
from ..rows import permute_with_scores, restore, weighted_restore
from .versions import require

require("megatron.core", "megatron-core", "0.16", "0.17")

from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402
from megatron.core.transformer.moe import router as library_router  # noqa: E402


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | float,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Megatron-Core's function by :func:`moe_custom_ops.aux_loss`: one kernel, one order of sums.

    Args:
        probs: [tokens, columns]; a sequence-level loss has the sequences side by side.
        tokens_per_expert: [columns].
        total_num_tokens: a number, or a tensor; a fraction under a padding mask included.
        topk: experts per token.
        num_experts: experts of the layer.
        moe_aux_loss_coeff: weight of the loss.
        fused: taken and not used: there is one implementation, and it is fused.
        padding_mask: bool [tokens], True for the tokens that count. (A router's mask has the other
            polarity: True is padding.)

    Returns:
        0-dim tensor of the dtype that the library's product of ``probs``, counts and total has.

    What differs in numbers: the sum over the tokens is a tree in float32, the scale is rounded once
    from float64.
    """
    op = "switch_load_balancing_loss_func"
    checks.is_tensor(op, "probs", probs)
    checks.is_tensor(op, "tokens_per_expert", tokens_per_expert)
    checks.is_number(op, "moe_aux_loss_coeff", moe_aux_loss_coeff)
    if padding_mask is not None:
        checks.is_tensor(op, "padding_mask", padding_mask)
        checks.dtype(op, "padding_mask", padding_mask, (torch.bool,))
    dtype = torch.promote_types(probs.dtype, tokens_per_expert.dtype)
    if tokens_per_expert.dtype not in checks.COUNT_DTYPES:
        is_float = tokens_per_expert.is_floating_point()
        tokens_per_expert = tokens_per_expert.to(torch.float32 if is_float else torch.int64)
    total = total_num_tokens
    if isinstance(total, float):
        total = probs.new_full((), total, dtype=torch.float64)
    numbers = total, num_experts, topk, float(moe_aux_loss_coeff)
    loss = aux_loss(probs, tokens_per_expert, *numbers, token_mask=padding_mask)
    if isinstance(total_num_tokens, Tensor):
        dtype = torch.promote_types(dtype, (1.0 / total_num_tokens.new_ones(())).dtype)
    return loss.to(dtype)


class TopKRouter(library_router.TopKRouter):  # type: ignore[misc]
    """The library's router, whose losses are :func:`switch_load_balancing_loss_func` of here."""

    def _with_loss(
        self,
        kind: str,
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool,
        batch: tuple[int, int] | None = None,
    ) -> Tensor:
        """``probs``, whose backward has that of the loss ``kind``, which is logged, too."""
        coeff = self.get_aux_loss_coeff(kind)
        if coeff == 0:
            return probs
        is_global, sequences = kind == "global_aux_loss", 1
        if batch is not None:
            # Sequence-first: a position's sequences lie side by side, as columns.
            length, sequences = batch
            scores, routing_map = scores.reshape(length, -1), routing_map.reshape(length, -1)
        group = self.tp_dp_cp_group if is_global else self.tp_cp_group
        counts, own_total, total = moe_utils.get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=group,
            topk=self.topk * sequences,
            with_padding_mask=with_padding_mask,
        )
        if is_global:
            self.global_tokens_per_expert += counts
            self.ga_steps += 1
            counts = self.global_tokens_per_expert / self.ga_steps
        loss = switch_load_balancing_loss_func(
            scores, counts, total, self.topk, self.config.num_moe_experts, coeff
        )
        return self.attach_and_log_load_balancing_loss(
            probs,
            coeff,
            loss / sequences,
            kind.replace("aux_loss", "load_balancing_loss"),
            group,
            reduce_group_has_dp=is_global,
            valid_token_count=own_total,
        )

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        inputs = probs, scores_for_aux_loss, routing_map, with_padding_mask
        return self._with_loss("aux_loss", *inputs)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        inputs = probs, scores_for_aux_loss, routing_map, with_padding_mask
        return self._with_loss("seq_aux_loss", *inputs, batch=(seq_length, bsz))

    def _apply_global_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        inputs = probs, scores_for_aux_loss, routing_map, with_padding_mask
        return self._with_loss("global_aux_loss", *inputs)


def _refuse(config: Any) -> None:
    for option in ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization"):
        expected = "False with this dispatcher; leave the library's in place for it"
        checks.value(not getattr(config, option, False), "convert", option, expected, True)


def _by_map(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, topk: int, num_rows: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows in expert-major order, their probs, the order) of tokens by a bool map."""
    order, _, offsets = expert_permutation_from_map(routing_map, topk, num_rows=num_rows)
    inverse = inverse_permutation(order, tokens.shape[0], topk)
    rows = permute_rows(tokens, order, topk, inverse=inverse)
    return rows, None if probs is None else _of_rows(probs, order, offsets, topk), order


def _of_rows(probs: Tensor, order: Tensor, offsets: Tensor, topk: int) -> Tensor:
    """The entry of ``probs`` [T, E] of each row's token and expert, 0 for padding."""
    num_experts = probs.shape[1]
    places = torch.arange(order.shape[0], device=order.device, dtype=offsets.dtype)
    experts = torch.searchsorted(offsets, places, right=True).clamp(max=num_experts - 1)
    entries = order.clamp(min=0).long() // topk * num_experts + experts
    return torch.where(order >= 0, probs.reshape(-1).gather(0, entries), 0.0)


class MoEAllGatherTokenDispatcher(token_dispatcher.MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """The library's dispatcher with the copies of this package.

    A token's rows are added in float32 and rounded once, without atomics; the library adds them
    in the dtype of the rows. Counts go to the host once, as there: its experts want them so.
    """

    routing_map: Any

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        _refuse(self.config)
        own = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map = self.routing_map[:, own].contiguous()
        tokens_per_expert = self.local_map.sum(dim=0).long().cpu()
        rows, row_probs, order = _by_map(
            hidden_states,
            self.local_map,
            probs[:, own],
            self._local_topk(),
            int(tokens_per_expert.sum()),
        )
        assert row_probs is not None
        self.reversed_local_input_permutation_mapping = order
        self.local_probs, self.routing_map = row_probs, None
        return rows, tokens_per_expert, row_probs

    def _local_topk(self) -> int:
        return min(self.router_topk, self.num_local_experts)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        order = self.reversed_local_input_permutation_mapping
        num_tokens = self.hidden_shape_before_permute[0]
        return restore(hidden_states, order, num_tokens, self._local_topk())


class MoEAlltoAllTokenDispatcher(token_dispatcher.MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """The library's dispatcher with the copies of this package: both permutations, both ways.

    A token's rows are added in float32 and rounded once, without atomics; the library adds them
    in the dtype of the rows.
    """

    num_local_experts: int

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        _refuse(self.config)
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        hidden_states = hidden_states.view(-1, self.hidden_shape[-1])
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states.view(self.hidden_shape))
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.tokens_per_expert
        )
        self.hidden_shape_before_permute = hidden_states.shape
        rows, row_probs, order = _by_map(
            hidden_states,
            routing_map,
            probs,
            self.config.moe_router_topk,
            int(self.num_out_tokens),
        )
        assert row_probs is not None
        self.reversed_local_input_permutation_mapping = order
        return rows, row_probs

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # With one local expert the library moves rows between ranks, and reorders none.
        num_local_experts, self.num_local_experts = self.num_local_experts, 1
        try:
            rows, tokens_per_expert, row_probs = super().dispatch_postprocess(
                global_input_tokens, global_probs
            )
        finally:
            self.num_local_experts = num_local_experts
        if num_local_experts > 1:
            # Of the library's own state, which is what a partial CUDA graph brings back.
            counts = self.num_global_tokens_per_local_expert.to(rows.device)
            order, _, _ = expert_permutation_from_counts(counts, rows.shape[0])
            self._local_order = order
            inverse = inverse_permutation(order, rows.shape[0], 1)
            rows, row_probs = permute_with_scores(rows, row_probs[:, None], order, inverse=inverse)
        return rows, tokens_per_expert, row_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        num_local_experts, self.num_local_experts = self.num_local_experts, 1
        try:
            if num_local_experts > 1:
                num_rows = hidden_states.shape[0]
                hidden_states = restore(hidden_states, self._local_order, num_rows, 1)
            return super().combine_preprocess(hidden_states)
        finally:
            self.num_local_experts = num_local_experts

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(permutated_local_input_tokens)
            self.shared_experts.post_forward_comm()
        output = restore(
            permutated_local_input_tokens,
            self.reversed_local_input_permutation_mapping,
            self.hidden_shape_before_permute[0],
            self.config.moe_router_topk,
        ).view(self.hidden_shape)
        if self.shared_experts is not None:
            output += self.shared_experts.get_output()
        return output


_CLASSES = {
    library_router.TopKRouter: TopKRouter,
    token_dispatcher.MoEAllGatherTokenDispatcher: MoEAllGatherTokenDispatcher,
    token_dispatcher.MoEAlltoAllTokenDispatcher: MoEAlltoAllTokenDispatcher,
}


def convert(model: nn.Module | Sequence[nn.Module]) -> int:
    """Give every MoE layer of ``model`` the router and the dispatcher of this module.

    Weights, buffers and state stay. Routers and dispatchers of other classes are left alone.

    Args:
        model: a model, or its chunks, as Megatron's ``get_model`` returns them.

    Returns:
        How many routers and dispatchers are now of this module.

    Raises:
        ValueError: a layer pads its experts' input (``moe_pad_expert_input_to_capacity``,
            ``moe_router_padding_for_quantization``), or nothing in the model could be changed.
        TypeError: ``model`` is no module, nor a sequence of them.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    name = type(model).__name__
    are_modules = isinstance(chunks, list | tuple) and all(
        isinstance(chunk, nn.Module) for chunk in chunks
    )
    checks.type_(are_modules, "convert", "model", "an nn.Module or a list of them", name)
    found: list[Any] = []
    for part in (part for chunk in chunks for part in chunk.modules()):
        for attribute in ("token_dispatcher", "router"):
            thing: Any = getattr(part, attribute, None)
            if type(thing) in (*_CLASSES, *_CLASSES.values()):
                _refuse(thing.config)
                found.append(thing)
    for thing in found:
        thing.__class__ = _CLASSES.get(type(thing), type(thing))
    expected = "with a TopKRouter, all-gather or all-to-all dispatcher of Megatron-Core"
    checks.value(len(found) > 0, "convert", "model", expected, name)
    return len(found)


def _check_map(
    op: str, argument: str, x: Tensor | None, num_tokens: int, num_experts: int | None = None
) -> None:
    checks.is_tensor(op, argument, x)
    assert x is not None
    columns = "experts" if num_experts is None else num_experts
    fits = x.dim() == 2 and x.shape[0] == num_tokens and num_experts in (None, x.shape[1])
    checks.shape(op, argument, x, f"[{num_tokens}, {columns}]", fits)


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Megatron-Core's ``permute`` by the ops of this package.

    Reads the number of rows, and the most experts that a token has, on the host, once per call (the
    library reads the former); a dispatcher of this module reads neither.

    Args:
        tokens: [T, H].
        routing_map: bool or integer [T, E], non-zero where a token has an expert.
        probs: optional [T, E].
        num_out_tokens: taken and not used: the map decides.
        fused: taken and not used.
        drop_and_pad: must be False.

    Returns:
        (rows [N, H], their probs [N] or None, the token of each row, int64 [N], which
        :func:`unpermute` takes: that very tensor)
    """
    checks.value(not drop_and_pad, "permute", "drop_and_pad", "False", drop_and_pad)
    checks.is_tensor("permute", "tokens", tokens)
    checks.rank("permute", "tokens", tokens, "[tokens, hidden]")
    _check_map("permute", "routing_map", routing_map, tokens.shape[0])
    if probs is not None:
        _check_map("permute", "probs", probs, *routing_map.shape)
    routing_map = routing_map.bool()
    per_token = routing_map.sum(1)
    num_rows = topk = 0
    if per_token.numel():
        num_rows, topk = torch.stack([per_token.sum(), per_token.max()]).tolist()
    topk = max(topk, 1)
    rows, row_probs, order = _by_map(tokens, routing_map, probs, topk, num_rows)
    token_of_row = order.long() // topk
    token_of_row.moe_order = order, tokens.shape[0], topk  # type: ignore[attr-defined]
    return rows, row_probs, token_of_row


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Megatron-Core's ``unpermute`` by the ops of this package.

    A token's rows are multiplied and added in float32 and rounded once, without atomics.

    Args:
        permuted_tokens: [N, H].
        sorted_indices: the third result of :func:`permute`, itself: it carries the slots.
        restore_shape: [T, H].
        probs: optional [T, E], by which the rows are multiplied.
        routing_map: [T, E]; needed with ``probs``.
        fused: taken and not used.
        drop_and_pad: must be False.

    Returns:
        [T, H] in the dtype of ``permuted_tokens``.
    """
    checks.value(not drop_and_pad, "unpermute", "drop_and_pad", "False", drop_and_pad)
    checks.is_tensor("unpermute", "permuted_tokens", permuted_tokens)
    checks.is_tensor("unpermute", "sorted_indices", sorted_indices)
    expected = "the third result of this module's permute"
    slots = getattr(sorted_indices, "moe_order", None)
    checks.value(slots is not None, "unpermute", "sorted_indices", expected, "another tensor")
    order, num_tokens, topk = slots  # type: ignore[misc]
    checks.shape(
        "unpermute",
        "permuted_tokens",
        permuted_tokens,
        f"[{order.shape[0]}, hidden]",
        permuted_tokens.dim() == 2 and permuted_tokens.shape[0] == order.shape[0],
    )
    sizes = [num_tokens, permuted_tokens.shape[1]]
    is_shape = isinstance(restore_shape, list | tuple) and list(restore_shape) == sizes
    checks.value(is_shape, "unpermute", "restore_shape", f"{sizes}", restore_shape)
    if probs is None:
        return restore(permuted_tokens, order, num_tokens, topk)
    _check_map("unpermute", "routing_map", routing_map, num_tokens)
    assert routing_map is not None
    _check_map("unpermute", "probs", probs, *routing_map.shape)
    offsets = routing_map.bool().sum(0).cumsum(0).int()
    row_probs = _of_rows(probs, order, offsets, topk)
    # Every row has a slot of its own, so nothing is added up here.
    scores = row_probs.new_zeros(num_tokens * topk).scatter(0, order.long(), row_probs)
    return weighted_restore(permuted_tokens, scores.view(num_tokens, topk), order)
