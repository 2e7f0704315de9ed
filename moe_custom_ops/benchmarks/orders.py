"""The order in which experts take the tokens, against the sorts and scatters of training codes."""

import torch
from torch import Tensor

from ..permutation import (
    expert_permutation,
    expert_permutation_from_counts,
    expert_permutation_from_map,
    inverse_permutation,
)
from .models import Model
from .rows import FORWARD, Family, Inputs, Traffic

# Ranks whose rows an exchange brings; all models' experts are a multiple.
RANKS = 8
NOTHING = (0, 0)


def random_ids(model: Model, num_tokens: int, device: torch.device) -> Tensor:
    return torch.rand(num_tokens, model.experts, device=device).topk(model.topk).indices


def eager_order(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """A stable sort of short keys, and counts by integer additions."""
    flat = ids.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    order = flat.to(torch.int16).argsort(stable=True)
    return order, counts.scatter_add_(0, flat, torch.ones_like(flat))


def eager_inverse(order: Tensor, num_assignments: int) -> Tensor:
    """The row of each assignment; of one that has none, the number of rows."""
    places = torch.arange(len(order), device=order.device)
    inverse = order.new_empty(num_assignments)
    if len(order) < num_assignments:
        inverse.fill_(len(order))
    return inverse.scatter_(0, order, places)


def make_ids(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    return (), (random_ids(model, num_tokens, device), model.experts)


def our_ids(ids: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    return expert_permutation(ids, num_experts)[:2]


def make_map(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    routing_map = torch.zeros(num_tokens, model.experts, dtype=torch.bool, device=device)
    routing_map.scatter_(1, random_ids(model, num_tokens, device), True)
    return (), (routing_map, model.topk)


def our_map(routing_map: Tensor, topk: int) -> tuple[Tensor, ...]:
    return expert_permutation_from_map(routing_map, topk)[:2]


def eager_map(routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Where the map is set, expert by expert, and how many of its token's experts came before."""
    size = topk * len(routing_map)
    expert, token = torch.nonzero_static(routing_map.T, size=size).unbind(1)
    place = routing_map.cumsum(1)[token, expert] - 1
    return token * topk + place, routing_map.sum(0)


def make_counts(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    num_rows = num_tokens * model.topk
    experts = model.experts // RANKS
    groups = torch.randint(RANKS * experts, (num_rows,), device=device)
    counts = torch.bincount(groups, minlength=RANKS * experts).view(RANKS, experts)
    return (), (counts, num_rows)


def our_counts(counts: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    return expert_permutation_from_counts(counts, num_rows)[:2]


def eager_counts(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    ranks, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    ids = expert.repeat_interleave(counts.flatten(), output_size=num_rows)
    return ids.to(torch.int16).argsort(stable=True), counts.sum(0)


def make_order(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    order = expert_permutation(random_ids(model, num_tokens, device), model.experts)[0]
    return (), (order, order.long(), num_tokens, model.topk)


def our_inverse(order: Tensor, order64: Tensor, num_tokens: int, topk: int) -> Tensor:
    return inverse_permutation(order, num_tokens, topk).flatten()


def eager_inverse_of(order: Tensor, order64: Tensor, num_tokens: int, topk: int) -> Tensor:
    return eager_inverse(order64, num_tokens * topk)


def traffic_of_ids(model: Model, inputs: Inputs) -> tuple[Traffic, Traffic]:
    """int64 ids; an int32 order, and int64 counts."""
    assignments = inputs[1][0].numel()
    return (8 * assignments, 4 * assignments + 8 * model.experts), NOTHING


def traffic_of_map(model: Model, inputs: Inputs) -> tuple[Traffic, Traffic]:
    """A byte of the map per token and expert; an int32 order, and int64 counts."""
    routing_map, topk = inputs[1]
    return (routing_map.numel(), 4 * topk * len(routing_map) + 8 * model.experts), NOTHING


def traffic_of_counts(model: Model, inputs: Inputs) -> tuple[Traffic, Traffic]:
    """int64 counts; an int32 order."""
    counts, num_rows = inputs[1]
    return (8 * counts.numel(), 4 * num_rows + 8 * counts.shape[1]), NOTHING


def traffic_of_order(model: Model, inputs: Inputs) -> tuple[Traffic, Traffic]:
    """An int32 order; an int32 inverse."""
    num_bytes = 4 * inputs[1][0].numel()
    return (num_bytes, num_bytes), NOTHING


ONLY = (FORWARD,)
FAMILIES = (
    Family(
        "expert_permutation",
        make_ids,
        {"ours": our_ids, "eager": eager_order},
        traffic_of_ids,
        ONLY,
    ),
    Family(
        "expert_permutation_from_map",
        make_map,
        {"ours": our_map, "eager": eager_map},
        traffic_of_map,
        ONLY,
        compiled=(),
    ),
    Family(
        "expert_permutation_from_counts",
        make_counts,
        {"ours": our_counts, "eager": eager_counts},
        traffic_of_counts,
        ONLY,
        compiled=(),
    ),
    Family(
        "inverse_permutation",
        make_order,
        {"ours": our_inverse, "eager": eager_inverse_of},
        traffic_of_order,
        ONLY,
        compiled=(),
    ),
)
