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


def test_what_the_text_says_of_all_rows(root):
    """No op's row is slower than another way, no compiled layer but by what clocks move."""
    rows = json.loads((root / "docs/benchmarks/h200.json").read_text())["rows"]
    layers = [row["times"] for row in rows if row["op"] == "layer"]
    ops = [row["times"] for row in rows if row["op"] != "layer"]
    assert len(layers) == 24 and all(len(times) == 4 for times in layers)
    assert all(times["compiled"] > 0.99 * times["ours compiled"] for times in layers)
    assert all(times["eager"] > times["ours"] for times in layers)
    assert len(ops) == len(rows) - 24
    assert all(sorted(times.values())[0] == times["ours"] and len(times) > 1 for times in ops)


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
