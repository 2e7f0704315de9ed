"""The dispatchers against torchtitan's own, local and over two ranks."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_custom_ops.testing import assert_close_in_norm
from tests.ranks import run_checks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    library = pytest.importorskip("torchtitan.models.common.token_dispatcher")
    from torchtitan.distributed import utils

    from moe_custom_ops.integrations import torchtitan as adapter

TOKENS, EXPERTS, TOPK, HIDDEN = 20, 8, 3, 16


def routing(seed, num_tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    scores, ids = torch.randn(num_tokens, EXPERTS, generator=generator).softmax(-1).topk(TOPK)
    return torch.randn(num_tokens, HIDDEN, generator=generator), scores, ids


def expert(rows, counts, first=0):
    which = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return (rows * (first + which + 1.0)[:, None].to(rows.dtype)).tanh()


def run(module, name, seed, dtype=torch.float32, mesh=None, first=0, num_tokens=TOKENS):
    dispatcher = getattr(module, name).Config(num_experts=EXPERTS, top_k=TOPK).build()
    assert type(dispatcher) is getattr(module, name)
    dispatcher.wire_meshes(ep_mesh=mesh)
    tokens, scores, ids = routing(seed, num_tokens)
    tokens, scores = tokens.to(dtype).requires_grad_(), scores.requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    rows, own_counts, metadata = dispatcher.dispatch(tokens, scores, ids, counts)
    out = dispatcher.combine(expert(rows, own_counts, first), metadata, tokens)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (out.float() * weight).sum().backward()
    return {"out": out, "tokens": tokens.grad, "scores": scores.grad}, rows, own_counts


def compare(actual, expected, tolerance=1e-6):
    for key, value in expected[0].items():
        assert_close_in_norm(actual[0][key], value, tolerance, key)
    assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2])


@pytest.mark.parametrize("name", ["LocalTokenDispatcher", "AllToAllTokenDispatcher"])
def test_without_a_mesh(name):
    compare(run(adapter, name, 1), run(library, name, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_type_is_rounded_once(dtype):
    exact, _, _ = run(library, "LocalTokenDispatcher", 1, torch.float64)
    stock, _, _ = run(library, "LocalTokenDispatcher", 1, dtype)
    own, _, _ = run(adapter, "LocalTokenDispatcher", 1, dtype)
    errors = [(x["out"].double() - exact["out"]).norm() for x in (own, stock)]
    assert own["out"].dtype == dtype and 0 < errors[0] < errors[1]


def test_no_token():
    (results, rows, _) = run(adapter, "LocalTokenDispatcher", 1, num_tokens=0)
    assert results["out"].shape == (0, HIDDEN) and rows.shape == (0, HIDDEN)


def check_over_ranks(group):
    # The exchanges of "spmd_types" need NCCL: gloo's list form takes equal sizes only.
    utils.set_spmd_backend("full_dtensor")
    mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("ep",))
    first = group.rank() * EXPERTS // group.size()
    options = {"mesh": mesh, "first": first}
    name = "AllToAllTokenDispatcher"
    seed = 5 + group.rank()
    compare(run(adapter, name, seed, **options), run(library, name, seed, **options))
    # A rank without tokens takes part.
    num_tokens = 0 if group.rank() == 0 else TOKENS
    results, rows, counts = run(adapter, name, seed, num_tokens=num_tokens, **options)
    assert results["out"].shape == (num_tokens, HIDDEN) and rows.shape[0] == counts.sum() > 0


def check_type_checking_is_refused(group):
    utils.set_spmd_backend("spmd_types")
    mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("ep",))
    patch = pytest.MonkeyPatch()
    patch.setattr(library.spmd, "is_type_checking", lambda: True)
    with pytest.raises(ValueError, match="type checking must be off with this dispatcher"):
        run(adapter, "AllToAllTokenDispatcher", 1, mesh=mesh)
    patch.undo()
    dist.barrier()


CHECKS = [check_over_ranks, check_type_checking_is_refused]


@functools.cache
def outcomes():
    return run_checks(2, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_over_two_ranks(check):
    assert outcomes().get(check.__name__, "did not run") == ""
