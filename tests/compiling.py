"""Helpers of the compile tests."""

import re

import torch
from torch._dynamo.utils import counters


def compile_fresh(function, backend="inductor", **options):
    """``torch.compile`` of one dynamic graph, with the counters of Dynamo and Inductor at zero."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, backend=backend, **{"dynamic": True, **options})


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def calls_in_generated_code(code: str) -> str:
    """The lines of Inductor's ``call`` that allocate a buffer or run one of our ops, in order.

    Names of graph inputs are numbered by first use, so the text does not depend on Dynamo's names.
    """
    body = code[code.index("def call(") :]
    names: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"input{len(names)}")

    lines = []
    for line in body[: body.index("return (")].splitlines():
        line = line.strip()
        runs_our_op = "torch.ops.moe." in line and not line.startswith(("#", "assert"))
        if runs_our_op or any(word in line for word in ("empty_strided", "clone", "copy_")):
            lines.append(line)
    return re.sub(r"\b(?:arg|primals_)\d+(?:_1)?\b", rename, "\n".join(lines))
