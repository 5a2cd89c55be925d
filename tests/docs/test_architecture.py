"""docs/architecture.md names files that exist, in folders that its section names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs/architecture.md"
ROOTS = (ROOT, ROOT / "src/cotenant", ROOT / "native", ROOT / "native/shim", ROOT / "docs")
QUOTED = re.compile(r"`([\w./-]+)`")
IN_DIAGRAM = re.compile(r"(?<![\w./-])[\w/]+\.(?:py|c|h)\b")
FILE = re.compile(r"[\w./-]+\.(?:py|c|h|S|inc|toml|yaml|md)|(?:[\w-]+/)*Makefile")
COLUMN = re.compile(r"^\| `(\w+)`(?:, `\w+`)* \| (.*)", re.MULTILINE)  # a package and what it is responsible for
NOT_OF_THE_TREE = {"run.json", "models.yaml", "services.yaml"}


def folders_above(path: Path) -> set[Path]:
    """The folders of a path, itself among them where it is one, up to the project's."""
    inside = {path, *path.parents} if path.is_dir() else set(path.parents)
    return {folder for folder in inside if folder.is_relative_to(ROOT)}


def missing(section: str) -> list[str]:
    """Paths of a section that are neither below a root nor in a folder that the section names."""
    diagrams = "\n".join(line for line in section.splitlines() if line.startswith("    "))
    named = {*QUOTED.findall(section), *IN_DIAGRAM.findall(diagrams)} - NOT_OF_THE_TREE
    named = {name for name in named if "NAME" not in name and not name.startswith("/")}
    wanted = {name for name in named if "/" in name or FILE.fullmatch(name)}
    folders = set(ROOTS)
    while True:  # a path that was found names folders, from which other paths may start
        paths = {name: folder / name for folder in folders for name in wanted if (folder / name).exists()}
        named_now = {above for name, path in paths.items() if "/" in name for above in folders_above(path)}
        if named_now <= folders:
            return sorted(wanted - set(paths))
        folders |= named_now


def test_sections_name_files_that_exist() -> None:
    page = PAGE.read_text()
    assert "## The server" in page
    table = page.split("\n## ")[0]
    sections = [COLUMN.sub("", table), *page.split("\n## ")[1:]]
    found = {section.split("\n")[0]: missing(section) for section in sections}
    assert not {title: names for title, names in found.items() if names}


def test_packages_have_the_rooms_that_the_table_names() -> None:
    rows = COLUMN.findall(PAGE.read_text().split("\n## ")[0])
    assert len(rows) > 15
    for package, owns in rows:
        home = ROOT / "src/cotenant" / package
        rooms = [name for name in QUOTED.findall(owns) if name.endswith(("/", ".py"))]
        gone = [name for name in rooms if not any((folder / name).exists() for folder in (home, *ROOTS))]
        assert not gone, f"{package} has no {', '.join(gone)}"


def test_a_dead_name_is_found() -> None:
    assert missing("`policy/jobs/rounds.py` and `jobs.py`") == ["jobs.py"]
    assert missing("`policy/partition/kernel.py`") == ["policy/partition/kernel.py"]
    assert missing("    server.py -> book.py\n\n`fleet/controller/`") == ["book.py"]
    assert missing("`policy/jobs/rounds.py`, `ordering.py` and `native/shim`") == []
