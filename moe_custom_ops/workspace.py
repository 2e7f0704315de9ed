"""Workspaces: preallocated scratch that a caller may own.

A workspace is a contiguous, 16-byte aligned, one-dimensional ``uint8`` tensor. It carries nothing
from one call to the next, so one buffer, as large as the largest user needs, serves every op that
runs on one stream. It lies apart from the inputs: an eager call looks, a compiled graph cannot.
"""

import torch
from torch import Tensor

from . import checks

ALIGNMENT = 16


def align(num_bytes: int) -> int:
    """``num_bytes`` (an int or SymInt) rounded up to the alignment of a workspace."""
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def make_workspace(num_bytes: int, device: torch.device | str | int | None = None) -> Tensor:
    """An uninitialised workspace of ``num_bytes`` bytes on ``device``.

    Its address is marked static for ``torch.compile``: under ``mode="reduce-overhead"`` PyTorch
    refuses to put a graph that writes an ordinary input into a CUDA graph ("skipping cudagraphs due
    to mutated inputs"). A non-persistent ``nn.Module`` buffer needs no such mark.

    Args:
        num_bytes: size in bytes, at least 0; the ``*_workspace_size`` functions compute it.
        device: where the workspace lives; the default device if None.

    Returns:
        uint8 tensor of shape [num_bytes].

    Raises:
        TypeError: ``num_bytes`` is not an int.
        ValueError: ``num_bytes`` is negative.

    Example:
        >>> workspace = make_workspace(aux_loss_workspace_size(4096, 64), "cpu")
    """
    checks.integer("make_workspace", "num_bytes", num_bytes, 0)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # Inside a compiled region the workspace is one of its own buffers, with nothing to mark.
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(workspace)
    return workspace


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses of the first byte and behind the last, or None where there are none to see."""
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # no storage, as while a graph is traced
        return None
    if not start or not tensor.numel():
        return None
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def overlap(workspace: Tensor | None, *inputs: Tensor | None) -> bool:
    """Whether ``workspace`` may reach into one of ``inputs``, as far as addresses are known."""
    own = None if workspace is None else _extent(workspace)
    if own is None:
        return False
    others = [_extent(x) for x in inputs if x is not None]
    return any(x is not None and own[0] < x[1] and x[0] < own[1] for x in others)


def apart(op: str, workspace: Tensor | None, **inputs: Tensor | None) -> None:
    """Refuse a workspace that would overwrite an input, where that can be seen."""
    if not overlap(workspace, *inputs.values()):
        return
    (name, *_) = (name for name, tensor in inputs.items() if overlap(workspace, tensor))
    checks.value(False, op, "workspace", "apart from the inputs", f"one that overlaps {name}")


def check(op: str, workspace: Tensor | None, num_bytes: int, like: Tensor) -> None:
    """Raise unless a caller's workspace will do for a call on the device of ``like``."""
    if workspace is None:
        return
    checks.dtype(op, "workspace", workspace, (torch.uint8,))
    checks.rank(op, "workspace", workspace, "[num_bytes]")
    checks.same_device(op, "workspace", workspace, like, "its inputs")
    checks.value(
        workspace.is_contiguous(), op, "workspace", "contiguous", f"strides {workspace.stride()}"
    )
    checks.value(
        workspace.storage_offset() % ALIGNMENT == 0,
        op,
        "workspace",
        f"aligned to {ALIGNMENT} bytes",
        f"a storage offset of {workspace.storage_offset()} bytes",
    )
    checks.value(
        workspace.shape[0] >= num_bytes,
        op,
        "workspace",
        f"at least {num_bytes} bytes long",
        f"{workspace.shape[0]} bytes",
    )
    # Of a tensor that has one: anyone can call the inner ops with any scratch.
    extent = _extent(workspace)
    if extent is not None:
        checks.value(
            extent[0] % ALIGNMENT == 0,
            op,
            "workspace",
            f"aligned to {ALIGNMENT} bytes",
            f"address {extent[0]:#x}",
        )


def view(workspace: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
    """The first ``num_elements`` of a workspace, which was checked, as ``dtype``."""
    return workspace[: num_elements * dtype.itemsize].view(dtype)
