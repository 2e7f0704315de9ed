"""A whole mixture-of-experts layer on the ops."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import checks
from ..losses import sequence_aux_loss
from ..permutation import expert_permutation, inverse_permutation
from ..rows import permute, permute_with_scores, restore
from . import expert_parallel
from .attach import add_in_backward, linked
from .combine import POST, PRE, check_choice, check_support, combine
from .grouped_mm import grouped_mm
from .modules import AuxLoss, check_tokens
from .router import Router, has_autocast, z_loss


class MoE(nn.Module):
    """Mixture-of-experts feed-forward layer: router, top-k, SwiGLU experts, no token dropped.

    Compiles with ``fullgraph=True`` into one graph for all token counts, with no host sync on a
    GPU. The experts work in the dtype of their weights, or in autocast's where that is on, and the
    output has that dtype. The router works in float32 always.

    Args:
        hidden_size: width H of the tokens.
        intermediate_size: width of each expert's SwiGLU.
        num_experts: experts of the layer, over all ranks.
        topk: experts per token.
        max_tokens: the most tokens that one call may have; it sizes the loss's workspace.
        aux_loss_coeff: weight of the load-balancing loss.
        shared_intermediate_size: width of an expert that every token takes, 0 for none.
        combine_impl: how the experts' rows are summed. "fused_weighted_sum" is
            :func:`moe_custom_ops.weighted_restore`, or ``restore`` where the scores were applied
            before; "weighted_sum" is plain PyTorch in float32, "legacy_bmm" the same as a batched
            product. Their peak memory is [T, topk, H] in float32.
        score_apply: where a token's scores multiply: "post" weights the experts' outputs, "pre" the
            tokens before the experts, "activation" the experts' activations (as Megatron-Core
            does). "fused_weighted_sum" refuses "pre", and "legacy_bmm" all but "post".
        score_func, route_norm, route_scale, num_groups, topk_groups, expert_bias: as of
            :class:`Router`. With ``expert_bias`` call :meth:`update_expert_bias` once per step.
        sequence_aux_loss_coeff: weight of the loss of each sequence,
            :func:`moe_custom_ops.sequence_aux_loss`; the sequences are the last axis but one of the
            input. 0 for none.
        z_loss_coeff: weight of the mean squared logsumexp of the router's logits (ST-MoE,
            arXiv:2202.08906). 0 for none.
        process_group: ranks over which the experts are spread, in order; each holds
            ``num_experts / size`` of them, and every rank must call the layer, with no tokens too.
            Ranks of one seed start as the parts of one layer.
        rank_capacity: None sends all rows to the ranks of their experts and reads their numbers on
            the host, once per call (compile it with
            ``torch._dynamo.config.capture_scalar_outputs``). An int sends as many rows from each
            rank to each, with no read: what is beyond is dropped, contributes zero, and is counted
            in ``num_dropped``.

    Attributes:
        num_dropped: int64 0-dim buffer, not saved: assignments beyond ``rank_capacity`` since it
            was last zeroed, of each forward without a gradient and of each backward. None without a
            capacity.

    The load that ``expert_bias`` follows and, where there is a gradient, the rows dropped are
    counted in the backward: one that does not reach the router's scores or the experts counts
    nothing, and a second pass through one graph (``retain_graph``, ``create_graph``) counts again.
    Recomputation counts once; only with ``use_reentrant=True`` drops are counted twice.

    Shapes:
        input [*, H]; output [*, H], the sum of the losses as a 0-dim float32 tensor, and
        ``tokens_per_expert`` int64 [num_experts] of this rank's tokens.

    Raises:
        TypeError: an argument has the wrong type, or the experts a dtype that ``combine_impl``
            lacks: when the layer is built, or first run, before any collective.
        ValueError: an argument has the wrong value, shape or device, or two do not go together.

    Example:
        >>> layer = MoE(64, 128, num_experts=8, topk=2, max_tokens=1024)
        >>> out, loss, tokens_per_expert = layer(torch.randn(4, 32, 64))
    """

    num_dropped: Tensor | None

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
        *,
        combine_impl: str = "fused_weighted_sum",
        score_apply: str = "post",
        score_func: str = "softmax",
        route_norm: bool = True,
        route_scale: float = 1.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        expert_bias: bool = False,
        sequence_aux_loss_coeff: float = 0.0,
        z_loss_coeff: float = 0.0,
        process_group: "dist.ProcessGroup | None" = None,
        rank_capacity: int | None = None,
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
        for name, coeff in (
            ("aux_loss_coeff", aux_loss_coeff),
            ("sequence_aux_loss_coeff", sequence_aux_loss_coeff),
            ("z_loss_coeff", z_loss_coeff),
        ):
            checks.is_number("MoE", name, coeff)
        check_choice(combine_impl, score_apply)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        checks.type_(isinstance(dtype, torch.dtype), "MoE", "dtype", "a torch.dtype", repr(dtype))
        default = torch.get_default_device()
        check_support(torch.device(default if device is None else device).type, dtype)
        self.num_experts, self.topk, self.max_tokens = num_experts, topk, max_tokens
        self.combine_impl, self.score_apply = combine_impl, score_apply
        self.sequence_aux_loss_coeff, self.z_loss_coeff = sequence_aux_loss_coeff, z_loss_coeff
        self.group: expert_parallel.Group | None = None
        self.rank_capacity = rank_capacity
        num_local = num_experts
        if process_group is not None:
            checks.process_group("MoE", "process_group", process_group)
            self.group = expert_parallel.group_of(process_group)
            expected = f"a divisor of num_experts = {num_experts} in size"
            divides = num_experts % self.group.size == 0
            checks.value(divides, "MoE", "process_group", expected, self.group.size)
            num_local = num_experts // self.group.size
        if rank_capacity is not None:
            checks.integer("MoE", "rank_capacity", rank_capacity, 1)
            expected = "None without a process_group"
            checks.value(self.group is not None, "MoE", "rank_capacity", expected, rank_capacity)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        def experts(inputs: int, outputs: int) -> nn.Parameter:
            shape = (num_local, inputs, outputs)
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = Router(
            hidden_size,
            num_experts,
            topk,
            score_func,
            route_norm,
            route_scale,
            num_groups,
            topk_groups,
            expert_bias,
            device,
        )
        self.up = experts(hidden_size, 2 * intermediate_size)
        self.down = experts(intermediate_size, hidden_size)
        self.shared_up: nn.Linear | None = None
        self.shared_down: nn.Linear | None = None
        if shared_intermediate_size:
            self.shared_up = linear(hidden_size, 2 * shared_intermediate_size)
            self.shared_down = linear(shared_intermediate_size, hidden_size)
        self.aux_loss = AuxLoss(num_experts, topk, aux_loss_coeff, max_tokens, device=device)
        dropped = None
        if rank_capacity is not None:
            dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.register_buffer("num_dropped", dropped, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[1])
            # Every rank draws for all, or ranks of one seed would start with equal experts.
            for rank in range(1 if self.group is None else self.group.size):
                own = self.group is None or rank == self.group.rank
                nn.init.uniform_(weight if own else torch.empty_like(weight), -bound, bound)
        for module in (self.router, self.shared_up, self.shared_down):
            if module is not None:
                module.reset_parameters()
        if self.num_dropped is not None:
            self.num_dropped.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        checks.is_tensor("MoE", "x", x)
        checks.dtype("MoE", "x", x, checks.FLOAT_DTYPES)
        checks.same_device("MoE", "x", x, self.up, "the layer")
        hidden_size = self.up.shape[1]
        if x.dim() == 0 or x.shape[-1] != hidden_size:
            raise ValueError(f"MoE: x must be of shape [*, {hidden_size}], got {list(x.shape)}")
        check_tokens("MoE", "x", math.prod(x.shape[:-1]), self.max_tokens)
        dtype = _compute_dtype(self.up)
        check_support(x.device.type, dtype)

        tokens = x.reshape(-1, hidden_size)
        top_scores, expert_ids, probs, logits = self.router(tokens)
        order, tokens_per_expert, offsets = expert_permutation(expert_ids, self.num_experts)
        tokens = tokens.to(dtype)
        dropped = None
        if self.group is None:
            inverse = inverse_permutation(order, tokens.shape[0], self.topk)
            rows = self._experts(*self._permute(tokens, top_scores, order, inverse), offsets)
        else:
            rows, order, inverse, dropped = self._exchanged(
                tokens, top_scores, order, tokens_per_expert
            )

        addend = None
        if self.shared_up is not None and self.shared_down is not None:
            addend = self.shared_down(_swiglu(self.shared_up(tokens)))
        rows, top_scores, addend = self._count(
            (rows, top_scores, addend), tokens_per_expert, dropped
        )
        choices = self.combine_impl, self.score_apply
        out = combine(rows, top_scores, order, inverse, addend, *choices)
        loss = self._losses(x, probs, logits, expert_ids, tokens_per_expert)
        # FSDP2 hooks outputs, and warns of views.
        out = out if x.dim() == 2 else out.view(x.shape)
        return out, loss, tokens_per_expert

    def _permute(
        self, tokens: Tensor, top_scores: Tensor, order: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Rows in the order of the experts, and the scores that the experts apply themselves."""
        if self.score_apply == POST:
            return permute(tokens, order, self.topk, inverse=inverse), None
        rows, row_scores = permute_with_scores(tokens, top_scores, order, inverse=inverse)
        if self.score_apply == PRE:
            return (rows.float() * row_scores[:, None]).to(rows.dtype), None
        return rows, row_scores

    def _experts(self, rows: Tensor, row_scores: Tensor | None, offsets: Tensor) -> Tensor:
        hidden = _swiglu(grouped_mm(rows, self.up.to(rows.dtype), offsets))
        if row_scores is not None:
            hidden = (hidden.float() * row_scores[:, None]).to(hidden.dtype)
        return grouped_mm(hidden, self.down.to(rows.dtype), offsets)

    def _exchanged(
        self, tokens: Tensor, top_scores: Tensor, order: Tensor, tokens_per_expert: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """By the ranks that hold the experts: (rows, their order, its inverse, number dropped)."""
        group = self.group
        assert group is not None
        dropped = None
        if self.rank_capacity is None:
            route = expert_parallel.exact_route(tokens_per_expert, order.shape[0], group)
        else:
            order, route, dropped = expert_parallel.capacity_route(
                order, tokens_per_expert, self.rank_capacity, group
            )
        inverse = inverse_permutation(order, tokens.shape[0], self.topk)
        rows, row_scores = self._permute(tokens, top_scores, order, inverse)
        # Whether an exchange has a backward must not depend on a rank's own input, or ranks that
        # wait for one another's gradients never meet.
        weights = self.router.weight, self.up, self.down
        rows = expert_parallel.send(linked(rows, *weights), route, group)
        local_inverse = inverse_permutation(route.order, route.num_received, 1)
        if row_scores is None:
            rows = permute(rows, route.order, 1, inverse=local_inverse)
        else:
            row_scores = expert_parallel.send(linked(row_scores, *weights), route, group)
            rows, row_scores = permute_with_scores(
                rows, row_scores[:, None], route.order, inverse=local_inverse
            )
        rows = self._experts(rows, row_scores, route.offsets)
        rows = restore(rows, route.order, route.num_received, 1, inverse=local_inverse)
        return expert_parallel.send_back(rows, route, group), order, inverse, dropped

    def _count(
        self,
        combined: tuple[Tensor, Tensor, Tensor | None],
        tokens_per_expert: Tensor,
        dropped: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is combined, one of which adds to the layer's totals in its backward.

        Whatever is frozen, one of them has a gradient if the output has.
        """
        totals, values = [], []
        if self.router.counts is not None:
            totals.append(self.router.counts)
            # The caller may sum what is returned over ranks, in place, before the backward.
            values.append(tokens_per_expert.clone())
        if dropped is not None and self.num_dropped is not None:
            totals.append(self.num_dropped)
            values.append(dropped)
        parts = list(combined)
        if not totals:
            return combined
        for place, part in enumerate(parts):
            if torch.is_grad_enabled() and part is not None and part.requires_grad:
                parts[place] = add_in_backward(part, tuple(totals), *values)
                rows, top_scores, addend = parts
                assert rows is not None and top_scores is not None
                return rows, top_scores, addend
        if dropped is not None and self.num_dropped is not None:
            self.num_dropped += dropped
        return combined

    def _losses(
        self,
        x: Tensor,
        probs: Tensor,
        logits: Tensor,
        expert_ids: Tensor,
        tokens_per_expert: Tensor,
    ) -> Tensor:
        loss = self.aux_loss(probs, tokens_per_expert, probs.shape[0])
        if self.sequence_aux_loss_coeff:
            length = x.shape[-2] if x.dim() > 1 else 1
            sequences = probs.view(math.prod(x.shape[:-2]), length, self.num_experts)
            counts = _counts_of_sequences(expert_ids, sequences)
            loss = loss + sequence_aux_loss(
                sequences, counts, self.topk, self.sequence_aux_loss_coeff
            )
        if self.z_loss_coeff:
            loss = loss + z_loss(logits, self.z_loss_coeff)
        return loss

    def update_expert_bias(
        self, rate: float = 1e-3, group: "dist.ProcessGroup | None" = None
    ) -> None:
        """:meth:`Router.update_expert_bias`."""
        self.router.update_expert_bias(rate, group)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, topk={self.topk}, "
            f"combine_impl={self.combine_impl!r}, score_apply={self.score_apply!r}"
        )


def _counts_of_sequences(expert_ids: Tensor, sequences: Tensor) -> Tensor:
    """int64 [B, E]: the assignments of each expert in each sequence."""
    num_sequences, length, num_experts = sequences.shape
    ids = expert_ids.view(num_sequences, length * expert_ids.shape[1])
    first = torch.arange(num_sequences, device=ids.device)[:, None] * num_experts
    places = (first + ids).flatten()
    counts = ids.new_zeros(num_sequences * num_experts)
    return counts.scatter_add(0, places, torch.ones_like(places)).view(num_sequences, num_experts)


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return nn.functional.silu(gate) * value


def _compute_dtype(weight: Tensor) -> torch.dtype:
    device_type = weight.device.type
    # Autocast leaves float64 as it is.
    casts = has_autocast(device_type) and weight.dtype != torch.float64
    if casts and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype
