import pytest
import torch

from moe_custom_ops import aux_loss, aux_loss_workspace_size, make_workspace
from moe_custom_ops.workspace import align, check, view


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


def test_a_view_has_the_address_of_its_workspace():
    workspace = make_workspace(64, "cpu")
    own = view(workspace, 8, torch.float64)
    assert own.data_ptr() == workspace.data_ptr() and own.shape == (8,)
    assert own.dtype == torch.float64


def test_the_length_and_the_address_are_checked():
    workspace, like = make_workspace(64, "cpu"), torch.rand(3)
    check("op", None, 72, like)
    check("op", workspace, 64, like)
    with pytest.raises(ValueError, match="op: workspace must be at least 72 bytes long, got 64"):
        check("op", workspace, 72, like)
    # An address that the storage offset does not show, as memory of another library may have.
    buffer, refused = bytearray(80), 0
    for start in range(8):
        foreign = torch.frombuffer(buffer, dtype=torch.uint8, offset=start, count=64)
        if foreign.data_ptr() % 16:
            refused += 1
            with pytest.raises(ValueError, match=r"op: workspace must be aligned to 16 .* address"):
                check("op", foreign, 4, like)
    assert refused >= 7
