"""make matrix: build each environment that can be had, and run the tests in it.

    python tests/matrix.py [--torch TORCH,TRITON[,ALSO] ...] [--environment PYTHON ...] [-- PYTEST]

A CUDA build of PyTorch is gigabytes, so ``torch==...+cpu`` is asked for, of the indexes that pip is
configured with; where pip has none, the environment is left out and the table says so. An
environment that exists already is named by its interpreter.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-matrix"
# The interpreter of triton 3.6 makes Python numbers of arrays, which NumPy 2.4 has ended.
TORCH = ("2.11.0,3.6.0,numpy<2.4", "2.12.0,3.7.0", "2.13.0,3.9.0")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
VERSIONS = (
    "import sys, torch, triton; "
    "print(sys.version.split()[0], torch.__version__, triton.__version__)"
)


def call(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return ((result.stdout + result.stderr).strip().splitlines() or ["no output"])[-1]


def build(python: str, torch: str, triton: str, *also: str) -> Path | str:
    """The interpreter of a new environment, or why there is none."""
    if call(python, "-c", "").returncode:
        return f"{python} is no interpreter that runs"
    folder = ENVIRONMENTS / f"{Path(python).name}-torch{torch}"
    interpreter = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        call(python, "-m", "venv", str(folder))
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [f"torch=={torch}+cpu", f"triton=={triton}", *also]
        wanted += extras["optional-dependencies"]["test"]
        installed = call(str(interpreter), "-m", "pip", "install", "--only-binary=:all:", *wanted)
        if installed.returncode:
            errors = [x for x in installed.stderr.splitlines() if x.startswith("ERROR")]
            shutil.rmtree(folder)
            return (errors or ["pip failed"])[0].removeprefix("ERROR: ")
        done.touch()
    return interpreter


def run(interpreter: str, arguments: list[str]) -> tuple[bool, str]:
    """Whether the tests pass, and a line of the table."""
    versions = call(interpreter, "-c", VERSIONS)
    if versions.returncode:
        return False, f"{interpreter}: {last_line(versions)}"
    pytest = (interpreter, "-m", "pytest", "-q", *arguments)
    results = [call(*pytest), call(*pytest, "-m", "kernels", TRITON_INTERPRET="1")]
    # 5 is that of no test, which a choice of tests may leave.
    failed = [result for result in results if result.returncode not in (0, 5)]
    for result in failed:
        print(result.stdout[-5000:], result.stderr[-2000:])
    cells = [*versions.stdout.split(), *map(last_line, results)]
    return not failed, "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/matrix.py")
    parser.add_argument("--torch", nargs="*", default=TORCH, metavar="TORCH,TRITON[,ALSO]")
    parser.add_argument("--environment", nargs="*", default=[], metavar="PYTHON")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, behind --")
    options = parser.parse_args()
    interpreters, lines, passed = list(options.environment), [], True
    for minor in PYTHONS:
        python = shutil.which(f"python{minor}")
        for pair in options.torch:
            torch, triton, *also = pair.split(",")
            built = build(python, torch, triton, *also) if python else f"no python{minor}"
            if isinstance(built, str):
                lines.append(f"| {minor} | {torch} | {triton} | left out: {built} | |")
            else:
                interpreters.append(str(built))
    for interpreter in interpreters:
        good, line = run(interpreter, options.pytest)
        passed &= good
        lines.append(line)
    print("| Python | torch | triton | tests | kernels, interpreted |\n|---|---|---|---|---|")
    print("\n".join(lines))
    return 0 if passed and interpreters else 1


if __name__ == "__main__":
    sys.exit(main())
