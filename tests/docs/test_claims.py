"""Every figure of the README and every section of docs/benchmarks that has figures has its row in claims.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
CLAIMS = (BENCHMARKS / "claims.md").read_text()
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
LINK = re.compile(r"\]\([^)]*\)")
FIGURE = re.compile(r"^\|.*\d|\d+(?:\.\d+)? (?:ms|s|%|us|GB/s)\b", re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    """Cells of all rows of tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def slug(heading: str) -> str:
    """The anchor of a heading, as test_pages.py makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).strip().replace(" ", "-")


def test_every_figure_of_the_readme_has_its_row() -> None:
    """Cells with a web address are other projects' own figures."""
    claims = {row[0]: row for row in rows(CLAIMS) if len(row) == 6}
    said = [row for row in rows((ROOT / "README.md").read_text()) if any("](docs/benchmarks/" in cell for cell in row)]
    assert said
    for name, *cells in said:
        assert name in claims, f"{name}: no row in claims.md"
        row = claims[name]
        assert all(row), f"{name}: a cell is empty"
        assert re.search(r"\d{4}-\d\d-\d\d", row[3]), f"{name}: no date"
        own = [cells[0], *(cell for cell in cells[1:] if "](docs/benchmarks/" in cell or len(cells) == 2)]
        missing = set(NUMBER.findall(LINK.sub("]", " ".join(own)))) - set(NUMBER.findall(f"{row[1]} {row[3]}"))
        assert not missing, f"{name}: {missing} of the README have no interval in claims.md"


def test_every_section_with_figures_has_its_row() -> None:
    missing = []
    for page in sorted(BENCHMARKS.glob("*.md")):
        for part in re.split(r"^(?=#+ )", page.read_text(), flags=re.MULTILINE) if page.name != "claims.md" else ():
            heading, _, body = part.partition("\n")
            target = page.name if heading.startswith("# ") else f"{page.name}#{slug(heading)}"
            figures = FIGURE.search(body) and (not heading.startswith("# ") or "\n## " not in page.read_text())
            if figures and f"({target})" not in CLAIMS:
                missing.append(target)
    assert not missing, f"no row in claims.md: {missing}"


def section(target: str) -> str:
    """The part of a page below a heading PAGE#ANCHOR, up to the next one of its level. PAGE: the whole page."""
    page, _, anchor = target.partition("#")
    text = (BENCHMARKS / page).read_text()
    if not anchor:
        return text
    parts = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    levels = [len(part) - len(part.lstrip("#")) for part in parts]
    first = next((i for i, part in enumerate(parts) if levels[i] and slug(part.partition("\n")[0]) == anchor), None)
    assert first is not None, f"{target}: no such heading"
    end = next((i for i in range(first + 1, len(parts)) if levels[i] <= levels[first]), len(parts))
    return "".join(parts[first:end])


def numbers(text: str) -> set[str]:
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def test_every_figure_of_a_section_s_row_is_in_the_section() -> None:
    """A figure is rounded in the row as it is on the page, so that both can be compared."""
    wrong = {}
    cited = [row for row in rows(CLAIMS) if len(row) == 5 and row[0].startswith("[")]
    assert len(cited) > 80
    for name, figure, *_ in cited:
        target = name[name.rindex("](") + 2 : -1]
        if missing := numbers(figure) - numbers(section(target)):
            wrong[target] = sorted(missing)
    assert not wrong


def test_the_second_harness_imports_nothing_of_the_project() -> None:
    programs = list((ROOT / "bench" / "independent").glob("*.py"))
    assert programs
    for path in programs:
        imports = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not {"cotenant", "bench"} & set(imports), path.name
