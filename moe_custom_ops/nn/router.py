"""Routers of training recipes, in plain PyTorch: scores, choice of experts, balancing."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import checks

SCORE_FUNCS = ("softmax", "sigmoid")
_TINY = 1e-20


class Router(nn.Module):
    r"""Scores of experts, and the ``topk`` of them that each token takes. In float32 always.

    .. math::

        s = \mathrm{score\_func}(x W^T), \qquad
        \mathrm{ids} = \mathrm{topk}(s + \mathrm{bias}), \qquad
        g = \mathrm{route\_scale} \cdot s_\mathrm{ids} / \textstyle\sum s_\mathrm{ids}

    With ``num_groups`` groups of consecutive experts, only those of the ``topk_groups`` groups are
    chosen from whose two highest :math:`s + \mathrm{bias}` have the largest sum (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2). The bias balances without a loss: it changes the choice and no
    weight, and :meth:`update_expert_bias` moves it by the load (arXiv:2408.15664).

    Args:
        hidden_size: width of the tokens.
        num_experts: experts E.
        topk: experts per token.
        score_func: "softmax" or "sigmoid".
        route_norm: whether the weights of a token's experts sum to ``route_scale``.
        route_scale: factor of the weights.
        num_groups: groups of experts; 1 is none.
        topk_groups: groups that a token's experts come from.
        expert_bias: whether there is a bias, float32 [E], saved with the layer, zero at first.

    Shapes:
        input [T, hidden_size]. Output: weights float32 [T, topk], ids int64 [T, topk], probs
        float32 [T, E] that sum to one over E (sigmoid scores are divided by their sum), for the
        balancing losses, and logits float32 [T, E].
    """

    expert_bias: Tensor | None
    counts: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        score_func: str = "softmax",
        route_norm: bool = True,
        route_scale: float = 1.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        expert_bias: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("hidden_size", hidden_size),
            ("num_experts", num_experts),
            ("topk", topk),
            ("num_groups", num_groups),
            ("topk_groups", topk_groups),
        ):
            checks.integer("Router", name, size, 1)
        checks.is_number("Router", "route_scale", route_scale)
        for name, flag in (("route_norm", route_norm), ("expert_bias", expert_bias)):
            checks.type_(isinstance(flag, bool), "Router", name, "a bool", type(flag).__name__)
        expected = " or ".join(map(repr, SCORE_FUNCS))
        checks.value(score_func in SCORE_FUNCS, "Router", "score_func", expected, repr(score_func))
        divisor = f"a divisor of num_experts = {num_experts}"
        checks.value(num_experts % num_groups == 0, "Router", "num_groups", divisor, num_groups)
        most = f"at most num_groups = {num_groups}"
        checks.value(topk_groups <= num_groups, "Router", "topk_groups", most, topk_groups)
        eligible = num_experts // num_groups * topk_groups
        most = f"at most the {eligible} experts that a token may choose from"
        checks.value(topk <= eligible, "Router", "topk", most, topk)
        self.num_experts, self.topk, self.score_func = num_experts, topk, score_func
        self.route_norm, self.route_scale = route_norm, route_scale
        self.num_groups, self.topk_groups = num_groups, topk_groups
        weight = torch.empty(num_experts, hidden_size, device=device, dtype=torch.float32)
        self.weight = nn.Parameter(weight)
        bias = counts = None
        if expert_bias:
            bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
            counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("expert_bias", bias)
        # Since the last update of the bias, of the forwards that had a backward.
        self.register_buffer("counts", counts, persistent=False)
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # A layer that is moved to a half type keeps its bias: small steps would be lost in one.
        bias = self.expert_bias
        super()._apply(fn, recurse)
        moved = self.expert_bias
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            self.expert_bias = bias.to(moved.device)
        return self

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        for buffer in (self.expert_bias, self.counts):
            if buffer is not None:
                buffer.zero_()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        checks.is_tensor("Router", "tokens", tokens)
        checks.rank("Router", "tokens", tokens, "[T, hidden_size]")
        with _no_autocast(tokens.device.type):
            logits = nn.functional.linear(tokens.float(), self.weight.float())
            if self.score_func == "softmax":
                scores = probs = logits.softmax(-1)
            else:
                scores = logits.sigmoid()
                # All may underflow.
                probs = scores / (scores.sum(-1, keepdim=True) + _TINY)
            if self.expert_bias is None and self.num_groups == 1:
                top_scores, expert_ids = scores.topk(self.topk)
            else:
                expert_ids = self._choice(scores.detach()).topk(self.topk).indices
                top_scores = scores.gather(1, expert_ids)
            if self.route_norm:
                total = top_scores.sum(-1, keepdim=True)
                top_scores = top_scores / (total if self.score_func == "softmax" else total + _TINY)
            if self.route_scale != 1.0:
                top_scores = top_scores * self.route_scale
        return top_scores, expert_ids, probs, logits

    def _choice(self, scores: Tensor) -> Tensor:
        """What the choice is made by: -inf for experts of other groups."""
        if self.expert_bias is not None:
            scores = scores + self.expert_bias.float()
        if self.num_groups == 1:
            return scores
        per_group = self.num_experts // self.num_groups
        groups = scores.view(scores.shape[0], self.num_groups, per_group)
        best = groups.topk(min(2, groups.shape[2])).values.sum(-1)
        chosen = best.topk(self.topk_groups).indices
        keep = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
        return groups.masked_fill(~keep[..., None], -torch.inf).flatten(1)

    @torch.no_grad()
    def update_expert_bias(
        self, rate: float = 1e-3, group: "dist.ProcessGroup | None" = None
    ) -> None:
        """``bias += rate * sign(mean load - load)``, and count anew. Call it once per step.

        The load is what the layer :class:`MoE` adds to ``counts`` in the backward of its output:
        that of all its forwards since the last call that had one. Recomputation
        counts nothing twice, and evaluation nothing. It is summed over the ranks of ``group``, or
        of the default group where ``torch.distributed`` is initialised; every rank must call.

        Raises:
            TypeError: ``rate`` is no number, ``group`` no ProcessGroup.
            ValueError: the router has no bias, or this rank is not of the group.
        """
        if self.expert_bias is None or self.counts is None:
            raise ValueError("update_expert_bias: the router must have expert_bias=True, got False")
        checks.is_number("update_expert_bias", "rate", rate)
        if group is not None:
            checks.process_group("update_expert_bias", "group", group)
        if group is not None or (dist.is_available() and dist.is_initialized()):
            dist.all_reduce(self.counts, group=group)
        # Of integers, exact: counts * E against the sum.
        under = self.counts.sum() - self.counts * self.num_experts
        self.expert_bias += rate * under.sign()
        self.counts.zero_()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, topk={self.topk}, score_func={self.score_func!r}"


def z_loss(logits: Tensor, coeff: float) -> Tensor:
    """``coeff * mean(logsumexp(logits) ** 2)`` (ST-MoE, arXiv:2202.08906, eq. 5); 0 of none."""
    squares = torch.logsumexp(logits, dim=-1).square()
    return coeff * squares.sum() / max(squares.shape[0], 1)


def has_autocast(device_type: str) -> bool:
    """A meta tensor's device has none. Dynamo of torch 2.11 cannot trace PyTorch's own question."""
    return device_type in ("cpu", "cuda")


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    if has_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
