"""Drawn calls of every op, and that faults planted in the package do not get past them."""

import inspect
import itertools

import pytest
import torch

import moe_custom_ops
from moe_custom_ops import checks
from moe_custom_ops import workspace as workspaces
from moe_custom_ops.losses import ops as losses
from moe_custom_ops.rows import reference as rows_reference
from moe_custom_ops.testing.fuzz import Call, properties
from moe_custom_ops.testing.fuzz.properties import HAS_KERNELS, INTERPRETED
from tests.test_imports import run_python

pytest.importorskip("hypothesis")
import hypothesis

from moe_custom_ops.testing.fuzz.__main__ import main
from moe_custom_ops.testing.fuzz.mutations import INVALID, mutations
from moe_custom_ops.testing.fuzz.running import run
from moe_custom_ops.testing.fuzz.strategies import VALID

# In a process that can run kernels they are what is checked.
pytestmark = [
    *([pytest.mark.kernels] if HAS_KERNELS else []),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"),
]

EXAMPLES = 20 if INTERPRETED else 60
# Enough to meet what a call in twenty has.
FAULT_EXAMPLES = 200
# What is the same in every process is tested in the faster one.
once = pytest.mark.skipif(INTERPRETED, reason="says nothing of kernels")
INVERSE = "inverse_permutation"
LEAVES = [
    ("aux_loss", "probs"),
    ("sequence_aux_loss", "probs"),
    ("permute", "tokens"),
    ("permute_with_scores", "tokens"),
    ("permute_with_scores", "top_scores"),
    ("weighted_restore", "rows"),
    ("weighted_restore", "top_scores"),
    ("weighted_restore", "addend"),
    ("restore", "rows"),
    ("restore", "addend"),
]


def drawn(strategy, count=150):
    calls = []

    @hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(strategy)
    def collect(call):
        calls.append(call)

    collect()
    return calls


@pytest.mark.parametrize("op", VALID)
def test_valid_calls(op):
    outcome = run(VALID[op], EXAMPLES)
    assert outcome.call is None, outcome.report()
    assert outcome.examples >= EXAMPLES
    # Which is plain PyTorch and has no kernel.
    assert outcome.seen.launches or op == "compose_permutations"
    assert outcome.seen.blunt <= 0.15 * outcome.seen.compared
    assert outcome.seen.compared or op not in dict(LEAVES)


@pytest.mark.parametrize("op", INVALID)
def test_refused_calls(op):
    outcome = run(INVALID[op], EXAMPLES)
    assert outcome.call is None, outcome.report()
    assert outcome.examples >= EXAMPLES


@once
def test_every_op_is_drawn():
    public = {name for name in moe_custom_ops.__all__ if not name.endswith("workspace_size")}
    assert set(VALID) == set(INVALID) == public - {"make_workspace"}


@once
@pytest.mark.parametrize("op", VALID)
def test_every_argument_is_drawn_and_broken(op):
    parameters = inspect.signature(getattr(moe_custom_ops, op)).parameters
    calls = drawn(VALID[op])
    assert {name for call in calls for name in call.sources} == set(parameters)
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            assert not all(name in call.sources for call in calls), f"{name} is always given"
    assert {name for call in calls[-40:] for name, _, _ in mutations(call)} == set(parameters)
    tensors = [
        x
        for call in calls
        for x in call.build()["arguments"].values()
        if isinstance(x, torch.Tensor) and x.dim() and x.dtype != torch.uint8
    ]
    assert any(x.numel() == 0 for x in tensors) or op == "expert_permutation_from_counts"
    assert any(not x.is_contiguous() for x in tensors)
    assert any(x.storage_offset() for x in tensors)
    # Orders are not expanded: one assignment in every row.
    assert any(0 in x.stride() for x in tensors) or op in ("compose_permutations", INVERSE)


def off_by_one_ulp(function):
    def wrong(*arguments):
        x = function(*arguments)
        return torch.nextafter(x, torch.full_like(x, torch.inf)) if x.is_floating_point() else x

    return wrong


def last_row_unwritten(function):
    def wrong(*arguments):
        x = function(*arguments).clone()
        x[-1:] = torch.nan
        return x

    return wrong


def zeroed(function):
    return lambda *arguments: torch.zeros_like(function(*arguments))


def silent(function):
    return lambda *arguments: None


def writing(function):
    def wrong(rows, *rest):
        result = function(rows, *rest)
        rows.add_(1.0)
        return result

    return wrong


def scribbling(function):
    def wrong(op, workspace, *rest):
        if isinstance(workspace, torch.Tensor):
            workspace.zero_()
        return function(op, workspace, *rest)

    return wrong


def launching(function):
    def wrong(*arguments):
        torch.ops.moe.inverse(torch.arange(3), 3, 1)
        return function(*arguments)

    return wrong


FAULTS = [
    ("permute", VALID, rows_reference, "grad_rows", off_by_one_ulp),
    ("weighted_restore", VALID, rows_reference, "weighted_restore", last_row_unwritten),
    ("restore", VALID, rows_reference, "weighted_restore", writing),
    ("weighted_restore", VALID, rows_reference, "grad_scores", zeroed),
    ("aux_loss", VALID, losses, "grad_rows", zeroed),
    ("aux_loss", INVALID, workspaces, "check", silent),
    ("aux_loss", INVALID, workspaces, "check", scribbling),
    ("weighted_restore", INVALID, checks, "same_device", silent),
]
if not HAS_KERNELS:
    FAULTS.append(("permute", INVALID, workspaces, "check", launching))
# Which only a comparison of bits can find.
ULPS = [
    ("weighted_restore", VALID, rows_reference, "weighted_restore", off_by_one_ulp),
    ("weighted_restore", VALID, rows_reference, "grad_scores", off_by_one_ulp),
]
if HAS_KERNELS:
    FAULTS = ULPS if INTERPRETED else FAULTS + ULPS


def assert_found_and_pasteable(outcome):
    assert outcome.call is not None, "the fault was not found"
    with pytest.raises(type(outcome.error)) as again:
        exec(outcome.call.pasteable(), {})
    assert str(again.value) == str(outcome.error)


@pytest.mark.parametrize(
    ("op", "strategies", "module", "name", "fault"),
    [pytest.param(*x, id=f"{x[0]}-{x[3]}-{x[4].__name__}") for x in FAULTS],
)
def test_a_planted_fault_is_found_and_its_call_pastes(
    op, strategies, module, name, fault, monkeypatch
):
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    assert_found_and_pasteable(run(strategies[op], FAULT_EXAMPLES, shrink=not INTERPRETED))


@once
@pytest.mark.parametrize(("op", "leaf"), LEAVES)
def test_a_gradient_that_is_zero_by_every_path_is_found(op, leaf, monkeypatch):
    original = properties._run

    def zero(function, arguments, leaves, grads, device):
        results, own = original(function, arguments, leaves, grads, device)
        pairs = zip(leaves, own, strict=True)
        return results, [
            torch.zeros_like(x) if name == leaf and x is not None else x for name, x in pairs
        ]

    monkeypatch.setattr(properties, "_run", zero)
    assert_found_and_pasteable(run(VALID[op], FAULT_EXAMPLES, shrink=False))


@once
def test_a_printed_call_needs_no_hypothesis(root):
    call = drawn(VALID["weighted_restore"])[-1]
    code = call.pasteable() + "import sys\nassert 'hypothesis' not in sys.modules\n"
    run_python(code, root)


@once
def test_a_call_prints_as_its_program():
    call = Call("permute", {"tokens": "torch.rand(2, 1)", "topk": "1"})
    assert call.pasteable() in repr(call)
    assert "tokens = torch.rand(2, 1)\ntopk = 1\n" in call.pasteable()


@once
def test_the_command_reports(capsys):
    assert main(["--examples", "45", "--seed", "3", "--ops", "permute", "restore"]) == 0
    first = capsys.readouterr().out
    assert "seed 3" in first and "0 ops failed: permute 23, restore 22" in first
    main(["--examples", "45", "--seed", "3", "--ops", "permute", "restore"])
    seeds = [[w for w in out.split() if w.isdigit()] for out in (first, capsys.readouterr().out)]
    assert list(itertools.islice(seeds[0], 4)) == list(itertools.islice(seeds[1], 4))


@once
def test_the_command_reports_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(rows_reference, "grad_rows", zeroed(rows_reference.grad_rows))
    assert main(["--examples", "100", "--ops", "permute"]) == 1
    out = capsys.readouterr().out
    assert "1 ops failed" in out and "check('permute', call" in out
