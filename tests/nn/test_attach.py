"""attach_loss: gradients and a log, once per backward however the forward is run."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_custom_ops.nn import attach_loss
from tests.compiling import compile_fresh


class Layer(torch.nn.Module):
    def __init__(self, log=True):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.register_buffer("log", torch.zeros(()) if log else None, persistent=False)

    def forward(self, x, scale=None):
        y = (x @ self.weight).tanh()
        return attach_loss(y, y.square().mean(), scale, self.log)


def expected_gradient(x, scale, times=1):
    layer = Layer()
    y = (x @ layer.weight).tanh()
    inner = y.square().mean()
    (times * (y.sum() + scale * inner)).backward()
    return layer.weight.grad, times * inner.detach()


def recomputed(reentrant):
    return lambda layer: lambda *args: checkpoint(layer, *args, use_reentrant=reentrant)


WAYS = {
    "eager": lambda layer: layer,
    "recomputed": recomputed(False),
    "recomputed, reentrant": recomputed(True),
    "compiled": lambda layer: compile_fresh(layer, "aot_eager"),
    "compiled by inductor": compile_fresh,
    "compiled and recomputed": lambda layer: compile_fresh(recomputed(False)(layer), "aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_and_the_log_come_once(way):
    x, scale = torch.randn(5, 8), torch.tensor(3.0)
    layer = Layer()
    run = WAYS[way](layer)
    for _ in range(2):
        run(x.clone().requires_grad_(), scale).sum().backward()
    gradient, log = expected_gradient(x, 3.0, times=2)
    torch.testing.assert_close(layer.weight.grad, gradient)
    torch.testing.assert_close(layer.log, log)


def test_without_a_scale_or_a_log():
    x, layer = torch.randn(5, 8), Layer(log=False)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected_gradient(x, 1.0)[0])


def test_the_scale_is_read_in_the_backward():
    x, scale, layer = torch.randn(5, 8), torch.tensor(0.0), Layer()
    out = layer(x, scale)
    # A loss scale that a scaler keeps in one tensor: changed by a replay's caller, not between.
    out.sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected_gradient(x, 0.0)[0])


def test_nothing_happens_without_a_gradient():
    layer = Layer()
    with torch.no_grad():
        out = layer(torch.randn(5, 8))
    assert layer.log == 0 and not out.requires_grad


def test_the_result_is_a_view():
    x = torch.randn(5, requires_grad=True)
    out = attach_loss(x, x.sum())
    assert out.data_ptr() == x.data_ptr()


def test_a_half_precision_loss_and_a_float64_log():
    x = torch.randn(6, dtype=torch.bfloat16, requires_grad=True)
    log = torch.zeros((), dtype=torch.float64)
    attach_loss(x, x.square().sum(), torch.tensor(2.0), log).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and log == x.square().sum().double()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
        ({"x": torch.ones(2, dtype=torch.int64)}, TypeError, "x must be of a float dtype, got int"),
        ({"loss": 1.0}, TypeError, "loss must be a Tensor, got float"),
        ({"loss": None}, TypeError, "loss must be a Tensor, got NoneType"),
        ({"loss": torch.ones(2)}, ValueError, r"loss must be of shape \[\], got \[2\]"),
        ({"scale": 0.5}, TypeError, "scale must be a Tensor, got float"),
        ({"scale": torch.tensor(1)}, TypeError, "scale must be float32, .* got int64"),
        ({"log": torch.zeros(1)}, ValueError, r"log must be of shape \[\], got \[1\]"),
        ({"log": torch.zeros((), dtype=torch.bfloat16)}, TypeError, "log must be float32 or flo"),
        ({"log": torch.zeros((), requires_grad=True)}, ValueError, "log must be without a grad"),
        ({"loss": torch.zeros((), device="meta")}, ValueError, "loss must be on the device of x"),
    ],
)
def test_bad_input(change, error, message):
    call = {"x": torch.ones(2), "loss": torch.tensor(1.0), **change}
    with pytest.raises(error, match=f"attach_loss: {message}"):
        attach_loss(**call)
