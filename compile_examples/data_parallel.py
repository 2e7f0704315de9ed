"""A MoE layer under DDP and under FSDP2: two processes, gradients of one process on both batches.

The balancing loss is off, because that of a batch is not the mean of its halves'. With it on, every
rank balances its own tokens.

Run it: python compile_examples/data_parallel.py
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from moe_custom_ops.nn import MoE

RANKS, HIDDEN, TOKENS, STEPS, TOLERANCE = 2, 64, 128, 3, 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(HIDDEN, 128, 8, 2, max_tokens=RANKS * TOKENS, aux_loss_coeff=0.0)

    def forward(self, x: Tensor) -> Tensor:
        out, _, _ = self.moe(x)
        return x + out


def ddp(block: Block) -> nn.Module:
    # Torch 2.13 warns of an argument to come, and asks to keep this one for buffers such as ours.
    warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
    # Scratch, and counts of the rank's own tokens: nothing that rank 0 may overwrite.
    return DistributedDataParallel(block, broadcast_buffers=False)


def fsdp2(block: Block) -> nn.Module:
    fully_shard(block, mesh=init_device_mesh("cpu", (RANKS,)))
    return block


def backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients, those of shards joined."""
    model(x).square().mean().backward()
    return [
        joined(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
    ]


def joined(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    batches = torch.randn(STEPS, RANKS * TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = backward(Block(), batches[0])

    ends, errors, same = [], [], True
    for wrap in (ddp, fsdp2):
        model = wrap(Block())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            gradients = backward(model, batch.chunk(RANKS)[rank])
            if step == 0:
                pairs = zip(gradients, expected, strict=True)
                errors += [(a - b).abs().max() / b.abs().max() for a, b in pairs]
            optimizer.step()
        end = torch.cat([joined(parameter).flatten() for parameter in model.parameters()])
        of_ranks = [torch.empty_like(end) for _ in range(RANKS)]
        dist.all_gather(of_ranks, end)
        same &= all(torch.equal(end, of_rank) for of_rank in of_ranks)
        ends.append(end)

    error = torch.stack(errors).max().item()
    # What FSDP2 gathers is equal on every rank by its making; that it is DDP's is not.
    agree = torch.equal(*ends)
    dist.destroy_process_group()
    if rank == 0:
        print(
            f"gradients as in one process within {TOLERANCE:.0e}: {error <= TOLERANCE}, {error:.1e}"
        )
        print(f"after {STEPS} steps every rank holds the same bits: {same}")
        print(f"FSDP2 ends with the bits of DDP: {agree}", flush=True)
    if not error <= TOLERANCE or not same or not agree:
        raise SystemExit(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Its processes end without the shutdown at which a thread of gloo may abort one.
        start_processes(work, (f"{folder}/store",), nprocs=RANKS, start_method="forkserver")


if __name__ == "__main__":
    main()
