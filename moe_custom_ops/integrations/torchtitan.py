"""torchtitan: token dispatchers for one rank and for expert parallelism by all-to-all.

    from moe_custom_ops.integrations.torchtitan import AllToAllTokenDispatcher

    token_dispatcher = AllToAllTokenDispatcher.Config(num_experts=64, top_k=8)

in a model's ``RoutedExperts.Config``, in place of torchtitan's own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..permutation import expert_permutation, expert_permutation_from_counts, inverse_permutation
from ..rows import permute, restore, weighted_restore
from .versions import require

require("torchtitan.models.common.token_dispatcher", "torchtitan", "0.3", "0.4")

from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402
from torchtitan.models.common import token_dispatcher as library  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class DispatchMetadata:
    """What ``combine`` needs of ``dispatch``.

    Not torchtitan's, whose indices are divided by top-k: that loses which score is a row's.
    """

    token_indices_sorted: Tensor
    inverse: Tensor
    top_scores: Tensor


@dataclass(frozen=True, kw_only=True)
class AllToAllDispatchMetadata(DispatchMetadata):
    local_order: Tensor
    local_inverse: Tensor
    input_splits: list[int]
    output_splits: list[int]


def _dispatch(
    dispatcher: Any, tokens: Tensor, top_scores: Tensor, expert_ids: Tensor
) -> tuple[Tensor, DispatchMetadata]:
    order, _, _ = expert_permutation(expert_ids, dispatcher.num_experts)
    inverse = inverse_permutation(order, *expert_ids.shape)
    rows = permute(tokens, order, dispatcher.top_k, inverse=inverse)
    return rows, DispatchMetadata(
        token_indices_sorted=order, inverse=inverse, top_scores=top_scores
    )


def _combine(rows: Tensor, metadata: DispatchMetadata, tokens: Tensor) -> Tensor:
    out = weighted_restore(
        rows, metadata.top_scores, metadata.token_indices_sorted, inverse=metadata.inverse
    )
    return out.to(tokens.dtype)


class LocalTokenDispatcher(library.LocalTokenDispatcher):  # type: ignore[misc]
    """torchtitan's dispatcher of one rank: no sort, no scatter-add.

    A token's rows are multiplied by their scores and added in float32 and rounded once; torchtitan
    rounds each product to the dtype of the rows and adds these.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(library.LocalTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        rows, metadata = _dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK)
        return rows, num_local_tokens_per_expert_E, metadata

    def combine(self, routed_output_RD: Tensor, metadata: DispatchMetadata, x_TD: Tensor) -> Tensor:
        return _combine(routed_output_RD, metadata, x_TD)


class AllToAllTokenDispatcher(library.AllToAllTokenDispatcher):  # type: ignore[misc]
    """torchtitan's dispatcher over an expert-parallel mesh; without one, as the local one.

    The exchanges, and the one read of their sizes on the host, are torchtitan's. The order of
    received rows is found on the device.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(library.AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        rows, sent = _dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK)
        if self.ep_mesh is None:
            return rows, num_local_tokens_per_expert_E, sent
        size = self.ep_mesh.size()
        with library.maybe_set_sparse_mesh():
            group = self._group()
            with torch.no_grad():
                received = self._token_count_exchange(num_local_tokens_per_expert_E, group, size)
                counts, input_splits, output_splits = self._sync_token_count_exchange(
                    num_local_tokens_per_expert_E, received, size
                )
            rows = self._dispatch_token_exchange(rows, group, output_splits, input_splits)
        counts = counts.view(size, -1)
        order, _, _ = expert_permutation_from_counts(counts, rows.shape[0])
        inverse = inverse_permutation(order, rows.shape[0], 1)
        metadata = AllToAllDispatchMetadata(
            token_indices_sorted=sent.token_indices_sorted,
            inverse=sent.inverse,
            top_scores=sent.top_scores,
            local_order=order,
            local_inverse=inverse,
            input_splits=input_splits,
            output_splits=output_splits,
        )
        return permute(rows, order, 1, inverse=inverse), counts.sum(0), metadata

    def combine(self, routed_output_RD: Tensor, metadata: DispatchMetadata, x_TD: Tensor) -> Tensor:
        rows = routed_output_RD
        if isinstance(metadata, AllToAllDispatchMetadata):
            rows = restore(
                rows, metadata.local_order, rows.shape[0], 1, inverse=metadata.local_inverse
            )
            with library.maybe_set_sparse_mesh():
                rows = self._combine_token_exchange(
                    rows, self._group(), metadata.input_splits, metadata.output_splits
                )
        return _combine(rows, metadata, x_TD)

    def _group(self) -> Any:
        if get_spmd_backend() != "spmd_types":
            return self.ep_mesh.get_group()
        # The ops of this package have no rules for types of shards.
        expected = "off with this dispatcher; torchtitan's own is checked"
        is_checking = library.spmd.is_type_checking()
        checks.value(not is_checking, "AllToAllTokenDispatcher", "type checking", expected, "on")
        return library.current_spmd_mesh().get_group("ep")
