"""Pages of the reference that are written from the code whenever the site is built, so that they cannot be stale.

`pages()` gives them as Markdown by their path below docs/: the options of every command, the settings of every file,
the live metrics, the calls from Python. `schemas()` gives the JSON Schemas of the files that users write, which the
site has in the same folder as these pages.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import Any

FOLDER = "reference"
# verb -> modules of its other forms, and the arguments by which cotenant.cli.main chooses each of them
OTHER_FORMS = {
    "plan": [("MODELS.yaml", "plan_llm")],
    "load": [("--openai URL", "load_llm")],
    "simulate": [
        ("--serving MODELS.yaml", "simulate_llm"),
        ("SERVICES.yaml", "simulate_serving"),
        ("--agent FILE", "simulate_turns"),
    ],
}
METRICS_OF = {  # program -> second words of the names of its metrics
    "Agent": ("gpu", "agent", "turn", "tenant"),
    "Server": ("server",),
    "Language models": ("model",),
    "Kubernetes": ("webhook", "plugin"),
    "Fleet controller": ("fleet",),
}


def pages() -> dict[str, str]:
    """Return the Markdown of each generated page, by its path below docs/."""
    from cotenant.cli.main import PANELS

    made = {f"{FOLDER}/options-{_slug(panel)}.md": _options(panel, list(verbs)) for panel, verbs in PANELS.items()}
    return made | {
        f"{FOLDER}/files.md": _files(),
        f"{FOLDER}/live-metrics.md": _live_metrics(),
        f"{FOLDER}/python.md": _python(),
    }


def schemas() -> dict[str, str]:
    """Return the JSON Schema of each kind of file that users write, by the schema's path below docs/."""
    from cotenant.api import file_formats

    return {
        f"{FOLDER}/{name}.schema.json": json.dumps(file_formats.schema(name), indent=1) for name in file_formats.names()
    }


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# ---- commands


def _options(panel: str, verbs: list[str]) -> str:
    import typer

    from cotenant.cli.main import VERBS

    text = [
        f"# Options: {panel[0].lower()}{panel[1:]}\n\nWhat `--help` says, written from the code. Examples and output: "
        "[commands](../commands.md).\n"
    ]
    for verb in verbs:
        forms = [("", VERBS[verb][0]), *((form, f"cotenant.cli.{name}") for form, name in OTHER_FORMS.get(verb, []))]
        for form, module in forms:
            command = typer.main.get_command(importlib.import_module(module).app)
            text += _command(f"cotenant {verb} {form}".strip(), command)
    return "\n".join(text)


def _command(name: str, command: Any) -> list[str]:
    """Return the sections of a command and of its subcommands."""
    parts = []
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        parts = [
            f"## {name}\n",
            f"{command.help.strip()}\n",
            _table(["option", "default", "what"], _parameters(command)),
        ]
    for sub, inner in subcommands.items():
        parts += _command(f"{name} {sub}", inner)
    return parts


def _parameters(command: Any) -> list[list[str]]:
    rows = []
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            named = f"`{(parameter.metavar or parameter.name.upper()).strip('[]')}`"
        else:
            named = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
        rows.append([named, _default(parameter.default), _escape(_cell(parameter.help or ""))])
    return rows


def _default(value: Any) -> str:
    """Return the default of an option or argument, as `--help` shows it. Empty for a switch, and if there is no default
    or the default is computed.
    """
    if value is None or callable(value) or isinstance(value, bool) or value in ("", (), []):
        return ""
    return f"`{_cell(', '.join(map(str, value)) if isinstance(value, list | tuple) else value)}`"


def _escape(text: str) -> str:
    """Put a backslash before each `<`, `>`, `*` and `_`, so that Markdown shows them as they are. Text with code in
    backticks is not changed.
    """
    return re.sub(r"([<>*_])", r"\\\1", text) if "`" not in text else text


# ---- files


def _files() -> str:
    from cotenant.api import file_formats

    text = [
        "# Files\n\nThe settings of every file that you write, from the code that reads it. Each has a JSON Schema, by "
        "which an editor completes and checks the file. `cotenant schema KIND --out KIND.schema.json` writes the "
        "schema; name it in the first line of your file, as in\n\n"
        "    # yaml-language-server: $schema=services.schema.json\n"
    ]
    for name, form in file_formats.FORMATS.items():
        schema = file_formats.schema(name)
        text += [
            f"## {name}\n",
            f"{form.title}: `{form.command}`. [JSON Schema]({name}.schema.json).\n",
            _settings(schema),
        ]
        for inner, part in schema.get("$defs", {}).items():
            where = _place(schema, inner)
            if where:
                text += [f"### {name}: {where}\n", _settings(part)]
    return "\n".join(text)


def _place(schema: dict[str, Any], name: str) -> str:
    """Return the name of the first setting whose value has the definition `name` of a schema (with `[]` if the value is
    a list), or an empty string if no setting refers to this definition.
    """
    for holder in (schema, *schema["$defs"].values()):
        for key, value in holder.get("properties", {}).items():
            if f'"#/$defs/{name}"' in json.dumps(value):
                return f"{key}[]" if value.get("type") == "array" else key
    return ""


def _settings(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = []
    for key, value in schema["properties"].items():
        default = value.get("default")
        shown = (
            "required"
            if key in required
            else ""
            if default in (None, [], {}) or isinstance(default, dict)
            else f"`{_value(default)}`"
        )
        rows.append([f"`{key}`", _cell(_kind(value)), shown, _cell(value.get("description", ""))])
    return _table(["setting", "value", "default", "what"], rows)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return value if isinstance(value, str) else json.dumps(value)


def _kind(value: dict[str, Any]) -> str:
    """Say in words how a value is written."""
    if "enum" in value:
        return ", ".join(f"`{_value(each)}`" for each in value["enum"])
    if "anyOf" in value:
        kinds = [_kind(each) for each in value["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in value:
        return "settings"
    if value.get("title") in ("time", "size", "part", "share"):
        return f"{value['title']}, such as `{value['examples'][-1]}`"
    kind = value.get("type", "anything")
    if isinstance(kind, list) and "array" in kind:
        return "text or a list"
    if kind == "array":
        return f"list of {_kind(value.get('items', {}))}"
    words = {"object": "settings", "string": "text", "integer": "whole number", "boolean": "`true`, `false`"}
    bounds = [f"{word} {value[key]:g}" for key, word in BOUNDS.items() if key in value]
    name = "text or number" if isinstance(kind, list) else words.get(kind, kind)
    return ", ".join([name, *bounds])


BOUNDS = {"exclusiveMinimum": "over", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}


# ---- live metrics


def _live_metrics() -> str:
    from cotenant.observability.metrics import every

    text = [
        "# Live metrics\n\nThe metrics that Prometheus scrapes, written from the code (`cotenant metrics` lists the "
        "same). The rules for names and labels, and the formulas of a run's metrics, are in [metrics](../metrics.md).\n"
    ]
    for title, words in METRICS_OF.items():
        rows = [
            [f"`{metric.name}`", metric.kind, ", ".join(metric.labels), _cell(metric.help)]
            for metric in every()
            if metric.name.split("_")[1] in words
        ]
        text += [f"## {title}\n", _table(["name", "kind", "labels", "what"], rows)]
    return "\n".join(text)


# ---- Python


def _python() -> str:
    import cotenant

    text = [
        "# Calls from Python\n\nWritten from the code. How they are used: [Python and notebooks](../howto/python.md).\n"
    ]
    results: dict[str, type] = {}
    for name in cotenant.__all__:
        found = getattr(cotenant, name)
        if inspect.isclass(found):
            results[name] = found
            continue
        text += [f"## cotenant.{name}\n", f"    {name}{_signature(found)}\n", _documented(found)]
        home = vars(inspect.getmodule(found))
        results |= {each: kind for each, kind in home.items() if inspect.isclass(kind) and hasattr(kind, "_repr_html_")}
    for name, found in results.items():
        text += [f"## {name}\n", _documented(found), "\n".join(_members(found))]
    return "\n".join(text)


def _members(found: type) -> list[str]:
    lines = []
    for name, member in vars(found).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        shown = f"`{name}`" if isinstance(member, property) else f"`{name}{_signature(function)}`"
        lines.append(f"- {shown}: {' '.join((inspect.getdoc(function) or '').split())}")
    return ["", *lines, ""]


def _signature(function: Any) -> str:
    """Parameters and result as the source has them, without self."""
    signature = inspect.signature(function)
    kept = [
        parameter.replace(annotation=_Written(parameter.annotation))
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return str(signature.replace(parameters=kept, return_annotation=_Written(signature.return_annotation)))


class _Written(str):
    """An annotation, shown without quotes."""

    __repr__ = str.__str__


def _documented(found: Any) -> str:
    return f"{inspect.getdoc(found) or ''}\n"
