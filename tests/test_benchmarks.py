"""The benchmarks run on small shapes. What they print here are no times of a GPU."""

import csv
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from moe_custom_ops.benchmarks import (
    __main__,
    ceilings,
    models,
    plots,
    ranks,
    report,
    rows,
    step,
    timing,
)

SMALL = models.Model("small", 16, 8, 16, 8)
CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(__main__, "MODELS", (SMALL,))
    monkeypatch.setattr(__main__, "QUICK_MODEL", "small")
    monkeypatch.setitem(__main__.SIZES, "cpu", {"decode": 2, "batch": 24, "train": 12, "long": 40})
    monkeypatch.setattr(timing, "MAX_CALLS", {"cpu": 2})
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 2**12)
    monkeypatch.setattr(ceilings, "cache_bytes", lambda device: 2**12)


def settings(repeats=1):
    return rows.Settings(CPU, "eager", repeats, False)


def family_of(op):
    (family,) = (family for family in __main__.FAMILIES if family.op == op)
    return family


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", __main__.FAMILIES, ids=lambda family: family.op)
def test_every_way_is_right(family):
    """They are what is timed: all agree with the eager form, in their gradients too."""
    for kind in family.kinds:
        row = rows.run(family._replace(models=None), kind, SMALL, 12, settings())
        assert row.left_out == {rows.COMPILED: rows.NOT_ASKED}
        assert set(row.times) == set(family.ways) and min(row.times.values()) > 0
        assert row.read > 0 and row.written > 0


def test_bytes():
    """Of 12 tokens, 8 experts each, 16 wide, in bfloat16."""
    found = {}
    for family in __main__.FAMILIES:
        inputs = family.make(SMALL, 12, CPU)
        found[family.op] = [rows.traffic_of(family, kind, SMALL, inputs) for kind in rows.KINDS]
    tokens, copies, order = 12 * 16 * 2, 96 * 16 * 2, 96 * 4
    forward, backward = (tokens + order, copies), (copies + order, tokens)
    assert found["permute(inverse)"][:2] == [forward, backward]
    assert found["permute(inverse)"][2] == (tokens + copies + 2 * order, tokens + copies)
    scores = 96 * 4
    assert found["weighted_restore"][:2] == [
        (copies + order + scores, tokens),
        (tokens + copies + order + scores, copies + scores),
    ]
    assert found["aux_loss"][0] == (12 * 16 * 4 + 16 * 8, 4)
    assert found["expert_permutation"][0] == (96 * 8, order + 16 * 8)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda x, order: x[order.token64] * 0, "a row whose error"),
        (lambda x, order: x[order.token64] * float("nan"), "a row whose error is inf"),
        (lambda x, order: x[order.token64].index_fill(0, order.order64[:1], 0.0), "a row"),
        (lambda x, order: x[order.token64].float(), "dtype torch.float32"),
        (lambda x, order: x[order.token64][1:], "shape [95, 16]"),
        (lambda x, order: (x, x), "2 results"),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_wrong_way_is_not_timed(broken, said):
    family = family_of("permute(inverse)")
    row = rows.run(
        family._replace(ways=family.ways | {"broken": broken}),
        rows.FORWARD,
        SMALL,
        12,
        settings(),
    )
    assert row.left_out["broken"].startswith(f"wrong: {said}") and "broken" not in row.times


@pytest.mark.usefixtures("small")
def test_a_zeroed_gradient_is_wrong():
    def zeroed(x, order):
        return x.detach()[order.token64] + 0 * x[order.token64]

    family = family_of("permute(inverse)")
    ways = family.ways | {"zeroed": zeroed}
    for kind, wrong in ((rows.FORWARD, False), (rows.BACKWARD, True), (rows.BOTH, True)):
        row = rows.run(family._replace(ways=ways), kind, SMALL, 12, settings())
        assert ("zeroed" in row.left_out) is wrong


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("op", ["path", "layer"])
def test_the_gradient_of_each_output_counts(op):
    """That of the loss is a millionth of the layer's."""
    family = family_of(op)

    def lost(*arguments):
        *others, loss = family.ways["ours"](*arguments)
        return *others, loss.detach() + 0 * loss

    ways = family.ways | {"lost": lost}
    for rounding in ((), ("lost",)):
        changed = family._replace(ways=ways, rounding=rounding)
        row = rows.run(changed, rows.BOTH, SMALL, 12, settings())
        assert row.left_out["lost"].startswith("wrong")


@pytest.mark.usefixtures("small")
def test_a_backward_whose_outputs_are_wrong():
    family = family_of("permute(inverse)")

    def sevens(x, order):
        rows = x[order.token64]
        return rows + (7.0 - rows.detach())

    row = rows.run(
        family._replace(ways=family.ways | {"sevens": sevens}), rows.BACKWARD, SMALL, 12, settings()
    )
    assert row.left_out["sevens"].startswith("wrong")


@pytest.mark.usefixtures("small")
def test_what_is_right_at_first_only_is_not_timed():
    family, calls = family_of("permute(inverse)"), []

    def tires(x, order):
        calls.append(1)
        return x[order.token64] * (len(calls) < 3)

    ways = family.ways | {"tires": tires}
    row = rows.run(family._replace(ways=ways), rows.FORWARD, SMALL, 12, settings())
    assert row.left_out["tires"].startswith("wrong: after it was timed")
    assert "tires" not in row.times


@pytest.mark.usefixtures("small")
def test_the_compiled_form_runs_its_backward_twice():
    asked = settings()._replace(compiled=True)
    row = rows.run(family_of("weighted_restore"), rows.BACKWARD, SMALL, 12, asked)
    assert row.left_out == {} and row.times["compiled"] > 0


@pytest.mark.usefixtures("small")
def test_a_way_that_runs_out_of_memory_is_left_out():
    def full(*arguments):
        raise torch.cuda.OutOfMemoryError

    family = family_of("permute(inverse)")
    ways = family.ways | {"full": full}
    row = rows.run(family._replace(ways=ways), rows.FORWARD, SMALL, 12, settings())
    assert row.left_out["full"] == "out of memory"
    assert {"ours", "eager"} <= set(row.times) and "full" not in row.times
    # Nothing is left to hold the others against.
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ways = family.ways | {"eager": full}
        rows.run(family._replace(ways=ways), rows.FORWARD, SMALL, 12, settings())


@pytest.mark.usefixtures("small")
def test_compiled_layers_of_both_kinds():
    """They round elsewhere; a router's rows of experts that no token took are rounding alone."""
    asked = settings()._replace(compiled=True)
    row = rows.run(family_of("layer"), rows.BOTH, models.Model("small", 64, 32, 32, 4), 16, asked)
    assert row.left_out == {}
    assert set(row.times) == {"ours", "eager", rows.COMPILED, rows.OURS_COMPILED}


def test_what_rounding_allows():
    expected = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    usual = (26 / 3) ** 0.5
    for own, exact, rounded in (
        (expected * 1.01, False, True),
        (expected * 1.03, False, False),
        (expected + torch.tensor([[0.0], [0.0], [usual / 200]]), False, True),
        (expected + torch.tensor([[0.0], [0.0], [usual / 100]]), False, False),
        (expected * torch.tensor([[0.0], [1.0], [1.0]]), False, False),
    ):
        assert (rows.error_of([own], [expected]) == "") is exact
        assert (rows.error_of([own], [expected], True) == "") is rounded


@pytest.mark.usefixtures("small")
def test_the_command(tmp_path, capsys):
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "csv")}
    arguments = ["--no-compile", "--repeats", "1", "--device", "cpu"]
    outputs = ["--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(tmp_path)]
    assert __main__.main([*arguments, *outputs]) == 0
    result = json.loads(files["json"].read_text())
    names = [row["name"] for row in result["rows"]]
    assert len(names) == len(set(names)) > 40
    assert "weighted_restore both small T12" in names
    assert set(result["header"]["ceilings"]) == {"0:1", "1:1", "2:1", "1:0"}
    assert result["header"]["repeats"] == 1
    by_name = {row["name"]: row for row in result["rows"]}
    path, layer = by_name["path both small T12"], by_name["layer both small T12"]
    share = 100 * path["times"]["ours"] / layer["times"]["ours"]
    assert path["percent_of_layer"] == pytest.approx(share) and layer["percent"] is None
    with files["csv"].open() as file:
        lines = list(csv.DictReader(file))
    assert [float(row["us ours"]) for row in lines] == [
        pytest.approx(row["times"]["ours"]) for row in result["rows"]
    ]
    for chart in ("roofline", "speedups"):
        assert (tmp_path / f"{chart}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in names)
    (line,) = (line for line in printed.splitlines() if line.startswith("path both small T12 "))
    assert line.endswith(f"{share:.1f}")

    for row in result["rows"]:
        row["times"]["ours"] = 1e9 if row["name"] == "permute(inverse) both small T2" else 1e-9
    files["json"].write_text(json.dumps(result))
    again = [*arguments, "--filter", "^permute.inverse. both small T", "--compare"]
    again += [str(files["json"])]
    assert __main__.main([*again, "--threshold", "1e30"]) == 0
    assert __main__.main(again) == 1
    *_, faster, slower = capsys.readouterr().out.splitlines()
    assert faster.endswith("0.000") and slower.endswith("slower")

    files["json"].write_text(json.dumps(result | {"rows": result["rows"][:1]}))
    assert __main__.main(again) == 1
    assert "is among these" in capsys.readouterr().out
    for key in ("device", "mode"):
        header = result["header"] | {key: "another"}
        files["json"].write_text(json.dumps(result | {"header": header}))
        with pytest.raises(SystemExit, match=f"is of {key} another"):
            __main__.main(again)


@pytest.mark.usefixtures("small")
def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch):
    run, made = rows.run, []

    def interrupted(*arguments):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(run(*arguments))
        return made[-1]

    monkeypatch.setattr(__main__, "run", interrupted)
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "csv")}
    arguments = ["--no-compile", "--repeats", "1", "--device", "cpu"]
    outputs = ["--json", str(files["json"]), "--csv", str(files["csv"])]
    assert __main__.main([*arguments, *outputs]) == 130
    assert len(report.read_json(files["json"])["rows"]) == 2
    assert len(files["csv"].read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--filter", "("], "--filter"),
        (["--mode", "graph", "--device", "cpu"], "needs an NVIDIA GPU"),
        (["--repeats", "0"], "--repeats: expected a positive integer, got 0"),
        (["--threshold", "nan"], "--threshold: expected per cent from 0, got nan"),
        (["--threshold", "-1"], "--threshold"),
        (["--device", "meta"], "--device: expected one of cpu"),
        (["--device", "cuda:99"], "--device"),
        (["--json", "/nowhere/rows.json"], "--json: /nowhere/rows.json is no file"),
        (["--csv", "/"], "--csv"),
        (["--filter", "a{999999999999}"], "--filter"),
        (
            ["--filter", "nothing", "--json", "/tmp/rows", "--csv", "/tmp/../tmp/rows"],
            "--csv: /tmp/../tmp/rows is what --json writes",
        ),
        (["--plot", __file__], "--plot"),
        (["--compare", "/nowhere"], "--compare: /nowhere is no file that --json wrote"),
        (["--compare", __file__], "--compare"),
    ],
)
def test_refused_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as refused:
        __main__.main(arguments)
    assert refused.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no row matches --filter 'nothing' on "):
        __main__.main(["--filter", "nothing"])


def test_a_name_of_the_table_is_a_filter():
    for op in ("permute(inverse)", "restore(inverse)", "weighted_restore(inverse)"):
        name = rows.name_of(op, "both", "Qwen3-30B-A3B", 8192)
        (case,) = __main__.cases("cuda", name, False)
        assert case[0].op == op


def test_charts(tmp_path):
    """Every way is drawn, and what has nothing to show is not."""
    pytest.importorskip("matplotlib")
    ways = {way for family in __main__.FAMILIES for way in family.ways}
    assert ways <= {rows.OURS, *plots.WAYS}
    header = {"device": "d", "torch": "t", "commit": "c", "mode": "m"}
    header["ceilings"] = {"1:1": 1.0, "0:1": 1.0, "1:0": 1.0}
    row = {"op": "aux_loss", "kind": "both", "tokens": 8, "percent": 5.0}
    row |= {"read": 8, "written": 8, "gb_per_s": 1.0, "times": {"ours": 1.0, "eager": 30.0}}
    path = tmp_path / "chart.png"
    nothing = [row | {"times": {"ours": 1.0}}], [row | {"kind": "backward"}], []
    for of_rows in nothing:
        assert not plots.speedups({"header": header, "rows": of_rows}, path) and not path.exists()
    no_rate = {"header": header, "rows": [row | {"percent": None}]}
    assert not plots.roofline(no_rate, path) and not path.exists()
    all_ways = dict.fromkeys(plots.WAYS, 0.01) | {"ours": 1.0, "eager": 300.0}
    result = {"header": header, "rows": [row, row | {"op": "permute", "times": all_ways}]}
    for draw in (plots.roofline, plots.speedups):
        assert draw(result, path) and path.read_bytes().startswith(b"\x89PNG")
        path.unlink()


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        (None, "o.png", "No such file"),
        ("[", "o.png", "--plot: .*Expecting value"),
        ("[]", "o.png", "is no file that --out wrote"),
        ('{"rows": 3}', "o.png", "is no file that --out wrote"),
        ("{}", "nowhere/o.png", "nowhere is no folder"),
    ],
)
def test_what_a_step_cannot_plot(text, target, said, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    source = tmp_path / "step.json"
    if text is not None:
        source.write_text(text)
    monkeypatch.setattr(sys, "argv", ["step", "--plot", str(source), str(tmp_path / target)])
    with pytest.raises(SystemExit) as refused:
        step.main()
    assert refused.value.code == 2 and re.search(said, capsys.readouterr().err)


def test_ticks():
    assert plots._ratio_ticks([1.2, 4.0]) == [0.5, 1.0, 2.0, 5.0]
    assert plots._ratio_ticks([0.01, 300.0]) == [0.01, 0.1, 1.0, 10.0, 100.0]


def test_quick_leaves_most_out():
    quick = list(__main__.cases("cuda", "", True))
    whole = list(__main__.cases("cuda", "", False))
    assert 20 < len(quick) < 50 < 200 < len(whole)
    assert not any(compiled for *_, compiled in quick) and any(c for *_, c in whole)


def test_the_rows_of_a_captured_graph_and_of_host_time(root):
    def names(host):
        found = __main__.cases("cuda", "", False, host)
        return {rows.name_of(family.op, kind, model.name, n) for family, model, n, kind, _ in found}

    captured = json.loads((root / "docs/benchmarks/h200.json").read_text())["rows"]
    assert names(False) == {row["name"] for row in captured}
    host = names(True)
    asked = {f"layer {kind} Qwen3-30B-A3B T1024" for kind in ("forward", "recorded", "both")}
    for op in ("layer", "aux_loss", "permute(inverse)", "weighted_restore"):
        asked |= {f"{op} {kind} Qwen3-30B-A3B T64" for kind in ("forward", "recorded", "both")}
    for op in ("expert_permutation", "inverse_permutation"):
        asked.add(f"{op} forward Qwen3-30B-A3B T64")
        assert f"{op} recorded Qwen3-30B-A3B T64" not in host
    assert asked <= host
    assert {name.split()[0] for name in host if not name.endswith(" T64")} == {"layer"}


@pytest.mark.usefixtures("small")
def test_by_host_time_ours_are_compiled_too(tmp_path, capsys):
    path = tmp_path / "rows.json"
    command = ["--mode", "host", "--device", "cpu", "--repeats", "1", "--json", str(path)]
    command += ["--filter", "^(expert_permutation forward|permute.inverse. (recorded|both)) "]
    assert __main__.main(command) == 0
    result = report.read_json(path)
    ways = {rows.OURS, rows.OURS_COMPILED, rows.EAGER, rows.COMPILED}
    assert [row["name"] for row in result["rows"]] == [
        "expert_permutation forward small T2",
        "permute(inverse) both small T2",
        "permute(inverse) recorded small T2",
    ]
    assert all(ways <= set(row["times"]) and not row["left_out"] for row in result["rows"])
    empty = result["header"]["empty_compiled_us"]
    assert empty > 0 and f"\nempty_compiled_us: {empty}\n" in capsys.readouterr().out
    assert __main__.main([*command, "--no-compile"]) == 0
    result = report.read_json(path)
    assert "empty_compiled_us" not in result["header"]
    assert not any(rows.OURS_COMPILED in row["times"] for row in result["rows"])


@pytest.mark.usefixtures("small")
def test_a_recorded_forward():
    """Its calls have gradients, and are held against the eager form's."""
    family, recorded = family_of("permute(inverse)"), []

    def seen(x, order):
        recorded.append(x.requires_grad and torch.is_grad_enabled())
        return x[order.token64]

    def lost(x, order):
        return x.detach()[order.token64] + 0 * x[order.token64]

    changed = family._replace(ways=family.ways | {"seen": seen, "lost": lost})
    row = rows.run(changed, rows.RECORDED, SMALL, 12, settings())
    assert row.times["seen"] > 0 and len(recorded) > 2 and all(recorded)
    assert row.left_out["lost"].startswith("wrong")
    inputs = family.make(SMALL, 12, CPU)
    expected = rows.traffic_of(family, rows.FORWARD, SMALL, inputs)
    assert rows.traffic_of(family, rows.RECORDED, SMALL, inputs) == expected


def test_calls_of_a_batch():
    device = torch.device("cuda")
    assert [timing.calls_per_batch(num_bytes, 1, device) for num_bytes in (1, 10**9)] == [120, 2]
    least = timing.HOST_CALLS
    found = [timing.calls_per_batch(num_bytes, 1, device, least) for num_bytes in (1, 10**9)]
    assert found == [120, least]


@pytest.mark.parametrize("size", range(1, 9))
def test_turns_are_balanced(size):
    """Every variant comes first, and last, and behind each other, as often as the rest."""
    names = "abcdefgh"[:size]
    turns = []
    runs = {name: functools.partial(turns.append, name) for name in names}

    def clock(run):
        run()
        return (turns[-1], turns.count(turns[-1]))

    repeats = 2 * size
    expected = {name: [(name, count + 1) for count in range(repeats)] for name in names}
    assert timing.take_turns(runs, clock, repeats) == expected
    taken = [turns[size * i : size * (i + 1)] for i in range(repeats)]
    for square in (taken[:size], taken[size:]):
        assert all(sorted(column) == list(names) for column in zip(*square, strict=True))
    behind = Counter(pair for order in taken for pair in itertools.pairwise(order))
    assert behind == Counter(dict.fromkeys(itertools.permutations(names, 2), 2))


def test_the_ceiling_of_a_mix():
    rate = ceilings.ceiling({(0, 1): 4.0, (1, 1): 2.0, (1, 0): 8.0})
    assert rate(0, 7) == 4.0 and rate(5, 5) == 2.0 and rate(9, 0) == 8.0
    assert rate(3, 1) == pytest.approx(1 / ((1 / 2 + 1 / 8) / 2))


@pytest.mark.kernels
@pytest.mark.parametrize("mix", ceilings.MIXES)
def test_the_stream(mix, kernel_device):
    from moe_custom_ops.benchmarks import kernels

    (reads, writes), block, programs = mix, 512, 3
    sources = torch.rand(programs * reads * block, device=kernel_device)
    length = programs * writes * block if writes else programs
    outs = torch.full((length,), float("nan"), device=kernel_device)
    kernels.stream(mix, block, sources, outs)
    totals = 1 + sources.view(programs, reads, block).sum(1)
    expected = totals[:, None].expand(programs, writes, block) if writes else totals.sum(1)
    torch.testing.assert_close(outs, expected.flatten())


def test_a_comparison():
    def record(name, own):
        return {"name": name, "times": {} if own is None else {"ours": own}}

    old = {"rows": [record("a", 10.0), record("b", 10.0), record("gone", 1.0)]}
    new = [record("a", 10.4), record("b", None), record("new", 5.0)]
    lines, worse = report.compare(new[:1] + new[2:], old, 5.0)
    assert len(lines) == 1 and lines[0].split() == ["a", "10.00", "10.40", "1.040"] and not worse
    assert report.compare(new[:1], old, 3.0)[1]
    lines, worse = report.compare(new, old, 5.0)
    assert lines[1].endswith("not timed now") and worse
    assert report.compare([record("a", float("nan"))], old, 5.0)[1]


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


@pytest.fixture
def transformers_step():
    pytest.importorskip("transformers")
    from moe_custom_ops.benchmarks import transformers_step

    return transformers_step


def test_a_transformers_step(transformers_step, tmp_path):
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


def test_an_op_that_differs_from_itself_is_named(transformers_step):
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


def test_over_ranks(root, tmp_path):
    """Eight of them: the bits are those of one, and only what was dropped is missing."""
    path = tmp_path / "ranks.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8"]
    command += ["-m", "moe_custom_ops.benchmarks.ranks", "--json", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "the same bits on 1, 2, 4, 8 ranks" in done.stdout
    (found,) = json.loads(path.read_text())["runs"].values()
    digests = [values for sizes in found["bits"].values() for values in sizes.values()]
    assert len(digests) == 8 and all(values == digests[0] for values in digests)
    assert len(set(digests[0].values())) == 2
    assert found["loss us"].keys() == found["layer"].keys() == {"1", "2", "4", "8"}
    for rows_of_size in found["layer"].values():
        assert [row["transport"] for row in rows_of_size] == ["one rank", "exact", "capacity"]
        assert all(row["ms"] > 0 for row in rows_of_size)
        assert all((row["error"] < 1e-2) is (row["dropped"] == 0) for row in rows_of_size)
    # By ranks other than the one that writes the file.
    assert found["layer"]["8"][2]["dropped"] > 0


def test_ranks_that_differ_are_named():
    def layer(transport, error, dropped=0):
        return {"transport": transport, "error": error, "dropped": dropped}

    same, other = {"loss": "a", "gradient": "b"}, {"loss": "a", "gradient": "c"}
    found = {
        "bits": {"eager": {"1": same, "2": same}, "compiled": {"1": same, "2": other}},
        "layer": {
            "2": [layer("exact", 0.5), layer("capacity", 0.5, 3), layer("odd", float("nan"))]
        },
    }
    assert ranks.faults(found) == [
        "compiled, 2 ranks: other bits",
        "layer, 2 ranks, exact: error 5.0e-01",
        "layer, 2 ranks, odd: error nan",
    ]


def test_without_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["ranks"])
    with pytest.raises(SystemExit) as refused:
        ranks.main()
    assert refused.value.code == 2 and "torchrun" in capsys.readouterr().err
