"""What the package and its examples never do: run code from data, or open a connection."""

import ast

import pytest

from tests.test_imports import run_python

BUILTINS = {"eval", "exec", "compile", "__import__"}
# What runs code from data, and what talks to the network.
MODULES = {
    "cloudpickle",
    "code",
    "codeop",
    "ctypes",
    "dill",
    "joblib",
    "marshal",
    "pickle",
    "runpy",
}
MODULES |= {"shelve", "subprocess", "yaml"}
MODULES |= {
    "asyncio",
    "ftplib",
    "http",
    "httpx",
    "multiprocessing",
    "requests",
    "smtplib",
    "socket",
}
MODULES |= {"socketserver", "ssl", "telnetlib", "urllib", "urllib3", "xmlrpc"}
# By their last names, whatever they are called on.
NAMES = {"system", "popen", "hub", "download_url_to_file", "load_inline", "import_module"}
NAMES |= {"Unpickler", "all_gather_object", "broadcast_object_list", "recv_object_list"}
ALLOWED = {
    # The name of the module is written in the package: an op's kernels, a framework.
    "moe_custom_ops/backend.py": {"import_module"},
    "moe_custom_ops/integrations/versions.py": {"import_module"},
    # Between ranks of one job, which run one program: those that debug or check it. pickle is for
    # what cannot be sent, and only writes.
    "moe_custom_ops/distributed/agreement.py": {"pickle", "all_gather_object"},
    "moe_custom_ops/check/ranks.py": {"all_gather_object"},
    # git and nvidia-smi, by written commands.
    "moe_custom_ops/benchmarks/report.py": {"subprocess"},
    # Source that the fuzz draws itself.
    "moe_custom_ops/testing/fuzz/calls.py": {"eval"},
    "moe_custom_ops/testing/fuzz/mutations.py": {"eval"},
    "moe_custom_ops/testing/fuzz/properties.py": {"import_module"},
}
FOLDERS = ("moe_custom_ops", "compile_examples")


def findings(tree):
    """(what a module does that it should not, line)"""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module.split(".")[0]]
        bad = [name for name in names if name in MODULES]
        if isinstance(node, ast.Name) and node.id in BUILTINS:
            bad.append(node.id)
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            bad.append(node.attr)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("pickle.load", "pickle.loads"):
            bad.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            safe = options.get("weights_only") == "True" or options.get("allow_pickle") == "False"
            bad += [] if safe else [ast.unparse(node.func)]
        for name in bad:
            yield name, node.lineno


def test_the_package_and_its_examples(root):
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    assert len(paths) > 60
    found = {
        str(path.relative_to(root)): dict(findings(ast.parse(path.read_text()))) for path in paths
    }
    assert {name: set(bad) for name, bad in found.items() if bad} == ALLOWED, found


@pytest.mark.parametrize(
    "code",
    [
        "eval(text)",
        "exec(text)",
        "import pickle",
        "from urllib.request import urlopen",
        "import socket as s",
        "import os; os.system(text)",
        "import importlib; importlib.import_module(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.hub.load(repository, name)",
        "pickle.loads(data)",
        "dist.broadcast_object_list(things)",
    ],
)
def test_the_scan_finds(code):
    assert list(findings(ast.parse(code)))


def test_the_scan_lets_pass():
    code = "model.eval(); torch.compile(f); torch.load(path, weights_only=True)"
    assert not list(findings(ast.parse(code)))


def test_no_connection_is_opened(root):
    run_python(
        """
import socket

def refuse(*arguments, **options):
    raise SystemExit("a connection was opened")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
import torch
import moe_custom_ops, moe_custom_ops.check, moe_custom_ops.distributed, moe_custom_ops.nn
layer = moe_custom_ops.nn.MoE(8, 16, 4, 2, 32)
out, loss, _ = layer(torch.randn(5, 8))
(out.sum() + loss).backward()
""",
        root,
    )
