"""The rules of expert_permutation over drawn shapes and ids."""

import pytest
import torch

from moe_custom_ops import expert_permutation
from tests.expert_permutation.test_ops import check

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_rules(data):
    num_experts = data.draw(st.integers(1, 9))
    topk = data.draw(st.integers(1, 4))
    ids = data.draw(st.lists(st.integers(-2, num_experts + 1), max_size=40))
    ids = torch.tensor(ids[: len(ids) // topk * topk], dtype=torch.int64).view(-1, topk)
    alignment = data.draw(st.integers(1, 5))
    num_rows = data.draw(st.none() | st.integers(0, 60))
    results = expert_permutation(ids, num_experts, alignment, num_rows)
    check(results, ids, num_experts, alignment, num_rows)
