"""Hypothesis strategies for calls that are valid but for one argument."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from .calls import Call, Refusal
from .properties import PACKAGE
from .strategies import VALID

# (argument, its source, what is raised)
Mutation = tuple[str, str, Refusal]

# The tensors of each op: what they hold, and whether their shape follows from other arguments.
_FLOAT, _INDEX, _COUNT, _BOOL, _MOVED, _SAME, _INVERSE = (
    "float", "index", "count", "bool", "moved", "addend", "inverse"
)  # fmt: skip
_TENSORS: dict[str, dict[str, tuple[str, bool]]] = {
    "aux_loss": {
        "probs": (_FLOAT, False),
        "tokens_per_expert": (_COUNT, True),
        "token_mask": (_BOOL, True),
    },
    "sequence_aux_loss": {
        "probs": (_FLOAT, False),
        "tokens_per_expert": (_COUNT, False),
        "cu_seqlens": (_INDEX, True),
        "token_mask": (_BOOL, True),
    },
    "expert_permutation": {"expert_ids": (_INDEX, False)},
    "expert_permutation_from_map": {"routing_map": (_BOOL, False)},
    "expert_permutation_from_counts": {"counts": (_INDEX, False)},
    "compose_permutations": {"first": (_INDEX, False), "second": (_INDEX, False)},
    "inverse_permutation": {"token_indices_sorted": (_INDEX, False)},
    "permute": {
        "tokens": (_MOVED, False),
        "token_indices_sorted": (_INDEX, False),
        "inverse": (_INVERSE, True),
    },
    "permute_with_scores": {
        "tokens": (_MOVED, False),
        "top_scores": (_FLOAT, True),
        "token_indices_sorted": (_INDEX, False),
        "inverse": (_INVERSE, True),
    },
    "weighted_restore": {
        "rows": (_FLOAT, False),
        "top_scores": (_FLOAT, False),
        "token_indices_sorted": (_INDEX, True),
        "addend": (_SAME, True),
        "inverse": (_INVERSE, True),
    },
    "restore": {
        "rows": (_FLOAT, False),
        "token_indices_sorted": (_INDEX, True),
        "addend": (_SAME, True),
        "inverse": (_INVERSE, True),
    },
}
_OPTIONAL = ("token_mask", "cu_seqlens", "addend", "inverse")
_WRONG_DTYPES = {
    _FLOAT: ("int64", "int8", "bool", "complex64", "float8_e4m3fn"),
    _INDEX: ("int16", "uint8", "float32", "bool", "float64"),
    _COUNT: ("bfloat16", "float16", "int16", "bool"),
    _BOOL: ("uint8", "int64", "float32"),
    _MOVED: ("complex64", "uint16"),
    _INVERSE: ("int64", "float32"),
}
# The least value of each integer, and where it is not simply "at least", the most.
_INTEGERS: dict[str, dict[str, tuple[int, int | None]]] = {
    "aux_loss": {"num_experts": (1, None), "topk": (1, None)},
    "sequence_aux_loss": {"topk": (1, None)},
    "expert_permutation": {
        "num_experts": (1, 4096),
        "alignment": (1, 2**31 - 1),
        "num_rows": (0, 2**31 - 1),
    },
    "expert_permutation_from_map": {
        "topk": (1, None),
        "alignment": (1, 2**31 - 1),
        "num_rows": (0, 2**31 - 1),
    },
    "expert_permutation_from_counts": {"num_rows": (0, 2**31 - 1), "alignment": (1, 2**31 - 1)},
    "inverse_permutation": {"num_tokens": (0, None), "topk": (1, None)},
    "permute": {"topk": (1, None)},
    "restore": {"num_tokens": (0, None), "topk": (1, None)},
}


# Which has no gradient, and requires one.
_RECORDED = "tokens.to(torch.float8_e5m2)"


def _value(argument: str) -> Refusal:
    return Refusal("ValueError", argument)


def _type(argument: str, by_schema: bool = False) -> Refusal:
    return Refusal("TypeError", argument, by_schema)


def _of_tensor(
    call: Call, name: str, tensor: Tensor, kind: str, follows: bool
) -> Iterator[Mutation]:
    yield name, "[1.0]", _type(name, by_schema=True)
    if name not in _OPTIONAL:
        yield name, "None", _type(name, by_schema=True)
    if kind == _SAME:
        other = torch.float64 if tensor.dtype == torch.float32 else torch.float32
        yield name, f"{name}.to({other})", _type(name)
    for dtype in _WRONG_DTYPES.get(kind, ()):
        yield name, f"{name}.to(torch.{dtype})", _type(name)
    if tensor.dtype in (torch.float32, torch.int64):
        yield name, f"{name}.to_sparse()", _value(name)
    if not _any_rank(call, name):
        yield name, f"{name}[None]", _value(name)
        if tensor.dim() > 1 and tensor.shape[-1]:
            yield name, f"{name}[..., 0]", _value(name)
    if follows:
        if tensor.shape and tensor.shape[0]:
            yield name, f"{name}[1:]", _value(name)
        if name != "top_scores":
            yield name, f"torch.nn.functional.pad({name}, (0, 1))", _value(name)
    if name != next(iter(_TENSORS[call.op])):
        yield name, f"{name}.to('meta')", _value(name)


def _any_rank(call: Call, name: str) -> bool:
    """Whether a tensor of another rank is a valid call, or a mistake of another argument."""
    return name == "expert_ids" or (call.op, name) == ("weighted_restore", "top_scores")


def _of_integer(name: str, minimum: int, maximum: int | None) -> Iterator[Mutation]:
    yield name, str(minimum - 1), _value(name)
    yield name, str(-(2**40)), _value(name)
    yield name, str(2**63), Refusal("ValueError", name, by_schema=True)
    if maximum is not None:
        yield name, str(maximum + 1), _value(name)
    for source in ("True", "2.0", "'2'", "torch.ones(2)"):
        yield name, source, _type(name, by_schema=True)
    if name != "num_rows":
        yield name, "None", _type(name, by_schema=True)


def _of_workspace(size: str) -> Iterator[Mutation]:
    name = "workspace"
    if eval(size, {"torch": torch, "moe_custom_ops": PACKAGE}):
        yield name, f"t.scratch({size} - 1)", _value(name)
        yield name, "t.scratch(0)", _value(name)
    yield name, f"t.scratch({size} + 16)[1:]", _value(name)
    yield name, f"t.scratch(2 * {size} + 32)[::2]", _value(name)
    yield name, f"t.scratch({size} + 16)[None]", _value(name)
    yield name, f"t.scratch({size} + 16).view(torch.int8)", _type(name)
    yield name, f"t.scratch({size} + 16).view(torch.float32)", _type(name)
    yield name, f"t.scratch({size} + 16).to('meta')", _value(name)
    yield name, "'big'", _type(name, by_schema=True)
    yield name, size, _type(name, by_schema=True)


def _of_op(call: Call, arguments: dict[str, Any]) -> Iterator[Mutation]:
    """What one op alone can be given wrongly."""
    sources = call.sources
    if call.op in ("aux_loss", "sequence_aux_loss"):
        for source in ("True", "'0.1'", "None", "torch.ones(2)"):
            yield "coeff", source, _type("coeff", by_schema=True)
    if call.op == "aux_loss":
        columns, total = arguments["probs"].shape[1], "total_num_tokens"
        if columns:
            yield "num_experts", str(columns + 1), _value("probs")
        if "token_mask" not in sources and arguments["probs"].shape[0]:
            yield total, "0", _value(total)
        for source in ("-1", "torch.ones(2)", "torch.ones(0)", "torch.ones((), device='meta')"):
            yield total, source, _value(total)
        for source in ("2.0", "True", "'8'", "None"):
            yield total, source, _type(total, by_schema=True)
        for dtype in ("bfloat16", "float16", "bool", "int16"):
            yield total, f"torch.ones((), dtype=torch.{dtype})", _type(total)
    elif call.op == "sequence_aux_loss":
        if "cu_seqlens" in sources:
            yield "cu_seqlens", "None", _value("probs")
        else:
            yield "cu_seqlens", "torch.zeros(1, dtype=torch.int64)", _value("probs")
        longer = "torch.nn.functional.pad(tokens_per_expert, (0, 1))"
        yield "tokens_per_expert", longer, _value("tokens_per_expert")
    elif call.op == "expert_permutation":
        for source in ("torch.tensor(3)", "torch.zeros((2, 0), dtype=torch.int64)"):
            yield "expert_ids", source, _value("expert_ids")
    elif call.op == "expert_permutation_from_map":
        yield "topk", str(arguments["routing_map"].shape[1] + 1), _value("topk")
        for shape in ("(2, 0)", "(2, 4097)"):
            source = f"torch.zeros({shape}, dtype=torch.bool)"
            yield "routing_map", source, _value("routing_map")
    elif call.op == "expert_permutation_from_counts":
        for shape in ("(0, 3)", "(3, 0)", "(128, 129)"):
            source = f"torch.zeros({shape}, dtype=torch.int64)"
            yield "counts", source, _value("counts")
        yield "num_rows", "None", _type("num_rows", by_schema=True)
    elif call.op in ("permute", "permute_with_scores"):
        if "tokens" in call.leaves:
            yield "tokens", _RECORDED, _type("tokens")
        if call.op == "permute" and arguments["tokens"].shape[0]:
            yield "topk", str(2**31), _value("T * topk")
    elif call.op == "restore" and arguments["num_tokens"]:
        yield "topk", str(2**31), _value("num_tokens * topk")
    elif call.op == "weighted_restore":
        for source in ("torch.tensor(0.5)", "torch.rand(2, 0)"):
            yield "top_scores", source, _value("top_scores")
    elif call.op == "inverse_permutation":
        yield "num_tokens", str(2**31), _value("num_tokens * topk")


def mutations(call: Call) -> list[Mutation]:
    arguments = call.build()["arguments"]
    found = list(_of_op(call, arguments))
    for name, (kind, follows) in _TENSORS[call.op].items():
        if name in call.sources:
            found += _of_tensor(call, name, arguments[name], kind, follows)
    for name, limits in _INTEGERS.get(call.op, {}).items():
        found += _of_integer(name, *limits)
    if call.workspace_size is not None:
        found += _of_workspace(call.workspace_size)
    return found


@st.composite
def _broken(draw: st.DrawFn, valid: st.SearchStrategy[Call]) -> Call:
    call = draw(valid)
    broken: dict[str, list[Mutation]] = {}
    for mutation in mutations(call):
        broken.setdefault(mutation[0], []).append(mutation)
    name, source, refusal = draw(st.sampled_from(broken[draw(st.sampled_from(sorted(broken)))]))
    leaves = tuple(leaf for leaf in call.leaves if leaf != name or source == _RECORDED)
    return dataclasses.replace(call, change=(name, source), leaves=leaves, refusal=refusal)


INVALID: dict[str, st.SearchStrategy[Call]] = {op: _broken(valid) for op, valid in VALID.items()}
