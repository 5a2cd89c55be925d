"""`cotenant bench colocation` in virtual time: form of the result, the page, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cotenant.bench.be_loads import soft_kernel
from cotenant.bench.colocation import parse_be, parse_ls, parse_schemes, quantile, rate_between
from cotenant.bench.harness import Bench
from cotenant.cli.bench import app
from cotenant.cli.profile import app as profile_app
from cotenant.core.errors import InputError
from cotenant.policy.colocation import SCHEMES
from cotenant.report.colocation import COLUMNS, build_page, figures, notes

VIRTUAL = ["colocation", "--gpus", "virtual", "--seconds", "0.5", "--be", "mm4096,add256"]


@pytest.fixture(scope="module")
def result() -> dict[str, dict[str, dict[str, float]]]:
    done = CliRunner().invoke(app, [*VIRTUAL, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout)
    return found


def test_every_scheme_has_a_row_for_every_load(result: dict[str, dict[str, dict[str, float]]]) -> None:
    assert list(result) == [scheme.name for scheme in SCHEMES]
    for loads in result.values():
        assert list(loads) == ["mm4096", "add256"]
        for row in loads.values():
            keys = {"ls_p50_ms", "ls_p99_ms", "ls_p99_over_alone", "be_over_alone", "slo_attainment", "be_kernel_ms"}
            assert keys <= set(row)
            assert row["ls_p99_ms"] == pytest.approx(row["ls_p99_over_alone"] * row["ls_alone_p99_ms"])


def test_the_gate_keeps_latency_and_concurrency_does_not(result: dict[str, dict[str, dict[str, float]]]) -> None:
    for load in ("mm4096", "add256"):
        assert result["tidal"][load]["ls_p50_over_alone"] < 1.2
        assert result["mps-plus"][load]["ls_p50_over_alone"] > 2  # on an H200 it is 82 and 3.0
        assert result["tidal"][load]["be_over_left"] > 0.95


def test_a_page_holds_every_row_and_needs_no_network(
    result: dict[str, dict[str, dict[str, float]]], tmp_path: Path
) -> None:
    recorded, page = tmp_path / "r.json", tmp_path / "p.html"
    recorded.write_text(json.dumps(result))
    done = CliRunner().invoke(app, ["colocation", "--from", str(recorded), "--html", str(page)])
    assert done.exit_code == 0
    for scheme in SCHEMES:
        assert scheme.name in done.stdout
    text = page.read_text()
    assert text.count("<tr") == 1 + 2 * len(SCHEMES)
    assert all(title in text for _, title, _ in COLUMNS)
    assert "<script src=" not in text


def test_names_on_the_page_are_text() -> None:
    row: dict[str, Any] = {key: 1.0 for key, _, _ in COLUMNS}
    page = build_page({"tidal": {"<b>x": row}}, "t")
    assert "<b>" not in page.split("<script>")[0]


def test_a_promise_is_named_where_its_line_is(result: dict[str, dict[str, dict[str, float]]]) -> None:
    """The label of the line at 1.05 stands at the exponent of 1.05, as a logarithmic axis wants it."""
    for figure in figures(result):
        line = next(shape for shape in figure["layout"]["shapes"] if shape["y0"] == shape["y1"])
        label = next(note for note in figure["layout"]["annotations"] if note["text"] == "+5 %")
        assert 10 ** label["y"] == pytest.approx(line["y0"])


def test_loads_and_schemes_have_different_marks_and_ticks_state_whole_factors(
    result: dict[str, dict[str, dict[str, float]]],
) -> None:
    frontier, by_load = figures(result)
    symbols = [trace["marker"]["symbol"] for trace in frontier["data"]]
    filled = {symbol for each in symbols if isinstance(each, list) for symbol in each}
    assert filled.isdisjoint(each for each in symbols if isinstance(each, str))
    for figure in (frontier, by_load):
        axis = figure["layout"]["yaxis"]
        assert dict(zip(axis["ticktext"], axis["tickvals"], strict=True))["50x"] == 50


def test_long_paths_leave_room_for_the_figures(result: dict[str, dict[str, dict[str, float]]], tmp_path: Path) -> None:
    """Two profiles of one name in different folders are told apart by what differs, and no figure is dropped."""
    paths = ["profile:/a/very/long/way/to/one/train.json", "profile:/a/very/long/way/to/two/train.json"]
    rows = {"tidal": dict.fromkeys(paths, result["tidal"]["mm4096"])}
    recorded = tmp_path / "r.json"
    recorded.write_text(json.dumps(rows))
    done = CliRunner().invoke(app, ["colocation", "--from", str(recorded)], env={"COLUMNS": "80"})
    assert "one/train.json" in done.stdout
    row = result["tidal"]["mm4096"]
    assert f"{row['ls_p99_over_alone']:.2f}" in done.stdout
    assert f"{row['be_over_left']:.1%}" in done.stdout
    assert "/a/very" not in done.stdout


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_figures_are_never_split_and_columns_left_out_are_named(
    result: dict[str, dict[str, dict[str, float]]], tmp_path: Path, columns: int
) -> None:
    recorded = tmp_path / "r.json"
    recorded.write_text(json.dumps(result))
    said = CliRunner().invoke(app, ["colocation", "--from", str(recorded)], env={"COLUMNS": str(columns)}).stdout
    row = result["tidal"]["mm4096"]
    line = next(line for line in said.splitlines() if "tidal" in line)
    assert f"{row['ls_p99_over_alone']:.2f}" in line
    assert f"{row['be_over_left']:.1%}" in line
    assert len(line) <= columns
    whole = any("BE of what LS leaves" in line and "p99 over alone" in line for line in said.splitlines()[:2])
    assert whole == (columns == 140)
    for title, shown in (("in time", f"{row['slo_attainment']:.1%}"), ("LS p50, ms", f"{row['ls_p50_ms']:.2f}")):
        assert (shown in line) != (title in said.partition("left out at")[2].partition("\n")[0])


def test_few_requests_are_said_to_be_rough(result: dict[str, dict[str, dict[str, float]]]) -> None:
    said = " ".join(notes(result))
    assert "is only rough" in said
    assert "Distinguishing an attainment of 99 % from 99.5 % takes 1,597" in said
    many = {"tidal": {"mm4096": result["tidal"]["mm4096"] | {"requests": 3000}}}
    assert "rough" not in " ".join(notes(many))
    low, high = result["tidal"]["mm4096"]["slo_attainment_ci95"]  # type: ignore[misc]
    assert low <= result["tidal"]["mm4096"]["slo_attainment"] <= high


def test_ranges_of_the_service_alone_go_upwards(result: dict[str, dict[str, dict[str, float]]]) -> None:
    row = result["tidal"]["mm4096"]
    slow, fast = {"ls_alone_p50_ms": 1.3, "ls_alone_p99_ms": 2.5}, {"ls_alone_p50_ms": 1.2, "ls_alone_p99_ms": 4.5}
    said = " ".join(notes({"tidal": {"mm4096": row | slow, "add256": row | fast}}))
    assert "LS alone: p50 1.20 to 1.30 ms, p99 2.50 to 4.50 ms." in said


def test_more_than_ls_leaves_is_explained(result: dict[str, dict[str, dict[str, float]]]) -> None:
    row = result["tidal"]["mm4096"]
    assert "over 100 %" in " ".join(notes({"mps-plus": {"mm4096": row | {"be_over_left": 1.12}}}))
    assert "over 100 %" not in " ".join(notes({"tidal": {"mm4096": row | {"be_over_left": 1.01}}}))


def test_a_p99_that_the_host_made_is_named(result: dict[str, dict[str, dict[str, float]]]) -> None:
    """Late requests decide a p99 from 1 % of them on, on either side; the worst come first."""

    def said(*late: tuple[int, int], calm: float | None = None) -> str:
        more = {"requests": 300, "ls_p99_over_alone_calm": calm}
        row: dict[str, Any] = result["tidal"]["mm4096"] | more
        return " ".join(
            notes({f"s{n}": {"mm4096": row | {"late_requests": list(pair)}} for n, pair in enumerate(late)})
        )

    assert "host" not in said((0, 0), (2, 2))
    assert "s0 beside mm4096 (3 of 300)." in said((0, 3))
    calm = "s0 beside mm4096 (4 of 300; p99 over alone is 1.25 without the blocks that had late requests)."
    assert calm in said((4, 1), calm=1.25)
    assert "s4 beside mm4096 (8 of 300); s1" in (many := said((0, 3), (0, 7), (0, 6), (0, 5), (0, 8)))
    assert many.endswith("; and 1 more.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ls", "vgg:4:100"],
        ["--ls", "resnet50:4:0"],
        ["--ls", "resnet50:0:10"],
        ["--be", "mm"],
        ["--be", "sub4"],
        ["--schemes", "best"],
        ["--be", "profile:/nowhere"],
        ["--be", "profile:/"],
        ["--be", "add0"],
        ["--duty-cycle", "x"],
        ["--duty-cycle", "0%"],
        ["--block", "1s"],
        ["--copy-inputs"],
        ["--gpus", "nosuch"],
    ],
)
def test_what_is_wrong_is_refused_before_any_work(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["colocation", "--gpus", "virtual", *arguments])
    assert isinstance(done.exception, InputError)


def test_schemes_are_named_once_and_what_is_wrong_is_theirs() -> None:
    assert [scheme.name for scheme in parse_schemes("tidal,orion,tidal")] == ["tidal", "orion"]
    with pytest.raises(InputError, match="--schemes: unknown co-location scheme 'best'"):
        parse_schemes("tidal,best")


def test_a_gpu_that_is_not_here_is_wrong_input() -> None:
    done = CliRunner().invoke(profile_app, ["kernels", "--gpus", "nosuch", "--", "true"])
    assert isinstance(done.exception, InputError)
    assert "this machine has no GPU" in str(done.exception)
    with pytest.raises(InputError, match="this machine has no GPU"), Bench("nosuch", {}):
        pass


def test_a_file_of_something_else_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"tidal": {"mm4096": {"ls_p50_ms": 1}}}')
    done = CliRunner().invoke(app, ["colocation", "--from", str(path)])
    assert isinstance(done.exception, InputError)


def test_more_work_in_flight_is_simulated() -> None:
    """200 us of short kernels in flight: LS waits for more of them."""
    p50 = []
    for in_flight_us in ("50", "200"):
        more = ["--in-flight-us", in_flight_us, "--requests", "40", "--be", "mm2048", "--schemes", "tidal", "--json"]
        done = CliRunner().invoke(app, ["colocation", "--gpus", "virtual", *more], catch_exceptions=False)
        p50.append(json.loads(done.stdout)["tidal"]["mm2048"]["ls_p50_ms"])
    assert p50[0] + 0.05 < p50[1]


def test_order_statistics_and_rates() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.99) == pytest.approx(9.9)
    block = {"begin_ns": 0, "end_ns": 4 * 10**9, "count": 40, "marks": [(2 * 10**9, 30)]}
    assert rate_between(block, 0, 2 * 10**9) == 15
    assert rate_between(block, 10**9, 3 * 10**9) == 10  # 15 in the first second and 5 in the second
    assert parse_ls("resnet50:4:100").batch == 4
    assert parse_be("mm4096,train-transformer") == ["mm4096", "train-transformer"]
    assert parse_be("train-resnet50:96") == ["train-resnet50:96"]
    for wrong in ("train-resnet50:0", "train-resnet50:", "mm4096:2"):
        with pytest.raises(InputError, match="unknown best-effort load"):
            parse_be(wrong)


def test_a_larger_batch_has_longer_kernels_on_the_software_gpu() -> None:
    assert soft_kernel("train-resnet50") == soft_kernel("train-resnet50:32")
    assert soft_kernel("train-resnet50:96")[0] == 3 * soft_kernel("train-resnet50")[0]
