"""What happens once per backward: a loss's gradient, and sums that are kept on the device.

A forward may run twice under activation checkpointing. Its backward runs once, so what is counted
there is counted once.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks

_LOG_DTYPES = (torch.float32, torch.float64)


class _Attach(torch.autograd.Function):
    """Identity of ``x``; ``loss`` receives ``scale`` as its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | None, log: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(loss, scale)
        ctx.log = log
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        loss, scale = ctx.saved_tensors
        if ctx.log is not None:
            ctx.log.add_(loss.detach())
        own = torch.ones_like(loss) if scale is None else scale.to(loss.dtype)
        return grad, own, None, None


class _AddInBackward(torch.autograd.Function):
    """Identity of ``x``; the backward adds each value to its total."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, totals: tuple[Tensor, ...], *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        ctx.totals = totals
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for total, value in zip(ctx.totals, ctx.saved_tensors, strict=True):
            total.add_(value)
        return grad, None, *(None for _ in ctx.totals)


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in range(ctx.count))


def linked(x: Tensor, *others: Tensor) -> Tensor:
    """``x``, which has a backward if one of ``others`` has, and gives them nothing."""
    return _Linked.apply(x, *others)


def add_in_backward(x: Tensor, totals: tuple[Tensor, ...], *values: Tensor) -> Tensor:
    """``x``, whose backward adds each of ``values`` to the total of its place."""
    return _AddInBackward.apply(x, totals, *values)


def attach_loss(
    x: Tensor, loss: Tensor, scale: Tensor | None = None, log: Tensor | None = None
) -> Tensor:
    """``x``, whose backward also runs that of ``scale * loss``.

    For losses of inner layers, which then need no way through the model's outputs. The value of
    what is differentiated does not contain them. Once per backward, ``loss`` is added to ``log`` on
    its device: also where the forward was recomputed, and with no sync. Works in compiled and
    captured steps. A second pass through one graph (``retain_graph``, ``create_graph``) injects and
    logs again.

    Args:
        x: any tensor with a float dtype that the model's own loss depends on, say the layer's
            output.
        loss: 0-dim, float.
        scale: 0-dim float tensor, the gradient of ``loss``: the loss scale of mixed precision, one
            over the number of accumulated micro-batches. The backward of a captured graph reads
            its value at each replay; in eager, PyTorch refuses a change in place between forward
            and backward. It is rounded to the loss's dtype: a float16 loss overflows where the
            scale does. None is one.
        log: float32 or float64 tensor of one element, 0-dim, to which the backward adds the
            unscaled ``loss``. Reset it with ``log.zero_()``.

    Returns:
        A view of ``x``, which PyTorch does not let be changed in place: clone it first. Where no
        gradient is recorded nothing is injected or logged.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or device.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> log = torch.zeros(())
        >>> y = attach_loss(2 * w, w.square().sum(), scale=torch.tensor(0.5), log=log)
        >>> y.sum().backward()
        >>> w.grad.tolist(), log.item()
        ([3.0, 3.0, 3.0], 3.0)
    """
    name = "attach_loss"
    checks.is_tensor(name, "x", x)
    checks.type_(x.is_floating_point(), name, "x", "of a float dtype", checks.dtype_name(x.dtype))
    scalars = (("loss", loss, checks.FLOAT_DTYPES), ("scale", scale, checks.FLOAT_DTYPES))
    for argument, tensor, dtypes in (*scalars, ("log", log, _LOG_DTYPES)):
        if tensor is None and argument != "loss":
            continue
        checks.is_tensor(name, argument, tensor)
        assert tensor is not None
        checks.dtype(name, argument, tensor, dtypes)
        checks.shape(name, argument, tensor, "[]", tensor.dim() == 0)
        checks.same_device(name, argument, tensor, x, "x")
    if log is not None:
        checks.value(not log.requires_grad, name, "log", "without a gradient", "requires_grad=True")
    return _Attach.apply(x, loss, scale, log)
