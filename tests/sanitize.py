"""make sanitize: every kernel at awkward shapes, forward and backward, with indices of every kind.

It runs under the tools of compute-sanitizer, which see each read and write, and compares what comes
out with the CPU. ``TRITON_INTERPRET=1`` runs it without a GPU.
"""

import os
import sys
import time
from collections import Counter
from unittest import mock

import torch

import moe_custom_ops as m
from moe_custom_ops import op as calls
from moe_custom_ops import triton_common
from moe_custom_ops.launch import Launch
from moe_custom_ops.losses import kernels as losses_kernels
from moe_custom_ops.losses import plans as losses_plans
from moe_custom_ops.permutation import kernels as permutation_kernels
from moe_custom_ops.permutation import plans as permutation_plans
from moe_custom_ops.rows import kernels as rows_kernels
from moe_custom_ops.rows import plans as rows_plans
from moe_custom_ops.testing import assert_same_bits, make_assignments, make_probs

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
MODULES = triton_common, losses_kernels, permutation_kernels, rows_kernels
GENERATOR = torch.Generator().manual_seed(0)
FEW_ROWS = ", few rows"


def kernel_names():
    """As kernels are called; what they call has other names, without the underscore in front."""
    names = {name for module in MODULES for name in vars(module)}
    return {name for name in names if name.startswith("_") and name.endswith("_kernel")}


def watch_launches():
    launched = Counter()
    launch = Launch.__call__

    def spy(self, *first):
        few = self.options.get("LOADS") == 1 or self.options.get("COMPACT", False)
        launched[self.kernel.fn.__name__ + FEW_ROWS * few] += self.grid[0] > 0
        return launch(self, *first)

    Launch.__call__ = spy
    return launched


def moved(call, device):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}


def results_and_gradients(function, call, leaves):
    call = {**call, **{k: call[k].detach().requires_grad_() for k in leaves}}
    results = function(**call)
    results = list(results) if isinstance(results, tuple) else [results]
    smooth = [x for x in results if x.requires_grad]
    if smooth:
        ones = [torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape) for x in smooth]
        results += torch.autograd.grad(smooth, [call[k] for k in leaves], ones)
    return results


def check(name, leaves=(), defined=True, **call):
    """The documented function, which goes the direct path, and on a GPU the registered op too.

    ``defined`` is whether the arguments have a result that is promised, and not only bounds.
    """
    op = getattr(torch.ops.moe, name)
    with mock.patch.object(calls, "_is_plain_mode", lambda: False):
        expected = results_and_gradients(op, call, leaves)
    for function in [getattr(m, name)] + [op] * (DEVICE == "cuda"):
        actual = results_and_gradients(function, moved(call, DEVICE), leaves)
        if defined:
            compare(actual, expected, name)


def compare(actual, expected, name):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(a, b, f"{name}, result {i}")


def random_bits(shape, dtype=torch.int64):
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=GENERATOR, dtype=dtype)


def malformed(good):
    """Like ``good``: negative, duplicated, huge, random bits, and good ones among such."""
    info = torch.iinfo(good.dtype)
    for number in (info.min, -1, 0, good.numel(), info.max):
        yield torch.full_like(good, number)
    yield random_bits(good.shape, good.dtype)
    some = good.clone()
    some[::2] = random_bits(some[::2].shape, good.dtype)
    yield some


def aux_losses():
    for shape, dtype in (
        ((1, 1), torch.float32),
        ((5, 7), torch.float64),
        ((130, 33), torch.bfloat16),
        ((300, 700), torch.float16),
        ((600, 8), torch.float32),
    ):
        probs, counts = make_probs(*shape, dtype=dtype)
        mask = torch.arange(shape[0]) % 3 > 0
        common = {"num_experts": 1, "topk": 2, "coeff": 0.1}
        losses = {"probs": probs, "tokens_per_expert": counts.double(), **common}
        check("aux_loss", ["probs"], total_num_tokens=shape[0], **losses)
        strided = probs.t().contiguous().t()
        losses["probs"] = strided
        total = torch.tensor(shape[0] + 0.5)
        check("aux_loss", ["probs"], total_num_tokens=total, token_mask=mask, **losses)


def sequence_losses():
    for num_tokens, columns, dtype in ((1, 1, torch.float32), (130, 33, torch.bfloat16)):
        for lengths in ([num_tokens], [0, num_tokens // 3, 0, num_tokens - num_tokens // 3]):
            probs, _ = make_probs(num_tokens, columns, dtype=dtype)
            ends = torch.tensor([0, *lengths]).cumsum(0)
            mask = torch.arange(num_tokens) % 3 > 0
            call = {"tokens_per_expert": torch.rand(len(lengths), columns), "topk": 2, "coeff": 0.1}
            call |= {"probs": probs}
            check("sequence_aux_loss", ["probs"], cu_seqlens=ends, **call)
            check("sequence_aux_loss", ["probs"], cu_seqlens=ends.int(), token_mask=mask, **call)
            for bad in (*malformed(ends), ends.flip(0)):
                check("sequence_aux_loss", ["probs"], defined=False, cu_seqlens=bad, **call)
    probs, _ = make_probs(7 * 19, 33)
    batch = {"probs": probs.view(7, 19, 33), "tokens_per_expert": torch.rand(7, 33)}
    check("sequence_aux_loss", ["probs"], topk=2, coeff=0.1, **batch)


def orders():
    for num_tokens, topk, experts, alignment in ((1, 1, 1, 1), (33, 3, 7, 5), (90, 3, 160, 1)):
        ids = torch.randint(0, experts, (num_tokens, topk), generator=GENERATOR)
        common = {"num_experts": experts, "alignment": alignment}
        check("expert_permutation", expert_ids=ids, **common)
        check("expert_permutation", expert_ids=ids, num_rows=0, **common)
        check("expert_permutation", expert_ids=ids.t().contiguous().t().int(), **common)
        for bad in malformed(ids):
            check("expert_permutation", expert_ids=bad, num_rows=num_tokens, **common)
        for share in (0.0, 0.3, 1.0):
            routing = torch.rand(num_tokens, experts, generator=GENERATOR) < share
            rest = {"topk": min(topk, experts), "alignment": alignment}
            check("expert_permutation_from_map", routing_map=routing, **rest)
    for shape, num_rows, alignment in (((1, 1), 9, 1), ((3, 7), 0, 8), ((2, 33), 301, 8)):
        counts = torch.randint(0, 9, shape, generator=GENERATOR)
        for some in (counts, *malformed(counts), random_bits(shape, torch.int32)):
            rest = {"num_rows": num_rows, "alignment": alignment}
            check("expert_permutation_from_counts", counts=some, **rest)


def check_restores(rows, order, inverse, scores, tokens, defined=True):
    num_tokens, topk = scores.shape
    common = {"token_indices_sorted": order, "inverse": inverse, "defined": defined}
    weighted = {"rows": rows, "top_scores": scores, "addend": tokens, **common}
    check("weighted_restore", ["rows", "top_scores", "addend"], **weighted)
    check("restore", ["rows"], rows=rows, num_tokens=num_tokens, topk=topk, **common)
    check("permute", ["tokens"], tokens=tokens, topk=topk, **common)
    both = {"tokens": tokens, "top_scores": scores, **common}
    check("permute_with_scores", ["tokens", "top_scores"], **both)


def restores():
    for num_tokens, topk, hidden, dtype in (
        (1, 1, 1, torch.float32),
        (33, 3, 130, torch.bfloat16),
        (9, 6, 7, torch.float64),
        (17, 8, 300, torch.float16),
    ):
        scores, order = make_assignments(num_tokens, topk, 16, alignment=4)
        wide = torch.randn(order.shape[0], 2 * hidden, generator=GENERATOR).to(dtype)
        tokens = torch.randn(num_tokens, hidden, generator=GENERATOR).to(dtype)
        inverse = torch.ops.moe.inverse_permutation(order, num_tokens, topk)
        check_restores(wide[:, ::2], order, None, scores, tokens)
        check_restores(wide[:, :hidden], order, inverse, scores, tokens)
        rows = wide[:, hidden:].contiguous()
        if num_tokens in (9, 33):
            for bad in (*malformed(order), random_bits(order.shape, torch.int32)):
                check_restores(rows, bad, None, scores, tokens)
            for bad in malformed(inverse):
                # Two assignments that claim a row both write it.
                check_restores(rows, order, bad, scores, tokens, defined=False)
        quantised = random_bits((num_tokens, hidden), torch.uint8)
        check("permute", tokens=quantised, token_indices_sorted=order, topk=topk)


def few_rows():
    """Of many tokens, as on one rank of many: the restores then leave out what has no row."""
    num_tokens = 23
    with mock.patch.object(rows_plans, "enough_programs", lambda device: num_tokens // 3):
        for topk, hidden, dtype in ((3, 33, torch.bfloat16), (5, 260, torch.float32)):
            scores, order = make_assignments(num_tokens, topk, 16)
            tokens = torch.randn(num_tokens, hidden, generator=GENERATOR).to(dtype)
            order = order[torch.rand(len(order), generator=GENERATOR) < 0.3]
            rows = torch.randn(len(order), hidden, generator=GENERATOR).to(dtype)
            inverse = torch.ops.moe.inverse_permutation(order, num_tokens, topk)
            check_restores(rows, order, inverse, scores, tokens)
            whole = {"rows": rows, "top_scores": scores, "token_indices_sorted": order}
            for leaf in ("rows", "top_scores"):
                check("weighted_restore", [leaf], **whole)
            for bad in malformed(order):
                check_restores(rows, bad, None, scores, tokens)
            bad = random_bits(inverse.shape, torch.int32)
            check_restores(rows, order, bad, scores, tokens, defined=False)


def many_assignments():
    """More than are inverted by one launch, and than one step of a scan adds."""
    count = 2 * permutation_plans.INVERT_AT_ONCE + 3
    order = torch.randperm(count, generator=GENERATOR)
    check("inverse_permutation", token_indices_sorted=order, num_tokens=count, topk=1)
    order[::3] = random_bits(order[::3].shape)
    check("inverse_permutation", token_indices_sorted=order, num_tokens=count, topk=1)
    ids = torch.randint(-1, 9, (5000, 4), generator=GENERATOR)
    check("expert_permutation", expert_ids=ids, num_experts=8)


def scratch_of_garbage():
    """What the inner ops run, which anyone may call with any scratch and any slots."""
    scores, order = make_assignments(33, 3, 8, alignment=4)
    rows, grad = torch.randn(order.shape[0], 130), torch.randn(33, 130)
    size = m.weighted_restore_workspace_size(33, 3)
    r, s, o, g = (x.to(DEVICE) for x in (rows, scores, order, grad))
    restore = calls.registered(rows_plans.restore, 6, 2)
    backward = calls.registered(rows_plans.restore_backward, 5, 1)
    scores_to_rows = calls.registered(rows_plans.scores_to_rows, 3)
    rows_to_scores = calls.registered(rows_plans.rows_to_scores, 3)
    expected = torch.ops.moe.restore_forward(rows, scores, order, None, 0, 0)
    for garbage in (random_bits((size,), torch.uint8), torch.full((size,), 255, dtype=torch.uint8)):
        results = restore(r, s, o, None, None, garbage.to(DEVICE), 0, 0)
        compare(results, expected, "restore_forward_in")
        bad = garbage[: 33 * 3 * 4].view(torch.int32).view(33, 3)
        on_device = bad.to(DEVICE)
        backward(g, r, s, o, on_device, True)
        backward(g, None, None, o, on_device, True)
        of_rows = scores_to_rows(s, o, on_device)
        rows_to_scores(of_rows, o, on_device)
    probs, counts = make_probs(130, 33)
    garbage = random_bits((m.aux_loss_workspace_size(130, 33),), torch.uint8).to(DEVICE)
    aux_loss = calls.registered(losses_plans.aux_loss, 6, 3)
    results = aux_loss(
        probs.to(DEVICE), counts.to(DEVICE), None, None, None, garbage, 33, 2, 0.1, 9
    )
    rest = (None, None, None, 33, 2, 0.1, 9)
    compare(results, torch.ops.moe.aux_loss_forward(probs, counts, *rest), "aux_loss_forward_in")
    ends, counts = random_bits((8,)).to(DEVICE), torch.rand(7, 33, device=DEVICE)
    size = m.sequence_aux_loss_workspace_size(130, 7, 33)
    garbage = random_bits((size,), torch.uint8).to(DEVICE)
    sequence_aux_loss = calls.registered(losses_plans.sequence_aux_loss, 7, 2)
    inputs = probs.to(DEVICE), counts, ends
    sequence_aux_loss(*inputs, None, None, None, garbage, 2, 0.1)


def main():
    calls.CUDA = DEVICE == "cuda"
    launched = watch_launches()
    for part in (
        aux_losses, sequence_losses, orders, restores, few_rows, many_assignments,
        scratch_of_garbage,
    ):  # fmt: skip
        start = time.monotonic()
        part()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(f"{part.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    expected = kernel_names()
    expected |= {name + FEW_ROWS for name in expected if "weighted_restore" in name}
    for name in sorted(expected):
        print(f"  {name}: {launched[name]} launches")
    missing = {name for name in expected if not launched[name]}
    if missing:
        print(f"never launched: {', '.join(sorted(missing))}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
