import pytest
import torch

from moe_custom_ops import aux_loss, aux_loss_workspace_size, make_workspace
from moe_custom_ops.workspace import align, scratch


@pytest.mark.parametrize("num_bytes", [0, 1, 16, 1000])
def test_make_workspace(num_bytes):
    workspace = make_workspace(num_bytes, "cpu")
    assert workspace.dtype == torch.uint8 and workspace.shape == (num_bytes,)
    assert workspace._dynamo_static_input_type == "unguarded"


def test_make_workspace_refuses_what_is_no_size():
    with pytest.raises(ValueError, match="num_bytes must be at least 0, got -1"):
        make_workspace(-1)
    with pytest.raises(TypeError, match="num_bytes must be an int, got float"):
        make_workspace(8.0)


def test_a_workspace_may_be_made_inside_a_compiled_region():
    def call(probs, counts):
        size = aux_loss_workspace_size(*probs.shape)
        workspace = make_workspace(size, "cpu")
        return aux_loss(probs, counts, probs.shape[0], 8, 2, 1.0, workspace)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for num_tokens in (5, 1000):
        probs, counts = torch.rand(num_tokens, 8), torch.ones(8)
        assert torch.equal(compiled(probs, counts), call(probs, counts))


def test_align():
    assert [align(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_scratch_is_a_view_and_checks_the_address():
    workspace = make_workspace(64, "cpu")
    view = scratch("op", workspace, 8, torch.float64)
    assert view.data_ptr() == workspace.data_ptr() and view.shape == (8,)
    with pytest.raises(ValueError, match="op: workspace must be at least 72 bytes long, got 64"):
        scratch("op", workspace, 9, torch.float64)
    # An address that the storage offset does not show, as memory of another library may have.
    buffer = bytearray(80)
    for start in range(8):
        foreign = torch.frombuffer(buffer, dtype=torch.uint8, offset=start, count=64)
        if foreign.data_ptr() % 16:
            with pytest.raises(ValueError, match="aligned to 16 bytes, got address"):
                scratch("op", foreign, 1, torch.float32)
