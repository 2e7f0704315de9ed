"""The Triton kernels against the reference, bit for bit: on a GPU, or under the interpreter."""

import pytest
import torch

from moe_custom_ops import sequence_aux_loss
from moe_custom_ops.backend import as_bytes, float64_bits
from moe_custom_ops.fixed_order import accumulator_dtype
from moe_custom_ops.losses import plans, reference
from moe_custom_ops.testing import assert_same_bits, make_probs

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def run(probs, counts, ends, mask, device, num_warps=None):
    """(loss, scales) from the kernels, over scratch and results that start as NaN."""
    move = lambda x: None if x is None else x.to(device)  # noqa: E731
    probs, counts, ends, mask = map(move, (probs, counts, ends, mask))
    num_sequences, num_experts = counts.shape
    dtype = accumulator_dtype(probs.dtype)
    slots = reference.num_slots(probs.shape[:-1].numel(), num_sequences, num_experts)
    empty = lambda *shape: torch.full(shape, torch.nan, dtype=dtype, device=device)  # noqa: E731
    partials = empty(slots * reference.max_chunks(num_experts))
    tile_lengths = torch.full((slots,), -(2**30), dtype=torch.int32, device=device)
    sum_tiles = plans.sequence_tile_sums(probs, counts, ends, mask, slots, num_warps)
    sum_tiles(probs, counts, ends, as_bytes(mask), partials, tile_lengths)
    loss, scales = empty(), empty(num_sequences)
    sums = empty(num_sequences)
    lengths = torch.full((num_sequences,), -1, dtype=torch.int64, device=device)
    add_slots, add_sequences = plans.sequence_from_tile_sums(probs, counts, ends, slots)
    add_slots(partials, tile_lengths, ends, sums, lengths)
    add_sequences(sums, lengths, loss, scales, float64_bits(num_experts * 0.1 / 2))
    return loss.cpu(), scales.cpu()


def check(probs, counts, ends, mask, device, **options):
    loss, scales = run(probs, counts, ends, mask, device, **options)
    expected = sequence_aux_loss(probs.cpu(), counts, 2, 0.1, ends, mask)
    assert_same_bits(loss, expected, "loss")
    assert not scales.isnan().any()


def packed(lengths, num_experts=8, dtype=torch.float32, head=0, tail=0):
    probs, _ = make_probs(head + sum(lengths) + tail, num_experts, dtype=dtype)
    counts = torch.randint(
        0, 99, (len(lengths), num_experts), generator=torch.Generator().manual_seed(0)
    )
    return probs, counts, torch.tensor([head, *lengths]).cumsum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_every_dtype(dtype, masked, kernel_device):
    probs, counts, ends = packed([40, 0, 7, 300], 160, dtype, head=5, tail=11)
    mask = None
    if masked:
        mask = torch.arange(probs.shape[0]) % 3 > 0
        probs[~mask] = torch.nan
    check(probs, counts, ends, mask, kernel_device)
    batch = probs[:360].view(3, 120, 160)
    mask = None if mask is None else mask[:360].view(3, 120)
    check(batch, counts[:3].float(), None, mask, kernel_device)


@pytest.mark.parametrize("num_experts", [1, 7, 64, 160, 2304])
def test_experts_and_tiles(num_experts, kernel_device):
    tile = reference.tile_tokens(num_experts)
    lengths = [1, tile - 1, 0, tile, tile + 1, 2 * tile, 3, 0]
    check(*packed(lengths, num_experts), None, kernel_device)
    probs, counts, _ = packed([tile + 1] * 3, num_experts)
    check(probs.view(3, tile + 1, num_experts), counts, None, None, kernel_device)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_many_sequences(index_dtype, kernel_device, monkeypatch):
    if kernel_device == "cpu":
        monkeypatch.setattr(plans, "SEARCH_BLOCK", 16)
        monkeypatch.setattr(plans, "TREE_BLOCK", 16)
    count = 70 if kernel_device == "cpu" else 5000
    lengths = torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    probs, counts, ends = packed(lengths)
    check(probs, counts, ends.to(index_dtype), None, kernel_device)


def test_no_sequences(kernel_device):
    probs, _ = make_probs(1200, 8)
    check(probs, torch.ones(0, 8), torch.tensor([0]), None, kernel_device)
    check(torch.rand(0, 40, 8), torch.ones(0, 8), None, None, kernel_device)


def test_an_empty_sequence_is_skipped_whatever_its_counts_hold(kernel_device):
    probs, counts, ends = packed([40, 7, 0])
    counts = counts.float()
    counts[1:] = torch.nan
    mask = torch.arange(47) < 40
    check(probs, counts, ends, mask, kernel_device)
    assert run(probs, counts, ends, mask, kernel_device)[0] > 0


def test_strides(kernel_device):
    probs, counts, _ = packed([20] * 3, 16)
    batch = probs.view(3, 20, 16)
    mask = torch.arange(60).view(3, 20) % 4 > 0
    for view in (
        batch.transpose(0, 1).contiguous().transpose(0, 1),  # sequence-first memory
        batch.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([batch, batch], 2)[..., 16:],
        batch[:, :1].expand(3, 20, 16),
    ):
        check(view, counts.t().contiguous().t(), None, mask.t().contiguous().t(), kernel_device)


@pytest.mark.parametrize("ends", [[50, 20, 0], [2**62, -(2**62), 7], [-5, 3, 2**40], [9, 9, 9]])
def test_malformed_bounds_stay_inside(ends, kernel_device):
    probs, counts, _ = packed([20, 30])
    loss, scales = run(probs, counts, torch.tensor(ends), None, kernel_device)
    assert loss.isfinite() and scales.isfinite().all()


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_no_launch_choice_changes_a_bit(num_warps, kernel_device, monkeypatch):
    if kernel_device == "cpu" and num_warps > 1:
        pytest.skip("the interpreter has no warps")
    call = packed([40, 0, 7, 300], 500)
    for few_programs, tree_block in ((1, 1024), (30, 16), (10**6, 64)):
        monkeypatch.setattr(plans, "FEW_PROGRAMS", few_programs)
        monkeypatch.setattr(plans, "TREE_BLOCK", tree_block)
        check(*call, None, kernel_device, num_warps=num_warps)


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_special_values_reach_the_loss(special, kernel_device):
    probs, counts, ends = packed([40, 7])
    probs[12, 3] = special
    counts[0, 3] = 5
    check(probs, counts, ends, None, kernel_device)
    assert not run(probs, counts, ends, None, kernel_device)[0].isfinite()
