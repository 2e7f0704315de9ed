"""What autograd records of a call, which may not depend on the way that the call went."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moe_custom_ops import (
    inverse_permutation,
    make_workspace,
    op,
    permute,
    permute_with_scores,
    permute_workspace_size,
    restore,
    weighted_restore,
)
from moe_custom_ops.testing import assert_same_bits, make_assignments
from tests.conftest import dispatched

pytestmark = pytest.mark.kernels

moe = torch.ops.moe


def inputs(dtype=torch.float32, num_tokens=6, hidden=20):
    """(tokens, rows, scores, addend), and an order with padding."""
    scores, order = make_assignments(num_tokens, 3, 8, alignment=4)
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randn(n, hidden, generator=generator).to(dtype)  # noqa: E731
    tensors = draw(num_tokens), draw(len(order)), scores.to(dtype), draw(num_tokens)
    return tensors, order


# Of (tokens, rows, scores, addend), an order and what inverts it: the leaves, and the call by a
# documented function or by its op.
CALLS = {
    "permute": ((0,), lambda f, t, r, s, a, order, *rest: f(t, order, 3, *rest)),
    "permute_with_scores": ((0, 2), lambda f, t, r, s, a, order, *rest: f(t, s, order, *rest)),
    "weighted_restore": ((1, 2, 3), lambda f, t, r, s, a, order, *rest: f(r, s, order, a, *rest)),
    "restore": ((1, 3), lambda f, t, r, s, a, order, *rest: f(r, order, 6, 3, a, *rest)),
}
FUNCTIONS = {
    "permute": permute,
    "permute_with_scores": permute_with_scores,
    "weighted_restore": weighted_restore,
    "restore": restore,
}


def loss(results):
    """No two elements have one gradient."""
    results = results if isinstance(results, tuple) else (results,)
    weights = (torch.arange(1.0, x.numel() + 1, device=x.device).view(x.shape) for x in results)
    return sum((x * w.to(x.dtype)).sum() for x, w in zip(results, weights, strict=True))


class Case:
    """A call of ``name``, its leaves on ``device``, and the gradients that it has on the CPU."""

    def __init__(self, name, device, given="nothing", dtype=torch.float32):
        tensors, order = inputs(dtype)
        places, call = CALLS[name]
        with dispatched():
            leaves = [tensors[i].clone().requires_grad_() for i in places]
            results = call(getattr(moe, name), *self.replaced(tensors, places, leaves), order)
            self.expected = torch.autograd.grad(loss(results), leaves)
        assert all(x.abs().sum() > 0 for x in self.expected)
        self.tensors, self.order = [x.to(device) for x in tensors], order.to(device)
        self.name, self.places, self.call = name, places, call
        self.leaves = [self.tensors[i].clone().requires_grad_() for i in places]
        self.rest = {
            "nothing": lambda: (),
            "workspace": lambda: (make_workspace(permute_workspace_size(6, 3), device),),
            "inverse": lambda: (None, inverse_permutation(self.order, 6, 3)),
        }[given]()

    @staticmethod
    def replaced(tensors, places, leaves):
        return [leaves[places.index(i)] if i in places else x for i, x in enumerate(tensors)]

    def __call__(self, *leaves, function=None):
        function = FUNCTIONS[self.name] if function is None else function
        tensors = self.replaced(self.tensors, self.places, leaves)
        return self.call(function, *tensors, self.order, *self.rest)

    def check(self, grads):
        for actual, expected in zip(grads, self.expected, strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("mode_in", ["forward", "backward", "both", "neither"])
@pytest.mark.parametrize("given", ["nothing", "workspace", "inverse"])
@pytest.mark.parametrize("name", CALLS)
def test_a_checkpoint_one_pass_of_which_is_under_a_mode(
    name, given, mode_in, launched, kernel_device
):
    """Each pass is to save what the other does: PyTorch compares them."""
    case = Case(name, kernel_device, given)
    launched.clear()

    def region(*leaves):
        results = case(*(x * 1 for x in leaves))
        return results if isinstance(results, tuple) else (results,)

    with FlopCounterMode(display=False) if mode_in in ("forward", "both") else nullcontext():
        results = checkpoint(region, *case.leaves, use_reentrant=False)
    forward = len(launched)
    with FlopCounterMode(display=False) if mode_in in ("backward", "both") else nullcontext():
        grads = torch.autograd.grad(loss(results), case.leaves)
    if kernel_device == "cpu":
        # Under a mode the dispatcher takes the CPU's implementation.
        assert (forward > 0) == (mode_in in ("backward", "neither"))
        assert (len(launched) > forward) == (mode_in in ("forward", "neither"))
    case.check(grads)


@pytest.mark.parametrize("way", ["function", "op"])
@pytest.mark.parametrize("given", ["nothing", "inverse"])
@pytest.mark.parametrize("name", ["permute", "permute_with_scores", "restore"])
def test_what_no_backward_reads_may_be_changed_in_place(name, given, way, launched, kernel_device):
    case = Case(name, kernel_device, given)
    launched.clear()
    changed = [leaf * 1 for leaf in case.leaves]
    results = case(*changed, function=None if way == "function" else getattr(moe, name))
    assert bool(launched) or way == "op"
    for z in changed:
        z.add_(1)
    case.check(torch.autograd.grad(loss(results), case.leaves))


@pytest.mark.parametrize("way", ["function", "op"])
@pytest.mark.parametrize("argument", ["rows", "top_scores", "token_indices_sorted"])
def test_what_a_backward_reads_may_not(argument, way, launched, kernel_device):
    case = Case("weighted_restore", kernel_device)
    rows, scores, addend = (leaf * 1 for leaf in case.leaves)
    function = weighted_restore if way == "function" else moe.weighted_restore
    results = case(rows, scores, addend, function=function)
    addend.add_(1)
    changed = {"rows": rows, "top_scores": scores, "token_indices_sorted": case.order}[argument]
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss(results), case.leaves)


@pytest.mark.parametrize("name", CALLS)
def test_both_ways_save_the_same_tensors(name, launched, kernel_device):
    for given in ("nothing", "workspace", "inverse"):
        case, saved = Case(name, kernel_device, given), []
        for function in (FUNCTIONS[name], getattr(moe, name)):
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
                case(*case.leaves, function=function)
            saved.append([(x.shape, x.dtype, x.stride()) for x in kept])
        assert saved[0] == saved[1] and saved[0]
        # The workspace is no part of it: two calls may share that.
        assert all(dtype != torch.uint8 for _, dtype, _ in saved[0])


@pytest.mark.parametrize("given", ["nothing", "workspace", "inverse"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_autograd_over_a_forward_past_the_dispatcher(name, given, launched, kernel_device):
    case = Case(name, kernel_device, given)
    launched.clear()
    results = case(*case.leaves)
    assert launched
    own_loss = loss(results)
    compiler = torch.compile(fullgraph=True, backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        own_loss.backward()
    case.check([leaf.grad for leaf in case.leaves])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("given", ["nothing", "inverse"])
@pytest.mark.parametrize("name", CALLS)
def test_batched_gradients(name, given, create_graph, launched, kernel_device):
    case = Case(name, kernel_device, given)
    results = case(*case.leaves)
    results = results if isinstance(results, tuple) else (results,)
    grads = [torch.randn(2, *x.shape, device=x.device) for x in results]
    options = {"retain_graph": True, "create_graph": create_graph}
    both = torch.autograd.grad(results, case.leaves, grads, is_grads_batched=True, **options)
    for i in range(2):
        alone = torch.autograd.grad(results, case.leaves, [x[i] for x in grads], **options)
        for batch, one in zip(both, alone, strict=True):
            assert_same_bits(batch[i].detach(), one.detach())
            assert one.abs().sum() > 0


def test_a_batched_gradient_has_a_gradient(launched, kernel_device):
    """Of a weighted restore, whose gradients depend on its inputs."""
    case = Case("weighted_restore", kernel_device, dtype=torch.float64)
    rows, scores, _ = case.leaves
    out = case(*case.leaves)
    grads = torch.randn(2, *out.shape, dtype=torch.float64, device=out.device).requires_grad_()
    leaves = rows, scores, grads

    def second(first):
        total = sum(x.square().sum() for x in first)
        return torch.autograd.grad(total, leaves, retain_graph=True)

    options = {"create_graph": True, "retain_graph": True}
    both = torch.autograd.grad(out, leaves[:2], grads, is_grads_batched=True, **options)
    alone = [torch.autograd.grad(out, leaves[:2], x, **options) for x in grads]
    expected = second([torch.stack(x) for x in zip(*alone, strict=True)])
    for actual, exact in zip(second(both), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)
        assert exact.abs().sum() > 0


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_jacobians_and_hessians(name, vectorize, launched, kernel_device):
    """Against those that plain indexing has."""
    case = Case(name, kernel_device, dtype=torch.float64)
    for i in range(4):
        case.tensors[i] = case.tensors[i][..., :2].contiguous() if i != 2 else case.tensors[i]
    leaves = tuple(case.tensors[i].clone() for i in case.places)

    def plain(*leaves):
        t, r, s, a = case.replaced(case.tensors, case.places, leaves)
        held = case.order >= 0
        index = case.order.clamp(min=0).long()
        if name in ("permute", "permute_with_scores"):
            rows = t[index // 3] * held[:, None]
            row_scores = s.flatten()[index] * held
            return rows if name == "permute" else torch.cat([rows, row_scores[:, None]], dim=1)
        weights = s.flatten()[index] if name == "weighted_restore" else torch.ones_like(r[:, 0])
        return a.index_add(0, index // 3, r * (weights * held)[:, None])

    def ours(*leaves):
        results = case(*leaves)
        if isinstance(results, tuple):
            return torch.cat([results[0], results[1][:, None]], dim=1)
        return results

    def cubed(function):
        return lambda *leaves: function(*leaves).pow(3).sum()

    for transform, of in (
        (torch.autograd.functional.jacobian, lambda function: function),
        (torch.autograd.functional.hessian, cubed),
    ):
        launched.clear()
        actual = transform(of(ours), leaves, vectorize=vectorize)
        assert launched
        expected = transform(of(plain), leaves)
        flatten = torch.utils._pytree.tree_leaves
        for a, b in zip(flatten(actual), flatten(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert all(x.abs().sum() > 0 for x in flatten(expected)[:1])


def test_there_is_one_plan_of_a_forward_and_one_of_its_backward(launched, kernel_device):
    """Whichever way the forward goes."""
    case = Case("weighted_restore", kernel_device)
    for function in (weighted_restore, moe.weighted_restore) * 2:
        results = case(*case.leaves, function=function)
        case.check(torch.autograd.grad(loss(results), case.leaves))
    assert len(op.PLANS) == 2
