"""`cotenant kube` without a cluster: what a pod becomes, claims, slices, and errors as sentences."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from held_agent import HeldAgent, uuid_of
from pods import check_pod, patched, pod, share


@pytest.fixture
def pod_file(tmp_path: Path) -> Path:
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(pod(annotations=share("30%", memory="8Gi"))))
    return path


def test_what_a_pod_becomes(call: Any, pod_file: Path) -> None:
    code, out, _ = call("kube", "mutate", pod_file)
    assert code == 0
    after = yaml.safe_load(out)
    check_pod(after)
    assert after["spec"]["containers"][0]["resources"]["limits"]["cotenant.dev/share"] == "30"
    code, out, _ = call("kube", "mutate", pod_file, "--patch")
    assert patched(yaml.safe_load(pod_file.read_text()), json.loads(out)) == after
    assert json.loads(call("kube", "mutate", pod_file, "--json")[1])["items"] == [after]
    assert set(json.loads(call("kube", "mutate", pod_file, "--patch", "--json")[1])) == {"patch"}
    bare = call("kube", "mutate", pod_file, "--mounts=plugin")[1]
    assert "hostPath" not in bare


def test_claims(call: Any, pod_file: Path) -> None:
    code, out, _ = call("kube", "claims", pod_file)
    assert code == 0
    assert [thing["kind"] for thing in yaml.safe_load_all(out)] == ["ResourceClaimTemplate", "Pod"]
    code, _, err = call("kube", "claims", pod_file, "--kubernetes", "1.33")
    assert code == 2
    assert "needs consumable capacity" in err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: Deployment\n", "must hold exactly one Pod, not Deployment"),
        ("", "must hold exactly one Pod, not nothing"),
        ("kind: \x00Pod\n", "not valid YAML: unacceptable character"),
        ("kind: Pod\n---\nkind: Pod\n", "must hold exactly one Pod, not Pod, Pod"),
        ("kind: [", "line 1: not valid YAML"),
        ("kind: Pod\nmetadata: {annotations: {cotenant.dev/request: '30'}}\nspec: {containers: [{name: a}]}\n",
         "'30' is over 100% of a GPU: a plain number is a fraction, write 30% or 0.3"),
        ("kind: Pod\nmetadata: {annotations: {cotenant.dev/request: 0.3}}\nspec: {containers: [{name: a}]}\n",
         "0.3 is not a string; put it in quotes"),
    ],
)  # fmt: skip
def test_wrong_files_are_one_sentence(call: Any, tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    code, out, err = call("kube", "mutate", path)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_other_wrong_input(call: Any, tmp_path: Path, pod_file: Path) -> None:
    for arguments, sentence in (
        (("kube", "mutate", tmp_path / "none.yaml"), "cannot be read: no such file or directory"),
        (("kube", "claims", pod_file, "--kubernetes", "new"), "must be a version such as 1.34, not 'new'"),
        (("kube", "plugin", "--node", "n", "--refresh", "1m"), "must be between 0.1s and 6s, not 1m"),
        (("kube", "plugin", "--node", "n", "--mounts", "x"), "'x' is not webhook or plugin"),
        (("kube", "slice", "--node", "n", "--agent-dir", tmp_path), "no agent answers"),
    ):
        code, out, err = call(*arguments)
        assert code in (1, 2)
        assert out == ""
        assert sentence in err
        assert len(err.splitlines()) == 1


@pytest.fixture
def agent() -> Iterator[HeldAgent]:
    found = HeldAgent(Path(tempfile.mkdtemp(prefix="cot-")), count=2)
    yield found
    found.close()


def test_the_slice_of_a_node(call: Any, agent: HeldAgent) -> None:
    code, out, _ = call("kube", "slice", "--node", "node-a", "--agent-dir", agent.folder, "--whole", "1", "--json")
    assert code == 0
    (found,) = json.loads(out)["items"]
    devices = found["spec"]["devices"]
    assert [device["attributes"]["uuid"]["string"] for device in devices] == [uuid_of(0), uuid_of(1)]
    assert [device["attributes"]["type"]["string"] for device in devices] == ["share", "gpu"]
    assert found["spec"]["nodeName"] == "node-a"
    code, _, err = call("kube", "slice", "--node", "n", "--agent-dir", agent.folder, "--whole", "7")
    assert code == 2
    assert "the agent has no GPU '7'" in err
