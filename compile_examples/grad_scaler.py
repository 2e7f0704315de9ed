"""float16 autocast with a GradScaler, whose scale reaches the load-balancing loss too.

The loss of an inner layer is attached to its output, so ``scaler.scale(loss)`` does not see it:
``attach_loss`` is given the scale.

Run it: python compile_examples/grad_scaler.py
"""

import torch

from moe_custom_ops.nn import MoE, attach_loss

HIDDEN, TOKENS = 64, 256
# float16 has 11 bits; the gradients pass through about a dozen roundings and sums of them.
TOLERANCE = 8 * torch.finfo(torch.float16).eps


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # A coefficient so large that a gradient without the balancing loss would miss the tolerance.
    layer = MoE(HIDDEN, 128, 8, 2, max_tokens=TOKENS, aux_loss_coeff=1.0, device=device)
    parameters = list(layer.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    scaler = torch.amp.GradScaler(device)
    x, target = torch.randn(2, TOKENS, HIDDEN, device=device)

    out, aux, _ = layer(x)
    expected = torch.autograd.grad((out - target).square().mean() + aux, parameters)
    before = [parameter.detach().clone() for parameter in parameters]

    with torch.autocast(device, torch.float16):
        out, aux, _ = layer(x)
    # The scale as a tensor; get_scale() would read it on the host.
    scale = scaler.scale(torch.ones((), device=device))
    out = attach_loss(out, aux, scale=scale)
    scaler.scale((out.float() - target).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()

    errors = []
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        errors.append((parameter.grad - gradient).abs().max() / gradient.abs().max())
    error = torch.stack(errors).max().item()  # NaN where a gradient is not finite
    stepped = not any(map(torch.equal, before, parameters)) and scaler.get_scale() == scale.item()
    print(f"gradients as in float32 within {TOLERANCE:.1e}: {error <= TOLERANCE}, {error:.1e}")
    print(f"nothing overflowed, the step was taken: {stepped}, scale {scale.item():.0f}")
    if not error <= TOLERANCE or not stepped:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
