"""Passages of prose in the tree: docstrings, comments, messages, help and paragraphs of docs, with where they are.

python tests/helpers/passages.py --seed 7 --count 160 [--kind comment]   # a sample as in docs/writing.md
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
C_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*', re.DOTALL)
WORD = re.compile(r"[(\"']?[A-Za-z]+(?:'s|-[a-z]+)*[.,:;)\"'?]*")
NOT_PROSE = re.compile(r"(?:noqa|type:|fmt:|pragma|!|-+ .* -+$)")
CALLS = (("help", re.compile(r"(?:^|\.)Option$|(?:^|\.)Argument$|Metric$")), ("message", re.compile(r"Error$|^LOG\.")))


class Passage(NamedTuple):
    """One passage. `kind`: docstring, comment, C comment, message, help, docs."""

    path: str
    line: int
    kind: str
    text: str


def is_prose(text: str) -> bool:
    """Whether a text has at least three words of letters only, so that paths, options and CSS do not count."""
    return sum(bool(WORD.fullmatch(each)) for each in text.split()) >= 3


def of_python(path: str, source: str) -> Iterator[Passage]:
    """Docstrings, strings of at least three words, and comments."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or isinstance(parents.get(node), ast.JoinedStr):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = [part.value if isinstance(part, ast.Constant) else "X" for part in parts]
        if not all(isinstance(word, str) for word in words) or not is_prose(text := "".join(map(str, words))):
            continue
        yield Passage(path, node.lineno, _kind(node, parents), " ".join(text.split()))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    block: list[tokenize.TokenInfo] = []
    for token in [*tokens, None]:
        alone = token is not None and not token.line[: token.start[1]].strip()
        if block and (token is None or not alone or token.start != (block[-1].start[0] + 1, block[-1].start[1])):
            text = " ".join(each.string.lstrip("#: ") for each in block)
            if is_prose(text) and not NOT_PROSE.match(text):
                yield Passage(path, block[0].start[0], "comment", text)
            block = []
        if token is not None:
            block.append(token)


def _kind(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    if isinstance(parents.get(node), ast.Expr):
        return "docstring"
    while not isinstance(node, ast.stmt) and node in parents:
        node = parents[node]
        if isinstance(node, ast.Call):
            for kind, pattern in CALLS:
                if pattern.search(ast.unparse(node.func)):
                    return kind
    return "message"


def of_c(path: str, source: str) -> Iterator[Passage]:
    """Comments, and string literals of at least three words."""
    for found in C_PARTS.finditer(source):
        text = found.group()
        kind = "message" if text.startswith('"') else "C comment"
        text = " ".join(re.sub(r"\n\s*\*", "\n", text.strip('"/*')).split())
        if is_prose(text) and not NOT_PROSE.match(text):
            yield Passage(path, source.count("\n", 0, found.start()) + 1, kind, text)


def of_markdown(path: str, source: str) -> Iterator[Passage]:
    """Paragraphs, without code and tables."""
    line = 1
    for part in re.split(
        r"(\n\s*\n)", re.sub(r"```.*?```", lambda m: "\n" * m.group().count("\n"), source, flags=re.S)
    ):
        if is_prose(part) and not part.lstrip().startswith(("|", "#")) and not part.startswith("    "):
            yield Passage(path, line + len(part) - len(part.lstrip("\n")), "docs", " ".join(part.split()))
        line += part.count("\n")


READERS = {".py": of_python, ".c": of_c, ".h": of_c, ".md": of_markdown}


def passages(*folders: str) -> list[Passage]:
    """All passages of the files under version control in these folders, in the order of their names."""
    listed = subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.splitlines() if Path(name).suffix in READERS and (ROOT / name).is_file()]
    return [p for name in names for p in READERS[Path(name).suffix](name, (ROOT / name).read_text(errors="replace"))]


def main() -> None:
    """Print a sample, each kind with its part of the whole."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--count", type=int, default=160)
    options.add_argument("--kind")
    given = options.parse_args()
    found = [p for p in passages("src", "native", "docs", "README.md") if given.kind in (None, p.kind)]
    for number, p in enumerate(sorted(random.Random(given.seed).sample(found, given.count)), 1):
        print(f"{number}. {p.kind} {p.path}:{p.line}\n   {p.text[:600]}")


if __name__ == "__main__":
    main()
