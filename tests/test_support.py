"""The table of the README that says what each op takes: every dtype in it, and every other."""

import re

import pytest
import torch

import moe_custom_ops as m
from tests.conftest import ROOT

T, K, E, H = 4, 2, 8, 5
ORDER = torch.arange(T * K).flip(0)
CALLS = {
    "aux_loss": {
        "probs": torch.rand(T, E),
        "tokens_per_expert": torch.ones(E),
        "total_num_tokens": torch.tensor(T),
        "num_experts": E,
        "topk": K,
        "coeff": 0.1,
        "token_mask": torch.ones(T, dtype=torch.bool),
    },
    "sequence_aux_loss": {
        "probs": torch.rand(T, E),
        "tokens_per_expert": torch.ones(2, E),
        "topk": K,
        "coeff": 0.1,
        "cu_seqlens": torch.tensor([0, 1, T]),
        "token_mask": torch.ones(T, dtype=torch.bool),
    },
    "expert_permutation": {"expert_ids": ORDER.view(T, K), "num_experts": E},
    "expert_permutation_from_map": {"routing_map": torch.ones(T, E, dtype=torch.bool), "topk": E},
    "expert_permutation_from_counts": {
        "counts": torch.ones(2, E, dtype=torch.int64),
        "num_rows": 9,
    },
    "permute": {"tokens": torch.rand(T, H), "token_indices_sorted": ORDER, "topk": K},
    "permute_with_scores": {
        "tokens": torch.rand(T, H),
        "top_scores": torch.rand(T, K),
        "token_indices_sorted": ORDER,
    },
    "weighted_restore": {
        "rows": torch.rand(T * K, H),
        "top_scores": torch.rand(T, K),
        "token_indices_sorted": ORDER,
    },
    "restore": {
        "rows": torch.rand(T * K, H),
        "token_indices_sorted": ORDER,
        "num_tokens": T,
        "topk": K,
    },
    "inverse_permutation": {"token_indices_sorted": ORDER, "num_tokens": T, "topk": K},
}
INVERSE = ORDER.int().view(T, K)
ALL_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


def parsed():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| Op | Argument | Shape | Dtypes |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        ops, argument, shape, dtypes = (cell.strip() for cell in line.strip("|").split("|"))
        with_gradient, _, without = dtypes.partition("; without a gradient ")
        for op in re.findall(r"`(\w+)`", ops):
            names = [[x for x in part.split(", ") if x] for part in (with_gradient, without)]
            argument = argument.strip("`")
            yield pytest.param(op, argument, shape, *names, id=f"{op}-{argument}")


TABLE = list(parsed())


def converted(x, dtype):
    """``x`` in ``dtype``, or None where PyTorch makes no such tensor."""
    try:
        return torch.empty(x.shape, dtype=dtype).copy_(x)
    except (RuntimeError, NotImplementedError):
        pass
    try:
        return torch.empty(x.shape, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        return None


@pytest.mark.parametrize(("op", "argument", "shape", "names", "without"), TABLE)
def test_each_dtype_is_taken_and_every_other_refused(op, argument, shape, names, without):
    call = {**CALLS[op]}
    if argument == "inverse":
        call["inverse"] = INVERSE
    taken = [getattr(torch, name) for name in names + without]
    assert taken and set(taken) <= set(ALL_DTYPES)
    refused = 0
    for dtype in ALL_DTYPES:
        x = converted(call[argument], dtype)
        if dtype in taken:
            if op in ("weighted_restore", "restore") and argument == "rows":
                call["addend"] = torch.zeros(T, H, dtype=dtype)
            getattr(m, op)(**{**call, argument: x})
        elif x is not None:
            refused += 1
            with pytest.raises(TypeError, match=f"{op}: {argument} must be "):
                getattr(m, op)(**{**call, argument: x})
    assert refused > 5


@pytest.mark.parametrize(("op", "argument", "shape", "names", "without"), TABLE)
def test_another_number_of_dimensions_is_refused(op, argument, shape, names, without):
    call = {**CALLS[op]}
    if argument == "inverse":
        call["inverse"] = INVERSE
    if "*" in shape.split("]")[0]:
        getattr(m, op)(**{**call, argument: call[argument][:, None]})
    elif "int, or a tensor" in shape:
        getattr(m, op)(**{**call, argument: T})
        getattr(m, op)(**{**call, argument: call[argument].view(1, 1)})
    else:
        with pytest.raises(ValueError, match=f"{op}: .* must be of shape"):
            getattr(m, op)(**{**call, argument: call[argument][None, None]})


@pytest.mark.parametrize(("op", "argument", "shape", "names", "without"), TABLE)
def test_a_dtype_without_a_gradient_is_refused_one(op, argument, shape, names, without):
    for name in without:
        dtype = getattr(torch, name)
        if dtype.is_floating_point:
            x = CALLS[op][argument].to(dtype).requires_grad_()
            with pytest.raises(TypeError, match="of a dtype that has a gradient"):
                getattr(m, op)(**{**CALLS[op], argument: x})


def test_every_public_op_is_in_the_table():
    in_table = {case.values[0] for case in TABLE}
    ops = {name for name in m.__all__ if not name.endswith(("_size", "workspace"))}
    assert in_table == set(CALLS) == ops - {"compose_permutations"}
    for op, call in CALLS.items():
        documented = {case.values[1] for case in TABLE if case.values[0] == op}
        assert {k for k, v in call.items() if isinstance(v, torch.Tensor)} <= documented
