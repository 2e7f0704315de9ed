"""Forward and backward of a MoE layer as one compiled graph for every token count.

The gradients are those of the eager layer, up to the rounding of what the compiler fuses.

Run it: python compile_examples/compiled_step.py
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_custom_ops.nn import MoE

HIDDEN, MAX_TOKENS, TOLERANCE = 64, 512, 1e-5


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = MoE(
        HIDDEN,
        128,
        num_experts=8,
        topk=2,
        max_tokens=MAX_TOKENS,
        shared_intermediate_size=64,
        device=device,
    )
    parameters = list(layer.parameters())

    # With dynamic=None the first count would be compiled as a constant: two graphs.
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)

    def gradients(layer: Callable[..., tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out, aux, _ = layer(x)
        # Outside: Inductor's CPU code for a mean of all elements is one up to 4096, another beyond.
        loss = (out - x).square().mean() + aux
        return list(torch.autograd.grad(loss, [x, *parameters]))

    errors = []
    for num_tokens in (MAX_TOKENS, 100, 37):
        x = torch.randn(num_tokens, HIDDEN, device=device)
        pairs = zip(gradients(compiled, x), gradients(layer, x), strict=True)
        # Of each gradient the largest error over the largest value.
        errors += [(actual - eager).abs().max() / eager.abs().max() for actual, eager in pairs]
    error = torch.stack(errors).max().item()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"compiled graphs: {graphs}")
    print(f"gradients as the eager ones within {TOLERANCE:.0e}: {error <= TOLERANCE}, {error:.1e}")
    if graphs != 1 or not error <= TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
