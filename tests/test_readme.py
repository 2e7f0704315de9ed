import json
import re


def code_blocks(root, language):
    return re.findall(rf"```{language}\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)


def test_the_example_runs_as_it_stands(root):
    (example,) = code_blocks(root, "python")
    assert len([line for line in example.splitlines() if line]) <= 10
    names = {}
    exec(example, names)
    assert names["out"].shape == (8, 16)
    assert names["router"].grad.abs().max() > 1e-4


def test_the_tests_that_show_the_promises_exist(root):
    text = (root / "README.md").read_text()
    sources = "\n".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+?)(?:_…)?`", text))
    assert len(named) >= 6
    for name in named:
        assert f"def {name}" in sources, name


def test_every_link_leads_somewhere(root):
    for page in (root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_says_what_was_measured(root):
    rows = json.loads((root / "docs/benchmarks/h200.json").read_text())["rows"]
    by_name = {row["name"]: row for row in rows}
    text = (root / "README.md").read_text()
    lines = re.findall(r"^\| `(\w+[^`]* T\d+)` \|(.*)\|$", text, re.MULTILINE)
    assert len(lines) > 20
    assert f"all {len(rows)} rows" in text
    for name, cells in lines:
        row = by_name[name]
        times = row["times"]
        others = [times.get(way, 0) / times["ours"] for way in ("eager", "compiled")]
        exact = [times["ours"], row["percent"], *others, row["percent_of_layer"]]
        for cell, value in zip(cells.split("|"), exact, strict=True):
            shown = cell.strip().rstrip("x")
            assert bool(shown) is bool(value), name
            if shown:
                digits = len(shown.partition(".")[2])
                assert shown == f"{value:.{digits}f}", name


def test_the_text_says_what_was_measured(root):
    rows = json.loads((root / "docs/benchmarks/h200.json").read_text())["rows"]
    text = " ".join((root / "README.md").read_text().split())

    def span(way, over="ours", **given):
        own = [row for row in rows if all(row[key] in given[key] for key in given)]
        found = [row["times"][way] / row["times"][over] for row in own if way in row["times"]]
        return min(found), max(found)

    def said(low, high, digits=2):
        return f"{low:.{digits}f} to {high:.{digits}f}"

    models = {row["model"] for row in rows}
    wide = {"Mixtral-8x7B", "GPT-OSS-120B"}
    train, both = {"tokens": [8192]}, {"kind": ["both"]}
    forward_too = {"kind": ["forward", "both"]}
    layers, ops = {"op": ["layer"]}, {"op": {row["op"] for row in rows} - {"layer"}}

    fused = said(*span("DeepSpeed", **train, **forward_too))
    small = said(*span("DeepSpeed", tokens=[64], **forward_too), 1)
    assert f"takes {fused} times as long at 8192 tokens, forward and with its backward" in text
    assert f"and {small} times at 64." in text
    product = said(*span("bmm", **train, **both, model=models - wide), 1)
    assert f"`bmm` the weighted sum takes {product} times" in text
    restore = {"op": ["weighted_restore", "weighted_restore(inverse)"]}
    gathered = {f"{x:.0f}" for x in span("eager", **restore, **train, **both, model=models - wide)}
    assert f"where the table's eager form takes {' to '.join(gathered)}." in text
    compiled = said(*span("compiled", **layers, **train, model=wide))
    ours = said(*span("ours compiled", **layers, **train, model=wide))
    assert f"layers take {compiled} times as long as ours uncompiled at 8192 tokens" in text
    assert f"and ours compiled {ours}." in text
    eager = said(*span("eager", "ours compiled", **layers, **train, **both))
    compiled = said(*span("compiled", "ours compiled", **layers, **train, **both))
    assert f"the eager layers take {eager} times as long at 8192 tokens" in text
    assert f"and compiled {compiled} times." in text

    assert "No op's row is slower than another way." in text
    ways = {way for row in rows for way in row["times"]}
    assert {"eager", "compiled", "DeepSpeed"} <= ways
    assert all(span(way, **ops)[0] > 1 for way in ways - {"ours", "ours compiled"})


def test_the_host_table_says_what_was_measured(root):
    result = json.loads((root / "docs/benchmarks/host.json").read_text())
    times = {row["name"]: row["times"] for row in result["rows"]}
    text = " ".join((root / "README.md").read_text().split())
    number = r" (\d+) \|"
    table = re.findall(rf"\| `([^`]+)`, (\d+) tokens \|{number * 4}", text)
    assert len(table) == 14
    for row, tokens, *cells in table:
        name, ways = (
            f"{row} Qwen3-30B-A3B T{tokens}",
            ("ours", "ours compiled", "eager", "compiled"),
        )
        assert cells == [f"{times[name][way]:.0f}" for way in ways], name
    assert f"an empty function takes {result['header']['empty_compiled_us']:.0f} so." in text

    def said(op, way, over, kinds=("both",), tokens=(64,)):
        names = [f"{o} {k} Qwen3-30B-A3B T{t}" for o in op for k in kinds for t in tokens]
        found = [times[name][way] / times[name][over] for name in names]
        return f"{min(found):.2f} to {max(found):.2f} times"

    losses = said(("aux_loss", "sequence_aux_loss"), "ours", "eager")
    restores = said(("weighted_restore", "weighted_restore(inverse)"), "ours", "eager")
    layers = (("layer",), "ours compiled")
    where = {"kinds": ("forward", "both"), "tokens": (64, 1024)}
    assert f"a loss takes {losses} the host time of its eager formula" in text
    assert f"`weighted_restore` {restores}." in text
    assert f"layer takes {said(*layers, 'ours', **where)} the host time" in text
    assert f"but {said(*layers, 'compiled', **where)} that of the compiled formula" in text


def test_the_transformers_table_says_what_was_measured(root):
    rows = json.loads((root / "docs/benchmarks/transformers_step.json").read_text())["rows"]
    text = (root / "docs/use_it_from.md").read_text()
    for name, row in rows.items():
        default, fixed = row["default"], row["deterministic"]
        low, high = default["interval"]
        cells = f"{default['ms']:.1f} | {low:.1f} to {high:.1f} | {default['peak_gib']:.1f}"
        assert f"| {name} | {cells} | {fixed['ms']:.1f} |" in text
        assert fixed["same_bits_again"] and not default["same_bits_again"]
        differ = [] if "compiled" in name else ["_scaled_dot_product_cudnn_attention_backward"]
        assert [op.split(".")[1] for op in default["differ"]] == differ
    adds = [row["default"]["atomic_adds"] for row in rows.values()]
    assert adds == [0, 0, 4, 1]


def test_the_training_step_table_says_what_was_measured(root):
    result = json.loads((root / "docs/benchmarks/step.json").read_text())
    text = (root / "README.md").read_text()
    assert len(result["rows"]) == 6
    for row in result["rows"]:
        low, high = row["interval"]
        share = result["share"].get(row["way"])
        cells = f"{row['ms']:.1f} | {low:.1f} to {high:.1f} | {row['peak_gib']:.1f} |"
        cells += "" if share is None else f" {share:.0%}"
        assert f"| {row['way']} | {cells} |" in text


def test_the_tables_over_ranks_say_what_was_measured(root):
    runs = json.loads((root / "docs/benchmarks/ranks.json").read_text())["runs"]
    text = (root / "docs/determinism.md").read_text()
    assert set(runs) == {"ring", "ring;allreduce:tree"}
    digests = set()
    for name, run in runs.items():
        for ranks, times in run["loss us"].items():
            cells = " | ".join(f"{us:.1f}" for us in times.values())
            assert f"| {ranks}, {name.split(':')[-1]} | {cells} |" in text
        sizes = [size for mode in run["bits"].values() for size in mode.items()]
        assert {ranks for ranks, _ in sizes} == {"1", "2"} and len(run["bits"]) == 3
        digests |= {tuple(values.items()) for _, values in sizes}
        for rows in run["layer"].values():
            assert all(row["error"] == row["dropped"] == 0 for row in rows)
    assert len(digests) == 1
    layers = runs["ring"]["layer"]
    alone = layers["1"][0]
    for ranks, rows in layers.items():
        for row in rows:
            cells = f"{row['ms']:.1f} | {alone['ms'] / row['ms']:.0%} |"
            if row["captured_ms"]:
                own = alone["captured_ms"] / row["captured_ms"]
                cells += f" {row['captured_ms']:.1f} | {own:.0%} |"
            else:
                cells += " | |"
            assert f"| {ranks} | {row['transport']} | {cells} {row['ours']:.0%} |" in text
