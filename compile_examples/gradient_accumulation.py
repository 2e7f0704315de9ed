"""Four micro-batches accumulate the gradients of one batch, load-balancing losses included.

``attach_loss`` puts each micro-batch's loss into its backward, scaled like the model's own, and
logs it on the device. The balancing loss of a batch is a product of two averages over it, so it is
not the mean of its micro-batches': what is compared with takes its output from the whole batch and
its balancing loss from the micro-batches.

Run it: python compile_examples/gradient_accumulation.py
"""

import torch

from moe_custom_ops.nn import MoE, attach_loss

HIDDEN, TOKENS, MICRO_BATCHES, TOLERANCE = 64, 512, 4, 1e-5


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # A coefficient so large that gradients without the balancing loss would miss the tolerance.
    layer = MoE(HIDDEN, 128, 8, 2, max_tokens=TOKENS, aux_loss_coeff=0.1, device=device)
    parameters = list(layer.parameters())
    x, target = torch.randn(2, TOKENS, HIDDEN, device=device)

    scale = torch.tensor(1 / MICRO_BATCHES, device=device)
    log = torch.zeros((), device=device)
    for part, part_target in zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
        out, aux, _ = layer(part)
        out = attach_loss(out, aux, scale=scale, log=log)
        ((out - part_target).square().mean() * scale).backward()

    out, _, _ = layer(x)
    losses = torch.stack([layer(part)[1] for part in x.chunk(MICRO_BATCHES)])
    whole = (out - target).square().mean() + losses.mean()
    expected = torch.autograd.grad(whole, parameters)

    errors = []
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        errors.append((parameter.grad - gradient).abs().max() / gradient.abs().max())
    error = torch.stack(errors).max().item()
    logged = torch.isclose(log, losses.sum(), rtol=1e-6, atol=0).item()
    print(f"gradients as of one batch within {TOLERANCE:.0e}: {error <= TOLERANCE}, {error:.1e}")
    print(f"the log holds the sum of the micro-batches' losses: {logged}, {log.item():.6f}")
    if not error <= TOLERANCE or not logged:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
