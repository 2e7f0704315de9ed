"""Hypothesis strategies for whole valid calls of every op."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from .calls import Call
from .properties import INTERPRETED

Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)
COUNTS = (torch.int32, torch.int64, torch.float32, torch.float64)
MOVED = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def _sizes(few: Sequence[Any], more: Sequence[Any]) -> st.SearchStrategy[Any]:
    """``more`` too, but under the interpreter, where a program takes milliseconds."""
    return st.sampled_from(few if INTERPRETED else [*few, *more])


_SEED = st.integers(0, 9999)
_HIDDEN = _sizes([1, 2, 3, 8, 16, 33, 0, 7, 130], [520, 1030])
_EXPERTS = _sizes([1, 2, 3, 4, 7, 8, 16, 33], [64, 130])
_TOPK = _sizes([1, 2, 3], [4, 6, 8, 9])
_TOKENS = _sizes(range(6), range(6, 21))
_OFTEN = st.sampled_from([True, True, True, False])
_RARELY = st.sampled_from([False, False, False, True])
_SELDOM = st.sampled_from([False] * 11 + [True])
_EITHER = st.booleans()


def _laid_out(draw: Draw, source: str, shape: Sequence[int], expandable: bool = False) -> str:
    """The source of a tensor, at strides of any kind."""
    kind = draw(st.sampled_from(["contiguous", "strided", "strided", "expanded"]))
    if kind == "contiguous" or not shape:
        return source
    if kind == "expanded" and expandable:
        return f"t.expanded({source}, {draw(st.integers(0, len(shape) - 1))})"
    axes = tuple(draw(st.permutations(range(len(shape)))))
    steps = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in shape)
    offset = draw(st.sampled_from([0, 1, 3, 4]))
    options = [
        f", axes={axes}" if axes != tuple(range(len(shape))) else "",
        f", steps={steps}" if max(steps) > 1 else "",
        f", offset={offset}" if offset else "",
    ]
    return f"t.laid_out({source}{''.join(options)})" if any(options) else source


def _normal(draw: Draw, shape: Sequence[int], dtype: torch.dtype, special: bool = True) -> str:
    options = f", seed={draw(_SEED)}"
    scale = draw(st.sampled_from([1.0, 8.0, 2.0**-20]))
    options += f", scale={scale}" if scale != 1.0 else ""
    options += ", special=0.05" if special and draw(_RARELY) else ""
    return f"t.normal({tuple(shape)}, {dtype}{options})"


def _workspace(draw: Draw, size: str) -> str | None:
    """None, or the source of a workspace of ``size`` bytes or more that holds something."""
    kind = draw(st.sampled_from(["none", "exact", "larger", "made"]))
    if kind == "none":
        return None
    if kind == "made":
        return f"moe_custom_ops.make_workspace({size})"
    more = " + 48" if kind == "larger" else ""
    return f"t.scratch({size}{more}, fill={draw(st.sampled_from([255, 0, 127]))})"


def _add(sources: dict[str, str], **more: str | None) -> None:
    sources.update({name: source for name, source in more.items() if source is not None})


def _leaves(draw: Draw, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if draw(_OFTEN))


def _of_loss(draw: Draw, sources: dict[str, str], dtype: torch.dtype) -> dict[str, Any]:
    if not draw(_OFTEN):
        return {}
    grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {"leaves": ("probs",), "grads": (_normal(draw, (), grad_dtype, special=False),)}


def _probs(draw: Draw, shape: Sequence[int], dtype: torch.dtype, ignored: str | None) -> str:
    """Of tokens that are ``ignored``, NaN."""
    source = f"t.probabilities({tuple(shape)}, {dtype}, seed={draw(_SEED)})"
    expandable = ignored is None
    if ignored is not None and draw(_EITHER):
        source = f"t.with_nan({source}, {ignored})"
    return _laid_out(draw, source, shape, expandable)


def _counts(draw: Draw, shape: Sequence[int]) -> str:
    dtype, high = draw(st.sampled_from(COUNTS)), draw(st.sampled_from([9, 2**26, 1]))
    source = f"t.integers({tuple(shape)}, {dtype}, {draw(_SEED)}, 0, {high})"
    return _laid_out(draw, source, shape, expandable=True)


def _mask(draw: Draw, shape: Sequence[int]) -> str | None:
    if draw(_EITHER):
        return None
    share = draw(st.sampled_from([0.6, 0.0, 1.0]))
    source = f"t.bools({tuple(shape)}, {draw(_SEED)}, {share})"
    return _laid_out(draw, source, shape, expandable=True)


def _tokens_and_experts(draw: Draw) -> tuple[int, int]:
    """Mostly few; now and then more than a tile, or experts of more than a chunk."""
    if draw(_SELDOM):
        return draw(_sizes([(70, 130), (513, 4)], [(1100, 8), (17, 1100)]))
    return draw(_sizes(range(12), range(12, 40))), draw(_EXPERTS)


_COEFF = st.sampled_from([1e-2, 1.0, 0.0, -0.5, 1e-4, 1, -0.0])


@st.composite
def aux_loss(draw: Draw) -> Call:
    num_tokens, num_experts = _tokens_and_experts(draw)
    columns = num_experts * draw(st.sampled_from([1, 1, 2, 3]))
    columns = columns if draw(st.integers(0, 15)) else 0
    dtype = draw(st.sampled_from(FLOATS))
    sources: dict[str, str] = {}
    _add(sources, token_mask=_mask(draw, (num_tokens,)))
    ignored = "~token_mask" if "token_mask" in sources else None
    sources["probs"] = _probs(draw, (num_tokens, columns), dtype, ignored)
    sources["tokens_per_expert"] = _counts(draw, (columns,))
    total = str(draw(st.sampled_from([max(num_tokens, 1), 7, 1, 2**20])))
    kind = draw(st.sampled_from(["int", "tensor", "fraction", "zero"]))
    if kind == "zero":
        allowed = num_tokens == 0 or "token_mask" in sources
        total = "0" if allowed and draw(_EITHER) else "torch.tensor(0)"
    elif kind == "tensor":
        shape = draw(st.sampled_from(["()", "(1,)", "(1, 1)"]))
        total = f"torch.full({shape}, {total}, dtype={draw(st.sampled_from(COUNTS))})"
    elif kind == "fraction":
        total = f"torch.tensor({total}.625, dtype={draw(st.sampled_from(COUNTS[2:]))})"
    sources["total_num_tokens"] = total
    _add(sources, num_experts=str(num_experts), topk=str(draw(_TOPK)), coeff=str(draw(_COEFF)))
    size = f"moe_custom_ops.aux_loss_workspace_size({num_tokens}, {columns}, {dtype})"
    _add(sources, workspace=_workspace(draw, size))
    return Call("aux_loss", sources, workspace_size=size, **_of_loss(draw, sources, dtype))


@st.composite
def sequence_aux_loss(draw: Draw) -> Call:
    num_tokens, num_experts = _tokens_and_experts(draw)
    num_sequences = draw(_sizes(range(4), [4, 5]))
    dtype = draw(st.sampled_from(FLOATS))
    sources: dict[str, str] = {}
    if draw(_EITHER):
        lead: tuple[int, ...] = (num_tokens,)
        index = draw(st.sampled_from(INDICES))
        ends = f"t.bounds({num_tokens}, {num_sequences}, {index}, {draw(_SEED)})"
        sources["cu_seqlens"] = _laid_out(draw, ends, (num_sequences + 1,))
    else:
        lead = (num_sequences, num_tokens)
    _add(sources, token_mask=_mask(draw, lead))
    ignored = "~token_mask" if "token_mask" in sources else None
    sources["probs"] = _probs(draw, (*lead, num_experts), dtype, ignored)
    sources["tokens_per_expert"] = _counts(draw, (num_sequences, num_experts))
    _add(sources, topk=str(draw(_TOPK)), coeff=str(draw(_COEFF)))
    tokens = torch.Size(lead).numel()
    size = f"{tokens}, {num_sequences}, {num_experts}, {dtype}"
    size = f"moe_custom_ops.sequence_aux_loss_workspace_size({size})"
    _add(sources, workspace=_workspace(draw, size))
    return Call("sequence_aux_loss", sources, workspace_size=size, **_of_loss(draw, sources, dtype))


def _alignment_and_rows(draw: Draw, sources: dict[str, str], num_assignments: int) -> None:
    if draw(_EITHER):
        sources["alignment"] = str(draw(st.sampled_from([1, 2, 3, 8, 16])))
    if draw(_EITHER):
        most = num_assignments + 20
        sources["num_rows"] = str(draw(st.sampled_from([most, num_assignments // 2, 0, 1])))
        if draw(_RARELY):
            sources["alignment"] = str(draw(st.sampled_from([2**30, 2**31 - 1])))


@st.composite
def expert_permutation(draw: Draw) -> Call:
    num_experts = draw(_EXPERTS) if not draw(_SELDOM) else draw(_sizes([300], [4096]))
    topk = draw(_TOPK)
    lead = draw(_sizes([(1,), (2, 3), (), (0,), (7,), (2, 0), (33,)], [(90,)]))
    index = draw(st.sampled_from(INDICES))
    ranges = [(0, num_experts), (-2, num_experts + 2), (-1, 1)]
    # The low halves of these are experts.
    ranges += [(2**32 - 2, 2**32 + num_experts)] if index == torch.int64 else []
    low, high = draw(st.sampled_from(ranges))
    shape = (*lead, topk)
    ids = f"t.integers({shape}, {index}, {draw(_SEED)}, {low}, {high})"
    sources = {
        "expert_ids": _laid_out(draw, ids, shape, expandable=True),
        "num_experts": str(num_experts),
    }
    num_tokens = torch.Size(lead).numel()
    _alignment_and_rows(draw, sources, num_tokens * topk)
    size = f"moe_custom_ops.expert_permutation_workspace_size({num_tokens}, {topk}, {num_experts})"
    _add(sources, workspace=_workspace(draw, size))
    return Call("expert_permutation", sources, workspace_size=size)


@st.composite
def expert_permutation_from_map(draw: Draw) -> Call:
    num_tokens, num_experts = draw(_sizes([0, 1, 2, 5, 33], [70])), draw(_EXPERTS)
    topk = min(draw(_TOPK), num_experts)
    share = draw(st.sampled_from([topk / num_experts, 0.5, 0.0, 1.0]))
    shape = (num_tokens, num_experts)
    routing_map = f"t.bools({shape}, {draw(_SEED)}, {round(share, 3)})"
    sources = {"routing_map": _laid_out(draw, routing_map, shape, True), "topk": str(topk)}
    _alignment_and_rows(draw, sources, num_tokens * topk)
    size = f"moe_custom_ops.expert_permutation_workspace_size({num_tokens}, {topk}, {num_experts})"
    _add(sources, workspace=_workspace(draw, size))
    return Call("expert_permutation_from_map", sources, workspace_size=size)


@st.composite
def expert_permutation_from_counts(draw: Draw) -> Call:
    shape = draw(st.integers(1, 8)), draw(_sizes([1, 2, 4, 7], [33]))
    index = draw(st.sampled_from(INDICES))
    ranges = [(0, 9), (-3, 4), (0, 1), (2**30, 2**31 - 1)]
    ranges += [(2**31, 2**40)] if index == torch.int64 else []
    low, high = draw(st.sampled_from(ranges))
    counts = f"t.integers({shape}, {index}, {draw(_SEED)}, {low}, {high})"
    sources = {"counts": _laid_out(draw, counts, shape, expandable=True)}
    sources["num_rows"] = str(draw(_sizes(range(40), range(40, 200))))
    if draw(_EITHER):
        sources["alignment"] = str(draw(st.sampled_from([1, 3, 16, 2**30, 2**31 - 1])))
    _add(sources, workspace=_workspace(draw, str(draw(st.sampled_from([0, 64])))))
    return Call("expert_permutation_from_counts", sources, workspace_size="0")


def _order(draw: Draw, num_assignments: int, plain: bool = False) -> tuple[str, int]:
    """(source of a ``token_indices_sorted``, its rows)"""
    num_rows = draw(st.sampled_from([num_assignments, num_assignments + 9, 0, 1]))
    num_rows = draw(st.integers(0, num_assignments + 16)) if draw(_EITHER) else num_rows
    options = f", dropped={draw(st.integers(0, 4))}" if draw(_RARELY) else ""
    if not plain and draw(_RARELY):
        options += f", duplicates={draw(st.integers(1, 5))}"
    index = draw(st.sampled_from(INDICES))
    source = f"t.order({num_assignments}, {num_rows}, {index}, seed={draw(_SEED)}{options})"
    return _laid_out(draw, source, (num_rows,)), num_rows


@st.composite
def compose_permutations(draw: Draw) -> Call:
    first, num_rows = _order(draw, draw(st.integers(0, 60)), plain=True)
    second, _ = _order(draw, num_rows)
    return Call("compose_permutations", {"first": first, "second": second})


@st.composite
def inverse_permutation(draw: Draw) -> Call:
    num_tokens = draw(_TOKENS) if draw(_OFTEN) else draw(_sizes([130], [300]))
    topk = draw(_TOPK)
    order, _ = _order(draw, num_tokens * topk)
    sources = {"token_indices_sorted": order, "num_tokens": str(num_tokens), "topk": str(topk)}
    return Call("inverse_permutation", sources)


def _inversion(draw: Draw, sources: dict[str, str], shape: Sequence[int], op: str) -> str:
    """A workspace, an inverse, both or neither; the source of the workspace's size."""
    num_tokens, topk = torch.Size(shape[:-1]).numel(), shape[-1]
    size = f"moe_custom_ops.{op}_workspace_size({num_tokens}, {topk})"
    _add(sources, workspace=_workspace(draw, size))
    if draw(_EITHER):
        inverse = f"moe_custom_ops.inverse_permutation(token_indices_sorted, {num_tokens}, {topk})"
        inverse += f".view({tuple(shape)})" if len(shape) != 2 else ""
        sources["inverse"] = _laid_out(draw, inverse, shape)
    return size


def _rows(
    draw: Draw, sources: dict[str, str], num_assignments: int, hidden: int, dtype: torch.dtype
) -> None:
    """The order, and rows of which padding may hold NaN."""
    sources["token_indices_sorted"], num_rows = _order(draw, num_assignments)
    rows, expandable = _normal(draw, (num_rows, hidden), dtype), True
    if draw(_EITHER):
        ignored = f"t.padding(token_indices_sorted, {num_assignments})"
        rows, expandable = f"t.with_nan({rows}, {ignored})", False
    sources["rows"] = _laid_out(draw, rows, (num_rows, hidden), expandable)


def _grad(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str:
    return _laid_out(draw, _normal(draw, shape, dtype, special=False), shape, expandable=True)


def _addend(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    return _laid_out(draw, _normal(draw, shape, dtype), shape, True) if draw(_EITHER) else None


@st.composite
def weighted_restore(draw: Draw) -> Call:
    lead = draw(_sizes([(1,), (3,), (), (0,), (2, 0), (2, 1, 2)], [(2, 3), (17,)]))
    topk, hidden, dtype = draw(_TOPK), draw(_HIDDEN), draw(st.sampled_from(FLOATS))
    shape = (*lead, topk)
    sources: dict[str, str] = {}
    _rows(draw, sources, torch.Size(shape).numel(), hidden, dtype)
    scores = _normal(draw, shape, draw(st.sampled_from(FLOATS)))
    sources["top_scores"] = _laid_out(draw, scores, shape, expandable=True)
    _add(sources, addend=_addend(draw, (*lead, hidden), dtype))
    size = _inversion(draw, sources, shape, "weighted_restore")
    names = ("rows", "top_scores", "addend")
    leaves = _leaves(draw, *(name for name in names if name in sources))
    return Call(
        "weighted_restore",
        sources,
        leaves,
        (_grad(draw, (*lead, hidden), dtype),),
        workspace_size=size,
    )


@st.composite
def restore(draw: Draw) -> Call:
    num_tokens, topk, hidden = draw(_TOKENS), draw(_TOPK), draw(_HIDDEN)
    dtype = draw(st.sampled_from(FLOATS))
    sources: dict[str, str] = {}
    _rows(draw, sources, num_tokens * topk, hidden, dtype)
    _add(sources, num_tokens=str(num_tokens), topk=str(topk))
    _add(sources, addend=_addend(draw, (num_tokens, hidden), dtype))
    size = _inversion(draw, sources, (num_tokens, topk), "weighted_restore")
    leaves = _leaves(draw, *(name for name in ("rows", "addend") if name in sources))
    return Call(
        "restore", sources, leaves, (_grad(draw, (num_tokens, hidden), dtype),), workspace_size=size
    )


def _tokens(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        source = f"t.bools({tuple(shape)}, {draw(_SEED)}, 0.5)"
    elif dtype in MOVED:
        source = f"t.bits({tuple(shape)}, {dtype}, {draw(_SEED)})"
    else:
        source = _normal(draw, shape, dtype)
    return _laid_out(draw, source, shape, expandable=True)


def _float_or_moved(draw: Draw) -> torch.dtype:
    return draw(st.sampled_from(FLOATS if draw(_OFTEN) else MOVED))


@st.composite
def permute(draw: Draw) -> Call:
    num_tokens, topk, hidden = draw(_TOKENS), draw(_TOPK), draw(_HIDDEN)
    dtype = _float_or_moved(draw)
    order, num_rows = _order(draw, num_tokens * topk)
    tokens = _tokens(draw, (num_tokens, hidden), dtype)
    sources = {"tokens": tokens, "token_indices_sorted": order, "topk": str(topk)}
    size = _inversion(draw, sources, (num_tokens, topk), "permute")
    if dtype in MOVED:
        return Call("permute", sources, workspace_size=size)
    leaves = _leaves(draw, "tokens")
    return Call(
        "permute", sources, leaves, (_grad(draw, (num_rows, hidden), dtype),), workspace_size=size
    )


@st.composite
def permute_with_scores(draw: Draw) -> Call:
    num_tokens, topk, hidden = draw(_TOKENS), draw(_TOPK), draw(_HIDDEN)
    dtype, scores_dtype = _float_or_moved(draw), draw(st.sampled_from(FLOATS))
    order, num_rows = _order(draw, num_tokens * topk)
    scores = _normal(draw, (num_tokens, topk), scores_dtype)
    sources = {
        "tokens": _tokens(draw, (num_tokens, hidden), dtype),
        "top_scores": _laid_out(draw, scores, (num_tokens, topk), expandable=True),
        "token_indices_sorted": order,
    }
    size = _inversion(draw, sources, (num_tokens, topk), "permute")
    grads = [_grad(draw, (num_rows,), scores_dtype)]
    leaves = _leaves(draw, "top_scores")
    if dtype in MOVED:
        return Call("permute_with_scores", sources, leaves, (None, *grads), workspace_size=size)
    leaves = (*leaves, *_leaves(draw, "tokens"))
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
