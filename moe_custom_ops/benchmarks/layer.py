"""The whole non-GEMM path of a layer, and the whole layer with its GEMMs."""

import torch
from torch import Tensor, nn

from ..losses import aux_loss
from ..nn import MoE
from ..nn.grouped_mm import grouped_mm
from ..permutation import expert_permutation, inverse_permutation
from ..rows import permute, weighted_restore
from . import losses
from .copies import DTYPE, by_expert, weighted_sum
from .models import Model
from .orders import eager_inverse, eager_order
from .rows import BOTH, COMPILED, FORWARD, OURS_COMPILED, Family, Inputs, Traffic
from .timing import memory_bytes

Results = tuple[Tensor, ...]


def make_path(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    probs = torch.randn(num_tokens, model.experts, device=device).softmax(-1)
    scores, ids = probs.topk(model.topk)
    tokens = torch.randn(num_tokens, model.hidden, device=device, dtype=DTYPE)
    made = torch.randn(num_tokens * model.topk, model.hidden, device=device, dtype=DTYPE)
    return (tokens, made, scores, probs), (ids,)


def our_path(tokens: Tensor, made: Tensor, scores: Tensor, probs: Tensor, ids: Tensor) -> Results:
    """(what the experts are given; the sum of what they ``made`` of it; the loss)

    Given their input back for their output, a compiler would leave both copies out.
    """
    (num_tokens, topk), num_experts = ids.shape, probs.shape[1]
    order, counts, _ = expert_permutation(ids, num_experts)
    inverse = inverse_permutation(order, num_tokens, topk)
    rows = permute(tokens, order, topk, inverse=inverse)
    out = weighted_restore(made, scores, order, inverse=inverse)
    return rows, out, aux_loss(probs, counts, num_tokens, num_experts, topk, losses.COEFF)


def eager_path(tokens: Tensor, made: Tensor, scores: Tensor, probs: Tensor, ids: Tensor) -> Results:
    topk = ids.shape[1]
    order, counts = eager_order(ids, probs.shape[1])
    inverse = eager_inverse(order, ids.numel())
    rows = by_expert(tokens, order // topk, inverse, topk)
    out = weighted_sum(made, scores, order, inverse)
    return rows, out, losses.eager(probs, counts, topk)


def traffic_of_path(model: Model, inputs: Inputs) -> tuple[Traffic, Traffic]:
    """What the ops of the path read and write, each by itself: two copies and their backwards, an
    order, its inverse and a loss."""
    (tokens, _, _, probs), (ids,) = inputs
    wide, small = tokens.numel() * DTYPE.itemsize, 4 * ids.numel()
    rows = wide * model.topk
    order = 2 * small + small, small + small
    forward = wide + rows + 3 * small + 4 * probs.numel(), rows + wide
    backward = wide + rows + rows + 3 * small, rows + wide + small
    return (forward[0] + order[0], forward[1] + order[1]), backward


_MADE: dict[tuple[Model, int], MoE] = {}


def _module(model: Model, num_tokens: int, device: torch.device) -> MoE:
    """The last one made is kept for the next row: they hold up to 34 GB, and their gradients too.

    Raises:
        MemoryError: its weights, their gradients and those to check them by would not fit.
    """
    key = model, num_tokens
    if key not in _MADE:
        _MADE.clear()
        num_bytes = 3 * model.experts * model.hidden * model.intermediate * DTYPE.itemsize
        if 4 * num_bytes > memory_bytes(device):
            raise MemoryError(f"{4 * num_bytes / 2**30:.0f} GiB are needed")
        sizes = model.hidden, model.intermediate, model.experts, model.topk, num_tokens
        _MADE[key] = MoE(*sizes, losses.COEFF, device=device, dtype=DTYPE)
    return _MADE[key]


def make_layer(model: Model, num_tokens: int, device: torch.device) -> Inputs:
    module = _module(model, num_tokens, device)
    tokens = torch.randn(num_tokens, model.hidden, device=device, dtype=DTYPE)
    return (tokens, module.router.weight, module.up, module.down), (module,)


def our_layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor, module: MoE) -> Results:
    parameters = {"router.weight": router, "up": up, "down": down}
    out, loss, _ = torch.func.functional_call(module, parameters, (x,))
    return out, loss


def eager_layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor, module: MoE) -> Results:
    parameters = {"weight": router}
    scores, ids, probs, _ = torch.func.functional_call(module.router, parameters, (x,))
    topk = ids.shape[1]
    order, counts = eager_order(ids, probs.shape[1])
    ends = counts.cumsum(0).to(torch.int32)
    inverse = eager_inverse(order, ids.numel())
    gate, value = grouped_mm(by_expert(x, order // topk, inverse, topk), up, ends).chunk(2, -1)
    rows = grouped_mm(nn.functional.silu(gate) * value, down, ends)
    out = weighted_sum(rows, scores, order, inverse)
    return out, losses.eager(probs, counts, topk)


def traffic_of_layer(model: Model, inputs: Inputs) -> tuple[Traffic, Traffic]:
    """What the layer is given and returns; its products are bound by arithmetic, where they are."""
    (tokens, *weights), _ = inputs
    width = tokens.numel() * DTYPE.itemsize
    held = sum(weight.numel() * weight.itemsize for weight in weights)
    return (width + held, width), (2 * width + held, width + held)


FAMILIES = (
    Family(
        "layer",
        make_layer,
        {"ours": our_layer, "eager": eager_layer},
        traffic_of_layer,
        (FORWARD, BOTH),
        host_sizes=("decode", "batch"),
        # The router's gradient is float32, and a sum over rows that a compiler rounds elsewhere.
        rounding=(COMPILED, OURS_COMPILED),
        ours_compiled=True,
    ),
    Family(
        "path",
        make_path,
        {"ours": our_path, "eager": eager_path},
        traffic_of_path,
        (FORWARD, BOTH),
    ),
)
