"""The Triton kernels against the reference, bit for bit: on a GPU, or under the interpreter."""

import pytest
import torch

from moe_custom_ops.backend import as_bytes, float64_bits
from moe_custom_ops.fixed_order import accumulator_dtype
from moe_custom_ops.losses import plans, reference
from moe_custom_ops.testing import assert_same_bits, make_probs

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COUNT_DTYPES = [torch.int32, torch.int64, torch.float32, torch.float64]


def run(probs, counts, total, num_experts, topk, coeff, device, num_warps=None, token_mask=None):
    """(loss, C) from the kernels, over scratch and results that start as NaN."""
    probs, counts = probs.to(device), counts.to(device)
    dtype = accumulator_dtype(probs.dtype)
    _, count = plans.num_partials(*probs.shape)
    partials = torch.full((count,), torch.nan, dtype=dtype, device=device)
    loss, scale = (torch.full((), torch.nan, dtype=dtype, device=device) for _ in range(2))
    mask = None if token_mask is None else token_mask.to(device)
    sum_tiles = plans.aux_tile_sums(probs, counts, mask, num_warps)
    sum_tiles(probs, counts, as_bytes(mask), partials)
    host_scale = num_experts * coeff / topk
    device_total = None
    if isinstance(total, torch.Tensor):
        device_total = total.to(device)
    else:
        host_scale = host_scale / total / total if total else 0.0
    add_tiles = plans.aux_from_tile_sums(count, dtype, loss.device)
    add_tiles(partials, device_total, loss, scale, float64_bits(host_scale))
    return loss.cpu(), scale.cpu()


def expect(probs, counts, total, num_experts, topk, coeff, token_mask=None):
    sums = reference.tile_sums(probs, counts, token_mask)
    return reference.loss_from_tile_sums(sums, total, num_experts, topk, coeff)


def check(probs, counts, total, num_experts, topk, coeff, device, **options):
    actual = run(probs, counts, total, num_experts, topk, coeff, device, **options)
    token_mask = options.get("token_mask")
    expected = expect(probs, counts, total, num_experts, topk, coeff, token_mask)
    for a, b, what in zip(actual, expected, ("loss", "scale"), strict=True):
        assert_same_bits(a, b, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count_dtype", COUNT_DTYPES)
def test_every_dtype(dtype, count_dtype, kernel_device):
    probs, counts = make_probs(300, 160, topk=6, dtype=dtype)
    check(probs, (counts + 2**24 + 1).to(count_dtype), 300, 160, 6, 1e-2, kernel_device)


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 65, 160, 512, 1025, 2304])
def test_columns(columns, kernel_device):
    tile = reference.tile_tokens(columns)
    for num_tokens in (1, tile - 1, tile, tile + 1, 3 * tile + 5):
        probs, counts = make_probs(num_tokens, columns)
        check(probs, counts, num_tokens, columns, 2, 1e-2, kernel_device)


@pytest.mark.parametrize(
    "total",
    [
        0,
        7,
        torch.tensor(7),
        torch.tensor([7.0]),
        torch.tensor(6.5, dtype=torch.float64),
        torch.tensor(0),
        torch.tensor(0.0),
    ],
)
def test_totals(total, kernel_device):
    num_tokens = 0 if isinstance(total, int) and total == 0 else 7
    probs, counts = make_probs(num_tokens, 8)
    check(probs, counts, total, 8, 2, 1e-2, kernel_device)


def test_a_device_total_of_zero_hides_nan(kernel_device):
    probs = torch.full((7, 8), torch.nan)
    loss, scale = run(probs, torch.ones(8), torch.tensor(0), 8, 2, 1.0, kernel_device)
    assert loss.item() == 0 and scale.item() == 0


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_special_values_reach_the_loss(special, kernel_device):
    probs, counts = make_probs(100, 8)
    probs[37, 3] = special
    counts[3] = 5
    loss, _ = run(probs, counts, 100, 8, 2, 1e-2, kernel_device)
    torch.testing.assert_close(loss, torch.tensor(special), equal_nan=True)
    check(probs, counts, 100, 8, 2, 1e-2, kernel_device)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-20, 1e30])
def test_extreme_magnitudes(magnitude, kernel_device):
    probs, counts = make_probs(100, 8)
    loss, _ = run(probs * magnitude, counts, 1, 8, 2, 1.0, kernel_device)
    assert loss != 0
    check(probs * magnitude, counts, 1, 8, 2, 1.0, kernel_device)


def test_strides(kernel_device):
    probs, counts = make_probs(90, 24)
    wide = torch.randn(90, 3, 25)[:, 1, 1:]
    for view in (
        probs.t().contiguous().t(),
        probs[::3],
        probs.expand(90, 24),
        wide,
        probs[:1].expand(40, -1),
    ):
        check(view, counts.repeat_interleave(2)[::2], view.shape[0], 24, 2, 1e-2, kernel_device)


def test_more_partial_sums_than_one_step_of_the_final_tree_adds(kernel_device, monkeypatch):
    if kernel_device == "cpu":
        monkeypatch.setattr(plans, "FINAL_BLOCK", 16)
    probs, counts = make_probs(8 * 5000 if kernel_device == "cuda" else 8 * 50, 1024)
    assert plans.num_partials(*probs.shape)[1] > 2 * plans.FINAL_BLOCK
    check(probs, counts, probs.shape[0], 1024, 2, 1e-2, kernel_device)


@pytest.mark.parametrize("shape", [(300, 160), (1, 8), (700, 8), (40, 2304)])
def test_masked_tokens_are_not_read(shape, kernel_device):
    probs, counts = make_probs(*shape)
    token_mask = torch.rand(shape[0], generator=torch.Generator().manual_seed(0)) < 0.6
    probs[~token_mask] = torch.nan
    call = (probs, counts, shape[0], shape[1], 2, 1e-2, kernel_device)
    check(*call, token_mask=token_mask)
    check(*call, token_mask=token_mask.repeat_interleave(3)[::3])
    assert run(*call, token_mask=token_mask)[0].isfinite()


def test_no_columns(kernel_device):
    check(torch.rand(5, 0), torch.ones(0), 5, 1, 1, 1.0, kernel_device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_subnormal_halves(dtype, kernel_device):
    probs, counts = make_probs(100, 8)
    probs = (probs * 2 * torch.finfo(dtype).smallest_normal).to(dtype)
    assert (probs.float() < torch.finfo(dtype).smallest_normal).any()
    check(probs, counts, 1, 8, 2, 1.0, kernel_device)


def test_no_launch_choice_changes_a_bit(kernel_device, monkeypatch):
    probs, counts = make_probs(301, 500, topk=8)
    expected = expect(probs, counts, 301, 500, 8, 1e-2)[0]
    chunks = set()
    # The interpreter has no warps.
    warps = (1, 2, 4, 8) if kernel_device == "cuda" else (4,)
    for few_programs in (10, 20, 40, 10**6):
        monkeypatch.setattr(plans, "FEW_PROGRAMS", few_programs)
        chunks.add(512 // plans.num_partials(301, 500)[0])
        for final_block in (16, 4096):
            monkeypatch.setattr(plans, "FINAL_BLOCK", final_block)
            for num_warps in warps:
                loss, _ = run(probs, counts, 301, 500, 8, 1e-2, kernel_device, num_warps)
                assert_same_bits(loss, expected)
    assert chunks == {64, 128, 256, 512}


def test_the_order_is_a_tree_of_adjacent_pairs(kernel_device):
    """Values whose sum depends on the order: any other order than the documented one fails."""
    probs = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0, 1e8, 1.0, -1e8])[:, None]
    tree = ((1e8 + 0.0) + (-1e8 + 0.0)) + ((1e8) + (-1e8))
    loss, _ = run(probs, torch.ones(1), 1, 1, 1, 1.0, kernel_device)
    assert loss.item() == tree == 0.0
    assert probs.sum(dtype=torch.float64).item() == 6.0
