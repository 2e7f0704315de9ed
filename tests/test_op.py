"""Past the dispatcher go calls that it would pass straight to CUDA, and no others."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_custom_ops import op


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(op, "CUDA", False)


def is_plain(x):
    return op.signature([x]) is not None


class Subclass(torch.Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_plain_calls():
    x = torch.rand(3)
    with torch.device("cpu"):
        assert is_plain(x) and op.signature([x])
    assert is_plain(x) and is_plain(torch.nn.Parameter(x))
    assert op.signature([x, None, torch.nn.Parameter(x)])
    with torch.no_grad():
        assert is_plain(x)
    with torch.inference_mode():
        assert is_plain(x) and is_plain(torch.rand(3))
    with torch.autocast("cpu"):
        assert is_plain(x)


@pytest.mark.parametrize(
    "other",
    [
        [1.0],
        3,
        torch.rand(3).as_subclass(Subclass),
        torch.rand(3).to_sparse(),
        torch.imag(torch.rand(3, dtype=torch.complex64).conj()),
        torch._efficientzerotensor((3,)),
    ],
)
def test_other_arguments_are_for_the_dispatcher(other):
    assert not is_plain(other)
    assert op.signature([torch.rand(3), other]) is None


def test_other_devices_are_for_the_dispatcher(monkeypatch):
    monkeypatch.setattr(op, "CUDA", True)
    assert not is_plain(torch.rand(3))
    assert not is_plain(torch.empty(3, device="meta"))


def test_modes_and_transforms_are_for_the_dispatcher():
    x = torch.rand(3)
    seen = []

    def see(y):
        seen.append(is_plain(y))
        seen.append(op.signature([x, y]) is not None)
        return y * 1

    torch.func.vmap(see)(torch.rand(2, 3))
    torch.func.grad(lambda y: see(y).sum())(x)
    torch.func.functionalize(see)(x)
    make_fx(see)(x)
    make_fx(see, pre_dispatch=True)(x)
    torch.jit.trace(see, x, check_trace=False)
    torch.compile(see, backend="eager")(x)
    with Mode():
        see(x)
    with Functions():
        see(x)
    with torch.device("cpu"), Functions():
        see(x)
    with forward_ad.dual_level():
        see(x)
    assert seen == [False] * len(seen) and len(seen) >= 20
    assert is_plain(x) and op.signature([x])


def test_a_batched_gradient_is_for_the_dispatcher():
    seen = []

    class See(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(is_plain(grad))
            return grad

    x = torch.rand(3, requires_grad=True)
    torch.autograd.grad(See.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [False]


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(op, "MAX_PLANS", 3)
    plans = op.Plans()
    for size in range(10):
        assert plans.get((size,)) is None
        assert plans.add((size,), f"plan {size}") == plans[(size,)] == f"plan {size}"
        assert len(plans) <= 3


def make(*arguments):
    """A plan that tells what it was made for."""
    return lambda *given: (arguments, given)


def test_a_plan_is_made_once_for_a_signature_and_its_numbers(monkeypatch):
    monkeypatch.setattr(op, "PLANS", op.Plans())
    x, y = torch.rand(3), torch.rand(3)
    first = op.plan(make, [x, None], (2, 0.5))
    assert op.plan(make, [y, None], (2, 0.5)) is first
    others = [
        op.plan(make, [y, x], (2, 0.5)),
        op.plan(make, [y.double(), None], (2, 0.5)),
        op.plan(make, [y, None], (3, 0.5)),
        op.plan(make, [y, None], (2, 0.0)),
        op.plan(lambda *x: make(*x), [y, None], (2, 0.5)),
    ]
    assert len({first, *others}) == len(op.PLANS) == 6
    # They are equal, and whatever a plan makes of a float it makes of the one of its run.
    assert op.plan(make, [y, None], (2, -0.0)) is others[3]
    assert first(y) == ((x, None, 2, 0.5), (y,))
    assert op.plan(make, [[1.0]]) is None and len(op.PLANS) == 6


def test_a_backward_has_a_plan_unless_it_is_recorded(monkeypatch):
    monkeypatch.setattr(op, "PLANS", op.Plans())
    x = torch.rand(3)
    assert op.backward_plan(make, [x]) is None
    with torch.no_grad():
        assert op.backward_plan(make, [x]) is op.plan(make, [x])


def test_the_registered_implementation_has_the_plans_of_the_other_way(monkeypatch):
    monkeypatch.setattr(op, "PLANS", op.Plans())
    x, y = torch.rand(3), torch.rand(3)
    plan = op.plan(make, [x, None], (2, 0.5))
    run = op.registered(make, 2, 2)
    assert run(y, None, 2, 0.5, 7) == ((x, None, 2, 0.5), (y, None, 2, 0.5, 7))
    for zero in (0.0, -0.0):
        assert str(run(y, None, 2, zero, 7)[1][3]) == str(zero)
    assert len(op.PLANS) == 2 and plan in op.PLANS.values()


def test_numbers_that_the_dispatcher_takes_for_a_float():
    assert op.plain_float(0.5) == 0.5
    for number in (3, -(2**62), np.float64(0.1)):
        plain = op.plain_float(number)
        assert type(plain) is float and plain == float(number)
    for other in (True, 2**63, 10**400, np.float32(0.1), np.int64(1), torch.tensor(0.1), "1", None):
        assert op.plain_float(other) is None


def test_a_signature_tells_apart_what_a_launch_depends_on():
    x = torch.zeros(8, 8)
    others = [x.double(), x[:4], x.T[:, :4], x[:, :4], x[:, 1:5], None]
    signatures = [tuple(op.signature([x])), *(tuple(op.signature([y])) for y in others)]
    assert len(set(signatures)) == len(signatures)
    assert op.signature([x]) == op.signature([torch.ones(8, 8)])
