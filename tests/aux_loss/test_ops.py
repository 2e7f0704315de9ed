"""Registration, values, gradients and bad input of aux_loss on the CPU."""

import itertools
import re

import pytest
import torch
from torch.library import opcheck

import moe_custom_ops
from moe_custom_ops import aux_loss, aux_loss_workspace_size, make_workspace
from moe_custom_ops.losses import plans, reference
from moe_custom_ops.testing import assert_same_bits, assert_within, make_probs

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INT, TENSOR = torch.ops.moe.aux_loss.int, torch.ops.moe.aux_loss.default


def workspace_for(probs):
    return make_workspace(aux_loss_workspace_size(*probs.shape, probs.dtype), probs.device)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("total", [30, torch.tensor(30), torch.tensor(29.5)])
def test_opcheck_of_the_public_op(requires_grad, given, total):
    probs, counts = make_probs(30, 16)
    probs.requires_grad_(requires_grad)
    workspace = workspace_for(probs) if given else None
    op = TENSOR if isinstance(total, torch.Tensor) else INT
    opcheck(op, (probs, counts, total, 8, 2, 1e-2, workspace))


@pytest.mark.parametrize("total", [30, torch.tensor(30.0)])
@pytest.mark.parametrize("mask", [None, torch.arange(30) % 3 > 0])
def test_opcheck_of_the_inner_ops(mask, total):
    """They have no gradient: what records them is the public op."""
    probs, counts = make_probs(30, 16)
    tensor, number = (total, 0) if isinstance(total, torch.Tensor) else (None, total)
    given, numbers = (probs, counts, mask, tensor, None), (8, 2, 1e-2, number)
    opcheck(torch.ops.moe.aux_loss_forward.default, (*given, *numbers))
    opcheck(torch.ops.moe.aux_loss_forward_in.default, (*given, workspace_for(probs), *numbers))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_experts", "columns"), [(1, 1), (7, 7), (32, 64), (256, 512), (160, 160)]
)
def test_value_against_a_float64_oracle(dtype, num_experts, columns):
    probs, counts = make_probs(500, columns, topk=6, dtype=dtype)
    loss = aux_loss(probs, counts, 500, num_experts, 6, 1e-2)
    scale = num_experts * 1e-2 / 6 / 500**2
    oracle = scale * (probs.double().sum(0) * counts).sum()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # 9 + 9 levels of the trees over tokens, columns and tiles, a product and the scale.
    assert_within(loss, oracle, oracle, roundings=20)


def test_even_routing_costs_the_coefficient():
    probs = torch.full((64, 8), 1 / 8)
    loss = aux_loss(probs, torch.full((8,), 64 * 2 // 8), 64, 8, 2, 0.125)
    assert loss.item() == 0.125


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_an_expanded_row(dtype):
    probs, counts = make_probs(100, 16, dtype=dtype)
    probs.requires_grad_()
    loss = aux_loss(probs, counts, 100, 8, 2, 1e-2)
    (grad,) = torch.autograd.grad(loss, probs, torch.tensor(3.0, dtype=loss.dtype))
    assert grad.dtype == dtype and grad.stride(0) == 0
    oracle = (3.0 * 8 * 1e-2 / 2 / 100**2 * counts.double()).expand(100, 16)
    assert_within(grad, oracle, oracle.abs(), roundings=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_against_autograd_through_the_reference(dtype):
    probs, counts = make_probs(100, 16, dtype=dtype)
    ours, theirs = probs.clone().requires_grad_(), probs.clone().requires_grad_()
    loss = aux_loss(ours, counts, 100, 8, 2, 1e-2)
    expected = reference.aux_loss(theirs, counts, 100, 8, 2, 1e-2)
    assert_same_bits(loss, expected)
    loss.backward()
    expected.backward()
    # The same two products, associated differently by autograd.
    assert_within(ours.grad, theirs.grad.double(), theirs.grad.double().abs(), roundings=3)


@pytest.mark.parametrize("total", [20, torch.tensor(20), torch.tensor(19.5)])
def test_gradcheck(total):
    probs, counts = make_probs(20, 8, dtype=torch.float64)
    probs.requires_grad_()
    call = lambda p: aux_loss(p, counts, total, 8, 2, 10.0)  # noqa: E731
    torch.autograd.gradcheck(call, probs)
    torch.autograd.gradgradcheck(lambda p: call(p) ** 2, probs)


def test_double_backward_reaches_the_incoming_gradient():
    probs, counts = make_probs(20, 8)
    probs.requires_grad_()
    upstream = torch.tensor(2.0, requires_grad=True)
    loss = aux_loss(probs, counts, 20, 8, 2, 10.0)
    (grad,) = torch.autograd.grad(loss, probs, upstream, create_graph=True)
    (twice,) = torch.autograd.grad(grad.square().sum(), upstream)
    scale = 8 * 10.0 / 2 / 20**2
    oracle = 20 * 2 * 2.0 * scale**2 * counts.double().square().sum()
    assert_within(twice, oracle, oracle, roundings=200)


@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_integer_and_tensor_totals_have_the_same_bits(count_dtype):
    probs, counts = make_probs(123, 24)
    counts = counts.to(count_dtype)
    losses = [
        aux_loss(probs, counts, total, 24, 2, 1e-3)
        for total in (
            123,
            torch.tensor(123),
            torch.tensor([123], dtype=torch.int32),
            torch.tensor(123.0),
            torch.tensor(123.0, dtype=torch.float64),
        )
    ]
    for loss in losses[1:]:
        assert_same_bits(loss, losses[0])


def test_a_fractional_total_is_not_rounded():
    probs, counts = make_probs(16, 8)
    loss = aux_loss(probs, counts, torch.tensor(10.5), 8, 2, 1.0)
    oracle = 8 / 2 / 10.5**2 * (probs.double().sum(0) * counts).sum()
    assert_within(loss, oracle, oracle, roundings=12)


def test_a_device_total_of_zero_gives_zero():
    probs = torch.full((4, 8), torch.nan, requires_grad=True)
    loss = aux_loss(probs, torch.zeros(8, dtype=torch.int64), torch.tensor(0), 8, 2, 1.0)
    (grad,) = torch.autograd.grad(loss, probs)
    assert loss.item() == 0 and (grad == 0).all()


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_a_device_total_of_zero_gives_zero_whatever_the_rest_holds(poison):
    probs = torch.rand(4, 8, requires_grad=True)
    loss = aux_loss(probs, torch.full((8,), poison), torch.tensor(0.0), 8, 2, 1.0)
    (grad,) = torch.autograd.grad(loss, probs, torch.tensor(poison))
    assert loss.item() == 0 and (grad == 0).all()


def test_no_columns():
    probs = torch.rand(5, 0, requires_grad=True)
    loss = aux_loss(probs, torch.ones(0), 5, 1, 1, 1.0)
    loss.backward()
    assert loss.item() == 0 and probs.grad.shape == (5, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("total", [40, torch.tensor(40.0)])
def test_masked_tokens_add_nothing_whatever_they_hold(dtype, total):
    probs, counts = make_probs(60, 16, dtype=dtype)
    mask = torch.arange(60) % 3 > 0
    probs[~mask] = torch.tensor([torch.nan, torch.inf, 1.0, 5.0]).to(dtype).repeat(5)[:, None]
    probs.requires_grad_()
    loss = aux_loss(probs, counts, total, 16, 2, 1e-2, token_mask=mask)
    oracle = 16 * 1e-2 / 2 / 40**2 * (probs[mask].double().sum(0) * counts).sum()
    assert_within(loss, oracle, oracle, roundings=20)
    loss.backward()
    exact = 16 * 1e-2 / 2 / 40**2 * counts.double().expand(40, 16)
    assert (probs.grad[~mask] == 0).all()
    assert_within(probs.grad[mask], exact, exact, roundings=4)


def test_a_mask_of_no_token_takes_a_total_of_zero():
    probs, counts = make_probs(60, 16)
    probs.requires_grad_()
    nobody = torch.zeros(60, dtype=torch.bool)
    loss = aux_loss(probs, counts, 0, 16, 2, 1e-2, token_mask=nobody)
    loss.backward()
    assert loss.item() == 0 and (probs.grad == 0).all()


def test_counts_and_total_are_constants():
    probs, counts = make_probs(60, 16)
    total = torch.tensor(60.0, requires_grad=True)
    assert not aux_loss(probs, counts.float().requires_grad_(), total, 16, 2, 1e-2).requires_grad


def test_the_loss_may_be_changed_in_place():
    probs, counts = make_probs(60, 16)
    loss = aux_loss(probs.requires_grad_(), counts, 60, 16, 2, 1e-2)
    expected = loss.detach() + 1
    loss += 1
    assert_same_bits(loss, expected)


def test_a_mask_of_all_tokens_changes_no_bit():
    probs, counts = make_probs(60, 16)
    everyone = torch.ones(60, dtype=torch.bool)
    loss = aux_loss(probs, counts, 60, 16, 2, 1e-2, token_mask=everyone)
    assert_same_bits(loss, aux_loss(probs, counts, 60, 16, 2, 1e-2))


def test_gradcheck_with_a_mask():
    probs, counts = make_probs(20, 8, dtype=torch.float64)
    probs.requires_grad_()
    mask = torch.arange(20) % 3 > 0
    call = lambda p: aux_loss(p, counts, 14, 8, 2, 10.0, token_mask=mask)  # noqa: E731
    assert torch.autograd.gradcheck(call, probs)
    assert torch.autograd.gradgradcheck(lambda p: call(p) ** 2, probs)


@pytest.mark.parametrize("total", [30, torch.tensor(30)])
def test_opcheck_with_a_mask(total):
    probs, counts = make_probs(30, 16)
    op = TENSOR if isinstance(total, torch.Tensor) else INT
    mask = torch.arange(30) % 3 > 0
    opcheck(op, (probs.requires_grad_(), counts, total, 8, 2, 1e-2, None, mask))


def test_no_tokens():
    probs = torch.empty(0, 8, requires_grad=True)
    loss = aux_loss(probs, torch.zeros(8, dtype=torch.int64), 0, 8, 2, 1.0)
    loss.backward()
    assert loss.item() == 0 and loss.shape == () and probs.grad.shape == (0, 8)


def test_tiny_scores_are_not_lifted_by_an_epsilon():
    probs = torch.full((8, 4), 1e-22)
    loss = aux_loss(probs, torch.full((4,), 4), 8, 4, 2, 1.0)
    assert_within(
        loss, 4 / 2 / 8**2 * torch.tensor(4 * 4 * 8 * 1e-22).double(), loss.double(), roundings=16
    )


def test_large_float_counts_are_exact_and_half_counts_are_refused():
    probs = torch.ones(1, 2, dtype=torch.float64)
    counts = torch.tensor([40839.0, 40841.0])
    assert aux_loss(probs, counts, 1, 2, 2, 1.0).item() == 40839.0 + 40841.0
    with pytest.raises(TypeError, match=r"tokens_per_expert must be .*float64, got bfloat16 \(256"):
        aux_loss(probs, counts.bfloat16(), 1, 2, 2, 1.0)


def test_half_gradients_near_the_subnormal_step_keep_their_scale():
    probs, counts = make_probs(8192, 128, topk=8, dtype=torch.float16)
    probs.requires_grad_()
    aux_loss(probs, counts, 8192, 128, 8, 1e-3).backward()
    exact = 128 * 1e-3 / 8 / 8192**2 * counts.double()
    step = 2.0**-24
    assert ((probs.grad[0].double() - exact).abs() <= step / 2 * 1.001).all()
    assert (probs.grad[0] != 0).any()


def test_strided_probs_and_counts():
    probs, counts = make_probs(60, 16)
    expected = aux_loss(probs, counts, 60, 16, 2, 1e-2)
    views = [probs.t().contiguous().t(), torch.cat([probs, probs], 1)[:, 16:]]
    for view in views:
        assert_same_bits(
            aux_loss(view, counts.repeat_interleave(2)[::2], 60, 16, 2, 1e-2), expected
        )


def test_two_backwards_of_one_graph_are_equal():
    probs, counts = make_probs(60, 16)
    probs.requires_grad_()
    workspace = workspace_for(probs)
    loss = aux_loss(probs, counts, 60, 16, 2, 1e-2, workspace)
    (first,) = torch.autograd.grad(loss, probs, retain_graph=True)
    workspace.fill_(255)
    (second,) = torch.autograd.grad(loss, probs)
    assert_same_bits(second, first)


def test_inference_mode_then_training_with_one_workspace():
    probs, counts = make_probs(60, 16)
    workspace = workspace_for(probs)
    with torch.inference_mode():
        first = aux_loss(probs, counts, 60, 16, 2, 1e-2, workspace)
    second = aux_loss(probs.requires_grad_(), counts, 60, 16, 2, 1e-2, workspace)
    second.backward()
    assert_same_bits(second, first.clone())
    assert probs.grad.abs().sum() > 0


def test_a_workspace_for_the_maximum_serves_every_smaller_call():
    for columns, dtype in itertools.product((1, 8, 65, 2304), (torch.float32, torch.float64)):
        sizes = [aux_loss_workspace_size(t, columns, dtype) for t in (0, 1, 511, 512, 513, 5000)]
        assert sizes == sorted(sizes) and all(size % 16 == 0 for size in sizes)


def test_the_workspace_holds_what_the_kernels_write():
    for tokens, columns in itertools.product((1, 511, 4096, 10**6), (1, 8, 65, 512, 2304, 16384)):
        _, partials = plans.num_partials(tokens, columns)
        assert partials * 4 <= aux_loss_workspace_size(tokens, columns)


def bad(change):
    probs, counts = make_probs(30, 16)
    call = {
        "probs": probs,
        "tokens_per_expert": counts,
        "total_num_tokens": 30,
        "num_experts": 8,
        "topk": 2,
        "coeff": 1e-2,
        "workspace": None,
    }
    return {**call, **change}


def misaligned(num_bytes):
    return torch.empty(num_bytes + 1, dtype=torch.uint8)[1:]


BAD_CALLS = [
    ({"token_mask": 3}, TypeError, "token_mask must be a Tensor, got int"),
    ({"token_mask": torch.ones(30)}, TypeError, "token_mask must be bool, got float32"),
    # Case 18: a mask over sequences against probs over tokens.
    (
        {"token_mask": torch.ones(16, dtype=torch.bool)},
        ValueError,
        r"token_mask must be of shape \[tokens\] = \[30\], got \[16\]",
    ),
    ({"total_num_tokens": 2**63}, ValueError, "total_num_tokens must fit 64 bits, got 9223372036"),
    ({"coeff": 10**400}, ValueError, "coeff must fit 64 bits, got 1000"),
    ({"probs": torch.rand(30, 16).to_sparse()}, ValueError, "probs must be a dense tensor, got"),
    ({"probs": [1.0]}, TypeError, "probs must be a Tensor, got list"),
    ({"probs": None}, TypeError, "probs must be a Tensor, got NoneType"),
    ({"tokens_per_expert": None}, TypeError, "tokens_per_expert must be a Tensor, got NoneType"),
    ({"total_num_tokens": None}, TypeError, "must be a Tensor or an int, got NoneType"),
    (
        {"probs": torch.rand(30)},
        ValueError,
        r"probs must be of shape \[tokens, columns\], got \[30\]",
    ),
    (
        {"probs": torch.ones(30, 16, dtype=torch.int64)},
        TypeError,
        "probs must be float32, bfloat16, float16 or float64, got int64",
    ),
    (
        {"tokens_per_expert": torch.ones(15)},
        ValueError,
        r"tokens_per_expert must be .*\[16\].*got \[15\]",
    ),
    (
        {"tokens_per_expert": torch.ones(16, 1)},
        ValueError,
        r"tokens_per_expert must be .*got \[16, 1\]",
    ),
    (
        {"tokens_per_expert": torch.ones(16).half()},
        TypeError,
        "tokens_per_expert must be .*got float16",
    ),
    (
        {"tokens_per_expert": torch.ones(16, device="meta")},
        ValueError,
        "tokens_per_expert must be on the device of probs, cpu, got meta",
    ),
    ({"num_experts": 6}, ValueError, r"columns a multiple of num_experts = 6, got \[30, 16\]"),
    ({"num_experts": 0}, ValueError, "num_experts must be at least 1, got 0"),
    ({"num_experts": 8.0}, TypeError, "num_experts must be an int, got float"),
    ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
    ({"topk": True}, TypeError, "topk must be an int, got bool"),
    ({"coeff": "1"}, TypeError, "coeff must be a number, got str"),
    ({"total_num_tokens": 0}, ValueError, "total_num_tokens must be at least 1, got 0"),
    ({"total_num_tokens": -3}, ValueError, "total_num_tokens must be at least 1, got -3"),
    (
        {"total_num_tokens": 30.0},
        TypeError,
        "total_num_tokens must be a Tensor or an int, got float",
    ),
    (
        {"total_num_tokens": torch.ones(2)},
        ValueError,
        r"total_num_tokens must be a tensor of one element, got shape \[2\]",
    ),
    (
        {"total_num_tokens": torch.ones(1).half()},
        TypeError,
        "total_num_tokens must be .*got float16",
    ),
    ({"total_num_tokens": torch.ones(1, device="meta")}, ValueError, "total_num_tokens must be on"),
    ({"workspace": 64}, TypeError, "workspace must be a Tensor, got int"),
    ({"workspace": torch.empty(64)}, TypeError, "workspace must be uint8, got float32"),
    (
        {"workspace": torch.empty(64, dtype=torch.uint8, device="meta")},
        ValueError,
        "workspace must be on",
    ),
    (
        {"workspace": torch.empty(0, dtype=torch.uint8)},
        ValueError,
        "workspace must be at least 16 bytes long, got 0 bytes",
    ),
    ({"workspace": torch.empty(8, 8, dtype=torch.uint8)}, ValueError, "workspace must be of shape"),
    ({"workspace": misaligned(64)}, ValueError, "workspace must be aligned to 16 bytes"),
    (
        {"workspace": torch.empty(128, dtype=torch.uint8)[::2]},
        ValueError,
        "workspace must be contiguous",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=f"aux_loss: .*{message}"):
        aux_loss(**bad(change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    # A list makes no graph, and Dynamo refuses sparse tensors by itself.
    [case for case in BAD_CALLS if not re.search("got list|dense", case[2])],
)
def test_bad_input_under_compile_has_the_same_message(change, error, message):
    call = bad(change)
    compiled = torch.compile(lambda: aux_loss(**call), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"(?s)aux_loss: .*{message}"):
        compiled()


def test_bad_input_through_torch_ops():
    call = bad({"topk": 0})
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        torch.ops.moe.aux_loss(*call.values())


def test_a_refused_call_writes_nothing():
    probs, counts = make_probs(30, 16)
    workspace = torch.full((16,), 77, dtype=torch.uint8)
    with pytest.raises(ValueError):
        aux_loss(probs, counts[:3], 30, 8, 2, 1e-2, workspace)
    assert (workspace == 77).all()


def test_an_inner_op_leaves_a_workspace_on_the_cpu_alone():
    """One that is too short is refused there, too."""
    probs, counts = make_probs(5000, 16)
    scratch = torch.full((48,), 77, dtype=torch.uint8)
    call = lambda own: (probs, counts, None, None, None, own, 8, 2, 1.0, 5000)  # noqa: E731
    with pytest.raises(ValueError, match="workspace must be at least 48 bytes long, got 32"):
        torch.ops.moe.aux_loss_forward_in(*call(scratch[:32]))
    loss, _ = torch.ops.moe.aux_loss_forward_in(*call(scratch))
    assert (scratch == 77).all()
    assert_same_bits(loss, aux_loss(probs, counts, 5000, 8, 2, 1.0))


@pytest.mark.parametrize("argument", ["probs", "tokens_per_expert", "total_num_tokens"])
def test_forward_mode_is_refused(argument):
    call = bad({"tokens_per_expert": torch.ones(16), "total_num_tokens": torch.tensor(30.0)})
    with torch.autograd.forward_ad.dual_level():
        primal = call[argument]
        call[argument] = torch.autograd.forward_ad.make_dual(primal, torch.ones_like(primal))
        with pytest.raises(NotImplementedError, match="aux_loss: forward-mode AD"):
            aux_loss(**call)


@pytest.mark.parametrize("bad_size", [(-1, 8), (8, -1)])
def test_workspace_size_refuses_negative_sizes(bad_size):
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        aux_loss_workspace_size(*bad_size)
    with pytest.raises(TypeError, match="dtype must be float32"):
        aux_loss_workspace_size(8, 8, torch.int32)


def test_exports():
    assert set(moe_custom_ops.__all__) <= set(dir(moe_custom_ops))


def test_the_scale_is_divided_in_float64_and_rounded_once():
    """A reciprocal in place of a division is off by one bit for about a quarter of the totals."""
    sums = torch.zeros(1, dtype=torch.float64)
    for total in range(1, 2000):
        exact = 7 * 1e-2 / 3 / total / total
        for given in (total, torch.tensor(total), torch.tensor(float(total))):
            scale = reference.loss_from_tile_sums(sums, given, 7, 3, 1e-2)[1]
            assert scale.item() == exact


def test_a_tile_is_a_power_of_two_that_the_columns_alone_decide():
    columns = (1, 8, 16, 17, 64, 65, 256, 512, 4096)
    assert [reference.tile_tokens(n) for n in columns] == [512, 512, 512, 256, 128, 64, 32, 16, 8]
    assert [reference.num_tiles(n, 64) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
