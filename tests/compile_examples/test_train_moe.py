"""The program runs as a user would run it, small: a process of its own in an empty folder."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "compile_examples" / "train_moe.py"
TINY = [
    "--hidden",
    "32",
    "--layers",
    "1",
    "--experts",
    "4",
    "--batch-size",
    "4",
    "--seq-len",
    "32",
    "--device",
    "cpu",
]

# Runs the program and prints how many graphs were compiled, recompiled ones included.
COUNT_GRAPHS = """
import runpy, sys
from torch._dynamo.utils import counters
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("graphs:", counters["stats"]["unique_graphs"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of its own: sentences over a few words, about 20 KB."""
    path = tmp_path_factory.mktemp("train_moe")
    words = [
        "the",
        "router",
        "sends",
        "each",
        "token",
        "to",
        "two",
        "experts",
        "and",
        "adds",
        "their",
        "weighted",
        "answers",
    ]
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(words, k=8)) + ".\n" for _ in range(500)]
    (path / "text.txt").write_text("".join(sentences))
    return path


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module, kept from changing this process's deterministic mode."""
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    spec = importlib.util.spec_from_file_location("train_moe", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_moe", module)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, out: str, *arguments: str, python: tuple[str, ...] = (), **env: str) -> str:
    fixed = [*TINY, "--device=cpu", "--text=text.txt", f"--out={out}"]
    process = subprocess.run(
        [sys.executable, *python, PROGRAM, *fixed, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def results(folder: Path, out: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / out / "train_moe.json").read_text(), parse_constant=refuse)


def test_learns_and_reports(folder: Path) -> None:
    steps = 150
    stdout = run(folder, "learns", "--eager", "--steps", str(steps), "--lr", "0.01")
    report = results(folder, "learns")

    assert report["config"]["steps"] == steps
    assert report["device"] == "cpu"
    assert report["torch"] == torch.__version__
    assert report["compiled"] is False
    assert report["same_bits"] is None
    assert report["text_bytes"] == (folder / "text.txt").stat().st_size
    assert report["tokens_per_second"] > 0
    assert report["seconds"] > 0

    # English letters: more than 3.5 bits, less than the 5 bits of 32 equally likely bytes.
    assert 3.5 < report["unigram_entropy"] < 5
    assert report["bits_per_byte"] < 0.6 * report["unigram_entropy"]
    assert report["bits_per_byte"] == report["validation"]["bits_per_byte"][-1]
    assert report["validation"]["step"][-1] == steps
    assert len(report["train"]["step"]) == len(report["train"]["bits_per_byte"]) == 100
    assert report["train"]["bits_per_byte"][0] > 6 > report["train"]["bits_per_byte"][-1]

    load = torch.tensor(report["expert_load"]["share"], dtype=torch.float64)
    assert load.shape == (100, 1, 4)
    torch.testing.assert_close(load.sum(-1), torch.ones(100, 1, dtype=torch.float64))

    assert (folder / "learns" / "train_moe.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"step  {steps} of {steps}" in stdout
    assert "tokens/s" in stdout
    assert "expert load" in stdout


def test_compiles_one_graph_of_the_loss_and_one_of_the_step(folder: Path) -> None:
    stdout = run(folder, "compiled", "--steps", "12", python=("-c", COUNT_GRAPHS))
    assert results(folder, "compiled")["compiled"] is True
    assert "graphs: 2" in stdout


def test_check_bits(folder: Path) -> None:
    stdout = run(folder, "bits", "--steps", "12", "--check-bits")
    assert "same bits in two runs: all 10 parameters" in stdout
    assert results(folder, "bits")["same_bits"] is True


def test_without_compiler_says_so_and_runs_eagerly(folder: Path) -> None:
    stdout = run(folder, "no_compiler", "--steps", "2", CXX=str(folder / "missing"))
    assert stdout.startswith("no C++ compiler found")
    assert results(folder, "no_compiler")["compiled"] is False


def test_one_bit_is_a_difference(program: ModuleType) -> None:
    first = {"weight": torch.randn(3, 4), "bias": torch.tensor([0.0, torch.nan])}
    second = {name: tensor.clone() for name, tensor in first.items()}
    assert program.different_bits(first, second) == []
    second["weight"].view(torch.int32)[2, 3] ^= 1
    assert program.different_bits(first, second) == ["weight"]
    second["bias"][0] = -0.0
    assert program.different_bits(first, second) == ["weight", "bias"]


def test_check_bits_fails_on_a_difference(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    original = program.train

    def train(*arguments: Any) -> Any:
        result = original(*arguments)
        if arguments[-1] == "again":
            result.parameters["head.weight"].view(torch.int32)[0, 0] ^= 1
        return result

    monkeypatch.setattr(program, "train", train)
    monkeypatch.chdir(folder)
    arguments = [
        *TINY,
        "--device=cpu",
        "--text",
        "text.txt",
        "--steps",
        "1",
        "--eager",
        "--check-bits",
    ]
    with pytest.raises(SystemExit, match=r"two runs differ in the bits of head\.weight"):
        program.main(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "short.txt"], "at least 330 bytes for --seq-len 32, got 11"),
        (["--text", "missing.txt"], "No such file or directory: 'missing.txt'"),
        (["--hidden", "48"], "hidden must be a multiple of 32, got 48"),
        (["--topk", "5"], "topk must be at most experts = 4, got 5"),
        (["--steps", "0"], "steps must be above 0, got 0"),
    ],
)
def test_errors_say_what_was_expected(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("hello world")
    with pytest.raises(SystemExit) as error:
        program.main([*TINY, *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
