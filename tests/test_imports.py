"""Importing in fresh processes, and the direction of imports inside the package."""

import ast
import subprocess
import sys
import textwrap

import pytest


def run_python(code, root):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


NO_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("triton is blocked")

sys.meta_path.insert(0, NoTriton())
"""


def test_import_and_cpu_calls_need_no_triton(root):
    run_python(
        NO_TRITON
        + """
import torch
import moe_custom_ops, moe_custom_ops.distributed, moe_custom_ops.nn
layer = moe_custom_ops.nn.MoE(8, 16, 4, 2, 32)
out, loss, _ = layer(torch.randn(5, 8))
(out.sum() + loss).backward()
assert not any(name.split(".")[0] == "triton" for name in sys.modules)
""",
        root,
    )


def test_a_kernel_call_without_triton_is_refused(root):
    run_python(
        NO_TRITON
        + """
from moe_custom_ops.backend import load_kernels
ops = ("aux_loss", "expert_permutation", "sequence_aux_loss", "weighted_restore")
for op, name in (*((op, "kernels") for op in ops), ("weighted_restore", "inverse_kernels")):
    try:
        load_kernels(f"moe_custom_ops.{op}", name)
    except ImportError as error:
        assert f"{op}: the CUDA kernels need triton >= 3.6" in str(error), error
        assert "CPU" in str(error)
    else:
        raise SystemExit("not refused")
""",
        root,
    )


def test_a_kernel_call_on_rocm_is_refused(root):
    run_python(
        """
import torch
torch.version.hip = "6.0"
from moe_custom_ops.backend import load_kernels
try:
    load_kernels("moe_custom_ops.aux_loss")
except NotImplementedError as error:
    assert str(error).startswith("aux_loss: the CUDA kernels are not supported on ROCm; move its")
else:
    raise SystemExit("not refused")
""",
        root,
    )


def test_import_is_cold(root):
    """No kernel, test helper or plotting library is imported, and no GPU is touched."""
    out = run_python(
        """
import sys, torch
before = set(sys.modules)
import moe_custom_ops, moe_custom_ops.distributed, moe_custom_ops.nn
new = {name for name in set(sys.modules) - before}
assert not torch.cuda.is_initialized()
print("\\n".join(sorted(new)))
""",
        root,
    )
    ours = {name for name in out.split() if name.startswith("moe_custom_ops")}
    assert "moe_custom_ops.aux_loss.reference" in ours
    bad = ("kernels", "triton_common", "testing", "benchmarks")
    assert not [name for name in ours if name.endswith(bad)]
    assert not [
        n for n in out.split() if n.split(".")[0] in ("triton", "matplotlib", "pytest", "tqdm")
    ]


@pytest.mark.parametrize(
    "op", ["aux_loss", "expert_permutation", "permute", "sequence_aux_loss", "weighted_restore"]
)
def test_the_first_call_ever_may_be_compiled(op, root):
    calls = {
        "aux_loss": "m.aux_loss(torch.rand(5, 8), torch.ones(8), 5, 8, 2, 1.0)",
        "sequence_aux_loss": "m.sequence_aux_loss(torch.rand(2, 5, 8), torch.ones(2, 8), 2, 1.0)",
        "weighted_restore": "m.weighted_restore(torch.rand(6, 8), torch.rand(6, 1), i)",
        "permute": "m.permute(torch.rand(6, 8), i, 1)",
        "expert_permutation": "m.expert_permutation(i[:, None], 6)[0] + 0.0",
    }
    run_python(
        f"""
import torch
import moe_custom_ops as m
i = torch.arange(6)
call = lambda: {calls[op]}
out = torch.compile(call, fullgraph=True)()
assert out.isfinite().all()
""",
        root,
    )


ALLOWED = {
    "__init__": {"api", "arguments", "ops", "workspace"},
    "integrations": {"api", "checks", "integrations"},
    "nn": {"api", "nn", "backend", "checks"},
    "api": {"direct", "ops", "checks"},
    "direct": {"direct", "ops", "arguments", "backend", "checks", "workspace", "fixed_order"},
    "ops": {
        "ops",
        "arguments",
        "reference",
        "backend",
        "batching",
        "checks",
        "workspace",
        "fixed_order",
    },
    "arguments": {"checks", "workspace"},
    "reference": {"fixed_order"},
    "kernels": {"reference", "triton_common", "fixed_order"},
    "workspace": {"checks"},
    "checks": set(),
    "fixed_order": set(),
    "triton_common": {"fixed_order"},
    "backend": set(),
    "batching": set(),
    "testing": {"api", "testing", "direct", "triton_common"},
    "benchmarks": {
        "api",
        "benchmarks",
        "check",
        "distributed",
        "integrations",
        "testing",
        "kernels",
        "nn",
    },
    "check": {"api", "check", "distributed", "testing"},
    "distributed": {"api", "distributed", "ops", "checks", "fixed_order"},
}
ROOMS = ("aux_loss", "expert_permutation", "sequence_aux_loss", "weighted_restore")


def _role(parts):
    """The layer that a module belongs to, and the room of the op that it lies in, if any.

    Of what a room has in parts, the last word is the layer: ``inverse_ops`` are ops.
    """
    room = parts[0] if parts and parts[0] in ROOMS else None
    rest = parts[1:] if room else parts
    if not rest:
        return ("__init__" if not room else "api"), room
    return rest[0].rpartition("_")[2] if room else rest[0], room


def _imports(path, package_root):
    """(module parts, imported parts) for every import of the package inside ``path``."""
    parts = path.relative_to(package_root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = parts[:-1] if is_package else parts
    names = {p.relative_to(package_root).with_suffix("").parts for p in package_root.rglob("*.py")}
    modules = {n[:-1] if n[-1] == "__init__" else n for n in names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = module if is_package else module[:-1]
            base = base[: len(base) - node.level + 1]
            target = (*base, *(node.module.split(".") if node.module else ()))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_custom_ops"):
            target = tuple(node.module.split(".")[1:])
        else:
            absolute = [a.name for a in getattr(node, "names", ()) if isinstance(node, ast.Import)]
            assert not any(name.startswith("moe_custom_ops") for name in absolute), path
            continue
        for alias in node.names:
            longer = (*target, alias.name)
            yield module, is_package, longer if longer in modules else target


def test_imports_run_one_way(root):
    package_root = root / "moe_custom_ops"
    seen = 0
    for path in package_root.rglob("*.py"):
        for module, is_package, target in _imports(path, package_root):
            role, room = _role(module)
            if is_package and room and len(module) == 1:
                role = "__init__"
            target_role, target_room = _role(target)
            seen += 1
            where = f"{path.relative_to(root)} imports {'.'.join(target) or 'the package'}"
            assert target_role in ALLOWED[role], where
            # One way inside a layer, too: what has a name of its own does not know the rest.
            if room and role == target_role:
                assert module[-1] == role, where
            if room and target_room:
                assert room == target_room, f"{where}: rooms do not import each other"
    assert seen > 20
