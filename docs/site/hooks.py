"""Hooks that MkDocs calls while it builds the site.

They add the pages that are generated from the code, append the list of decisions to its page, insert the blank lines
that lists need, and refuse files that are loaded from other sites.
"""

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
    """Return a Markdown list with a link to each decision record: first those in force, then the superseded ones."""
    in_force, superseded = ["## In force\n"], ["\n## Superseded\n"]
    for path in sorted(folder.glob("0*.md")):
        text = path.read_text()
        title = re.sub(r"^\d+\. ", "", text.splitlines()[0].removeprefix("# ").split(": ", 1)[-1])
        lines = superseded if "\nStatus: superseded" in text else in_force
        lines.append(f"- [{path.name[:4]}]({path.name}): {title}")
    return "\n".join([*in_force, *superseded])


def with_blank_lines(markdown: str) -> str:
    """Insert a blank line between a paragraph and the list after it. Python-Markdown needs it, code hosts do not."""
    lines: list[str] = []
    for line in markdown.split("\n"):
        if LIST_ITEM.match(line) and lines and not CONTINUES.match(lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def on_files(files, config, **_):
    """Add the pages that are generated from the code (decision 0149)."""
    from mkdocs.structure.files import File

    for path, text in {**reference.pages(), **reference.schemas()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page, config, **_) -> str:
    if page.file.src_uri == "decisions/README.md":
        markdown += "\n" + decisions(Path(config["docs_dir"]) / "decisions") + "\n"
    return with_blank_lines(markdown)


def on_post_page(output: str, page, **_) -> str:
    """Raise ValueError, which ends the build, if a page would load a script, style, font or picture from elsewhere."""
    foreign = LOADED.search(output)
    if foreign:
        raise ValueError(f"{page.file.src_uri} loads from another site: {foreign.group(0)}")
    return output
