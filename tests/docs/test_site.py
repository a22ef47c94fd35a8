"""The site: public names, pictures, links, the guide's promises, commands, the run folder."""

import re

import numpy as np
import pytest
from calls import COMMANDS
from doc_pages import PAGES, ROOT, blocks, ran, script, text

import mpdiag
from mpdiag.analysis.layers import merge_layers
from mpdiag.numerics.formats import FP16
from mpdiag.runs.run import open_run
from mpdiag.runs.schema import schema
from mpdiag.runs.training_log import read_log


def test_the_api_page_has_every_public_name_and_no_other():
    documented = re.findall(r"^::: mpdiag\.(\w+)$", text("docs/api.md"), flags=re.MULTILINE)
    assert set(documented) == set(mpdiag.__all__) - {"__version__"}


def test_pictures_are_what_their_script_draws():
    for name, picture in script("pictures").pictures().items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == picture


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page):
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text(page)):
        assert target.startswith("https://") or (here / target).exists(), target
    named = re.findall(
        r"`((?:mpdiag|tests|benchmarks|studies|docs|examples)/[\w./-]+)`", text(page)
    )
    for path in named:
        assert (ROOT / path).exists(), path


def test_every_page_is_in_the_menu():
    listed = set(re.findall(r"[\w/-]+\.md", text("mkdocs.yml")))
    assert listed == {p.removeprefix("docs/") for p in PAGES if p.startswith("docs/")}


# -- what the README's and the guide's examples leave behind ---------------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_recording_and_the_plan(page):
    left = ran(page)
    assert isinstance(left.names["plan"], mpdiag.PrecisionPlan)
    assert open_run(left.folder / "runs" / "mine").meta["steps_recorded"] == 5


def test_the_findings():
    left = ran("docs/quickstart.md")
    findings = left.names["analysis"].findings
    assert [words[0] for words in left.printed[: len(findings)]] == [f.severity for f in findings]
    assert left.printed


def test_the_training_by_the_plan():
    for page, loops in (("README.md", 1), ("docs/quickstart.md", 1), ("docs/training.md", 2)):
        left = ran(page)
        assert left.names["result"].scale == left.names["plan"].loss_scale.init_scale
        assert len(read_log(left.folder / "runs" / "mine-fp16").steps) == 4 * loops


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_plan_trains_a_new_model(page):
    names = ran(page).names
    recorded, trained = names["built"][-2:]  # the first one is of pages that build none
    assert len(names["built"]) == 3
    assert recorded is not trained
    assert names["model"] is trained


def test_shapes():
    left = ran("docs/analysis.md")
    advice = mpdiag.analyze(left.folder / "runs" / "mine").plan.shapes
    assert [words[1] for words in left.printed if len(words) == 5] == [a.dimension for a in advice]
    assert advice


def test_what_ran_where():
    printed = ran("docs/tensor-cores.md").printed
    assert "unit" in printed[-1][0] or "Tensor Core" in printed[-1][0]


def test_the_search_leaves_a_plan():
    left = ran("docs/sensitivity.md")
    assert mpdiag.PrecisionPlan.load(left.folder / "plan.json") == left.names["found"].plan


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/quickstart.md"])
def test_the_results_are_those_of_the_sample_runs(page):
    row = r"^\| (FP\w+[^|]*) \| ([\d.]+) \| ([\d.]+) \|(?: 0 of 400 \|)?$"
    rows = re.findall(row, text(page), re.MULTILINE)
    final = "| final loss |" in text(page)
    logs = [
        read_log(ROOT / "sample_runs" / f"ssd{end}") for end in ("", "-fp16-no-scale", "-fp16-plan")
    ]
    losses = [log.final_loss if final else log.steps[-1].loss for log in logs]
    metrics = [log.outcome("mAP@0.5") for log in logs]
    shown = [(f"{m:.3f}", f"{loss:.3f}") for m, loss in zip(metrics, losses, strict=True)]
    assert [(metric, loss) for _, metric, loss in rows] == shown


def test_the_readme_is_short_and_its_table_has_every_command_and_no_other():
    assert len(text("README.md").splitlines()) <= 250
    rows = re.findall(r"^\| `mpdiag (\w+)", text("README.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


# -- one page a command, with every option ---------------------------------------------------------


@pytest.fixture(scope="module")
def hooks():
    return script("hooks")


def test_each_command_has_a_page_and_each_page_a_command():
    pages = {path.stem for path in (ROOT / "docs" / "commands").glob("*.md")} - {"index"}
    assert pages == set(COMMANDS)
    assert set(re.findall(r"commands/(\w+)\.md", text("mkdocs.yml"))) == {"index", *COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_lists_every_option(name, hooks):
    page = hooks.on_page_markdown(text(f"docs/commands/{name}.md"))
    assert page.startswith(f"# mpdiag {name}\n")
    for parameter in COMMANDS[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                assert re.search(rf"^\| `.*{option}\b", page, flags=re.MULTILINE), option
        assert parameter.name == "help" or parameter.help.split(":")[0] in page


def test_the_overview_lists_every_command_and_no_other():
    overview = text("docs/commands/index.md")
    rows = re.findall(r"^\| (?:\[)?`mpdiag (\w+)", overview, flags=re.MULTILINE)
    assert set(rows) == set(COMMANDS)


def test_the_overview_says_which_commands_speak_json():
    speakers = {n for n, c in COMMANDS.items() if any("--json" in p.opts for p in c.params)}
    linked = re.findall(r"\[`(\w+)`\]\(\.\./schemas/\1\.json\)", text("docs/commands/index.md"))
    assert set(linked) == speakers


def test_output_gets_its_style(hooks):
    page = "```shell\nmpdiag runs\n```\n<!-- output: 3 -->\n```text\nrun  state\n```\n"
    styled = "```shell\nmpdiag runs\n```\n\n```{.text .output}\nrun  state\n```\n"
    assert hooks.on_page_markdown(page) == styled


def test_powers_are_raised_in_sentences_alone(hooks):
    html = "<p>2^-25.3 of 2^(e+1). <code>2^8</code></p>"
    raised = "<p>2<sup>-25.3</sup> of 2<sup>e+1</sup>. <code>2^8</code></p>"
    assert hooks.on_page_content(html) == raised


PAGE = "docs/run-folder.md"


def test_every_column_is_documented_and_no_other():
    table = (
        text(PAGE).partition("The columns of `stats/*.parquet`:")[2].partition("A bin is closed")[0]
    )
    documented = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert documented == set(schema().names)


def test_pandas_alone_tells_what_a_loss_scale_would_lose():
    left = ran(PAGE)
    records = open_run(left.folder / "runs" / "mine").records
    first = records.select(np.flatnonzero(records.of_kind("activation_grad"))[:1])
    expected = first.histograms().lost_to_zero(FP16, left.names["scale_exponent"])
    assert left.names["lost"] == expected.value[0]
    assert 0 < left.names["lost"] < left.names["row"]["numel"]  # an example that shows something


def test_counts_add_up_as_documented():
    frame = ran(PAGE).names["stats"]
    apart = frame[["zeros", "subnormals", "infs", "nans"]].sum(axis=1)
    assert (frame["numel"] == apart + frame["counts"].map(sum)).all()
    assert (frame["means"].map(len) == frame["counts"].map(len)).all()


def test_duckdb_says_what_the_analysis_says(monkeypatch):
    duckdb = pytest.importorskip("duckdb")
    monkeypatch.chdir(ran(PAGE).folder)
    query, histograms = blocks(PAGE, "sql")
    rows = duckdb.sql(query).fetchall()
    merged = merge_layers(open_run("runs/mine").records)
    h = merged.histograms
    counted = {
        (kind, name, e): n
        for kind, name, counts in zip(merged.kinds, merged.names, h.counts.tolist(), strict=True)
        for e, n in zip(h.exponents.tolist(), counts, strict=True)
        if n
    }
    assert {tuple(key): n for *key, n in duckdb.sql(histograms).fetchall() if n} == counted
    layers = merged.of_kind("activation_grad")
    h = layers.histograms
    lost = h.lost_to_zero(FP16).value / h.nonzero
    expected = {
        n: (float(h.absmax[i]), int(h.numel[i]), float(lost[i])) for i, n in enumerate(layers.names)
    }
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: pytest.approx(rest) for name, rest in expected.items()
    }
    assert rows[0][3] > 0
    assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)
