"""The JupyterHub example: its profiles are pods that the webhook takes, its local command is one that `run` takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pods import check_pod, patched, pod

from cotenant.kube.mutate import mutate
from cotenant.kube.shares import shares_of

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "jupyterhub" / "jupyterhub_config.py"


@pytest.fixture
def config() -> Any:
    """What the example sets."""
    found = SimpleNamespace(KubeSpawner=SimpleNamespace(), LocalProcessSpawner=SimpleNamespace())
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), {"get_config": lambda: found})
    return found


def test_every_profile_is_a_pod_with_a_share(config: Any) -> None:
    profiles = config.KubeSpawner.profile_list
    assert [one["slug"] for one in profiles] == ["cpu", "small", "large"]
    assert [one["slug"] for one in profiles if one.get("default")] == ["cpu"]
    shares = []
    for one in profiles:
        annotations = one.get("kubespawner_override", {}).get("extra_annotations", {})
        notebook = pod("jupyter-ada", annotations=annotations, containers=[{"name": "notebook", "image": "x"}])
        after = patched(notebook, mutate(notebook))
        check_pod(after)
        shares += [(s.request, s.limit, s.memory_bytes) for s in shares_of(after)]
    assert shares == [(0.12, 0.5, 8 << 30), (0.5, 1.0, 32 << 30)]


@pytest.mark.parametrize(
    ("form", "request_"), [({"share": ["large"]}, "50%"), ({}, "12%"), ({"share": ["x; rm"]}, "12%")]
)
def test_a_local_notebook_is_a_tenant(config: Any, form: dict[str, list[str]], request_: str) -> None:
    options = config.LocalProcessSpawner.options_from_form(form)
    spawner = SimpleNamespace(user=SimpleNamespace(name="ada"), user_options=options, cmd=None)
    config.LocalProcessSpawner.pre_spawn_hook(spawner)
    assert spawner.cmd[:4] == ["cotenant", "run", "--name=jupyter/ada", f"--request={request_}"]
    assert spawner.cmd[-2:] == ["--", "jupyterhub-singleuser"]

    import typer

    from cotenant.cli.run import app

    command = typer.main.get_command(app)
    with command.make_context("run", spawner.cmd[2:]) as context:
        assert context.params["name"] == "jupyter/ada"
        assert context.params["memory"] in ("8Gi", "32Gi")
        assert context.params["command"] == ("jupyterhub-singleuser",) or context.params["command"] == [
            "jupyterhub-singleuser"
        ]
