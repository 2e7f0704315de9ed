"""The wheel and the sdist: equal bytes from equal files, the package alone, and installable."""

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[1]
NAME = (
    "moe_custom_ops-" + tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
)
BESIDE = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
BESIDE |= {"reproducible_sdist.py"}
SOURCES = ("moe_custom_ops", "tests", *sorted(BESIDE - {"PKG-INFO", "setup.cfg"}))


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Two builds in two places, of copies whose files are of other times and permissions."""
    folders = []
    for number, mode in enumerate((0o644, 0o600)):
        folder = tmp_path_factory.mktemp("build")
        source, out = folder / f"source{number}", folder / "dist"
        source.mkdir()
        for name in SOURCES:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, source / name, ignore=ignored)
            else:
                shutil.copyfile(ROOT / name, source / name)
        for path in source.rglob("*.*"):
            os.utime(path, (1.6e9 + 1e6 * number, 1.6e9 + 1e6 * number))
            path.chmod(mode | (0o111 if path.is_dir() else 0))
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out))
        run(*command, cwd=source, env=environment)
        folders.append(out)
    return folders


@pytest.mark.parametrize("name", [f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl"])
def test_two_builds_have_the_same_bytes(name, builds):
    first, second = (folder / name for folder in builds)
    assert first.read_bytes() == second.read_bytes()


def package_files(root):
    found = [p.relative_to(root) for p in (root / "moe_custom_ops").rglob("*") if p.is_file()]
    return {str(p) for p in found if "__pycache__" not in p.parts}


def test_the_wheel_holds_the_package_alone(builds, root):
    with zipfile.ZipFile(builds[0] / f"{NAME}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    about = {f"{NAME}.dist-info/{x}" for x in ("METADATA", "RECORD", "WHEEL", "top_level.txt")}
    assert names == package_files(root) | about | {f"{NAME}.dist-info/licenses/LICENSE"}


def test_the_sdist_holds_the_package_and_what_builds_it(builds, root):
    with tarfile.open(builds[0] / f"{NAME}.tar.gz") as sdist:
        members = sdist.getmembers()
    files = {m.name.removeprefix(f"{NAME}/") for m in members if not m.isdir()}
    about = {name for name in files if name.startswith("moe_custom_ops.egg-info/")}
    assert files - about == package_files(root) | BESIDE
    assert all(m.isfile() or m.isdir() for m in members)
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 1.7e9)}


def test_the_wheel_in_an_empty_environment(builds, tmp_path, root):
    """Empty but for PyTorch, which is that of the environment that runs the tests."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = tmp_path / "venv" / "bin" / "python"
    wheel = builds[0] / f"{NAME}-py3-none-any.whl"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    run(*pip, "install", "--no-deps", "--no-index", str(wheel))
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (site / "torch.pth").write_text("\n".join(others))
    code = """
    import sys
    import moe_custom_ops as m, moe_custom_ops.check, moe_custom_ops.distributed, moe_custom_ops.nn
    import torch
    assert m.__file__.startswith(sys.prefix), m.__file__
    loss = m.aux_loss(torch.full((8, 4), 0.25), torch.tensor([4, 4, 4, 4]), 8, 4, 2, 0.5)
    assert loss.item() == 0.5
    """
    run(str(python), "-I", "-c", textwrap.dedent(code), cwd=tmp_path)
    run(str(python), "-I", "-m", "moe_custom_ops.check", cwd=tmp_path)
