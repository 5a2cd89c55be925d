"""The Helm chart, from the very functions that make the plain manifests: values become references to .Values."""

from __future__ import annotations

import re
from typing import Any

from cotenant.kube import values as choices
from cotenant.kube.manifests import objects
from cotenant.kube.values import Values, to_yaml

_MARK = re.compile(r"@@([A-Za-z.]+)@@")
_SCALAR = re.compile(r"""^(?P<head>\s*(?:- )*(?:[A-Za-z0-9_./-]+: )?)(?P<quote>['"]?)(?P<text>.*@@.*)(?P=quote)$""")
RELEASE = "Release.Namespace"


class ChartValues(Values):
    """Values that are marks; `optional` ones always count as there, and are made conditional in the text."""

    def __init__(self) -> None:
        super().__init__(namespace=f"@@{RELEASE}@@")

    def __call__(self, path: str) -> Any:
        super().__call__(path)
        return f"@@{path}@@"

    def join(self, pattern: str, *paths: str) -> Any:
        text = pattern
        for path in paths:
            text = text.replace("%v", self(path), 1)
        return text

    def when(self, path: str) -> bool:
        return True


def files() -> dict[str, str]:
    """The chart's files by name."""
    values = ChartValues()
    templates: dict[str, list[str]] = {}
    for condition, thing in objects(values):
        part = thing["metadata"].get("labels", {}).get("app.kubernetes.io/component", "dra")
        text = render(thing)
        if condition is not None:
            text = f"{{{{- if .Values.{condition} }}}}\n{text}{{{{- end }}}}\n"
        templates.setdefault(part, []).append(text)
    found = {f"templates/{part}.yaml": "---\n".join(texts) for part, texts in templates.items()}
    found["templates/NOTES.txt"] = NOTES
    found["values.yaml"] = choices.as_yaml()
    found["Chart.yaml"] = CHART
    return found


def render(thing: dict[str, Any]) -> str:
    """One object as a template."""
    return "".join(_line(line) for line in to_yaml(thing).splitlines())


def _line(line: str) -> str:
    if "@@" not in line:
        return line + "\n"
    key = re.match(r"^(\s*)(runtimeClassName): ", line)
    text = _SCALAR.sub(lambda match: match.group("head") + _reference(match.group("text")), line)
    if key is not None:  # only there when it says something
        path = _MARK.search(line)
        assert path is not None
        return f"{{{{- if .Values.{path.group(1)} }}}}\n{text}\n{{{{- end }}}}\n"
    return text + "\n"


def _reference(text: str) -> str:
    """A template action for a scalar with marks in it. JSON is YAML, whatever the value is."""
    paths = [path if path == RELEASE else f"Values.{path}" for path in _MARK.findall(text)]
    if _MARK.fullmatch(text):
        return f"{{{{ toJson .{paths[0]} }}}}"
    pattern = _MARK.sub("%v", text).replace('"', '\\"')
    return f'{{{{ printf "{pattern}" {" ".join("." + path for path in paths)} | toJson }}}}'


CHART = """\
apiVersion: v2
name: cotenant
description: Shares of GPUs for pods, without a change to their images.
type: application
version: 0.1.0
appVersion: "0.1.0"
kubeVersion: ">=1.28.0-0"
"""

NOTES = """\
A pod asks for a piece of a GPU with annotations:

    metadata:
      annotations:
        cotenant.dev/request: "30%"
        cotenant.dev/limit: "60%"
        cotenant.dev/memory: 8Gi

Who has which piece now:

    kubectl -n {{ .Release.Namespace }} exec ds/cotenant-node -c agent -- cotenant ps --dir /run/cotenant/agent
"""
