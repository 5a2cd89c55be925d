"""Links between pages lead somewhere, and every page has its place in the site's navigation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|^    [^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As code hosts and the site make them: lower case, spaces as hyphens, other punctuation dropped."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        for link in LINK.findall(CODE.sub("", page.read_text())):
            target, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            outside = DOCS in page.parents and DOCS not in file.parents  # the website contains only files of docs/
            if outside or not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_every_page_has_its_place_in_the_navigation() -> None:
    """Pages of reference/ are written when the site is built (test_reference.py)."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = [page for page in re.findall(r"[\w/-]+\.md", navigation) if not page.startswith("reference/")]
    decisions = DOCS / "decisions"
    expected = {
        page.relative_to(DOCS).as_posix() for page in PAGES if page.parent != decisions or page.name == "README.md"
    }
    assert len(listed) == len(set(listed)), "a page is listed twice"
    assert set(listed) == expected


def test_a_superseded_decision_names_the_page_that_lists_it() -> None:
    superseded = [page for page in (DOCS / "decisions").glob("0*.md") if "\nStatus: superseded" in page.read_text()]
    assert len(superseded) > 25
    for page in superseded:
        link = re.search(r"^Status: superseded by \[[^\]]+\]\(([^)]+)\)", page.read_text(), re.MULTILINE)
        assert link is not None, page.name
        assert f"(../decisions/{page.name})" in (page.parent / link[1]).read_text(), page.name
