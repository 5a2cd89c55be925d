"""Every command, policy and experiment is documented, and `cotenant --help` is quick."""

from __future__ import annotations

import importlib.util
import math
import re
import resource
import subprocess
from pathlib import Path

import pytest
from command import command

from cotenant.cli.main import VERBS
from cotenant.cli.policies import policy_lists

DOCS = Path(__file__).resolve().parents[2] / "docs"


def headings(page: str) -> str:
    return "\n".join(line for line in (DOCS / page).read_text().splitlines() if line.startswith("#"))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_section(verb: str) -> None:
    module, help_line = VERBS[verb]
    assert importlib.util.find_spec(module) is not None, f"{module} does not exist"
    assert re.search(rf"^## cotenant {re.escape(verb)}\b", headings("commands.md"), flags=re.MULTILINE), (
        f"docs/commands.md has no section '## cotenant {verb}'"
    )
    assert help_line.endswith(".")


def test_no_section_is_of_a_verb_that_is_gone() -> None:
    named = set(re.findall(r"^## cotenant (\S+)", headings("commands.md"), flags=re.MULTILINE))
    assert named <= set(VERBS)


@pytest.mark.parametrize("kind", policy_lists())
def test_every_policy_is_described(kind: str) -> None:
    text = (DOCS / "policies.md").read_text()
    for name, summary in policy_lists()[kind].items():
        assert f"`{name}`" in text, f"docs/policies.md does not describe {kind} {name}"
        assert summary


def test_every_experiment_has_its_page_and_picture() -> None:
    folder = DOCS / "experiments"
    index = (folder / "README.md").read_text()
    files = sorted(folder.glob("*.yaml"))
    assert files
    for file in files:
        page = file.with_suffix(".md").read_text()
        assert f"cotenant sweep docs/experiments/{file.name}" in page
        assert f"({file.stem}.svg)" in page
        assert f"({file.stem}.md)" in index
        assert 1000 < file.with_suffix(".svg").stat().st_size < 150_000


@pytest.mark.parametrize("file", sorted((DOCS / "experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_can_be_read(file: Path) -> None:
    from cotenant.sim.jobs.sweep_file import read_sweep

    sweep = read_sweep(file)
    assert 20 <= len(sweep) <= 250
    assert len(sweep.axes["seed"]) >= 2


def test_every_test_that_a_user_report_names_is_there() -> None:
    """`folder/file`, `folder/file::test` or `folder/...::test`: a page that promises tests must not outlive them."""
    tests = DOCS.parent / "tests"
    named = re.findall(r"`(\w+)/(\w+|…)(?:::(\w+))?`", (DOCS / "user-reports.md").read_text())
    assert len(named) > 40
    for folder, file, test in named:
        pages = [tests / folder / f"{file}.py"] if file != "…" else sorted((tests / folder).glob("test_*.py"))
        assert any(page.exists() and f"def {test}" in page.read_text() for page in pages), f"{folder}/{file}::{test}"


def test_help_is_quick() -> None:
    """The target is 0.3 s on a quiet machine; counted in processor time, best of five, so that a busy one passes."""
    best = math.inf
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command("--help"), capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert "simulate" in done.stdout
    assert best < 0.6


def test_help_imports_nothing_heavy() -> None:
    """What keeps it quick, whatever the machine: none of the libraries that take long to import."""
    heavy = {"numpy", "polars", "numba", "pydantic", "yaml"}
    code = f"import sys, cotenant.cli.main; sys.exit(' '.join({heavy} & set(sys.modules)))"
    done = subprocess.run([command()[0], "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
