"""Faults of PyTorch that were reported in public and could bite here, on the installed version.

Those of a single op are in ``tests/<op>/test_compile.py``.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moe_custom_ops import (
    aux_loss,
    expert_permutation,
    expert_permutation_from_map,
    inverse_permutation,
    make_workspace,
    permute,
    permute_with_scores,
    restore,
    sequence_aux_loss,
    weighted_restore,
)
from moe_custom_ops.testing import assert_same_bits, make_assignments, make_probs
from tests.compiling import compile_fresh, graphs
from tests.test_imports import run_python

EXPERTS, TOPK, HIDDEN = 8, 3, 20


def make(num_tokens, seed=0, device="cpu"):
    """(tokens, probs, scores, expert_ids), of which the ids are the most likely experts."""
    generator = torch.Generator().manual_seed(seed)
    probs, _ = make_probs(num_tokens, EXPERTS, seed=seed)
    scores, ids = probs.topk(TOPK)
    tokens = torch.randn(num_tokens, HIDDEN, generator=generator)
    return [x.to(device) for x in (tokens, probs, scores, ids)]


def layer(tokens, probs, scores, expert_ids, workspace=None):
    """Every op of a layer, with what is between them exact: (out, loss)."""
    order, counts, _ = expert_permutation(expert_ids, EXPERTS, 4, None, workspace)
    loss = aux_loss(probs, counts, probs.shape[0], EXPERTS, TOPK, 0.1, workspace)
    of_sequence = sequence_aux_loss(probs[None], counts[None], TOPK, 0.1, workspace=workspace)
    rows = permute(tokens, order, TOPK, workspace) * 2
    out = weighted_restore(rows, scores, order, tokens, workspace)
    return out + restore(rows, order, tokens.shape[0], TOPK, None, workspace), loss + of_sequence


def two_layers(tokens, probs, scores, ids, other_probs, other_scores, other_ids, workspace=None):
    out, loss = layer(tokens, probs, scores, ids, workspace)
    out, other_loss = layer(out, other_probs, other_scores, other_ids, workspace)
    return out, loss * other_loss


def inputs_of_two_layers(num_tokens=30):
    first, second = make(num_tokens), make(num_tokens, seed=1)[1:]
    for x in (*first[:3], *second[:2]):
        x.requires_grad_()
    return [*first, *second]


def results_and_gradients(function, inputs, *rest, before_backward=None):
    out, loss = function(*inputs, *rest)
    leaves = [x for x in inputs if x.requires_grad]
    if before_backward:
        before_backward()
    grads = torch.autograd.grad([out, loss], leaves, [torch.ones_like(out), torch.ones_like(loss)])
    return [out, loss, *grads]


def check(actual, expected):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")
        assert b.abs().sum() > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_one_workspace_for_all_ops_of_two_layers(backend):
    """A graph was reordered so that a call read what a later one had written to shared scratch."""
    inputs, workspace = inputs_of_two_layers(), make_workspace(2**14)
    expected = results_and_gradients(two_layers, inputs)
    compiled = compile_fresh(two_layers, backend)
    check(results_and_gradients(compiled, inputs, workspace), expected)


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_a_stale_workspace_between_the_backwards_of_two_layers(backend):
    """A mutated buffer that a backward saves gives the gradients of whoever wrote it last."""
    inputs, workspace = inputs_of_two_layers(), make_workspace(2**14)
    expected = results_and_gradients(two_layers, inputs)
    function = compile_fresh(two_layers, backend) if backend else two_layers
    spoil = lambda: workspace.fill_(255)  # noqa: E731
    check(results_and_gradients(function, inputs, workspace, before_backward=spoil), expected)


WRITTEN_TO = r"modified by an inplace operation: \[torch.ByteTensor"


def checkpointed(*arguments):
    return torch.utils.checkpoint.checkpoint(two_layers, *arguments, use_reentrant=False)


def test_a_workspace_in_an_eager_checkpointed_region():
    """The forward is run again in the backward, between other calls that write the workspace.

    One among the checkpoint's arguments is kept as an activation: PyTorch does not mind that our
    ops write it, but sees that others do.
    """
    inputs, workspace = inputs_of_two_layers(), make_workspace(2**14)
    expected = results_and_gradients(two_layers, inputs)

    def region(*arguments):
        call = lambda *x: two_layers(*x, workspace)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(call, *arguments, use_reentrant=False)

    spoil = lambda: workspace.fill_(255)  # noqa: E731
    check(results_and_gradients(region, inputs, before_backward=spoil), expected)
    check(results_and_gradients(checkpointed, inputs, workspace), expected)
    with pytest.raises(RuntimeError, match=WRITTEN_TO):
        results_and_gradients(checkpointed, inputs, workspace, before_backward=spoil)


def test_a_workspace_in_a_compiled_checkpointed_region():
    """The backward's graph has the workspace as an input, which the forward's saves for it.

    A call in between writes it, and PyTorch refuses the backward; a fresh workspace is the cure.
    """
    inputs, workspace = inputs_of_two_layers(), make_workspace(2**14)
    expected = results_and_gradients(two_layers, inputs)
    compiled = compile_fresh(checkpointed)
    check(results_and_gradients(compiled, inputs, workspace), expected)
    spoil = lambda: workspace.fill_(255)  # noqa: E731
    with pytest.raises(RuntimeError, match=WRITTEN_TO):
        results_and_gradients(compiled, inputs, workspace, before_backward=spoil)
    check(results_and_gradients(compiled, inputs, before_backward=spoil), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_clone_of_an_input_beside_its_mutated_original(backend):
    """A compiler took the clone for its original, and the clone showed the later write."""
    tokens, _, scores, ids = make(30)
    order = expert_permutation(ids, EXPERTS)[0]

    def call(tokens, order, workspace):
        old, old_workspace = tokens.clone(), workspace.clone()
        tokens.mul_(2)
        rows = permute(tokens, order, TOPK, workspace)
        out = weighted_restore(rows, scores, order, old, workspace)
        return out, permute(old, order, TOPK, workspace), old, old_workspace

    def run(function):
        workspace = make_workspace(2**14).fill_(7)
        own = tokens.clone()
        return *function(own, order, workspace), own

    for actual, expected in zip(run(compile_fresh(call, backend)), run(call), strict=True):
        assert_same_bits(actual, expected)
    assert (run(call)[3] == 7).all()


def overlaps():
    """(op, arguments, the input that begins inside the workspace, at which all of it lies)."""
    tokens, probs, scores, ids = make(30)
    order, counts, _ = expert_permutation(ids, EXPERTS)
    rows, mask, total = permute(tokens, order, TOPK), torch.ones(30).bool(), torch.tensor(30)
    ends = torch.tensor([0, 30])
    routing = torch.zeros(30, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)
    losses = {"probs": probs, "tokens_per_expert": counts, "total_num_tokens": total}
    losses |= {"num_experts": EXPERTS, "topk": TOPK, "coeff": 0.1, "token_mask": mask}
    packs = {"probs": probs, "tokens_per_expert": counts[None], "topk": TOPK, "coeff": 0.1}
    packs |= {"cu_seqlens": ends, "token_mask": mask}
    ordered = {"token_indices_sorted": order}
    weighted = {"rows": rows, "top_scores": scores, **ordered, "addend": tokens}
    plain = {"rows": rows, **ordered, "num_tokens": 30, "topk": TOPK, "addend": tokens}
    calls = {
        aux_loss: losses,
        sequence_aux_loss: packs,
        expert_permutation: {"expert_ids": ids, "num_experts": EXPERTS},
        expert_permutation_from_map: {"routing_map": routing, "topk": TOPK},
        weighted_restore: weighted,
        restore: plain,
        permute: {"tokens": tokens, **ordered, "topk": TOPK},
        permute_with_scores: {"tokens": tokens, "top_scores": scores, **ordered},
    }
    for function, call in calls.items():
        for name, x in call.items():
            # permute_with_scores keeps its scores out of the scratch, which it does not use.
            if isinstance(x, torch.Tensor) and (function, name) != (
                permute_with_scores,
                "top_scores",
            ):
                yield pytest.param(function, call, name, id=f"{function.__name__}-{name}")


def overlap(call, name, device):
    """The call with the input ``name`` across the end of the workspace, and one behind the end."""
    size = 2**14
    call = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    x = call[name]
    buffer = torch.zeros(2 * size + x.nbytes, dtype=torch.uint8, device=device)
    results = []
    for start in (size - 8, size):
        place = buffer[start : start + x.nbytes].view(x.dtype).view(x.shape)
        place.copy_(x)
        results.append({**call, name: place, "workspace": buffer[:size]})
    # The second has overwritten a part of the first, whose values no refusal reads.
    return results


@pytest.mark.parametrize(("function", "call", "name"), list(overlaps()))
def test_a_workspace_that_overlaps_an_input_is_refused(function, call, name):
    """An op wrote over what it was about to read."""
    bad, good = overlap(call, name, "cpu")
    before = bad["workspace"].clone()
    message = f"{function.__name__}: workspace must be apart from the inputs.* overlaps {name}"
    with pytest.raises(ValueError, match=message):
        function(**bad)
    with pytest.raises(ValueError, match=message):
        getattr(torch.ops.moe, function.__name__)(**bad)
    assert torch.equal(bad["workspace"], before)
    function(**good)


@pytest.mark.kernels
@pytest.mark.parametrize(("function", "call", "name"), list(overlaps()))
def test_so_it_is_past_the_dispatcher(function, call, name, launched, kernel_device):
    """Where the plan of another call has the same signature."""
    bad, good = overlap(call, name, kernel_device)
    function(**good)
    launched.clear()
    with pytest.raises(ValueError, match=f"workspace must be apart.* overlaps {name}"):
        function(**bad)
    assert not launched


def test_a_workspace_that_overlaps_an_input_of_a_graph():
    """No address is known while a graph is made; PyTorch sees that two inputs share memory."""
    buffer = torch.zeros(2**14, dtype=torch.uint8)
    order = buffer[:96].view(torch.int64).copy_(torch.arange(12))
    compiled = compile_fresh(lambda t, o, w: permute(t, o, 3, w))
    with pytest.raises(Exception, match="input mutations on views with different dtypes"):
        compiled(torch.rand(4, 5), order, buffer)


def strided(x):
    """``x`` as every second column of a transposed buffer."""
    wide = x.new_zeros(*x.shape[:-2], 2 * x.shape[-1], x.shape[-2]) if x.dim() > 1 else None
    if wide is None:
        return x.repeat_interleave(2)[::2]
    view = wide.transpose(-1, -2)[..., ::2]
    return view.copy_(x)


def layouts(tokens, probs, scores, ids):
    """Shape, strides and dtype of every result and gradient, of inputs with odd strides."""
    device = tokens.device
    tokens, probs, scores, ids = (strided(x) for x in (tokens, probs, scores, ids))
    order, counts, ends = expert_permutation(ids, EXPERTS, 4)
    routing = torch.zeros(30, EXPERTS, dtype=torch.bool, device=device)
    mapped = expert_permutation_from_map(strided(routing), TOPK, 4)
    leaves = [x.detach().requires_grad_() for x in (tokens, probs, scores)]
    tokens, probs, scores = leaves
    mask = strided(torch.ones(30, dtype=torch.bool, device=device))
    inverse = inverse_permutation(order, 30, TOPK)
    losses = [
        aux_loss(probs, strided(counts), 30, EXPERTS, TOPK, 0.1),
        aux_loss(probs, counts, 30, EXPERTS, TOPK, 0.1, token_mask=mask),
        sequence_aux_loss(probs.view(1, 30, EXPERTS), counts[None], TOPK, 0.1),
        sequence_aux_loss(probs, counts[None], TOPK, 0.1, torch.tensor([0, 30], device=device)),
    ]
    rows, row_scores = permute_with_scores(tokens, scores, order)
    leaves.append(rows := strided(rows.detach()).requires_grad_())
    batched = scores.view(5, 6, TOPK)
    outs = [
        permute(tokens, order, TOPK),
        permute(strided(tokens.detach().to(torch.float8_e5m2).view(torch.uint8)), order, TOPK),
        row_scores,
        weighted_restore(rows, scores, order, tokens),
        weighted_restore(rows, batched, order, tokens.view(5, 6, HIDDEN)),
        restore(rows, order, 30, TOPK, tokens, None, strided(inverse)),
    ]
    grads = []
    for result in (*losses, *outs):
        if result.requires_grad:
            grad = torch.ones((), device=device).expand(result.shape)
            got = torch.autograd.grad(result, leaves, grad, retain_graph=True, allow_unused=True)
            grads += [x for x in got if x is not None]
    results = [order, counts, ends, *mapped, inverse, *losses, *outs, *grads]
    assert len(grads) > 12
    return [(x.shape, x.stride(), x.dtype) for x in results]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_strides_of_the_fake(device):
    """Inductor reads a result by the strides of the fake: others gave garbage, or an assertion."""
    inputs = make(30, device=device)
    real = layouts(*inputs)
    with FakeTensorMode() as mode:
        fake = layouts(*(mode.from_tensor(x) for x in inputs))
    assert fake == real


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["past the dispatcher", "torch.ops.moe"])
def test_the_first_call_inside_a_capture(way, root):
    """A kernel was compiled, or its module loaded, by a call that a capture forbids."""
    run_python(
        f"""
import torch
import moe_custom_ops.op
from tests.test_compiler_traps import check, inputs_of_two_layers, results_and_gradients, two_layers
way = {way!r}
inputs = inputs_of_two_layers()
expected = results_and_gradients(two_layers, inputs)
if way == "torch.ops.moe":
    # Nothing is plain, so every call takes the dispatcher.
    moe_custom_ops.op._is_plain_mode = lambda: False
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    own = [x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs]
side.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    results = results_and_gradients(two_layers, own)
graph.replay()
torch.cuda.synchronize()
check(results, expected)
""",
        root,
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_fifty_token_counts_stay_under_the_recompile_limit(dynamic):
    """Past ``recompile_limit`` graphs, 8 by default, PyTorch silently runs the function eagerly.

    0 and 1 are constants to it, and without ``dynamic=True`` the first count is one too.
    """
    compiled = compile_fresh(layer, "aot_eager", dynamic=dynamic)
    workspace = make_workspace(2**14)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=4):
        for num_tokens in (7, *range(50)):
            inputs = make(num_tokens)
            inputs[0].requires_grad_()
            actual, expected = compiled(*inputs, workspace), layer(*inputs)
            for a, b in zip(actual, expected, strict=True):
                assert_same_bits(a, b, f"{num_tokens} tokens")
            (grad,) = torch.autograd.grad(actual[0].sum(), inputs[0])
            assert_same_bits(grad, torch.autograd.grad(expected[0].sum(), inputs[0])[0])
    assert graphs() <= (3 if dynamic else 4)


SCORES, ORDER = make_assignments(4, TOPK, EXPERTS)
ROWS, COUNTS = torch.randn(12, 5), torch.arange(EXPERTS) + 1
DIFFERENTIABLE = {
    "aux_loss": (lambda p: aux_loss(p, COUNTS, 4, EXPERTS, TOPK, 0.1), SCORES.new_ones(4, EXPERTS)),
    "sequence_aux_loss": (
        lambda p: sequence_aux_loss(p, COUNTS[None], TOPK, 0.1),
        SCORES.new_ones(1, 4, EXPERTS),
    ),
    "weighted_restore": (lambda s: weighted_restore(ROWS, s, ORDER).sum(), SCORES),
    "restore": (lambda r: restore(r, ORDER, 4, TOPK).sum(), ROWS),
    "permute": (lambda t: permute(t, ORDER, TOPK).sum(), torch.randn(4, 5)),
    "permute_with_scores": (
        lambda s: permute_with_scores(torch.ones(4, 5), s, ORDER)[1].sum(),
        SCORES,
    ),
}
TRANSFORMS = torch.func
REVERSE = {
    "grad": lambda f, x: TRANSFORMS.grad(f)(x),
    "vjp": lambda f, x: TRANSFORMS.vjp(f, x)[1](torch.ones(())),
    "jacrev": lambda f, x: TRANSFORMS.jacrev(f)(x),
    "hessian": lambda f, x: TRANSFORMS.hessian(f)(x),
}
FORWARD = {
    "jvp": lambda f, x: TRANSFORMS.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: TRANSFORMS.jacfwd(f)(x),
    "linearize": lambda f, x: TRANSFORMS.linearize(f, x)[1](x),
}


@pytest.mark.parametrize("transform", REVERSE)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_reverse_mode_of_torch_func_is_refused_by_pytorch(op, transform):
    """A gradient past an op that a transform does not know would be a silent zero."""
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        REVERSE[transform](*DIFFERENTIABLE[op])


@pytest.mark.parametrize("transform", FORWARD)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_forward_mode_of_torch_func_is_refused(op, transform):
    """The registered ops would drop the tangent."""
    with pytest.raises(NotImplementedError, match=f"{op}: forward-mode AD is not implemented"):
        FORWARD[transform](*DIFFERENTIABLE[op])


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_functionalize_is_refused_by_pytorch(op):
    """It knows no operator of a schema that may write an argument."""
    function, x = DIFFERENTIABLE[op]
    with pytest.raises(RuntimeError, match=rf"alias annotations: moe::{op}[(.]"):
        TRANSFORMS.functionalize(function)(x)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_the_jacobians_of_autograd_work(op):
    """Instead of ``torch.func``'s: by rows, and all at once, which takes ``is_grads_batched``."""
    function, x = DIFFERENTIABLE[op]
    (expected,) = torch.autograd.grad(function(y := x.clone().requires_grad_()), y)
    for vectorize in (False, True):
        jacobian = torch.autograd.functional.jacobian(function, x, vectorize=vectorize)
        assert_same_bits(jacobian, expected)
    # Of the square of a linear function.
    square = lambda x: function(x) ** 2  # noqa: E731
    _, product = torch.autograd.functional.hvp(square, x, torch.ones_like(x))
    torch.testing.assert_close(product, 2 * expected * expected.sum())
    assert expected.abs().sum() > 0
