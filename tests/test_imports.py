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
for room in ("losses", "permutation", "rows"):
    try:
        load_kernels(f"moe_custom_ops.{room}")
    except ImportError as error:
        assert f"{room}: the CUDA kernels need triton >= 3.6" in str(error), error
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
    load_kernels("moe_custom_ops.losses")
except NotImplementedError as error:
    assert str(error).startswith("losses: the CUDA kernels are not supported on ROCm; move its")
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
    assert "moe_custom_ops.losses.reference" in ours
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


# Nothing but kernels imports kernels: the rest has them of ``backend``, when it launches one.
SHARED = {"backend", "checks", "fixed_order", "launch", "workspace"}
ALLOWED = {
    "__init__": {"api", "arguments", "workspace"},
    "integrations": {"api", "checks", "integrations"},
    "nn": {"api", "nn", "backend", "checks"},
    "distributed": {"api", "distributed", "ops", "arguments", "reference", "checks"},
    "check": {"api", "check", "distributed", "testing"},
    "api": {"ops", "arguments"},
    "ops": {"op", "plans", "arguments", "reference", *SHARED},
    "plans": {"arguments", "reference", *SHARED},
    "arguments": {"reference", "checks", "fixed_order", "workspace"},
    "reference": {"fixed_order"},
    "kernels": {"triton_common"},
    "op": {"batching", "checks", "launch"},
    "workspace": {"checks"},
    "launch": set(),
    "batching": set(),
    "backend": set(),
    "checks": set(),
    "fixed_order": set(),
    "triton_common": set(),
    "testing": {"api", "testing", "launch", "op"},
    "benchmarks": {
        "api",
        "benchmarks",
        "check",
        "distributed",
        "integrations",
        "testing",
        "nn",
    },
}
ROOMS = ("losses", "permutation", "rows")
# A room that may import from another: what its own layer may, and that layer.
MAY_KNOW = {("rows", "permutation")}


def _role(parts):
    """The layer that a module belongs to, and the room of the ops that it lies in, if any."""
    room = parts[0] if parts and parts[0] in ROOMS else None
    rest = parts[1:] if room else parts
    if not rest:
        return ("__init__" if not room else "api"), room
    return rest[0], room


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
            # The package itself has the documented functions.
            target_role, target_room = _role(target) if target else ("api", None)
            seen += 1
            where = f"{path.relative_to(root)} imports {'.'.join(target) or 'the package'}"
            if room and target_room and room != target_room:
                assert (room, target_room) in MAY_KNOW, f"{where}: rooms do not know each other"
                assert target_role in ALLOWED[role] | {role}, where
            else:
                assert target_role in ALLOWED[role], where
    assert seen > 20


def test_kernels_are_jitted_functions_alone(root):
    """What chooses sizes and allocates is in ``plans``, which needs no triton."""
    seen = 0
    for room in ROOMS:
        tree = ast.parse((root / "moe_custom_ops" / room / "kernels.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                decorators = [
                    ast.unparse(x.func if isinstance(x, ast.Call) else x)
                    for x in node.decorator_list
                ]
                assert decorators == ["triton.jit"], f"{room}: {node.name} has {decorators}"
                seen += 1
            elif isinstance(node, ast.Assign):
                value = ast.unparse(node.value)
                assert value.startswith("tl.constexpr("), f"{room}: {value}"
            else:
                is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                assert is_text or isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)
    assert seen > 10


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_no_function(room, root):
    """A package's function of a room's name hid the module: neither could then be relied on."""
    run_python(
        f"""
import types
import moe_custom_ops
import moe_custom_ops.{room} as x
assert type(x) is types.ModuleType and x.__name__ == "moe_custom_ops.{room}", x
assert moe_custom_ops.{room} is x and {room!r} not in moe_custom_ops.__all__
import moe_custom_ops.{room}.ops, moe_custom_ops.{room}.plans
assert moe_custom_ops.{room} is x and callable(moe_custom_ops.{room}.plans._kernels)
""",
        root,
    )


def test_no_module_has_the_name_of_a_function(root):
    package_root = root / "moe_custom_ops"
    tree = ast.parse((package_root / "__init__.py").read_text())
    names = {a.name for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) for a in x.names}
    assert "aux_loss" in names
    modules = {path.stem for path in package_root.glob("*.py")} | {
        path.parent.name for path in package_root.glob("*/__init__.py")
    }
    assert set(ROOMS) < modules and not names & modules
