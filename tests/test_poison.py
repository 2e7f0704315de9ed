"""The fixture under which every test runs finds what an op leaves unwritten."""

import pytest
import torch

from moe_custom_ops import launch, make_workspace
from moe_custom_ops.testing import assert_same_bits
from tests.compiling import compile_fresh


@torch.library.custom_op("moe_test::double", mutates_args=(), device_types=("cpu", "cuda"))
def double(x: torch.Tensor, forgets: int) -> torch.Tensor:
    """2 x, but for the last ``forgets`` elements, which are never written."""
    out = torch.empty_like(x)
    end = x.numel() - forgets
    out[:end] = x[:end] * 2
    return out


@double.register_fake
def _(x, forgets):
    return torch.empty_like(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_one_element_left_unwritten_by_an_op(dtype, compiled):
    """After as many calls that wrote it, so that stale memory held the right value."""
    function = compile_fresh(double) if compiled else double
    x = torch.arange(5).to(dtype)
    for _ in range(3):
        assert_same_bits(function(x, 0), x * 2)
    with pytest.raises(AssertionError, match=r"1 of 5 elements differ.*at \(4,\)"):
        assert_same_bits(function(x, 1), x * 2)


def test_one_element_left_unwritten_by_compiled_code():
    """Inductor allocates past PyTorch's switch."""

    def call(x):
        out = torch.empty(5)
        out[:4].copy_(x)
        return out

    out = compile_fresh(call)(torch.zeros(4))
    assert (out[:4] == 0).all() and out[4].isnan()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_way_to_allocate(device):
    device = torch.empty(0, device=device).device
    like = torch.zeros(2, 3, device=device)
    floats = [
        torch.empty(3, device=device),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (1, 2), device=device),
        like.new_empty(4),
        launch.allocator(device)((2, 3), (3, 1), torch.float32),
    ]
    assert all(x.isnan().all() for x in floats)
    assert (make_workspace(100, device) == 255).all()
    assert (like.new_empty(4, dtype=torch.int32) == 2**31 - 1).all()
    assert like.new_empty(4, dtype=torch.bool).all()


def test_pytorch_chooses_its_algorithms_as_ever():
    torch.empty(3)
    assert not torch.are_deterministic_algorithms_enabled()
    with torch.device("meta"):
        assert torch.empty(3).is_meta
