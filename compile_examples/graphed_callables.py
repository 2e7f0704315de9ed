"""Forward and backward of a MoE layer as the CUDA graphs of torch.cuda.make_graphed_callables.

The rest of the step stays eager. Loss and gradients have the bits of the layer run without.

Run it: python compile_examples/graphed_callables.py
"""

import copy

import torch
from torch import Tensor, nn

from moe_custom_ops.nn import MoE

TOKENS, HIDDEN, STEPS = 512, 256, 5


class Differentiable(nn.Module):
    """The layer without its integer output, which has no gradient to capture."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux, _ = self.moe(x)
        return out, aux


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    out, aux = module(x)
    loss = (out - x).float().square().mean() + aux
    gradients = torch.autograd.grad(loss, [x, *module.parameters()])
    # The graphs' outputs and gradients lie where the next replay writes.
    return [loss.detach(), *(gradient.clone() for gradient in gradients)]


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: make_graphed_callables needs an NVIDIA GPU, and none is visible")
        return
    torch.manual_seed(0)
    layer = MoE(
        HIDDEN, 512, num_experts=16, topk=4, max_tokens=TOKENS, device="cuda", dtype=torch.bfloat16
    )
    plain = Differentiable(layer)
    batches = torch.randn(STEPS, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    # The sample must need a gradient where the later inputs do.
    sample = torch.randn_like(batches[0], requires_grad=True)
    graphed = copy.deepcopy(plain)
    torch.cuda.make_graphed_callables(graphed, (sample,))  # Changes the module's own forward.

    same = True
    for batch in batches:
        same &= all(map(torch.equal, step(graphed, batch), step(plain, batch)))
    print(f"loss and gradients of {STEPS} batches have the same bits: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
