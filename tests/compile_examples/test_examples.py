"""The short examples run as they stand."""

import os
import subprocess
import sys

import pytest
import torch


def run_example(name, root):
    result = subprocess.run(
        [sys.executable, root / "compile_examples" / name],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_aux_loss(root):
    out = run_example("aux_loss.py", root)
    assert "4096 tokens: loss 0.01" in out and "compiled graphs: 1" in out


def test_weighted_restore(root):
    assert "result [4, 128, 256], relative error" in run_example("weighted_restore.py", root)


def test_cuda_graph_step(root):
    out = run_example("cuda_graph_step.py", root)
    if not torch.cuda.is_available():
        assert out == "skipped: a CUDA graph needs an NVIDIA GPU, and none is visible\n"
        pytest.skip("needs an NVIDIA GPU; the example says so too")
    assert "every parameter has the same bits: True" in out
    assert "so have loss and gradient norm of every step: True" in out


def test_rounding(root):
    out = run_example("rounding.py", root)
    errors = dict(line.rsplit(": ", 1) for line in out.splitlines() if "not installed" not in line)
    for dtype in ("float32", "bfloat16"):
        # Of one rounding to bf16: a quarter of its spacing on average, 2**-9, no more than 2**-8.
        own = float(errors[f"moe_custom_ops, {dtype} scores"])
        assert 0 < own < 2**-8
        for name, error in errors.items():
            if name.endswith(f"{dtype} scores"):
                assert own <= float(error), name
