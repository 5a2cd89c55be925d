"""The report page: every run in it, nothing fetched from elsewhere, the same bytes for the same runs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_records import random_record

from cotenant.core.errors import InputError
from cotenant.report.distributions import MOST_POINTS, cdf_points, ratio_to, rounded
from cotenant.report.embed import asset, plotly
from cotenant.report.page import build_page, headline, opening, table_html, write_page
from cotenant.report.runs import Run, arrange, run_of

POLICIES = (("fifo + proportional", 1.0), ("srtf + tune", 3.0), ("<b>las</b> & {{data}} + greedy", 2.0))
FAMILIES = {"res50": "image", "alexnet": "image", "transformer": "language", "lstm": "language", "m5": "speech"}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [run_of(random_record(1, jobs=50, boost=boost, label=label), FAMILIES) for label, boost in POLICIES]


@pytest.fixture(scope="module")
def sweep() -> list[Run]:
    return [
        run_of(random_record(seed, jobs=25, boost=boost, label=label, rate_per_h=20 * load, options={"load": load}))
        for load in (0.5, 1.0, 0.75)
        for seed in (1, 2)
        for label, boost in POLICIES[:2]
    ]


def data_of(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert match
    return json.loads(match.group(1))


def markup_of(page: str) -> str:
    """The page without its scripts."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_every_run_is_in_the_page(runs: list[Run]) -> None:
    page = build_page(runs, "Three & more")
    data, markup = data_of(page), markup_of(page)
    assert [run["label"] for run in data["runs"]] == [label for label, _ in POLICIES]
    for run in data["runs"]:
        assert len(run["cdf"]["jct_s"]["x"]) == 50
        assert run["cdf"]["jct_s"]["y"][-1] == 1
        assert len(run["series"]["gpu"]) == 240
        assert set(run["groups"]) == {"gpus", "class", "model"}
    assert markup.count("<tr data-run=") == 3
    assert "Three &amp; more" in markup
    assert "&lt;b&gt;las&lt;/b&gt; &amp; {{data}} + greedy" in markup
    assert "<b>las</b>" not in page


def test_figures_in_the_page_are_those_of_the_summary(runs: list[Run]) -> None:
    page = build_page(runs)
    for i, run in enumerate(runs):
        row = re.search(rf'<tr data-run="{i}">(.*?)</tr>', page)
        assert row
        cells = re.findall(r'data-v="([^"]*)"', row.group(1))
        assert float(cells[0]) == pytest.approx(run.summary["jct_s"]["mean"], rel=1e-5)
        assert float(cells[8]) == pytest.approx(run.summary["makespan_s"], rel=1e-5)
    shown = data_of(page)["runs"][0]["summary"]
    assert shown == runs[0].summary


def test_the_page_needs_no_network(runs: list[Run]) -> None:
    markup = markup_of(build_page(runs))
    assert not re.findall(r'(?:src|href)="(?!data:)', markup)
    assert "@import" not in markup
    assert "url(" not in markup


def test_the_chart_library_is_the_published_file() -> None:
    """plotly-basic.min.js of plotly.js-basic-dist-min 4.1.1; its licence asks to be kept with every copy."""
    digest = hashlib.sha256(plotly().encode()).hexdigest()
    assert digest == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert "Permission is hereby granted, free of charge" in asset("plotly-basic.LICENSE")
    assert "Licensed under the MIT license" in plotly()[:200]


def test_a_report_of_six_runs_is_small() -> None:
    runs = [run_of(random_record(0, jobs=1000), FAMILIES)] * 6
    page = build_page(runs)
    assert page.count("plotly.js (basic - minified)") == 1
    assert len(page.encode()) < 1_500_000


def test_same_runs_same_bytes() -> None:
    pages = [build_page([run_of(random_record(4, jobs=20), FAMILIES)]) for _ in range(2)]
    assert pages[0] == pages[1]


def test_the_headline_names_the_fastest_and_the_slowest(runs: list[Run]) -> None:
    text = headline(runs)
    ranked = sorted(runs, key=lambda run: run.summary["jct_s"]["mean"])
    assert ranked[0].policy == "srtf + tune"
    assert text.startswith("<b>srtf + tune</b> finishes a job in")
    assert f"<b>{ranked[-1].policy}</b>" in text
    assert "&lt;" not in text
    assert "of that waiting." in headline(runs[:1])


def test_best_of_a_column_is_marked(runs: list[Run]) -> None:
    best = min(range(3), key=lambda i: runs[i].summary["jct_s"]["mean"])
    rows = re.findall(r'<tr data-run="\d">(.*?)</tr>', table_html(runs))
    marked = ["best" in re.findall(r'<td class="([^"]*)"', row)[0] for row in rows]
    assert marked == [i == best for i in range(3)]


def test_jobs_against_themselves_under_the_first_policy(runs: list[Run]) -> None:
    data = data_of(build_page(runs))
    assert data["baseline"] == "fifo + proportional"
    assert data["runs"][0]["ratio"] is None
    ratio = runs[1].spreads["jct_s"] / runs[0].spreads["jct_s"]
    assert data["runs"][1]["ratio"]["faster"] == rounded(float((ratio < 0.99).mean()))
    assert data["runs"][1]["ratio"]["x"][-1] == rounded(float(ratio.max()))


def test_the_baseline_can_be_chosen(runs: list[Run]) -> None:
    assert data_of(build_page(runs, baseline="srtf + tune"))["runs"][1]["ratio"] is None
    with pytest.raises(InputError, match="no run of policy 'sjf'; known: 'fifo"):
        build_page(runs, baseline="sjf")


def test_a_sweep_gets_facets_and_loads_in_order(sweep: list[Run]) -> None:
    page = build_page(sweep)
    data = data_of(page)
    assert data["facets"] == [
        {"key": "load", "name": "load", "values": ["0.5", "0.75", "1"]},
        {"key": "seed", "name": "seed", "values": ["1", "2"]},
    ]
    assert data["policies"] == ["fifo + proportional", "srtf + tune"]
    assert [run["load"] for run in data["runs"]] == [0.5] * 4 + [1.0] * 4 + [0.75] * 4
    assert data["runs"][1]["label"] == "srtf + tune · load 0.5 · seed 1"
    assert 'srtf + tune<span class="cond"> · load 0.5 · seed 1</span>' in page
    # 3 loads are 3 conditions, and seeds are repetitions
    assert re.search(r"has the lowest mean completion time in \d of 3 conditions, 2 seeds each", page)


def test_a_page_opens_where_the_policies_differ_most() -> None:
    """Both policies alike at load 1; at load 0.5 the second is faster. A condition of one policy alone says nothing."""
    made = [("a", 1.0, 0.5), ("b", 3.0, 0.5), ("a", 1.0, 1.0), ("b", 1.0, 1.0), ("a", 9.0, 2.0)]
    runs = arrange(
        [run_of(random_record(1, jobs=20, label=p, boost=boost, options={"load": load})) for p, boost, load in made]
    )
    assert opening(runs) == {"load": "0.5"}
    assert data_of(build_page(runs))["opens"] == {"load": "0.5"}
    assert opening(runs[2:4] + runs[:2]) == {"load": "0.5"}
    alone = arrange([run_of(random_record(1, jobs=20, label="a", options={"load": load})) for load in (0.5, 1.0)])
    assert opening(alone) == {"load": "1"}


def test_seeds_alone_are_no_conditions() -> None:
    runs = [
        run_of(random_record(seed, jobs=20, label=p, boost=b)) for seed in (1, 2) for p, b in (("a", 1.0), ("b", 3.0))
    ]
    for run, seed in zip(runs, (1, 1, 2, 2), strict=True):
        run.info.seed = seed
    assert headline(arrange(runs)).startswith("<b>b</b> has the lowest mean completion time over 2 seeds, at best")


def test_of_policies_that_are_level_somewhere_the_faster_one_is_named() -> None:
    """All alike at load 1, b faster at load 2: b is best in both, a in one."""
    made = [("a", 1.0, 1), ("b", 1.0, 1), ("a", 1.0, 2), ("b", 3.0, 2)]
    runs = [run_of(random_record(1, jobs=20, label=p, boost=b, options={"load": load})) for p, b, load in made]
    expected = "<b>b</b> has the lowest mean completion time, alone or level with others, in 2 of 2 conditions, at best"
    assert headline(arrange(runs)).startswith(expected)


def test_the_page_says_where_moving_was_free() -> None:
    free = {"restart_cost_s": 0.0, "checkpoint_cost_s": 0.0}
    runs = {cost: run_of(random_record(1, jobs=20, options={**free, "restart_cost_s": cost})) for cost in (0.0, 30.0)}
    for run in runs.values():
        run.summary["moves"] = 5
    assert "Moving is free here" in markup_of(build_page([runs[0.0]]))
    assert "Moving is free" not in markup_of(build_page([runs[30.0]]))


def test_use_of_the_cluster_has_no_best(runs: list[Run]) -> None:
    heads = dict(
        re.findall(r'data-better="(\w+)"><button type="button">([^<]*)', table_html(runs))[i][::-1] for i in range(15)
    )
    assert {heads[name] for name in ("GPU", "CPU", "memory")} == {"neither"}
    assert heads["mean"] == "lower"


def test_labels_are_unique_even_for_the_same_run_twice() -> None:
    twice = arrange([run_of(random_record(1, jobs=5)) for _ in range(3)])
    assert [run.label for run in twice] == ["fifo + proportional", "fifo + proportional (2)", "fifo + proportional (3)"]


def test_runs_where_nothing_finished() -> None:
    from sample_records import hand_record

    from cotenant.core.events import Kind, Reason

    record = hand_record([{"id": "a", "arrival_s": 0.0, "gpus": 1.0}], [(0.0, 0, Kind.ARRIVE, Reason.NONE)])
    page = build_page([run_of(record)])
    assert "No job finished in these runs." in page
    assert data_of(page)["runs"][0]["cdf"]["jct_s"] == {"x": [], "y": []}


def test_an_unwritable_page_leaves_nothing(tmp_path: Path, runs: list[Run]) -> None:
    with pytest.raises(InputError, match="is a folder"):
        write_page(tmp_path, runs)
    with pytest.raises(InputError, match="cannot write here"):
        write_page(tmp_path / "no" / "page.html", runs)
    assert list(tmp_path.iterdir()) == []
    write_page(tmp_path / "page.html", runs)
    assert [f.name for f in tmp_path.iterdir()] == ["page.html"]


def test_the_scripts_parse(runs: list[Run], tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    scripts = re.findall(r"<script>(.*?)</script>", build_page(runs), flags=re.DOTALL)
    file = tmp_path / "page.js"
    file.write_text(scripts[-1])
    subprocess.run([node, "--check", str(file)], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["runs", "sweep"])
def test_a_browser_draws_it_without_errors(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    page = tmp_path / "page.html"
    # Collects the page's own errors and warnings in an element that the dump of the page contains.
    watch = """<script>
        const note = (text) => { document.documentElement.dataset.wrong = text; };
        addEventListener("error", (event) => note(event.message));
        addEventListener("unhandledrejection", (event) => note(String(event.reason)));
        console.error = console.warn = (...all) => note(all.join(" "));
    </script>"""
    page.write_text(build_page(request.getfixturevalue(which)).replace("<head>", f"<head>{watch}", 1))
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1280,900", "--virtual-time-budget=20000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    html_tag = re.search(r"<html[^>]*>", done.stdout)
    assert html_tag, done.stderr[-2000:]
    assert "data-wrong" not in html_tag.group(0)
    assert done.stdout.count('class="main-svg"') >= 13


@given(st.lists(st.floats(0.001, 1e7), max_size=1500))
def test_a_drawn_distribution_is_a_distribution(values: list[float]) -> None:
    points = cdf_points(np.array(values))
    x, y = points["x"], points["y"]
    assert len(x) == len(y) <= max(len(values), MOST_POINTS)
    assert x == sorted(x)
    assert y == sorted(y)
    if values:
        assert y[-1] == 1
        assert x[-1] == rounded(max(values))
        # Every point must be on the true curve: y is the share of values at or below some value that rounds to x.
        counts = {rounded(float((np.array(values) <= v).mean())) for v in values}
        assert set(y) <= counts


def test_distributions_by_hand() -> None:
    assert cdf_points(np.array([3.0, np.nan, 1.0, 1.0, 2.0])) == {"x": [1, 1, 2, 3], "y": [0.5, 0.5, 0.75, 1]}
    got = ratio_to(np.array([1.0, 2.0, 3.0, np.nan]), np.array([2.0, 2.0, 2.0, 2.0]))
    assert got is not None
    assert (got["x"], rounded(got["faster"]), rounded(got["slower"])) == ([0.5, 1, 1.5], 0.33333, 0.33333)
    assert ratio_to(np.array([np.nan]), np.array([1.0])) is None
    assert rounded([1.234567, float("nan"), None, 0.0, 5.0]) == [1.2346, None, None, 0, 5]
