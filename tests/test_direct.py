"""The direct path is for calls that the dispatcher would pass straight to CUDA, and no others."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_custom_ops import direct


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(direct, "CUDA", False)


def is_plain(x):
    return direct.signature(x) is not None


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
        assert is_plain(x) and direct.signature(x)
    assert is_plain(x) and is_plain(torch.nn.Parameter(x))
    assert direct.signature(x, None, torch.nn.Parameter(x))
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
    assert direct.signature(torch.rand(3), other) is None


def test_other_devices_are_for_the_dispatcher(monkeypatch):
    monkeypatch.setattr(direct, "CUDA", True)
    assert not is_plain(torch.rand(3))
    assert not is_plain(torch.empty(3, device="meta"))


def test_modes_and_transforms_are_for_the_dispatcher():
    x = torch.rand(3)
    seen = []

    def see(y):
        seen.append(is_plain(y))
        seen.append(direct.signature(x, y) is not None)
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
    assert is_plain(x) and direct.signature(x)


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
    monkeypatch.setattr(direct, "MAX_PLANS", 3)
    plans = direct.Plans()
    for size in range(10):
        assert plans.get((size,)) is None
        assert plans.add((size,), f"plan {size}") == plans[(size,)] == f"plan {size}"
        assert len(plans) <= 3


def test_a_signature_tells_apart_what_a_launch_depends_on():
    x = torch.zeros(8, 8)
    others = [x.double(), x[:4], x.T[:, :4], x[:, :4], x[:, 1:5], None]
    signatures = [tuple(direct.signature(x)), *(tuple(direct.signature(y)) for y in others)]
    assert len(set(signatures)) == len(signatures)
    assert direct.signature(x) == direct.signature(torch.ones(8, 8))
