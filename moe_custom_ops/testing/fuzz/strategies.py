"""Hypothesis strategies for whole valid calls of every op."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from .calls import Call
from .pieces import (
    COUNTS,
    EITHER,
    EXPERTS,
    FLOATS,
    HIDDEN,
    INDICES,
    MOVED,
    OFTEN,
    RARELY,
    SEED,
    SELDOM,
    TOKENS,
    TOPK,
    Draw,
    add,
    draw_layout,
    draw_leaves,
    draw_normal,
    draw_workspace,
    sizes,
)


def _of_loss(draw: Draw, sources: dict[str, str], dtype: torch.dtype) -> dict[str, Any]:
    if not draw(OFTEN):
        return {}
    grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {"leaves": ("probs",), "grads": (draw_normal(draw, (), grad_dtype, special=False),)}


def _probs(draw: Draw, shape: Sequence[int], dtype: torch.dtype, ignored: str | None) -> str:
    """Of tokens that are ``ignored``, NaN."""
    source = f"t.probabilities({tuple(shape)}, {dtype}, seed={draw(SEED)})"
    expandable = ignored is None
    if ignored is not None and draw(EITHER):
        source = f"t.with_nan({source}, {ignored})"
    return draw_layout(draw, source, shape, expandable)


def _counts(draw: Draw, shape: Sequence[int]) -> str:
    dtype, high = draw(st.sampled_from(COUNTS)), draw(st.sampled_from([9, 2**26, 1]))
    source = f"t.integers({tuple(shape)}, {dtype}, {draw(SEED)}, 0, {high})"
    return draw_layout(draw, source, shape, expandable=True)


def _mask(draw: Draw, shape: Sequence[int]) -> str | None:
    if draw(EITHER):
        return None
    share = draw(st.sampled_from([0.6, 0.0, 1.0]))
    source = f"t.bools({tuple(shape)}, {draw(SEED)}, {share})"
    return draw_layout(draw, source, shape, expandable=True)


def _tokens_and_experts(draw: Draw) -> tuple[int, int]:
    """Mostly few; now and then more than a tile, or experts of more than a chunk."""
    if draw(SELDOM):
        return draw(sizes([(70, 130), (513, 4)], [(1100, 8), (17, 1100)]))
    return draw(sizes(range(12), range(12, 40))), draw(EXPERTS)


_COEFF = st.sampled_from([1e-2, 1.0, 0.0, -0.5, 1e-4, 1, -0.0])


@st.composite
def aux_loss(draw: Draw) -> Call:
    num_tokens, num_experts = _tokens_and_experts(draw)
    columns = num_experts * draw(st.sampled_from([1, 1, 2, 3]))
    columns = columns if draw(st.integers(0, 15)) else 0
    dtype = draw(st.sampled_from(FLOATS))
    sources: dict[str, str] = {}
    add(sources, token_mask=_mask(draw, (num_tokens,)))
    ignored = "~token_mask" if "token_mask" in sources else None
    sources["probs"] = _probs(draw, (num_tokens, columns), dtype, ignored)
    sources["tokens_per_expert"] = _counts(draw, (columns,))
    total = str(draw(st.sampled_from([max(num_tokens, 1), 7, 1, 2**20])))
    kind = draw(st.sampled_from(["int", "tensor", "fraction", "zero"]))
    if kind == "zero":
        allowed = num_tokens == 0 or "token_mask" in sources
        total = "0" if allowed and draw(EITHER) else "torch.tensor(0)"
    elif kind == "tensor":
        shape = draw(st.sampled_from(["()", "(1,)", "(1, 1)"]))
        total = f"torch.full({shape}, {total}, dtype={draw(st.sampled_from(COUNTS))})"
    elif kind == "fraction":
        total = f"torch.tensor({total}.625, dtype={draw(st.sampled_from(COUNTS[2:]))})"
    sources["total_num_tokens"] = total
    add(sources, num_experts=str(num_experts), topk=str(draw(TOPK)), coeff=str(draw(_COEFF)))
    size = f"moe_custom_ops.aux_loss_workspace_size({num_tokens}, {columns}, {dtype})"
    add(sources, workspace=draw_workspace(draw, size))
    return Call("aux_loss", sources, workspace_size=size, **_of_loss(draw, sources, dtype))


@st.composite
def sequence_aux_loss(draw: Draw) -> Call:
    num_tokens, num_experts = _tokens_and_experts(draw)
    num_sequences = draw(sizes(range(4), [4, 5]))
    dtype = draw(st.sampled_from(FLOATS))
    sources: dict[str, str] = {}
    if draw(EITHER):
        lead: tuple[int, ...] = (num_tokens,)
        index = draw(st.sampled_from(INDICES))
        ends = f"t.bounds({num_tokens}, {num_sequences}, {index}, {draw(SEED)})"
        sources["cu_seqlens"] = draw_layout(draw, ends, (num_sequences + 1,))
    else:
        lead = (num_sequences, num_tokens)
    add(sources, token_mask=_mask(draw, lead))
    ignored = "~token_mask" if "token_mask" in sources else None
    sources["probs"] = _probs(draw, (*lead, num_experts), dtype, ignored)
    sources["tokens_per_expert"] = _counts(draw, (num_sequences, num_experts))
    add(sources, topk=str(draw(TOPK)), coeff=str(draw(_COEFF)))
    tokens = torch.Size(lead).numel()
    size = f"{tokens}, {num_sequences}, {num_experts}, {dtype}"
    size = f"moe_custom_ops.sequence_aux_loss_workspace_size({size})"
    add(sources, workspace=draw_workspace(draw, size))
    return Call("sequence_aux_loss", sources, workspace_size=size, **_of_loss(draw, sources, dtype))


def _alignment_and_rows(draw: Draw, sources: dict[str, str], num_assignments: int) -> None:
    if draw(EITHER):
        sources["alignment"] = str(draw(st.sampled_from([1, 2, 3, 8, 16])))
    if draw(EITHER):
        most = num_assignments + 20
        sources["num_rows"] = str(draw(st.sampled_from([most, num_assignments // 2, 0, 1])))
        if draw(RARELY):
            sources["alignment"] = str(draw(st.sampled_from([2**30, 2**31 - 1])))


@st.composite
def expert_permutation(draw: Draw) -> Call:
    num_experts = draw(EXPERTS) if not draw(SELDOM) else draw(sizes([300], [4096]))
    topk = draw(TOPK)
    lead = draw(sizes([(1,), (2, 3), (), (0,), (7,), (2, 0), (33,)], [(90,)]))
    index = draw(st.sampled_from(INDICES))
    ranges = [(0, num_experts), (-2, num_experts + 2), (-1, 1)]
    # The low halves of these are experts.
    ranges += [(2**32 - 2, 2**32 + num_experts)] if index == torch.int64 else []
    low, high = draw(st.sampled_from(ranges))
    shape = (*lead, topk)
    ids = f"t.integers({shape}, {index}, {draw(SEED)}, {low}, {high})"
    sources = {
        "expert_ids": draw_layout(draw, ids, shape, expandable=True),
        "num_experts": str(num_experts),
    }
    num_tokens = torch.Size(lead).numel()
    _alignment_and_rows(draw, sources, num_tokens * topk)
    size = f"moe_custom_ops.expert_permutation_workspace_size({num_tokens}, {topk}, {num_experts})"
    add(sources, workspace=draw_workspace(draw, size))
    return Call("expert_permutation", sources, workspace_size=size)


@st.composite
def expert_permutation_from_map(draw: Draw) -> Call:
    num_tokens, num_experts = draw(sizes([0, 1, 2, 5, 33], [70])), draw(EXPERTS)
    topk = min(draw(TOPK), num_experts)
    share = draw(st.sampled_from([topk / num_experts, 0.5, 0.0, 1.0]))
    shape = (num_tokens, num_experts)
    routing_map = f"t.bools({shape}, {draw(SEED)}, {round(share, 3)})"
    sources = {"routing_map": draw_layout(draw, routing_map, shape, True), "topk": str(topk)}
    _alignment_and_rows(draw, sources, num_tokens * topk)
    size = f"moe_custom_ops.expert_permutation_workspace_size({num_tokens}, {topk}, {num_experts})"
    add(sources, workspace=draw_workspace(draw, size))
    return Call("expert_permutation_from_map", sources, workspace_size=size)


@st.composite
def expert_permutation_from_counts(draw: Draw) -> Call:
    shape = draw(st.integers(1, 8)), draw(sizes([1, 2, 4, 7], [33]))
    index = draw(st.sampled_from(INDICES))
    ranges = [(0, 9), (-3, 4), (0, 1), (2**30, 2**31 - 1)]
    ranges += [(2**31, 2**40)] if index == torch.int64 else []
    low, high = draw(st.sampled_from(ranges))
    counts = f"t.integers({shape}, {index}, {draw(SEED)}, {low}, {high})"
    sources = {"counts": draw_layout(draw, counts, shape, expandable=True)}
    sources["num_rows"] = str(draw(sizes(range(40), range(40, 200))))
    if draw(EITHER):
        sources["alignment"] = str(draw(st.sampled_from([1, 3, 16, 2**30, 2**31 - 1])))
    add(sources, workspace=draw_workspace(draw, str(draw(st.sampled_from([0, 64])))))
    return Call("expert_permutation_from_counts", sources, workspace_size="0")


def _order(draw: Draw, num_assignments: int, plain: bool = False) -> tuple[str, int]:
    """(source of a ``token_indices_sorted``, its rows)"""
    num_rows = draw(st.sampled_from([num_assignments, num_assignments + 9, 0, 1]))
    num_rows = draw(st.integers(0, num_assignments + 16)) if draw(EITHER) else num_rows
    options = f", dropped={draw(st.integers(0, 4))}" if draw(RARELY) else ""
    if not plain and draw(RARELY):
        options += f", duplicates={draw(st.integers(1, 5))}"
    index = draw(st.sampled_from(INDICES))
    source = f"t.order({num_assignments}, {num_rows}, {index}, seed={draw(SEED)}{options})"
    return draw_layout(draw, source, (num_rows,)), num_rows


@st.composite
def compose_permutations(draw: Draw) -> Call:
    first, num_rows = _order(draw, draw(st.integers(0, 60)), plain=True)
    second, _ = _order(draw, num_rows)
    return Call("compose_permutations", {"first": first, "second": second})


@st.composite
def inverse_permutation(draw: Draw) -> Call:
    num_tokens = draw(TOKENS) if draw(OFTEN) else draw(sizes([130], [300]))
    topk = draw(TOPK)
    order, _ = _order(draw, num_tokens * topk)
    sources = {"token_indices_sorted": order, "num_tokens": str(num_tokens), "topk": str(topk)}
    return Call("inverse_permutation", sources)


def _inversion(draw: Draw, sources: dict[str, str], shape: Sequence[int], op: str) -> str:
    """A workspace, an inverse, both or neither; the source of the workspace's size."""
    num_tokens, topk = torch.Size(shape[:-1]).numel(), shape[-1]
    size = f"moe_custom_ops.{op}_workspace_size({num_tokens}, {topk})"
    add(sources, workspace=draw_workspace(draw, size))
    if draw(EITHER):
        inverse = f"moe_custom_ops.inverse_permutation(token_indices_sorted, {num_tokens}, {topk})"
        inverse += f".view({tuple(shape)})" if len(shape) != 2 else ""
        sources["inverse"] = draw_layout(draw, inverse, shape)
    return size


def _rows(
    draw: Draw, sources: dict[str, str], num_assignments: int, hidden: int, dtype: torch.dtype
) -> None:
    """The order, and rows of which padding may hold NaN."""
    sources["token_indices_sorted"], num_rows = _order(draw, num_assignments)
    rows, expandable = draw_normal(draw, (num_rows, hidden), dtype), True
    if draw(EITHER):
        ignored = f"t.padding(token_indices_sorted, {num_assignments})"
        rows, expandable = f"t.with_nan({rows}, {ignored})", False
    sources["rows"] = draw_layout(draw, rows, (num_rows, hidden), expandable)


def _grad(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str:
    return draw_layout(draw, draw_normal(draw, shape, dtype, special=False), shape, expandable=True)


def _addend(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    return draw_layout(draw, draw_normal(draw, shape, dtype), shape, True) if draw(EITHER) else None


@st.composite
def weighted_restore(draw: Draw) -> Call:
    lead = draw(sizes([(1,), (3,), (), (0,), (2, 0), (2, 1, 2)], [(2, 3), (17,)]))
    topk, hidden, dtype = draw(TOPK), draw(HIDDEN), draw(st.sampled_from(FLOATS))
    shape = (*lead, topk)
    sources: dict[str, str] = {}
    _rows(draw, sources, torch.Size(shape).numel(), hidden, dtype)
    scores = draw_normal(draw, shape, draw(st.sampled_from(FLOATS)))
    sources["top_scores"] = draw_layout(draw, scores, shape, expandable=True)
    add(sources, addend=_addend(draw, (*lead, hidden), dtype))
    size = _inversion(draw, sources, shape, "weighted_restore")
    names = ("rows", "top_scores", "addend")
    leaves = draw_leaves(draw, *(name for name in names if name in sources))
    return Call(
        "weighted_restore",
        sources,
        leaves,
        (_grad(draw, (*lead, hidden), dtype),),
        workspace_size=size,
    )


@st.composite
def restore(draw: Draw) -> Call:
    num_tokens, topk, hidden = draw(TOKENS), draw(TOPK), draw(HIDDEN)
    dtype = draw(st.sampled_from(FLOATS))
    sources: dict[str, str] = {}
    _rows(draw, sources, num_tokens * topk, hidden, dtype)
    add(sources, num_tokens=str(num_tokens), topk=str(topk))
    add(sources, addend=_addend(draw, (num_tokens, hidden), dtype))
    size = _inversion(draw, sources, (num_tokens, topk), "weighted_restore")
    leaves = draw_leaves(draw, *(name for name in ("rows", "addend") if name in sources))
    return Call(
        "restore", sources, leaves, (_grad(draw, (num_tokens, hidden), dtype),), workspace_size=size
    )


def _tokens(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        source = f"t.bools({tuple(shape)}, {draw(SEED)}, 0.5)"
    elif dtype in MOVED:
        source = f"t.bits({tuple(shape)}, {dtype}, {draw(SEED)})"
    else:
        source = draw_normal(draw, shape, dtype)
    return draw_layout(draw, source, shape, expandable=True)


def _float_or_moved(draw: Draw) -> torch.dtype:
    return draw(st.sampled_from(FLOATS if draw(OFTEN) else MOVED))


@st.composite
def permute(draw: Draw) -> Call:
    num_tokens, topk, hidden = draw(TOKENS), draw(TOPK), draw(HIDDEN)
    dtype = _float_or_moved(draw)
    order, num_rows = _order(draw, num_tokens * topk)
    tokens = _tokens(draw, (num_tokens, hidden), dtype)
    sources = {"tokens": tokens, "token_indices_sorted": order, "topk": str(topk)}
    size = _inversion(draw, sources, (num_tokens, topk), "permute")
    if dtype in MOVED:
        return Call("permute", sources, workspace_size=size)
    leaves = draw_leaves(draw, "tokens")
    return Call(
        "permute", sources, leaves, (_grad(draw, (num_rows, hidden), dtype),), workspace_size=size
    )


@st.composite
def permute_with_scores(draw: Draw) -> Call:
    num_tokens, topk, hidden = draw(TOKENS), draw(TOPK), draw(HIDDEN)
    dtype, scores_dtype = _float_or_moved(draw), draw(st.sampled_from(FLOATS))
    order, num_rows = _order(draw, num_tokens * topk)
    scores = draw_normal(draw, (num_tokens, topk), scores_dtype)
    sources = {
        "tokens": _tokens(draw, (num_tokens, hidden), dtype),
        "top_scores": draw_layout(draw, scores, (num_tokens, topk), expandable=True),
        "token_indices_sorted": order,
    }
    size = _inversion(draw, sources, (num_tokens, topk), "permute")
    grads = [_grad(draw, (num_rows,), scores_dtype)]
    leaves = draw_leaves(draw, "top_scores")
    if dtype in MOVED:
        return Call("permute_with_scores", sources, leaves, (None, *grads), workspace_size=size)
    leaves = (*leaves, *draw_leaves(draw, "tokens"))
    grads.insert(0, _grad(draw, (num_rows, hidden), dtype))
    return Call("permute_with_scores", sources, leaves, tuple(grads), workspace_size=size)


VALID: dict[str, st.SearchStrategy[Call]] = {
    "aux_loss": aux_loss(),
    "sequence_aux_loss": sequence_aux_loss(),
    "expert_permutation": expert_permutation(),
    "expert_permutation_from_map": expert_permutation_from_map(),
    "expert_permutation_from_counts": expert_permutation_from_counts(),
    "compose_permutations": compose_permutations(),
    "inverse_permutation": inverse_permutation(),
    "permute": permute(),
    "permute_with_scores": permute_with_scores(),
    "weighted_restore": weighted_restore(),
    "restore": restore(),
}
