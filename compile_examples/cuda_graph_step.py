"""A whole training step of a MoE layer captured by hand in a CUDA graph and replayed on new inputs.

The step clips its gradients; what would read their norm on the host would fail in the capture. The
replayed run has the bits of the same run made eagerly, step by step.

Run it: python compile_examples/cuda_graph_step.py
"""

from collections.abc import Callable

import torch

from moe_custom_ops.nn import MoE

TOKENS, HIDDEN, STEPS, MAX_NORM = 512, 256, 300, 0.02


def train(
    wrap: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Train a fresh layer with steps run through ``wrap``.

    Returns its parameters, and loss and gradient norm of every step [STEPS, 2].
    """
    torch.manual_seed(0)
    layer = MoE(
        HIDDEN, 512, num_experts=16, topk=4, max_tokens=TOKENS, device="cuda", dtype=torch.bfloat16
    )
    parameters = list(layer.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, capturable=True, fused=True)
    x = torch.zeros(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        out, aux, _ = layer(x)
        loss = (out - x).float().square().mean() + aux
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            parameters, MAX_NORM, error_if_nonfinite=False, foreach=True
        )
        optimizer.step()
        return torch.stack([loss.detach(), norm.float()])

    run = wrap(step)
    generator = torch.Generator().manual_seed(1)
    history = []
    for _ in range(STEPS):
        x.copy_(torch.randn(TOKENS, HIDDEN, generator=generator))
        # Cloned, because the next replay writes to the same memory.
        history.append(run().clone())
    steps = torch.stack(history)
    print(f"  loss after {STEPS} steps: {steps[-1, 0].item():.6f}")
    return [parameter.detach() for parameter in parameters], steps


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
        result = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: a CUDA graph needs an NVIDIA GPU, and none is visible")
        return
    print("eager:")
    eager_parameters, eager_steps = train(on_side_stream)
    print("captured:")
    captured_parameters, captured_steps = train(captured)
    same = all(map(torch.equal, eager_parameters, captured_parameters))
    same_steps = torch.equal(eager_steps, captured_steps)
    print(f"every parameter has the same bits: {same}")
    print(f"so have loss and gradient norm of every step: {same_steps}")
    clipped = int((eager_steps[:, 1] > MAX_NORM).sum())
    print(f"gradients were clipped in {clipped} steps")
    if not same or not same_steps or not clipped:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
