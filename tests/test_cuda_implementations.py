"""The CUDA implementations of the inner ops, host code included, against those for the CPU.

Under the interpreter they take CPU tensors, so CI runs them too.
"""

import pytest
import torch

from moe_custom_ops import weighted_restore_workspace_size
from moe_custom_ops.aux_loss import ops as aux
from moe_custom_ops.sequence_aux_loss import ops as sequence
from moe_custom_ops.testing import assert_same_bits, make_assignments, make_probs
from moe_custom_ops.weighted_restore import inverse_ops
from moe_custom_ops.weighted_restore import ops as restore

pytestmark = pytest.mark.kernels


def garbage(num_bytes):
    return torch.full((num_bytes,), 255, dtype=torch.uint8)


def to(device, call):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in call]


def check(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("num_tokens", "total"),
    [
        (0, 0),
        (0, 7),
        (60, 40),
        (60, torch.tensor(39.5)),
        (60, torch.tensor(0)),
        (0, torch.tensor(0)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_aux_loss(num_tokens, total, masked, kernel_device):
    probs, counts = make_probs(num_tokens, 16)
    mask = torch.arange(num_tokens) % 3 > 0 if masked else None
    tensor, number = (total, 0) if isinstance(total, torch.Tensor) else (None, total)
    size = aux.aux_loss_workspace_size(num_tokens, 16)

    def run(tile_sums, from_tile_sums, device):
        inputs = to(device, (probs, counts, mask))
        workspace = garbage(size).to(device)
        tile_sums(*inputs, workspace)
        rest = (*to(device, [tensor]), number, 8, 2, 1e-2, workspace)
        return from_tile_sums(*inputs, *rest)

    check(
        run(aux._aux_loss_tile_sums_cuda, aux._aux_loss_from_tile_sums_cuda, kernel_device),
        run(aux.aux_loss_tile_sums, aux.aux_loss_from_tile_sums, "cpu"),
    )


@pytest.mark.parametrize(("num_tokens", "columns"), [(0, 16), (700, 16), (40, 700)])
def test_the_sums_of_a_rank(num_tokens, columns, kernel_device):
    probs, counts = make_probs(num_tokens, columns)
    size = aux.aux_loss_workspace_size(num_tokens, columns)

    def run(tile_sums, padded_sums, from_tile_sums, device):
        inputs = to(device, (probs, counts, None))
        workspace = garbage(size).to(device)
        tile_sums(*inputs, workspace)
        own = padded_sums(inputs[0], workspace, 9)
        sums = torch.cat([own, own])
        rest = (None, 50, columns, 2, 1e-2, None, sums)
        return own, *from_tile_sums(*inputs, *rest)

    results = run(
        aux._aux_loss_tile_sums_cuda,
        aux._aux_loss_padded_sums_cuda,
        aux._aux_loss_from_tile_sums_cuda,
        kernel_device,
    )
    expected = run(
        aux.aux_loss_tile_sums, aux.aux_loss_padded_sums, aux.aux_loss_from_tile_sums, "cpu"
    )
    check(results, expected)
    with pytest.raises(ValueError, match="size must be at least"):
        aux._aux_loss_padded_sums_cuda(*to(kernel_device, [probs, garbage(size)]), -1)
    with pytest.raises(ValueError, match="workspace must be given without sums"):
        inputs = to(kernel_device, (probs, counts))
        aux._aux_loss_from_tile_sums_cuda(*inputs, None, None, 5, columns, 2, 0.1, None)


@pytest.mark.parametrize("lengths", [[], [0, 0], [40, 0, 7], [700, 600]])
@pytest.mark.parametrize(("layout", "columns"), [("packed", 16), ("batch", 16), ("batch", 700)])
def test_the_sums_of_sequences_of_a_rank(lengths, layout, columns, kernel_device):
    counts = torch.ones(len(lengths), columns)
    if layout == "batch":
        probs = make_probs(30 * len(lengths), columns)[0].view(len(lengths), 30, columns)
        ends = None
    else:
        probs, _ = make_probs(max(sum(lengths), 600), columns)
        ends = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = probs.shape[:-1].numel()
    size = sequence.sequence_aux_loss_workspace_size(num_tokens, len(lengths), columns)

    def run(tile_sums, padded_sums, from_tile_sums, device):
        inputs = to(device, (probs, counts, ends, None))
        workspace = garbage(size).to(device)
        tile_sums(*inputs, workspace)
        own = padded_sums(*inputs[:3], workspace, 5)
        given = torch.arange(len(lengths), device=device)
        of_sums = from_tile_sums(*inputs, 2, 0.1, None, own[:, 0].contiguous(), given)
        return own, *of_sums, *from_tile_sums(*inputs, 2, 0.1, workspace, None, given)

    results = run(
        sequence._sequence_aux_loss_tile_sums_cuda,
        sequence._sequence_aux_loss_padded_sums_cuda,
        sequence._sequence_aux_loss_from_tile_sums_cuda,
        kernel_device,
    )
    expected = run(
        sequence.sequence_aux_loss_tile_sums,
        sequence.sequence_aux_loss_padded_sums,
        sequence.sequence_aux_loss_from_tile_sums,
        "cpu",
    )
    check(results, expected)


def test_aux_loss_of_no_token_and_a_total_of_zero_hides_infinity(kernel_device):
    probs = torch.full((60, 16), torch.inf, device=kernel_device)
    counts = torch.ones(16, device=kernel_device)
    nobody = torch.zeros(60, dtype=torch.bool, device=kernel_device)
    workspace = garbage(aux.aux_loss_workspace_size(60, 16)).to(kernel_device)
    aux._aux_loss_tile_sums_cuda(probs, counts, nobody, workspace)
    loss, scale = aux._aux_loss_from_tile_sums_cuda(
        probs, counts, nobody, None, 0, 8, 2, 1e-2, workspace
    )
    assert loss.item() == 0 and scale.item() == 0


@pytest.mark.parametrize("lengths", [[], [0, 0], [40, 0, 7], [700]])
@pytest.mark.parametrize("layout", ["packed", "masked", "batch"])
def test_sequence_aux_loss(lengths, layout, kernel_device):
    counts = torch.ones(len(lengths), 16)
    if layout == "batch":
        probs = make_probs(30 * len(lengths), 16)[0].view(len(lengths), 30, 16)
        ends = mask = None
    else:
        # At least one tile, which no sequence holds where there is none.
        probs, _ = make_probs(max(sum(lengths), 600), 16)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        mask = torch.arange(probs.shape[0]) % 3 > 0 if layout == "masked" else None
    num_tokens = probs.shape[:-1].numel()
    size = sequence.sequence_aux_loss_workspace_size(num_tokens, len(lengths), 16)

    def run(tile_sums, from_tile_sums, device):
        inputs = to(device, (probs, counts, ends, mask))
        workspace = garbage(size).to(device)
        tile_sums(*inputs, workspace)
        return from_tile_sums(*inputs, 2, 0.1, workspace)

    check(
        run(
            sequence._sequence_aux_loss_tile_sums_cuda,
            sequence._sequence_aux_loss_from_tile_sums_cuda,
            kernel_device,
        ),
        run(sequence.sequence_aux_loss_tile_sums, sequence.sequence_aux_loss_from_tile_sums, "cpu"),
    )


@pytest.mark.parametrize("num_tokens", [0, 6])
@pytest.mark.parametrize("num_rows", [0, 5, 18, 30])
@pytest.mark.parametrize("with_addend", [False, True])
def test_weighted_restore(num_tokens, num_rows, with_addend, kernel_device):
    scores, indices = make_assignments(num_tokens, 3, 8)
    indices = torch.cat([indices, torch.full((30,), -1)])[:num_rows]
    rows = torch.randn(num_rows, 20)
    lead = (2, num_tokens // 2)
    scores, grad = scores.view(*lead, 3), torch.randn(*lead, 20)
    addend = torch.randn(*lead, 20) if with_addend else None
    size = weighted_restore_workspace_size(num_tokens, 3)

    def run(invert, gather, backward, device):
        own_rows, own_scores, own_indices, own_addend, own_grad = to(
            device, (rows, scores, indices, addend, grad)
        )
        workspace = garbage(size).to(device)
        invert(own_indices, scores.numel(), workspace)
        shape = list(scores.shape)
        results = []
        for given in (workspace, None):
            out, slots = gather(own_rows, own_scores, own_indices, own_addend, given, shape)
            plain, _ = gather(own_rows, None, own_indices, own_addend, given, shape)
            results += [out, slots, plain]
        grads = backward(own_grad, own_rows, own_scores, own_indices, slots, True)
        only_scores = backward(own_grad, own_rows, own_scores, own_indices, slots, False)
        only_rows = backward(own_grad, None, own_scores, own_indices, slots, True)
        plain_rows = backward(own_grad, None, None, own_indices, slots, True)
        assert only_scores[0].shape == only_rows[1].shape == plain_rows[1].shape == (0,)
        assert_same_bits(only_scores[1], grads[1])
        assert_same_bits(only_rows[0], grads[0])
        return *results, *grads, plain_rows[0]

    cuda = (
        inverse_ops._invert_permutation_cuda,
        restore._restore_gather_cuda,
        restore._restore_backward_cuda,
    )
    cpu = (inverse_ops.invert_permutation, restore.restore_gather, restore.restore_backward)
    check(run(*cuda, kernel_device), run(*cpu, "cpu"))


def test_a_direct_call_with_wrong_lengths_is_refused(kernel_device):
    scores, indices = make_assignments(6, 3, 8)
    rows, grad = torch.randn(18, 20), torch.randn(6, 20)
    slots = torch.zeros(6, 3, dtype=torch.int32)
    arguments = to(kernel_device, (grad, rows, scores, indices, slots))
    grad, rows, scores, indices, slots = arguments
    backward = restore._restore_backward_cuda
    for changed, message in [
        ((grad, rows, scores, indices[:9], slots), "token_indices_sorted must be of shape"),
        ((grad, rows, scores, indices, slots[:2]), "top_scores must be of shape"),
        ((grad[:2], rows, scores, indices, slots), "grad must be of shape"),
        ((grad, rows[:, :9], scores, indices, slots), "rows must be of shape"),
        ((grad, rows, scores, indices, slots.long()), "slots must be int32"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"restore_backward: {message}"):
            backward(*changed, True)
    for changed, message in [
        ((rows, scores, indices[:9], None, None, [6, 3]), "token_indices_sorted must be of shape"),
        ((rows, scores, indices, None, None, [5, 3]), "top_scores must be of shape"),
        ((rows, scores, indices, grad[:1], None, [6, 3]), "addend must be of shape"),
    ]:
        with pytest.raises(ValueError, match=f"restore_gather: {message}"):
            restore._restore_gather_cuda(*changed)


def test_slots_of_any_strides(kernel_device):
    scores, indices = make_assignments(6, 3, 8)
    arguments = (torch.randn(6, 20), torch.randn(18, 20), scores, indices)
    grad, rows, scores, indices = to(kernel_device, arguments)
    _, slots = restore._restore_gather_cuda(rows, scores, indices, None, None, [6, 3])
    strided = slots.t().contiguous().t()
    backward = restore._restore_backward_cuda
    check(
        backward(grad, rows, scores, indices, strided, True),
        backward(grad, rows, scores, indices, slots, True),
    )
