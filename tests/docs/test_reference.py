"""What the site's reference has is what the code has: every command, option, setting, metric and call."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from cotenant.api import file_formats
from cotenant.cli.main import PANELS, VERBS
from cotenant.core.errors import InputError
from cotenant.observability.metrics import every

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "agent": "gpus: soft\nquota: 100ms\nidle_credit: 0\ncopies: {period_bytes: 8MiB}\n"
    "colocation: {scheme: tidal, duty_cycle: 100%, clock: 0.92, run_ahead: never}\n"
    "tenants: [{name: a, request: 10%..50%, limit: 0.5, memory: {bytes: 8GiB, enforce: driver}, gpus: [0]},"
    " {name: b, user: alice, mechanism: mps, work_class: compute}]",
    "services": "gpus: {count: 2, model: RTX2080Ti}\nlisten: {max_body: 64MiB, drain: 30s}\nreplan: {period: 20s}\n"
    "partitions: [20%, 0.5]\nservices: [{name: a, rate_rps: 60, slo_ms: 108, class: best-effort, memory: 8GiB}]\n"
    "applications: [{name: t, graph: traffic, rate_rps: 5, slo_ms: 600}]",
    "models": "gpus: {count: 1, model: soft, memory: 512MiB}\nidle: 10s\n"
    "models: [{name: a, command: 'serve {port}', memory: 256MiB, keep: 1}]",
    "cluster": "nodes: [{count: 2, gpus: 8, gpu: H100-80GB, memory: 1TiB}, {gpus: 4, cpus: 32}]",
    "sweep": "title: t\ncluster: 4x8\njobs: 300\nload: [0.7, 1.5]\nordering: [fifo, las]\nseed: [1, 2]",
    "job": "command: [python, train.py]\nshare: 30%\nmemory: 16GiB\nduration: 2h\nenv: {SEED: '1'}\nretries: 1",
    "experiment": "services: services.yaml\nload: {rate: x1, rates: {cats: [50, 200]}, step: 10s}\nduration: 30s",
}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/site/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made: dict[str, str] = generator().pages()
    return made


def test_every_page_is_in_the_navigation(pages: dict[str, str]) -> None:
    listed = re.findall(r"reference/[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(pages)


def test_every_command_has_its_section_with_every_option(pages: dict[str, str]) -> None:
    import typer

    for verbs in PANELS.values():
        for verb in verbs:
            page = next(text for text in pages.values() if re.search(rf"^## cotenant {verb}\b", text, re.MULTILINE))
            command = typer.main.get_command(importlib.import_module(VERBS[verb][0]).app)
            parts = [*getattr(command, "commands", {}).values()] or [command]
            for option in (name for part in parts for param in part.params for name in param.opts):
                if option.startswith("--") and option != "--help":
                    assert f"`{option}`" in page, f"{option} of cotenant {verb}"


def test_every_option_and_argument_says_what_it_is(pages: dict[str, str]) -> None:
    silent = [
        f"{path}: {line}"
        for path, text in pages.items()
        if "/options-" in path
        for line in text.splitlines()
        if line.startswith("| `") and line.endswith("|  |")
    ]
    assert not silent


def test_every_live_metric_has_one_row(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(cotenant_\w+)` \|", pages["reference/live-metrics.md"], re.MULTILINE)
    assert sorted(rows) == sorted(metric.name for metric in every())


def test_every_call_is_described(pages: dict[str, str]) -> None:
    import cotenant

    page = pages["reference/python.md"]
    for name in cotenant.__all__:
        section = re.search(rf"^## (?:cotenant\.)?{name}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section is not None, name
        assert len(section[1].strip()) > 40, name


def described(schema: dict[str, Any]) -> list[str]:
    """Settings of a schema that nothing describes."""
    parts = [schema, *schema.get("$defs", {}).values()]
    return [key for part in parts for key, value in part.get("properties", {}).items() if not value.get("description")]


@pytest.mark.parametrize("name", file_formats.names())
def test_a_schema_is_valid_describes_every_setting_and_takes_an_example(name: str) -> None:
    schema = file_formats.schema(name)
    json.dumps(schema, allow_nan=False)
    Draft202012Validator.check_schema(schema)
    assert described(schema) == []
    Draft202012Validator(schema).validate(yaml.safe_load(EXAMPLES[name]))


@pytest.mark.parametrize(
    "text",
    [
        "quota: 100",
        "colocation: {scheme: tidall}",
        "colocation: {duty: 50%}",
        "discipline: fair",
        "tenants: [{name: a, mechanism: foo}]",
        "tenants: [{name: a, oversubscribe: yes}]",
    ],
)
def test_the_agents_schema_refuses_what_the_agent_refuses(text: str) -> None:
    assert not Draft202012Validator(file_formats.schema("agent")).is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("name", file_formats.names())
def test_a_schema_refuses_a_setting_that_does_not_exist(name: str) -> None:
    wrong = yaml.safe_load(EXAMPLES[name]) | {"no_such_setting": 1}
    errors = list(Draft202012Validator(file_formats.schema(name)).iter_errors(wrong))
    # the further keys of a models file are those of a services file, so they are not errors
    assert bool(errors) == (name != "models")


def test_the_shipped_files_fit_their_schemas() -> None:
    sweeps = sorted((ROOT / "docs/experiments").glob("*.yaml"))
    experiments = sorted((ROOT / "src/cotenant/loadgen/mixes").glob("*.yaml"))
    assert sweeps
    assert experiments
    for name, files in (("sweep", sweeps), ("experiment", experiments)):
        validator = Draft202012Validator(file_formats.schema(name))
        for file in files:
            validator.validate(yaml.safe_load(file.read_text()))


def test_an_unknown_file_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown file 'fleet'; known: agent, services"):
        file_formats.schema("fleet")
