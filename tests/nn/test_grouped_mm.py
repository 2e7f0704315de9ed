import pytest
import torch
from torch.library import opcheck

from moe_custom_ops.nn.grouped_mm import grouped_mm

OFFSETS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def make(dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    x = torch.randn(11, 6, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(4, 6, 5, dtype=dtype, device=device, requires_grad=True)
    return x, weight, OFFSETS.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_each_group_is_multiplied_by_its_own_expert(device):
    x, weight, offsets = make(device=device)
    out = grouped_mm(x, weight, offsets)
    expected = torch.cat([x[:4] @ weight[1], x[4:9] @ weight[3], x.new_zeros(2, 5)])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    x, weight, offsets = make(device=device)
    call = lambda x, weight: grouped_mm(x, weight, offsets)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    x, weight, offsets = make(device=device)
    opcheck(torch.ops.moe.grouped_mm_fallback.default, (x, weight, offsets))
    grad = torch.randn(11, 5, dtype=x.dtype, device=device, requires_grad=True)
    opcheck(torch.ops.moe.grouped_mm_weight_grad.default, (x, grad, offsets))


@pytest.mark.cuda
def test_the_native_product_agrees_with_the_fallback():
    torch.manual_seed(0)
    x = torch.randn(96, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(3, 64, 32, dtype=torch.bfloat16, device="cuda")
    offsets = torch.tensor([16, 16, 96], dtype=torch.int32, device="cuda")
    fallback = torch.ops.moe.grouped_mm_fallback(x, weight, offsets)
    torch.testing.assert_close(grouped_mm(x, weight, offsets), fallback, rtol=1e-2, atol=0.1)


@pytest.mark.cuda
@pytest.mark.parametrize(("width_in", "width_out"), [(64, 20), (20, 64), (64, 64)])
def test_widths_that_the_native_product_lacks_take_the_fallback(width_in, width_out):
    x = torch.randn(16, width_in, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(3, width_in, width_out, dtype=torch.bfloat16, device="cuda")
    offsets = torch.tensor([4, 8, 16], dtype=torch.int32, device="cuda")
    out = grouped_mm(x, weight, offsets)
    out.float().square().sum().backward()
    assert out.shape == (16, width_out) and (x.grad != 0).any()
