"""The losses over ranks, of a batch that the ranks share by tiles: digests of one process."""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import distributed
from .cases import (
    COEFF,
    LOSS_EXPERTS,
    LOSS_TOKENS,
    TOPK,
    Results,
    counts_of,
    gradients,
    loss_inputs,
    sequence_inputs,
)


def _own(group: "dist.ProcessGroup") -> slice:
    """This rank's tokens: whole tiles, as evenly as they go, the rest on the last rank."""
    tile = distributed.tile_tokens(LOSS_EXPERTS)
    tiles, rank, size = LOSS_TOKENS // tile, group.rank(), group.size()
    end = LOSS_TOKENS if rank == size - 1 else tiles * (rank + 1) // size * tile
    return slice(tiles * rank // size * tile, end)


def joined(part: Tensor, dim: int, group: "dist.ProcessGroup") -> Tensor:
    """The parts of all ranks, in order, on the CPU of each."""
    parts: list[Tensor] = [part] * group.size()
    dist.all_gather_object(parts, part.cpu(), group=group)
    return torch.cat(parts, dim)


def aux_loss(device: torch.device, group: "dist.ProcessGroup") -> Results:
    """Those of the case "aux_loss, float32"."""
    probs, ids = loss_inputs()
    own = _own(group)
    counts = counts_of(ids[own], LOSS_EXPERTS).to(device)
    leaf = probs[own].to(device).requires_grad_()
    loss = distributed.aux_loss(leaf, counts, len(leaf), LOSS_EXPERTS, TOPK, COEFF, group)
    return _results(loss, leaf, 4, 0, group)


def sequence_aux_loss(device: torch.device, group: "dist.ProcessGroup") -> Results:
    """Those of the case "sequence_aux_loss, batch"."""
    probs, counts = sequence_inputs()
    # Of the counts, all from rank 0: their sum over the ranks is what counts.
    counts = counts * (group.rank() == 0)
    leaf = probs[:, _own(group)].to(device).requires_grad_()
    loss = distributed.sequence_aux_loss(leaf, counts.to(device), TOPK, COEFF, group)
    return _results(loss, leaf, 7, 1, group)


def _results(
    loss: Tensor, leaf: Tensor, seed: int, dim: int, group: "dist.ProcessGroup"
) -> Results:
    own = gradients([loss], seed, probs=leaf)
    return {"loss": loss, **{name: joined(grad, dim, group) for name, grad in own.items()}}


OF_RANKS = {"aux_loss, float32": aux_loss, "sequence_aux_loss, batch": sequence_aux_loss}
