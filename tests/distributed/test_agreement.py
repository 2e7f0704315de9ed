"""Calls that are refused, on one rank and on several."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from moe_custom_ops import aux_loss_workspace_size
from moe_custom_ops.distributed import (
    aux_loss,
    check_agreement,
    running_aux_loss,
    sequence_aux_loss,
    tile_tokens,
)
from moe_custom_ops.distributed.collectives import in_order
from moe_custom_ops.testing import assert_same_bits
from tests.compiling import compile_fresh
from tests.ranks import run_checks

PROBS, COUNTS = torch.rand(6, 8), torch.tensor([2, 2, 2, 2, 1, 1, 1, 1])


def call(function=aux_loss, group=None, **change):
    arguments = {
        "probs": PROBS,
        "tokens_per_expert": COUNTS,
        "total_num_tokens": 6,
        "num_experts": 8,
        "topk": 2,
        "coeff": 0.1,
        "group": group,
        **change,
    }
    return function(**arguments)


def check_nothing_is_said_where_all_is_equal(group):
    check_agreement(group, num_experts=8, dtype=torch.float32)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    call(group=group)


def check_values_that_differ_are_named_on_every_rank(group):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    odd = group.rank() == 1
    holders = r"on rank 1"
    for change, message in (
        ({"num_experts": 4 if odd else 8}, f"num_experts is 8 on rank.* 0.*, 4 {holders}"),
        ({"topk": 1 if odd else 2}, f"topk is 2 on rank.* 0.*, 1 {holders}"),
        ({"coeff": 0.2 if odd else 0.1}, f"coeff is 0.1 on rank.* 0.*, 0.2 {holders}"),
        ({"reduction": "partial" if odd else "global"}, f"reduction is .*'partial' {holders}"),
        ({"max_tokens": 9 if odd else None}, f"max_tokens is None on .*, 9 {holders}"),
        (
            {"probs": PROBS.double() if odd else PROBS},
            f"dtype is torch.float32 on rank.*, torch.float64 {holders}",
        ),
        (
            {
                "probs": torch.rand(6, 16) if odd else PROBS,
                "tokens_per_expert": torch.ones(16 if odd else 8, dtype=torch.int64),
            },
            f"columns of probs is 8 on rank.*, 16 {holders}",
        ),
    ):
        with pytest.raises(
            ValueError, match=f"aux_loss: the ranks must be called alike.*{message}"
        ):
            call(group=group, **change)
    with pytest.raises(ValueError, match=r"num_sequences is 2 on rank.*, 3 on rank 1"):
        sequences = 3 if odd else 2
        counts = torch.ones(sequences, 8, dtype=torch.int64)
        sequence_aux_loss(torch.rand(sequences, 4, 8), counts, 2, 0.1, group)
    with pytest.raises(
        ValueError, match="check_agreement: the ranks must be called alike, got seed"
    ):
        check_agreement(group, seed=group.rank())
    state = {"running_counts": torch.zeros(8, dtype=torch.int64), "num_steps": 0}
    for name, value, message in (
        ("num_steps", 3, "num_steps is 0 on rank.*, 3 on rank 1"),
        ("running_counts", COUNTS, r"running_counts is tensor.*on ranks 0 2, tensor.*on rank 1"),
    ):
        change = {name: value} if odd else {}
        with pytest.raises(ValueError, match=f"running_aux_loss: .*{message}"):
            call(running_aux_loss, group=group, **{**state, **change})


def check_values_of_any_kind(group):
    odd = group.rank() == 1
    large = torch.zeros(2000)
    large[1000] = float(odd)
    for values in (
        {"x": large},
        {"x": torch.tensor(0.1 + 1e-6 * odd)},
        {"x": torch.zeros(3 if odd else 2)},
        {"x": torch.zeros(2, dtype=torch.float64 if odd else torch.float32)},
        {"x": torch.zeros(2) if odd else 0.0},
        {"x": None} if odd else {},
        {"x": (1, odd)},
    ):
        with pytest.raises(ValueError, match=r"x is .* on ranks 0 2, .* on rank 1"):
            check_agreement(group, **values)
    for values in (
        {"x": 1 if odd else 1.0, "y": float("nan")},
        {"x": {"a": 1, "b": 2} if odd else {"b": 2, "a": 1}},
        {"x": [torch.zeros(2)]},
        {},
    ):
        check_agreement(group, **values)
    unpicklable = {"x": lambda: 0} if odd else {"x": 0}
    with pytest.raises(Exception, match=r"pickle|refused their arguments; rank 1"):
        check_agreement(group, **unpicklable)


def check_ranks_are_those_of_the_job(group):
    part = dist.new_group([1, 2])
    if group.rank() > 0:
        with pytest.raises(ValueError, match="x is 1 on rank 1, 2 on rank 2"):
            check_agreement(part, x=group.rank())


def check_every_kind_of_refusal_stops_all(group):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with forward_ad.dual_level():
        odd = group.rank() == 1
        probs = forward_ad.make_dual(PROBS, PROBS) if odd else PROBS
        error = NotImplementedError if odd else ValueError
        with pytest.raises(error, match="forward-mode AD is not implemented"):
            call(group=group, probs=probs)


def check_a_rank_that_is_refused_stops_all(group):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    if group.rank() == 1:
        with pytest.raises(ValueError, match=r"^aux_loss: topk must be at least 1, got 0"):
            call(group=group, topk=0)
    else:
        refusal = "other ranks refused their arguments; rank 1: ValueError: aux_loss: topk must be"
        with pytest.raises(ValueError, match=refusal):
            call(group=group)
    # The group is as good as before.
    assert call(group=group) > 0


def check_a_refusal_comes_before_any_collective(group):
    dist.set_debug_level(dist.DebugLevel.OFF)
    if group.rank() == 0:
        # The others call nothing: a collective here would wait for them.
        refusals = [
            ({"topk": 0}, ValueError, "topk must be at least 1"),
            (
                {"tokens_per_expert": COUNTS.float()},
                TypeError,
                "must be int32 or int64, got float32",
            ),
            (
                {"total_num_tokens": torch.tensor(6.0)},
                TypeError,
                "must be int32 or int64, got float",
            ),
            ({"tokens_per_expert": COUNTS[1:]}, ValueError, "tokens_per_expert must be of shape"),
            (
                {"reduction": "sum"},
                ValueError,
                "reduction must be 'global' or 'partial', got 'sum'",
            ),
            (
                {"max_tokens": 5},
                ValueError,
                "max_tokens must be at least 6, the tokens of this rank",
            ),
            (
                {"workspace": torch.empty(0, dtype=torch.uint8)},
                ValueError,
                "workspace must be at le",
            ),
        ]
        for change, error, message in refusals:
            with pytest.raises(error, match=message):
                call(group=group, **change)
        for change, message in (
            ({"topk": 0}, "topk must be at least 1"),
            ({"total_num_tokens": 0}, "total_num_tokens must be at least 1, got a lower"),
            ({"total_num_tokens": -1}, "total_num_tokens must be at least 1, got a lower"),
            ({"probs": PROBS[0]}, "probs must be of shape .tokens, columns., got"),
            ({"probs": PROBS[None]}, "probs must be of shape .tokens, columns., got"),
            ({"max_tokens": 2**31}, "max_tokens must be less than 2..31"),
        ):
            with pytest.raises(Exception, match=message):
                compile_fresh(functools.partial(call, group=group, **change), "aot_eager")()
        with pytest.raises(Exception, match=r"probs must be of shape .batch, seq, experts., got"):
            compile_fresh(
                lambda: sequence_aux_loss(PROBS, COUNTS[None], 2, 0.1, group), "aot_eager"
            )()


CHECKS = [
    check_a_refusal_comes_before_any_collective,
    check_nothing_is_said_where_all_is_equal,
    check_values_that_differ_are_named_on_every_rank,
    check_a_rank_that_is_refused_stops_all,
    check_values_of_any_kind,
    check_ranks_are_those_of_the_job,
    check_every_kind_of_refusal_stops_all,
]


@functools.cache
def outcomes(world_size):
    return run_checks(world_size, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [3])
def test_agreement(check, world_size):
    assert outcomes(world_size).get(check.__name__, "did not run") == ""


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def running(**change):
    state = {"running_counts": torch.zeros(8, dtype=torch.int64), "num_steps": 0}
    return call(running_aux_loss, **{**state, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"running_counts": None}, TypeError, "running_counts must be a Tensor, got NoneType"),
        (
            {"running_counts": torch.zeros(8)},
            TypeError,
            "running_counts must be int64, got float32",
        ),
        ({"running_counts": COUNTS[1:]}, ValueError, "running_counts must be of shape .columns.,"),
        ({"num_steps": -1}, ValueError, "num_steps must be at least 0, got -1"),
        ({"num_steps": 0.5}, TypeError, "num_steps must be an int, got float"),
        ({"num_steps": torch.tensor(1.0)}, TypeError, "num_steps must be int32 or int64, got flo"),
        ({"num_steps": COUNTS}, ValueError, r"num_steps must be of shape \[\] or \[1\], got \[8\]"),
        ({"probs": [1.0]}, TypeError, "probs must be a Tensor, got list"),
        ({"group": "world"}, TypeError, "group must be a ProcessGroup, got str"),
    ],
)
def test_refusals_of_the_running_form(change, error, message, alone):
    with pytest.raises(error, match=message):
        running(**change)


def test_refusals_of_sequences(alone):
    counts = torch.ones(2, 8, dtype=torch.int64)
    probs = torch.rand(2, 5, 8)
    with pytest.raises(TypeError, match="tokens_per_expert must be int32 or int64, got float32: o"):
        sequence_aux_loss(probs, counts.float(), 2, 0.1, alone)
    with pytest.raises(ValueError, match="max_tokens must be at least 5, the tokens of this rank"):
        sequence_aux_loss(probs, counts, 2, 0.1, alone, max_tokens=4)
    with pytest.raises(ValueError, match=r"max_tokens must be at least 524289, .* room for 524288"):
        long = torch.rand(1, 8).expand(524289, 8)
        cu_seqlens = torch.tensor([0] * 4 + [524289])
        sequence_aux_loss(long, torch.ones(4, 8, dtype=torch.int64), 2, 0.1, alone, cu_seqlens)


def test_without_a_default_group():
    with pytest.raises(ValueError, match="group must be given without a default group, got None"):
        call()


def test_tile_tokens():
    assert [tile_tokens(n) for n in (0, 8, 64, 128, 256, 2048)] == [512, 512, 128, 64, 32, 8]
    with pytest.raises(ValueError, match="tile_tokens: num_columns must be at least 0, got -1"):
        tile_tokens(-1)


def test_in_order_keeps_the_ranks_order_and_drops_what_lies_behind():
    gathered = torch.arange(24.0).view(3, 2, 4) + 1
    counts = torch.tensor([[1, 0], [0, 4], [3, 2]])
    expected = torch.zeros(2, 12)
    expected[0, :4] = torch.tensor([1.0, 17, 18, 19])
    expected[1, :6] = torch.tensor([13.0, 14, 15, 16, 21, 22])
    assert torch.equal(in_order(gathered, counts), expected)


@pytest.mark.parametrize("reduction", ["global", "partial"])
def test_a_workspace_of_the_caller_is_taken(reduction, alone):
    """It carries nothing in, and on the CPU nothing is written to it."""
    workspace = torch.full((aux_loss_workspace_size(6, 8),), 255, dtype=torch.uint8)
    expected = call(group=alone, reduction=reduction)
    assert_same_bits(call(group=alone, reduction=reduction, workspace=workspace), expected)
    assert expected > 0 and (workspace == 255).all()
    with pytest.raises(ValueError, match="workspace must be at least"):
        call(group=alone, reduction=reduction, workspace=workspace[:-16])


@pytest.mark.kernels
def test_a_workspace_of_the_caller_is_used(alone, launched, kernel_device):
    size = aux_loss_workspace_size(6, 8)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=kernel_device)
    on_device = {"probs": PROBS.to(kernel_device), "tokens_per_expert": COUNTS.to(kernel_device)}
    loss = call(group=alone, reduction="partial", workspace=workspace, **on_device)
    assert_same_bits(loss, call(group=alone, reduction="partial"))
    assert launched and not (workspace == 255).all()
