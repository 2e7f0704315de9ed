"""TransformerEngine's names against their documented formulas.

The library itself cannot be imported without a GPU.
"""

import pytest
import torch

from moe_custom_ops.integrations.transformer_engine import (
    fused_moe_aux_loss,
    moe_permute,
    moe_unpermute,
)
from moe_custom_ops.testing import assert_close_in_norm, assert_same_bits
from tests.compiling import compile_fresh

TOKENS, EXPERTS, TOPK, HIDDEN = 30, 8, 3, 16


def routing():
    generator = torch.Generator().manual_seed(0)
    scores, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(TOPK)
    return torch.randn(TOKENS, HIDDEN, generator=generator), scores, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [TOKENS, torch.tensor(TOKENS)])
def test_the_loss(dtype, counts, total):
    probs = torch.rand(TOKENS, EXPERTS).to(dtype).requires_grad_()
    tokens_per_expert = torch.arange(EXPERTS).to(counts)
    loss = fused_moe_aux_loss(
        probs, tokens_per_expert, total, EXPERTS, TOPK, 0.1, deterministic=False
    )
    assert loss.dtype == dtype
    scale = EXPERTS * 0.1 / (TOPK * TOKENS**2)
    row = scale * torch.arange(EXPERTS).double()
    expected = (probs.double() * row).sum()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    assert_close_in_norm(loss.double(), expected, tolerance)
    (grad,) = torch.autograd.grad(loss, probs)
    assert_close_in_norm(grad.double(), row.expand(TOKENS, EXPERTS), tolerance)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_out_tokens", [-1, 0, TOKENS * TOPK, 40])
@pytest.mark.parametrize("weighted", [None, "merging_probs", "probs"])
def test_there_and_back(ids_dtype, num_out_tokens, weighted):
    tokens, scores, ids = routing()
    leaves = [tokens.clone().requires_grad_(), scores.clone().requires_grad_()]
    rows, row_id_map = moe_permute(
        leaves[0], ids.to(ids_dtype), num_out_tokens=num_out_tokens, map_type="index"
    )
    order = ids.flatten().argsort(stable=True)
    num_rows = num_out_tokens if num_out_tokens > 0 else TOKENS * TOPK
    assert torch.equal(rows, tokens[order[:num_rows] // TOPK])
    options = {} if weighted is None else {weighted: leaves[1]}
    out = moe_unpermute(rows * 2, row_id_map, map_type="index", **options)

    kept = torch.zeros(TOKENS * TOPK).scatter(0, order[:num_rows], 1.0).view(TOKENS, TOPK)
    exact = [tokens.double().requires_grad_(), scores.double().requires_grad_()]
    factor = kept if weighted is None else kept * exact[1]
    expected = 2 * exact[0] * factor.sum(1, keepdim=True)
    assert_close_in_norm(out.double(), expected, 1e-6)
    weight = torch.randn(TOKENS, HIDDEN)
    needed = leaves[: 1 if weighted is None else 2]
    grads = torch.autograd.grad((out * weight).sum(), needed)
    exact_grads = torch.autograd.grad((expected * weight).sum(), exact[: len(needed)])
    for grad, expected_grad in zip(grads, exact_grads, strict=True):
        assert_close_in_norm(grad.double(), expected_grad, 1e-6)


def test_ids_of_other_ranks_are_dropped():
    tokens, _, ids = routing()
    ids[::2, 1] = -1
    rows, row_id_map = moe_permute(tokens, ids, map_type="index")
    assert (row_id_map[::2, 1] == -1).all()
    out = moe_unpermute(rows, row_id_map, map_type="index")
    kept = (ids >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(out, tokens * kept)


def test_no_token():
    tokens, _, ids = routing()
    rows, row_id_map = moe_permute(tokens[:0], ids[:0], map_type="index")
    assert rows.shape == (0, HIDDEN)
    assert moe_unpermute(rows, row_id_map, map_type="index").shape == (0, HIDDEN)


def test_compiled_with_the_number_of_experts():
    tokens, scores, ids = routing()

    def layer(x, scores, ids):
        rows, row_id_map = moe_permute(x, ids, map_type="index", num_experts=EXPERTS)
        return moe_unpermute(rows, row_id_map, scores, map_type="index")

    assert_same_bits(
        compile_fresh(layer, "aot_eager")(tokens, scores, ids), layer(tokens, scores, ids)
    )


@pytest.mark.parametrize("map_type", ["mask", "rows"])
def test_the_mask_map_is_refused(map_type):
    tokens, _, ids = routing()
    message = f"map_type must be 'index', got '{map_type}'.*expert_permutation_from_map"
    with pytest.raises(ValueError, match=f"moe_permute: {message}"):
        moe_permute(tokens, ids, map_type=map_type)
    with pytest.raises(ValueError, match=f"moe_unpermute: {message}"):
        moe_unpermute(tokens, ids.int(), map_type=map_type)


def test_bad_input():
    tokens, scores, ids = routing()
    with pytest.raises(ValueError, match=r"routing_map must be of shape \[tokens, topk\], got"):
        moe_permute(tokens, ids[0], map_type="index")
    with pytest.raises(TypeError, match="num_out_tokens must be an int, got float"):
        moe_permute(tokens, ids, 2.0, map_type="index")
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        moe_permute(tokens, ids, map_type="index", num_experts=0)
    rows, row_id_map = moe_permute(tokens, ids, map_type="index")
    with pytest.raises(ValueError, match="probs must be None beside merging_probs, got both"):
        moe_unpermute(rows, row_id_map, scores, map_type="index", probs=scores)
    with pytest.raises(ValueError, match=r"merging_probs must be of shape \[30, 3\], got \[30, 2"):
        moe_unpermute(rows, row_id_map, scores[:, :2], map_type="index")
    with pytest.raises(TypeError, match="row_id_map must be int32, got int64"):
        moe_unpermute(rows, row_id_map.long(), map_type="index")
    with pytest.raises(TypeError, match="coeff must be a number, got NoneType"):
        fused_moe_aux_loss(scores, torch.ones(3), 3, 3, 2, None)
    with pytest.raises(TypeError, match="tokens_per_expert must be a Tensor, got list"):
        fused_moe_aux_loss(scores, [1.0], 3, 8, 2, 0.1)
