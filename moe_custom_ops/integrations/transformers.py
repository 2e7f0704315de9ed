"""Transformers: an experts implementation and the load-balancing loss.

from moe_custom_ops.integrations.transformers import register, use_load_balancing_loss

register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_custom_ops")
with use_load_balancing_loss(model):
    model(**batch, output_router_logits=True).loss.backward()
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..losses import aux_loss
from ..permutation import expert_permutation, inverse_permutation
from ..rows import permute, weighted_restore
from .versions import require

require(
    "transformers.integrations.moe",
    "transformers",
    "5.24",
    "5.25",
    "ALL_EXPERTS_FUNCTIONS",
    "_grouped_linear",
)

# The library's own grouped product, so that an adapter changes no matrix product.
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear  # noqa: E402

NAME = "moe_custom_ops"
_LOSS = "load_balancing_loss_func"
_LOSS_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def register(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` known to Transformers.

    Then ``from_pretrained`` and ``from_config`` take it, and ``model.set_experts_implementation``.

    Raises:
        ValueError: ``name`` is that of another implementation.
    """
    checks.type_(isinstance(name, str), "register", "name", "a str", type(name).__name__)
    known = ALL_EXPERTS_FUNCTIONS.get(name, experts_forward) is not experts_forward
    expected = "a name that is not taken"
    checks.value(not known and name != "eager", "register", "name", expected, repr(name))
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What an experts module of Transformers does with its tokens, on the ops of this package.

    Args:
        self: a module whose class has ``use_experts_implementation``: any of its layouts of
            weights, with or without gate, bias and norm.
        hidden_states: [T, H].
        top_k_index: [T, K] ids of this rank's experts. One of ``num_experts`` or more is another
            rank's: it adds nothing, and its weight gets a gradient of zero.
        top_k_weights: [T, K], or as many in another shape; any float dtype.

    Returns:
        [T, H] in the dtype of ``hidden_states``.

    What differs in numbers from the library's "grouped_mm": the weighted sum of a token's rows is
    added in float32 in the order of its experts and rounded once, where the library rounds each
    product to the promoted dtype of rows and weights first. In float32 the two differ by the
    order of additions alone.
    """
    experts: Any = self
    num_tokens, topk = top_k_index.shape
    if top_k_index.dtype not in checks.INDEX_DTYPES:
        top_k_index = top_k_index.long()
    order, _, offsets = expert_permutation(top_k_index, experts.num_experts)
    inverse = inverse_permutation(order, num_tokens, topk)
    rows = permute(hidden_states, order, topk, inverse=inverse)

    places = torch.arange(order.shape[0], device=offsets.device, dtype=offsets.dtype)
    absent = biases = None
    if getattr(experts, "_is_expert_parallel", True):
        # A grouped product leaves these rows, and their gradients, as they were in memory.
        absent = (places >= offsets[-1:])[:, None]
    if experts.has_bias:
        expert_of_row = torch.searchsorted(offsets, places, right=True)
        biases = expert_of_row.clamp(max=experts.num_experts - 1)

    def project(x: Tensor, name: str) -> Tensor:
        bias = None if biases is None else getattr(experts, f"{name}_bias")[biases]
        weight = getattr(experts, name)
        x = _grouped_linear(x, weight, offsets, bias=bias, is_transposed=experts.is_transposed)
        return x if absent is None else x.masked_fill(absent, 0.0)

    if experts.has_gate:
        rows = experts._apply_gate(project(rows, "gate_up_proj"))
    else:
        rows = experts.act_fn(project(rows, "up_proj"))
    rows = project(rows, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    # Under autocast the experts may work in fewer bits than what they add to.
    rows = rows.to(torch.promote_types(rows.dtype, hidden_states.dtype))
    scores = top_k_weights.reshape(num_tokens, topk)
    out = weighted_restore(rows, scores, order, inverse=inverse)
    return out.to(hidden_states.dtype)


def load_balancing_loss(
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    r"""Transformers' ``load_balancing_loss_func``, by :func:`moe_custom_ops.aux_loss`.

    .. math::
        \text{loss} = E \sum_e \frac{n_e}{N} \cdot \frac{\sum_t p_{t,e}}{N}

    with counts, probabilities and the number of rows N pooled over the layers, as the library does;
    the layers' sums are added in their order. With even routing it is ``top_k``.

    Args:
        gate_logits: router logits [tokens, num_experts] of each layer. Anything but a tuple gives
            0, as in the library.
        num_experts: None takes the columns of the logits.
        top_k: experts per token.
        attention_mask: [batch, sequence], 0 for padding, which is not counted; anything else counts
            once. (The library weights by the value, so that a mask of other values than 0 and 1
            gives another loss there.) One that is longer than the tokens, as in decoding with a
            cache, counts by its last columns.

    Returns:
        0-dim float32 tensor.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.
    """
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    op = "load_balancing_loss"
    checks.value(len(gate_logits) > 0, op, "gate_logits", "of at least one layer", "()")
    first = gate_logits[0]
    for layer in gate_logits:
        checks.is_tensor(op, "gate_logits", layer)
        checks.rank(op, "gate_logits", layer, "[tokens, num_experts]")
        checks.dtype(op, "gate_logits", layer, checks.FLOAT_DTYPES)
    num_experts = first.shape[1] if num_experts is None else num_experts
    checks.integer(op, "num_experts", num_experts, 1)
    checks.integer(op, "top_k", top_k, 1)
    most = f"at most num_experts = {num_experts}"
    checks.value(top_k <= num_experts, op, "top_k", most, top_k)
    for layer in gate_logits:
        same = layer.shape[1] == num_experts
        checks.value(same, op, "gate_logits", f"of {num_experts} columns", layer.shape[1])
    mask = None
    if attention_mask is not None:
        checks.is_tensor(op, "attention_mask", attention_mask)
        for layer in gate_logits:
            same = layer.shape[0] == first.shape[0]
            checks.value(same, op, "gate_logits", "of as many tokens in each layer", layer.shape[0])
        mask = _mask_of_tokens(attention_mask, first.shape[0]).to(first.device) != 0

    counts = torch.zeros(num_experts, dtype=torch.int64, device=first.device)
    probs = []
    for layer in gate_logits:
        of_layer = torch.softmax(layer.to(first.device), dim=-1)
        counts = counts + _assignments(of_layer, top_k, mask)
        probs.append(of_layer.float() if of_layer.dtype == torch.float64 else of_layer)
    total: Tensor | int = sum(layer.shape[0] for layer in gate_logits)
    if mask is not None:
        total = mask.sum() * len(gate_logits)
    # num_experts * coeff / top_k is the library's factor.
    numbers = total, num_experts, top_k, float(top_k)
    losses = [aux_loss(layer, counts, *numbers, token_mask=mask) for layer in probs]
    loss = losses[0]
    for other in losses[1:]:
        loss = loss + other
    return loss


def _mask_of_tokens(mask: Tensor, num_tokens: int) -> Tensor:
    """[tokens]: of a mask of more positions than there are tokens, the last ones."""
    if mask.dim() == 2 and mask.shape[0] and mask.numel() > num_tokens:
        mask = mask[:, mask.shape[1] - num_tokens // mask.shape[0] :]
    checks.value(
        mask.numel() == num_tokens,
        "load_balancing_loss",
        "attention_mask",
        f"of one entry per token, {num_tokens}",
        list(mask.shape),
    )
    return mask.reshape(-1)


def _assignments(probs: Tensor, topk: int, mask: Tensor | None) -> Tensor:
    """int64 [experts]: how often each is among the ``topk`` of a token that counts."""
    ids = torch.topk(probs.detach(), topk, dim=-1).indices
    counted = torch.ones_like(ids) if mask is None else mask[:, None].long().expand_as(ids)
    counts = torch.zeros(probs.shape[1], dtype=torch.int64, device=probs.device)
    return counts.scatter_add(0, ids.reshape(-1), counted.reshape(-1))


@contextlib.contextmanager
def use_load_balancing_loss(model: nn.Module) -> Iterator[None]:
    """While it lasts, the models of ``model``'s kinds have :func:`load_balancing_loss`.

    It takes the place of ``load_balancing_loss_func`` in the library's modules that define the
    classes of ``model`` and its parts, for all models of these classes and all threads, and gives
    it back when the last such context ends. A module whose function has other parameters keeps it.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no module of the model has such a function.
    """
    name = type(model).__name__
    is_module = isinstance(model, nn.Module)
    checks.type_(is_module, "use_load_balancing_loss", "model", "an nn.Module", name)
    modules = _loss_modules(model)
    if not modules:
        raise ValueError(
            f"use_load_balancing_loss: model must be of a class whose module has {_LOSS}"
            f"({', '.join(_LOSS_PARAMETERS)}), got {type(model).__name__}"
        )
    with _LOCK:
        for module in modules:
            original, users = _SWAPPED.get(module, (getattr(module, _LOSS), 0))
            _SWAPPED[module] = original, users + 1
            setattr(module, _LOSS, load_balancing_loss)
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                original, users = _SWAPPED.pop(module)
                if users > 1:
                    _SWAPPED[module] = original, users - 1
                else:
                    setattr(module, _LOSS, original)


# The library's own function of each module that has ours, and how many contexts want it there.
_SWAPPED: dict[ModuleType, tuple[Any, int]] = {}
_LOCK = threading.Lock()


def _loss_modules(model: nn.Module) -> list[ModuleType]:
    classes = {cls for part in model.modules() for cls in type(part).__mro__}
    modules = {cls.__module__: sys.modules.get(cls.__module__) for cls in classes}
    return [
        module
        for module in modules.values()
        if module is not None
        and hasattr(module, _LOSS)
        and list(inspect.signature(getattr(module, _LOSS)).parameters) == _LOSS_PARAMETERS
    ]
