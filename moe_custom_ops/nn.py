"""Modules over the ops. Each owns its workspace as a non-persistent buffer."""

import contextlib
import math

import torch
from torch import Tensor, nn

from . import checks
from .aux_loss import aux_loss, aux_loss_workspace_size
from .expert_permutation import expert_permutation, expert_permutation_workspace_size
from .grouped_mm import grouped_mm
from .weighted_restore import (
    inverse_permutation,
    permute,
    weighted_restore,
    weighted_restore_workspace_size,
)

__all__ = ["AuxLoss", "MoE", "WeightedRestore"]


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
        _check_tokens("AuxLoss", math.prod(probs.shape[:1]), self.max_tokens)
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
        _check_tokens("WeightedRestore", math.prod(top_scores.shape[:-1]), self.max_tokens)
        return weighted_restore(rows, top_scores, token_indices_sorted, addend, self.workspace)

    def extra_repr(self) -> str:
        return f"max_tokens={self.max_tokens}, topk={self.topk}"


class MoE(nn.Module):
    """Mixture-of-experts feed-forward layer: softmax router, top-k, SwiGLU experts, no dropping.

    Compiles with ``fullgraph=True`` into one graph for all token counts, with no host sync on a
    GPU. The experts work in the dtype of their weights, or in autocast's where that is on, and the
    output has that dtype. The router works in float32 always; top-k scores are normalised to sum to
    one.

    Args:
        hidden_size: width H of the tokens.
        intermediate_size: width of each expert's SwiGLU.
        num_experts: experts of the layer.
        topk: experts per token.
        max_tokens: the most tokens that one call may have; it sizes the workspaces.
        aux_loss_coeff: weight of the load-balancing loss.
        shared_intermediate_size: width of an expert that every token takes, 0 for none.

    Shapes:
        input [*, H]; output [*, H], the loss as a 0-dim float32 tensor, and ``tokens_per_expert``
        int64 [num_experts].

    Example:
        >>> layer = MoE(64, 128, num_experts=8, topk=2, max_tokens=1024)
        >>> out, loss, tokens_per_expert = layer(torch.randn(4, 32, 64))
    """

    workspace: Tensor

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        aux_loss_coeff: float = 1e-2,
        shared_intermediate_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size, minimum in (
            ("hidden_size", hidden_size, 1),
            ("intermediate_size", intermediate_size, 1),
            ("num_experts", num_experts, 1),
            ("topk", topk, 1),
            ("max_tokens", max_tokens, 0),
            ("shared_intermediate_size", shared_intermediate_size, 0),
        ):
            checks.integer("MoE", name, size, minimum)
        if topk > num_experts:
            raise ValueError(f"MoE: topk must be at most num_experts = {num_experts}, got {topk}")
        self.num_experts, self.topk, self.max_tokens = num_experts, topk, max_tokens

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        def experts(inputs: int, outputs: int) -> nn.Parameter:
            shape = (num_experts, inputs, outputs)
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = nn.Linear(
            hidden_size, num_experts, bias=False, device=device, dtype=torch.float32
        )
        self.up = experts(hidden_size, 2 * intermediate_size)
        self.down = experts(intermediate_size, hidden_size)
        self.shared_up: nn.Linear | None = None
        self.shared_down: nn.Linear | None = None
        if shared_intermediate_size:
            self.shared_up = linear(hidden_size, 2 * shared_intermediate_size)
            self.shared_down = linear(shared_intermediate_size, hidden_size)
        self.aux_loss = AuxLoss(num_experts, topk, aux_loss_coeff, max_tokens, device=device)
        size = expert_permutation_workspace_size(max_tokens, topk, num_experts)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.register_buffer("workspace", workspace, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
        for linear in (self.router, self.shared_up, self.shared_down):
            if linear is not None:
                linear.reset_parameters()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        checks.is_tensor("MoE", "x", x)
        checks.type_(x.is_floating_point(), "MoE", "x", "of a float dtype", x.dtype)
        hidden_size = self.up.shape[1]
        if x.dim() == 0 or x.shape[-1] != hidden_size:
            raise ValueError(f"MoE: x must be of shape [*, {hidden_size}], got {list(x.shape)}")
        _check_tokens("MoE", math.prod(x.shape[:-1]), self.max_tokens)
        tokens = x.reshape(-1, hidden_size)
        with _no_autocast(x.device.type):
            logits = nn.functional.linear(tokens.float(), self.router.weight.float())
            probs = logits.softmax(-1)
        top_scores, expert_ids = probs.topk(self.topk)
        top_scores = top_scores / top_scores.sum(-1, keepdim=True)

        token_indices_sorted, tokens_per_expert, offsets = expert_permutation(
            expert_ids, self.num_experts, workspace=self.workspace
        )
        inverse = inverse_permutation(token_indices_sorted, tokens.shape[0], self.topk)
        dtype = _compute_dtype(self.up)
        tokens = tokens.to(dtype)
        rows = permute(tokens, token_indices_sorted, self.topk, inverse=inverse)
        hidden = _swiglu(grouped_mm(rows, self.up.to(dtype), offsets))
        rows = grouped_mm(hidden, self.down.to(dtype), offsets)

        addend = None
        if self.shared_up is not None and self.shared_down is not None:
            addend = self.shared_down(_swiglu(self.shared_up(tokens)))
        out = weighted_restore(rows, top_scores, token_indices_sorted, addend, inverse=inverse)
        loss = self.aux_loss(probs, tokens_per_expert, tokens.shape[0])
        return out.view(x.shape), loss, tokens_per_expert

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, topk={self.topk}"


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return nn.functional.silu(gate) * value


def _has_autocast(device_type: str) -> bool:
    """A meta tensor's device has none. Dynamo of torch 2.11 cannot trace PyTorch's own question."""
    return device_type in ("cpu", "cuda")


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    if _has_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _compute_dtype(weight: Tensor) -> torch.dtype:
    device_type = weight.device.type
    # Autocast leaves float64 as it is.
    casts = _has_autocast(device_type) and weight.dtype != torch.float64
    if casts and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


def _check_tokens(module: str, num_tokens: int, max_tokens: int) -> None:
    if num_tokens > max_tokens:
        raise ValueError(
            f"{module}: its workspace is for at most max_tokens = {max_tokens} tokens, "
            f"got {num_tokens}"
        )
