"""The JupyterHub example: its profiles are pods that the webhook takes, its local command is one that `run` takes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pods import check_pod, patched, pod

from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.kube.admission.mutate import mutate
from cotenant.kube.shares import shares_of

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "jupyterhub" / "cotenant.py"


@pytest.fixture
def config() -> Any:
    """What the example sets."""
    found = SimpleNamespace(KubeSpawner=SimpleNamespace(), LocalProcessSpawner=SimpleNamespace())
    names: dict[str, Any] = {"get_config": lambda: found, "__name__": "config"}
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), names)
    found.tenant_name, found.names = names["tenant_name"], names
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
    config.names["COTENANT"] = "true"  # so that no agent is called
    spawner = SimpleNamespace(user=SimpleNamespace(name="ada"), user_options=options, cmd=None)
    asyncio.run(config.LocalProcessSpawner.pre_spawn_hook(spawner))
    assert spawner.cmd[:4] == ["true", "run", "--name=jupyter/ada", f"--request={request_}"]
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


@pytest.mark.parametrize(
    ("user", "server", "name"),
    [
        ("ada", "", "jupyter/ada"),
        ("ada@uni.edu", "", "jupyter/ada_40uni.edu"),
        ("ada", "gpu two", "jupyter/ada/gpu_20two"),
        ("ada/gpu", "", "jupyter/ada_2fgpu"),  # must differ from the server "gpu" of user "ada"
        ("ada_40uni.edu", "", "jupyter/ada_5f40uni.edu"),  # must differ from ada@uni.edu
        ("Zoë", "", "jupyter/Zo_c3_ab"),
    ],
)
def test_users_and_their_servers_are_tenants_of_different_names(config: Any, user: str, server: str, name: str) -> None:
    assert config.tenant_name(user, server) == name
    check_spec(TenantSpec(name))


def test_long_names_stay_names_and_different(config: Any) -> None:
    long = [config.tenant_name("x" * 80 + end) for end in ("a", "b")]
    assert long[0] != long[1]
    assert all(len(name) == 63 and check_spec(TenantSpec(name)) for name in long)


class HTTPError(Exception):
    """In place of tornado's, which comes with JupyterHub."""


@pytest.fixture
def tornado(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with that error."""
    web = ModuleType("tornado.web")
    web.HTTPError = HTTPError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tornado", ModuleType("tornado"))
    monkeypatch.setitem(sys.modules, "tornado.web", web)


@pytest.mark.usefixtures("tornado")
def test_a_refusal_is_what_the_user_sees(config: Any, tmp_path: Path) -> None:
    """JupyterHub shows `jupyterhub_message`: of an HTTPError at once, of others only on the page of a slow start."""
    tool = tmp_path / "cotenant"
    tool.write_text("#!/bin/sh\necho 'cotenant: --request: GPU 0 has 20% left to promise' >&2\nexit 2\n")
    tool.chmod(0o755)
    config.names["COTENANT"] = str(tool)
    spawner = SimpleNamespace(user=SimpleNamespace(name="ada"), user_options={}, cmd=["jupyterhub-singleuser"])
    with pytest.raises(HTTPError) as refused:
        asyncio.run(config.LocalProcessSpawner.pre_spawn_hook(spawner))
    said = "GPU 0 has 20% left to promise"
    assert (refused.value.args, refused.value.jupyterhub_message) == ((409, said), said)  # type: ignore[attr-defined]
    assert spawner.cmd == ["jupyterhub-singleuser"]


@pytest.mark.parametrize("chosen", [["large"], {"a": 1}, 7, None])
def test_a_choice_of_another_kind_is_none(config: Any, chosen: object) -> None:
    """By the hub's own interface a user's program may send anything."""
    spawner = SimpleNamespace(user=SimpleNamespace(name="ada"), user_options={"share": chosen})
    assert "--request=12%" in config.names["local_command"](spawner)


@pytest.mark.usefixtures("tornado")
def test_a_program_that_is_not_there_is_one_sentence(config: Any) -> None:
    config.names["COTENANT"] = "/nowhere/cotenant"
    spawner = SimpleNamespace(user=SimpleNamespace(name="ada"), user_options={}, cmd=["jupyterhub-singleuser"])
    with pytest.raises(HTTPError, match="cannot be run on the hub's machine: No such file"):
        asyncio.run(config.LocalProcessSpawner.pre_spawn_hook(spawner))
