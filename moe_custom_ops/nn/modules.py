"""Modules over one op. Each owns its workspace as a non-persistent buffer."""

import math

import torch
from torch import Tensor, nn

from .. import checks
from ..losses import aux_loss, aux_loss_workspace_size
from ..rows import weighted_restore, weighted_restore_workspace_size


class AuxLoss(nn.Module):
    """:func:`moe_custom_ops.aux_loss` with a workspace for up to ``max_tokens`` tokens.

    Args:
        num_experts: experts of the layer.
        topk: experts per token.
        coeff: weight of the loss.
        max_tokens: the most tokens that one call may have; more raise ValueError.
        num_columns: columns of ``probs``, if they are not ``num_experts`` (sequence-level loss).
        dtype: dtype of ``probs``; a workspace for float64 serves every dtype.
    """

    workspace: Tensor

    def __init__(
        self,
        num_experts: int,
        topk: int,
        coeff: float,
        max_tokens: int,
        num_columns: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("num_experts", num_experts), ("topk", topk)):
            checks.integer("AuxLoss", name, size, 1)
        checks.is_number("AuxLoss", "coeff", coeff)
        checks.integer("AuxLoss", "max_tokens", max_tokens, 0)
        self.num_experts, self.topk, self.coeff = num_experts, topk, coeff
        self.max_tokens = max_tokens
        columns = num_experts if num_columns is None else num_columns
        size = aux_loss_workspace_size(max_tokens, columns, dtype)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.register_buffer("workspace", workspace, persistent=False)

    def forward(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        total_num_tokens: Tensor | int,
        token_mask: Tensor | None = None,
    ) -> Tensor:
        checks.is_tensor("AuxLoss", "probs", probs)
        check_tokens("AuxLoss", "probs", math.prod(probs.shape[:1]), self.max_tokens)
        return aux_loss(
            probs,
            tokens_per_expert,
            total_num_tokens,
            self.num_experts,
            self.topk,
            self.coeff,
            self.workspace,
            token_mask,
        )

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, topk={self.topk}, coeff={self.coeff}, "
            f"max_tokens={self.max_tokens}"
        )


class WeightedRestore(nn.Module):
    """:func:`moe_custom_ops.weighted_restore` with a workspace for up to ``max_tokens`` tokens.

    Args:
        max_tokens: the most tokens that one call may have; more raise ValueError.
        topk: experts per token.
    """

    workspace: Tensor

    def __init__(
        self, max_tokens: int, topk: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        checks.integer("WeightedRestore", "max_tokens", max_tokens, 0)
        checks.integer("WeightedRestore", "topk", topk, 1)
        self.max_tokens, self.topk = max_tokens, topk
        size = weighted_restore_workspace_size(max_tokens, topk)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.register_buffer("workspace", workspace, persistent=False)

    def forward(
        self,
        rows: Tensor,
        top_scores: Tensor,
        token_indices_sorted: Tensor,
        addend: Tensor | None = None,
    ) -> Tensor:
        checks.is_tensor("WeightedRestore", "top_scores", top_scores)
        # Not ``shape.numel()``, which makes a symbolic size a constant.
        num_tokens = math.prod(top_scores.shape[:-1])
        check_tokens("WeightedRestore", "top_scores", num_tokens, self.max_tokens)
        return weighted_restore(rows, top_scores, token_indices_sorted, addend, self.workspace)

    def extra_repr(self) -> str:
        return f"max_tokens={self.max_tokens}, topk={self.topk}"


def check_tokens(module: str, argument: str, num_tokens: int, max_tokens: int) -> None:
    if num_tokens > max_tokens:
        raise ValueError(
            f"{module}: {argument} must have at most max_tokens = {max_tokens} tokens, for which "
            f"the workspace is, got {num_tokens}"
        )
