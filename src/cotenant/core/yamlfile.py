"""Reading of YAML files: duplicate keys are refused, and errors have their line.

PyYAML is imported on first use, so that programs start faster.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.textfile import read_text

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True)
class YamlFile:
    """The content of a YAML file, and the line of each part of the content."""

    content: Any
    file: str | None
    _tree: Any = field(default=None, repr=False)

    def line(self, where: tuple[int | str, ...] | str | None) -> int | None:
        """Return the line, counted from 1, of a part of the content. `where` is the path to this part, as keys and
        indices, or as text like a field in a message (`services[0].slo_ms`, `services.0.slo_ms`). If the file does not
        have this part, the line is that of the last part on the path that it has; None if it lacks even the first.
        """
        if isinstance(where, str):
            where = tuple(int(index) if index else name for index, name in _PART.findall(where))
        return _line_of(self._tree, where or ())

    @contextmanager
    def located(self) -> Iterator[None]:
        """Return a context that adds this file and the line of the field to InputErrors that lack them."""
        try:
            yield
        except InputError as error:
            if error.line is not None or (error.file is not None and error.file != self.file):
                raise
            raise InputError(
                error.message, file=self.file, line=self.line(error.field), field=error.field
            ) from None  # fmt: skip


def parse_yaml(text: str, file: str | Path | None = None) -> YamlFile:
    """Parse the single YAML document of a text. Raises InputError with the line if the text is not YAML or has
    duplicate keys.
    """
    documents = parse_documents(text, file)
    if len(documents) > 1:
        raise InputError("holds several documents (---); one is expected", file=file)
    return documents[0] if documents else YamlFile(None, None if file is None else str(file))


def parse_documents(text: str, file: str | Path | None = None) -> list[YamlFile]:
    """Parse all YAML documents of a text, each read as by `parse_yaml`."""
    import yaml

    name = None if file is None else str(file)
    found = []
    try:
        loader = yaml.SafeLoader(text)
        try:
            while loader.check_node():
                tree = loader.get_node()
                _refuse_traps(tree, name)
                found.append(YamlFile(loader.construct_document(tree), name, tree))
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise InputError(f"not valid YAML: {error.problem or error.context}", file=file, line=line) from None
    except RecursionError:
        raise InputError("not valid YAML: nested too deeply", file=file) from None
    # PyYAML raises other errors for characters and dates that do not exist, and Python raises one for very long numbers
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        said = "a number has thousands of digits" if "digits" in str(error) else str(error).splitlines()[0]
        raise InputError(f"not valid YAML: {said}", file=file) from None
    return found


def read_yaml(path: str | Path) -> YamlFile:
    """Read the single YAML document of a file. Raises InputError if it cannot be read, or as `parse_yaml` does."""
    _refuse_packed(Path(path))
    return parse_yaml(read_text(path), path)


def _refuse_packed(path: Path) -> None:
    """Raise InputError, with the command that unpacks the file, if it is compressed by gzip. Files that cannot be read
    pass."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
            if packed:
                source = shlex.quote(path.name)
                command = f"gunzip -k {source}" if path.suffix == ".gz" else f"gzip -dc < {source} > unpacked.yaml"
                raise InputError(f"the file is compressed; unpack it with: {command}", file=path)


def _refuse_traps(tree: Any, file: str | None) -> None:
    """Raise InputError for duplicate keys: YAML forbids them, but PyYAML silently takes the last one. Values such as
    22:30, which PyYAML reads as numbers of base 60, become text, as in YAML 1.2 and Kubernetes.
    """
    import yaml

    pending, seen = [tree], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:  # an alias stands for a node that was visited already
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and ":" in node.value:
            node.tag = "tag:yaml.org,2002:str"
        if isinstance(node, yaml.SequenceNode):
            pending += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, _ in node.value:
                # the merge key `<<` may occur several times, and the mappings that it merges may have the same keys
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines:
                    raise InputError(f"{name} is already given on line {lines[name]}", file=file, line=line, field=name)
                lines[name] = line
            pending += reversed([value for _, value in node.value])


def _line_of(tree: Any, where: tuple[int | str, ...]) -> int | None:
    if tree is None:
        return None
    import yaml

    line: int = tree.start_mark.line + 1
    for depth, part in enumerate(where):
        if isinstance(tree, yaml.MappingNode):
            pair = next(((k, v) for k, v in tree.value if k.value == str(part)), None)
            if pair is None:
                return line if depth else None
            line, tree = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(tree, yaml.SequenceNode) and isinstance(part, int | str) and str(part).isdigit():
            if int(part) >= len(tree.value):
                return line
            tree = tree.value[int(part)]
            line = tree.start_mark.line + 1
        else:
            return line
    return line
