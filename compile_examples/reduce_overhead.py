"""Training steps of a MoE layer under mode="reduce-overhead": every graph becomes a CUDA graph.

Run it: python compile_examples/reduce_overhead.py
"""

import torch
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_manager

from moe_custom_ops.nn import MoE

TOKENS, HIDDEN, STEPS = 512, 256, 20


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: mode='reduce-overhead' needs an NVIDIA GPU, and none is visible")
        return
    torch.manual_seed(0)
    layer = MoE(
        HIDDEN, 512, num_experts=16, topk=4, max_tokens=TOKENS, device="cuda", dtype=torch.bfloat16
    )
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    losses = []
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for _ in range(STEPS):
        # A gradient kept from the last step would lie in memory that this step's replay reuses.
        optimizer.zero_grad(set_to_none=True)
        # The outputs of the last step may be overwritten from here on.
        torch.compiler.cudagraph_mark_step_begin()
        out, aux, _ = compiled(x)
        loss = (out - x).float().square().mean() + aux
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    skips = counters["inductor"]["cudagraph_skips"]
    # Without it a run that makes no CUDA graph at all would skip none.
    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    recorded = manager is not None and len(manager.roots) > 0
    learns = bool(losses[-1] < losses[0])
    print(f"cudagraph skips in {STEPS} steps: {skips}, graphs were recorded: {recorded}")
    print(f"the loss falls: {learns}, from {losses[0].item():.4f} to {losses[-1].item():.4f}")
    if skips or not recorded or not learns:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
