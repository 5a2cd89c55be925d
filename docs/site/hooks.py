"""Steps of the site's build: pages from the code, the list of decisions, blank lines before lists, no foreign file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import reference

LIST_ITEM = re.compile(r"^(?:[-*]|\d+\.) ")
CONTINUES = re.compile(r"^(?:[-*] |\d+\. | |#|\||$)")
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\s(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")


def decisions(folder: Path) -> str:
    """A line per decision record, linked: those in force, then those that a later page sums up."""
    in_force, superseded = ["## In force\n"], ["\n## Superseded\n"]
    for path in sorted(folder.glob("0*.md")):
        text = path.read_text()
        title = re.sub(r"^\d+\. ", "", text.splitlines()[0].removeprefix("# ").split(": ", 1)[-1])
        lines = superseded if "\nStatus: superseded" in text else in_force
        lines.append(f"- [{path.name[:4]}]({path.name}): {title}")
    return "\n".join([*in_force, *superseded])


def with_blank_lines(markdown: str) -> str:
    """Python-Markdown, unlike code hosts, wants a blank line between a paragraph and its list."""
    lines: list[str] = []
    for line in markdown.split("\n"):
        if LIST_ITEM.match(line) and lines and not CONTINUES.match(lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def on_files(files, config, **_):
    """Adds the pages that are written from the code (decision 0149)."""
    from mkdocs.structure.files import File

    for path, text in {**reference.pages(), **reference.schemas()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page, config, **_) -> str:
    if page.file.src_uri == "decisions/README.md":
        markdown += "\n" + decisions(Path(config["docs_dir"]) / "decisions") + "\n"
    return with_blank_lines(markdown)


def on_post_page(output: str, page, **_) -> str:
    """Ends the build when a page would load a script, style, font or picture from another site."""
    foreign = LOADED.search(output)
    if foreign:
        raise ValueError(f"{page.file.src_uri} loads from another site: {foreign.group(0)}")
    return output
