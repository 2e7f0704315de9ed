"""The examples of ways to run a training step hold what they print."""

import pytest
import torch

from tests.compile_examples.test_examples import run_example


def run_on_gpu(name, root, what):
    out = run_example(name, root)
    if not torch.cuda.is_available():
        assert out == f"skipped: {what} needs an NVIDIA GPU, and none is visible\n"
        pytest.skip("needs an NVIDIA GPU; the example says so too")
    return out


def test_compiled_step(root):
    out = run_example("compiled_step.py", root)
    assert "compiled graphs: 1\n" in out
    assert "gradients as the eager ones within 1e-05: True" in out


def test_reduce_overhead(root):
    out = run_on_gpu("reduce_overhead.py", root, "mode='reduce-overhead'")
    assert "cudagraph skips in 20 steps: 0, graphs were recorded: True" in out
    assert "the loss falls: True" in out


def test_graphed_callables(root):
    out = run_on_gpu("graphed_callables.py", root, "make_graphed_callables")
    assert "loss and gradients of 5 batches have the same bits: True" in out


def test_data_parallel(root):
    out = run_example("data_parallel.py", root)
    assert "gradients as in one process within 1e-05: True" in out
    assert "after 3 steps every rank holds the same bits: True" in out
    assert "FSDP2 ends with the bits of DDP: True" in out


def test_expert_parallel(root):
    out = run_example("expert_parallel.py", root)
    assert "eager and compiled, as of one process within 1e-05: True" in out
    assert "room for 64 rows a rank drops the 64 beyond: True" in out


def test_export(root):
    out = run_example("export.py", root)
    assert "have the layer's bits at three counts: True" in out


def test_gradient_accumulation(root):
    out = run_example("gradient_accumulation.py", root)
    assert "gradients as of one batch within 1e-05: True" in out
    assert "the log holds the sum of the micro-batches' losses: True" in out


def test_grad_scaler(root):
    out = run_example("grad_scaler.py", root)
    assert "gradients as in float32 within 7.8e-03: True" in out
    assert "nothing overflowed, the step was taken: True" in out
