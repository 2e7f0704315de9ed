"""A MoE layer exported with a dynamic token count, saved, loaded and run on other counts.

Run it: python compile_examples/export.py
"""

import io

import torch

# Also what an importing process needs: the program calls the ops that this import registers.
from moe_custom_ops.nn import MoE

HIDDEN, MAX_TOKENS = 64, 512


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = MoE(HIDDEN, 128, num_experts=8, topk=2, max_tokens=MAX_TOKENS, device=device).eval()
    # The layer refuses more than max_tokens, so the dimension must have the same bound.
    tokens = torch.export.Dim("tokens", max=MAX_TOKENS)
    sample = torch.randn(50, HIDDEN, device=device)
    with torch.no_grad():
        program = torch.export.export(layer, (sample,), dynamic_shapes=({0: tokens},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()

    same = True
    for num_tokens in (50, 7, MAX_TOKENS):
        x = torch.randn(num_tokens, HIDDEN, device=device)
        with torch.no_grad():
            same &= all(map(torch.equal, loaded(x), layer(x)))
    print(f"output, loss and tokens per expert have the layer's bits at three counts: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
