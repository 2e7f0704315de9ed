"""The benchmarks run, row by row, on small shapes. What they print here are no times of a GPU."""

import pytest
import torch

from moe_custom_ops.benchmarks import (
    layer,
    losses,
    permutations,
    restores,
    step,
    transformers_step,
)
from moe_custom_ops.benchmarks.__main__ import format_host, format_row
from moe_custom_ops.benchmarks.timing import HostTimes, Row


@pytest.fixture(autouse=True)
def _without_a_graph(monkeypatch):
    """Each call once, in place of many in a captured graph."""

    def once(call, inputs, calls=0, repeats=0):
        for arguments in inputs[:1]:
            call(*arguments)
        return 2.0

    def host_once(calls):
        for call in calls:
            call()
        return [2.0, *(4.0 for _ in calls[1:])]

    for module in (layer, losses, permutations, restores):
        monkeypatch.setattr(module, "graph_time", once)
        monkeypatch.setattr(module, "host_times", host_once)
        monkeypatch.setattr(module, "input_sets", lambda num_bytes, device: 2)
    monkeypatch.setattr(losses, "AUX_LOSS_SHAPES", [(16, 8)])
    monkeypatch.setattr(losses, "SEQUENCE_SHAPES", [(2, 8, 8)])
    monkeypatch.setattr(layer, "LAYERS", [(8, 2, 16, 4)])
    monkeypatch.setattr(restores, "SHAPES", [(8, 2, 16)])
    monkeypatch.setattr(permutations, "SHAPES", [(8, 2, 16)])
    monkeypatch.setattr(permutations, "ORDERS", [(8, 2, 4)])
    monkeypatch.setattr(permutations, "RECEIVED", [(2, 4, 64)])
    monkeypatch.setattr(restores, "INVERSIONS", [256])
    monkeypatch.setattr(restores, "ODD_SHAPES", [(8, 2, 9)])
    for module in (restores, permutations):
        monkeypatch.setattr(module, "SPARSE_SHAPE", (16, 8, 4))


def test_losses():
    device = torch.device("cpu")
    rows = [*losses.aux_loss_rows(device), *losses.sequence_rows(device)]
    assert [row.num_bytes for row in rows] == [16 * 8 * 4] * 3
    for times in (losses.aux_loss_host(device), losses.sequence_host(device)):
        assert times.others == {"eager": 4.0}


def test_permutations():
    device = torch.device("cpu")
    order, *others = permutations.orders(device)
    assert order.num_bytes == 12 * 16 and order.eager
    assert [row.num_bytes for row in others] == [12 * 16, 4 * 64]
    *rows, sparse, worst = permutations.rows(device)
    assert [row.num_bytes for row in rows] == [8 * 3 * 16 * 2] * 3
    assert 16 * 4 * 2 < sparse.num_bytes < worst.num_bytes == 16 * 9 * 4 * 2
    for times in (permutations.orders_host(device), permutations.rows_host(device)):
        assert times.others == {"eager": 4.0}


def test_layer():
    device = torch.device("cpu")
    (row,) = layer.rows(device)
    assert row.num_bytes == 2 * 8 * 16 * (6 + 6 + 2) + 4 * 8 * 4 and row.compiled
    assert layer.host(device).others == {"eager": 4.0}
    inputs = layer.make(8, 2, 16, 4, device)
    for ours, eager in zip(
        layer.step(layer.our_path)(*inputs), layer.step(layer.eager_path)(*inputs), strict=True
    ):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2 * eager.abs().max().item())
        assert eager.abs().max() > 0


def test_the_formulas_compared_are_the_same():
    probs, counts = torch.rand(16, 8), torch.randint(0, 9, (8,))
    ours, eager = losses.our_aux_loss(probs, counts), losses.eager_aux_loss(probs, counts)
    torch.testing.assert_close(ours, eager)
    counts = torch.randint(0, 9, (2, 8))
    for own, ends in ((probs.view(2, 8, 8), None), (probs, torch.tensor([0, 8, 16]))):
        ours = losses.our_sequence_aux_loss(own, counts, ends)
        torch.testing.assert_close(ours, losses.eager_sequence_aux_loss(own, counts, ends))
    ids = torch.rand(9, 4).topk(2).indices
    order, inverse, counts = permutations.eager_order(ids, 4)
    own, own_counts, _ = permutations.expert_permutation(ids, 4)
    assert torch.equal(own.long(), order) and torch.equal(own_counts, counts)
    assert torch.equal(order[inverse], torch.arange(18))
    rows, scores, indices, _ = restores.make(8, 2, 16, torch.device("cpu"))
    ours = restores.weighted_restore(rows, scores, indices)
    torch.testing.assert_close(ours, restores.eager_restore(rows, scores, indices))


@pytest.mark.kernels
def test_restores(kernel_device):
    device = torch.device(kernel_device)
    rows = list(restores.rows(device))
    num_bytes = {row.name: row.num_bytes for row in rows}
    assert len(num_bytes) == len(rows) == 1 + 4 + 2 + 2
    assert num_bytes["restore forward T8 K2 H16"] == (8 * 2 + 8) * 16 * 2
    assert num_bytes["restore f+b T8 K2 H9"] == (3 * 8 * 2 + 2 * 8) * 9 * 2
    assert num_bytes["restore forward 1.5 of K8 T16 H4"] < 16 * 6 * 4 * 2
    times = restores.host(device)
    assert times.others == {"bare launches": 4.0, "eager": 4.0}


def test_format():
    row = Row("name", 8000, 2.0, 6.0, 3.0)
    assert format_row(row, 8000.0).split() == ["name", "2.00", "4", "50", "6.0", "3.0", "1.5"]
    assert format_row(row._replace(eager=None, compiled=None), 8000.0).split()[-1] == "50"
    line = format_host(HostTimes("op", 2.0, {"eager": 4.0}))
    assert line == "op: ours 2 us, eager 4 us (ours 0.50 of it)"


@pytest.mark.parametrize("combine_impl", ["fused_weighted_sum", "weighted_sum"])
def test_the_stack_whose_steps_are_timed(combine_impl):
    config = step.Config(2, 2, 8, 32, 2, 16, 4, 2)
    torch.manual_seed(0)
    stack = step.Stack(config, combine_impl, torch.device("cpu"))
    x, target = (torch.randn(2, 8, 32, dtype=torch.bfloat16) for _ in range(2))
    loss = stack(x, target)
    loss.backward()
    assert loss > 1 and all((p.grad != 0).any() for p in stack.parameters())


def test_the_interval_of_a_median_and_the_chart(tmp_path):
    low, high = step.interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert 1.0 <= low <= 3.0 <= high <= 100.0 and low < high
    assert step.interval([5.0] * 9) == (5.0, 5.0)
    row = {"way": "fused", "ms": 3.0, "interval": [2.5, 3.5], "peak_gib": 1.0}
    result = {"rows": [row], "config": step.Config()._asdict(), "device": "a GPU"}
    step.plot(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


SMALL_QWEN3 = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}


def test_a_transformers_step(tmp_path):
    pytest.importorskip("transformers")
    eager = [way for way in transformers_step.WAYS if not way.compiled]
    result = transformers_step.measure(SMALL_QWEN3, 16, 8, 2, torch.device("cpu"), eager)
    losses = [row["deterministic"]["losses"] for row in result["rows"].values()]
    assert len(losses[0]) == 8 and losses[0][0] != losses[0][-1]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    for row in result["rows"].values():
        for kind in row.values():
            assert kind["same_bits_again"] and kind["differ"] == []
        assert row["default"]["losses"] == row["deterministic"]["losses"][:2]
    transformers_step.plot(result, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_an_op_that_differs_from_itself_is_named():
    draws = torch.arange(100.0)

    @torch.library.custom_op("moe_test::drifts", mutates_args=("out",))
    def drifts(x: torch.Tensor, out: torch.Tensor) -> None:
        draws.add_(1)
        out.copy_(x + draws[0])

    x, out = torch.tensor([float("nan"), 1.0]), torch.zeros(2)
    with transformers_step.Repeated() as repeated:
        (x * 2).relu_().sum()
        torch.empty(1000)
        assert repeated.differ == set()
        drifts(x, out)
    assert repeated.differ == {"moe_test.drifts.default"}
    assert out[1] == 1 + draws[0]
