"""A whole training step of a MoE layer captured by hand in a CUDA graph and replayed on new inputs.

The replayed run ends with the bits of the same run made eagerly.

Run it: python compile_examples/cuda_graph_step.py
"""

from collections.abc import Callable

import torch

from moe_custom_ops.nn import MoE

TOKENS, HIDDEN, STEPS = 512, 256, 50


def train(
    wrap: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]],
) -> list[torch.Tensor]:
    """Train a fresh layer with steps run through ``wrap``; returns its parameters."""
    torch.manual_seed(0)
    layer = MoE(
        HIDDEN, 512, num_experts=16, topk=4, max_tokens=TOKENS, device="cuda", dtype=torch.bfloat16
    )
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, capturable=True, fused=True)
    x = torch.zeros(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        out, aux, _ = layer(x)
        loss = (out - x).float().square().mean() + aux
        loss.backward()
        optimizer.step()
        return loss

    run = wrap(step)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(STEPS):
        x.copy_(torch.randn(TOKENS, HIDDEN, generator=generator))
        loss = run()
    print(f"  loss after {STEPS} steps: {loss.item():.6f}")
    return [parameter.detach() for parameter in layer.parameters()]


def on_side_stream(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Warm up with one step on a side stream, where autograd then keeps its accumulators."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    return step


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    on_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: a CUDA graph needs an NVIDIA GPU, and none is visible")
        return
    print("eager:")
    eager_parameters = train(on_side_stream)
    print("captured:")
    captured_parameters = train(captured)
    same = all(map(torch.equal, eager_parameters, captured_parameters))
    print(f"every parameter has the same bits: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
