"""The committed digests, on the CPU, by the kernels and over ranks, and what the command says."""

import json
import os
import subprocess
import sys

import pytest
import torch

from moe_custom_ops.check import __main__ as command
from moe_custom_ops.check.cases import CASES, digest, digests, expert_ids, floats

GOLDEN = json.loads(command.GOLDEN.read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_has_the_committed_digests(name):
    assert digests(CASES[name](torch.device("cpu"))) == GOLDEN[name]


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_have_the_committed_digests(name, kernel_device, launched):
    assert digests(CASES[name](torch.device(kernel_device))) == GOLDEN[name]
    assert launched


def test_every_case_is_committed_and_no_other():
    assert list(GOLDEN) == list(CASES)
    assert all(GOLDEN.values())


def test_the_inputs_round_and_are_uneven():
    x = floats(4096, seed=1)
    assert x.unique().numel() > 4000 and (x < 0).any() and (x > 0).any()
    assert x.sum() != x.flip(0).cumsum(0)[-1] or x[:100].sum() != x[:100].double().sum().float()
    ids = expert_ids(500, 16, 4, seed=2)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=16)
    assert counts.min() > 0 and counts.max() > 2 * counts.min()


def test_a_digest_is_of_dtype_shape_and_bits():
    x = torch.tensor([1.0, torch.nan, 0.0])
    others = (x.double(), x.view(1, 3), x.nextafter(torch.tensor(torch.inf)), x[:2], -x)
    assert len({digest(y) for y in (x, *others)}) == 6
    patterns = torch.tensor([0x3F800000, -0x3FFFFF, -(2**31)], dtype=torch.int32)
    assert digest(patterns.view(torch.float32)) == digest(x)


def test_the_command_passes_and_says_so(capsys):
    assert command.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count(" equal\n") == len(CASES)
    assert out.endswith("1 rank: every result has the bits of this package\n")


def test_the_command_names_what_differs(capsys, monkeypatch):
    def broken(device):
        raise RuntimeError("no such kernel")

    def off_by_a_bit(device):
        results = CASES["aux_loss, float32"](device)
        loss = results["loss"].detach()
        return {**results, "loss": loss.nextafter(torch.ones_like(loss))}

    cases = {"restore": broken, "aux_loss, float32": off_by_a_bit}
    monkeypatch.setattr(command, "CASES", cases)
    assert command.main(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "restore" in out and "rank 0: RuntimeError: no such kernel" in out
    assert f"must be {GOLDEN['aux_loss, float32']['loss']}" in out
    assert "gradient of probs" not in out and "1 rank: NOT all equal" in out


def test_the_ranks_that_differ_are_named(capsys):
    good, bad = {"restore": [], "permute": []}, {"restore": ["out is a, must be b"], "permute": []}
    assert not command.report([good, bad, {"permute": []}, bad])
    out = capsys.readouterr().out
    assert "differs on ranks 1, 2, 3" in out and "rank 3: out is a, must be b" in out
    assert "rank 2: did not come to it" in out
    assert command.report([good, good])


def under_torchrun(root, code, ranks=3):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", *code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_under_torchrun(root):
    result = under_torchrun(root, ["-m", "moe_custom_ops.check", "--device", "cpu"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "aux_loss, float32, over ranks              equal\n" in result.stdout
    assert "sequence_aux_loss, batch, over ranks       equal\n" in result.stdout
    assert "3 ranks: every result has the bits of this package\n" in result.stdout


BROKEN = """
import datetime, os, sys
import moe_custom_ops.check.__main__ as command
from moe_custom_ops.check import cases
from moe_custom_ops.distributed import losses

def broken(*arguments):
    raise RuntimeError("no kernel image")

command.COLLECTIVE = datetime.timedelta(seconds=20)
command.OUTCOME = datetime.timedelta(seconds=90)
if os.environ["RANK"] == "1":
    if sys.argv[1] == "local":
        command.CASES["restore"] = broken
    else:
        losses.gather = broken
code = command.main(["--device", "cpu"])
sys.stdout.flush()
os._exit(code)
"""


@pytest.mark.parametrize("where", ["local", "over ranks"])
def test_a_rank_that_fails_is_named(where, root, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    result = under_torchrun(root, [str(script), where], ranks=2)
    assert result.returncode != 0
    assert "rank 1: RuntimeError: no kernel image" in result.stdout, result.stderr
    assert "2 ranks: NOT all equal\n" in result.stdout
    assert "permute_with_scores                        equal\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "xpu"], "invalid choice: 'xpu'"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: PyTorch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_devices_that_are_not_there(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_failures_are_not_committed(monkeypatch, capsys):
    before = command.GOLDEN.read_text()
    monkeypatch.setitem(command.CASES, "restore", lambda device: 1 / 0)
    with pytest.raises(SystemExit):
        command.main(["--device", "cpu", "--write"])
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert command.GOLDEN.read_text() == before
