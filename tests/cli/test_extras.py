"""An install without extras: what it can do it does, and what it cannot names the extra that it needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import base_install
import pytest
from waiting import wait_for

from cotenant.cli.main import VERBS
from cotenant.core.extras import EXTRAS, extra_of

ROOT = Path(__file__).resolve().parents[2]
# For each command: arguments with which it runs until it needs an optional package, and the extra that has it ("" if
# the base has it).
NEEDS = {
    "simulate": ("--trace x.csv", "sim"),
    "sweep": ("x.yaml --out x", "sim"),
    "compare": ("x", "report"),
    "explain": ("x 1", "report"),
    "trace": ("inspect x.csv", "sim"),
    "mig": ("plan --jobs 1", "plan"),
    "profile": ("job x.yaml", "sim"),
    "predict": ("--input x.csv", "sim"),
    "doctor": ("", ""),
    "agent": ("--gpus nonsense", ""),
    "run": ("-- true", ""),
    "ps": ("", ""),
    "set": ("x", ""),
    "top": ("", ""),
    "stop": ("x", ""),
    "park": ("x", ""),
    "resume": ("x", ""),
    "preempt": ("--gpu 0", ""),
    "bench": ("gateway", "serve"),
    "kube": ("webhook --self-signed", "kube"),
    "slurm": ("prolog", ""),
    "plan": ("services.yaml", "plan"),
    "plan-convert": ("services.yaml --out x", "plan"),
    "serve": ("services.yaml", "serve"),
    "infer": ("resnet50", "serve"),
    "timed-llm": ("--port 0", "serve"),
    "experiment": ("x", "serve"),
    "load": ("--url http://127.0.0.1:1 --service x=1", "serve"),
    "dashboard": ("nonsense", ""),
    "metrics": ("", ""),
    "schema": ("agent", ""),
    "fleet": ("up", "fleet"),
    "submit": ("-- true", ""),
    "queue": ("", ""),
    "logs": ("1", ""),
    "cancel": ("1", ""),
    "policies": ("", "sim"),
    "demo": ("", "sim"),
}


def command(*words: str) -> list[str]:
    return [sys.executable, str(Path(base_install.__file__)), *words]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "COTENANT_DIR": str(folder / "agent"), "XDG_STATE_HOME": str(folder)}


def cotenant(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`cotenant WORDS` where the base alone is installed."""
    return subprocess.run(
        command(*words), cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def test_every_verb_is_listed_here() -> None:
    assert set(NEEDS) == set(VERBS)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, str]]]:
    """What each verb answers to its words and to --help: code, standard output, standard error."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "services.yaml").write_text(
        "gpus: {count: 1, model: RTX2080Ti}\nservices: [{name: x, model: resnet50, rate_rps: 1, slo_ms: 108}]\n"
    )
    lines = [[verb, *words.split()] for verb, (words, _) in NEEDS.items()] + [[verb, "--help"] for verb in NEEDS]
    done = subprocess.run(
        command(), input=json.dumps(lines), cwd=folder, env=environment(folder), capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return {verb: [tuple(found[i]), tuple(found[i + len(NEEDS)])] for i, verb in enumerate(NEEDS)}


@pytest.mark.parametrize("verb", NEEDS)
def test_a_verb_names_the_extra_that_it_needs(verb: str, answers: dict[str, list[tuple[int, str, str]]]) -> None:
    extra = NEEDS[verb][1]
    code, out, err = answers[verb][0]
    if extra:
        sentence = f"cotenant: {verb} needs the extra \"{extra}\": pip install 'cotenant[{extra}]'\n"
        assert (code, out, err) == (2, "", sentence)
    else:
        assert "pip install" not in err, err
        assert "no such option" not in err, err


@pytest.mark.parametrize("verb", NEEDS)
def test_the_help_of_a_verb_needs_no_extra(verb: str, answers: dict[str, list[tuple[int, str, str]]]) -> None:
    code, out, err = answers[verb][1]
    assert (code, err) == (0, "")
    assert "Usage: cotenant" in out


def test_every_module_can_be_imported_or_names_its_extra(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import importlib, json, sys\n"
        "from pathlib import Path\n"
        "import base_install, cotenant\n"
        "from cotenant.core.extras import EXTRAS, MissingExtraError\n"
        "base_install.hide()\n"
        "root, wrong = Path(cotenant.__file__).parent, []\n"
        "for path in sorted(root.rglob('*.py')):\n"
        "    parts = ('cotenant', *path.relative_to(root).with_suffix('').parts)\n"
        "    if parts[-1] in ('__main__', 'sitecustomize') or not (path.parent / '__init__.py').exists():\n"
        "        continue\n"
        "    name = '.'.join(part for part in parts if part != '__init__')\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except MissingExtraError as error:\n"
        "        if error.name not in EXTRAS[error.extra] or f'cotenant[{error.extra}]' not in str(error):\n"
        "            wrong.append([name, str(error)])\n"
        "    except ImportError as error:\n"
        "        wrong.append([name, repr(error)])\n"
        "print(json.dumps(wrong))\n"
    )
    env = environment(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(Path(base_install.__file__).parent)
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=120, check=True
    )  # fmt: skip
    assert json.loads(done.stdout) == []


def distributions(extra: str | None) -> set[str]:
    """What pyproject.toml has the base (None) or an extra bring, without what those bring in turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    for entry in project["dependencies"] if extra is None else project["optional-dependencies"][extra]:
        name, others = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", entry).groups()  # type: ignore[union-attr]
        if name == "cotenant":
            found = found.union(*(distributions(other) for other in others.split(",")))
        else:
            found.add(re.sub(r"[-_.]+", "-", name).lower())
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_the_modules_that_are_said_to_need_it(extra: str) -> None:
    names = {"grpc": "grpcio", "google.protobuf": "protobuf"}
    assert {names.get(module, module) for module in EXTRAS[extra]} == distributions(extra)


def test_all_is_every_extra_but_torch() -> None:
    assert distributions("all") == set().union(*(distributions(extra) for extra in EXTRAS if extra != "torch"))


def test_the_extra_of_a_module() -> None:
    assert extra_of("numba") == "sim"
    assert extra_of("numba.core", preferred="serve") == "serve"
    assert extra_of("numba", preferred="kube") == "sim"
    assert extra_of("google") == "serve"
    assert extra_of("yaml") is None


def test_what_is_imported_is_declared() -> None:
    """Every module from outside that the package imports comes with the base or an extra."""
    # pydantic and Ray bring the first and the last; triton is needed for measurements only
    known = {"pydantic-core", "triton", "starlette"}
    declared = distributions(None).union(*(distributions(extra) for extra in EXTRAS)) | known
    found = packages_distributions()
    strangers = set()
    for path in (ROOT / "src").rglob("*.py"):
        pattern = r"^ *(?:import \w+(?=[., \n])|from \w+(?=[\w.]* import ))"
        statements = re.findall(pattern, path.read_text(), re.MULTILINE)
        imported = {statement.split()[1] for statement in statements}
        for name in imported - sys.stdlib_module_names - {"cotenant"}:
            by = {re.sub(r"[-_.]+", "-", each).lower() for each in found.get(name, [name])}
            if not by & declared:
                strangers.add((path.name, name))
    assert not strangers


def answers_at(path: Path) -> bool:
    """Whether a server listens there, which it does a moment after its socket is there."""
    with socket.socket(socket.AF_UNIX) as door:
        return door.connect_ex(str(path)) == 0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """An agent on the software GPU where the base alone is installed; its folder's parent."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the shim")
    running = subprocess.Popen(
        command("agent", "--gpus", "soft"), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: answers_at(tmp_path / "agent" / "control.sock") or running.poll() is not None)
        assert running.poll() is None, running.stderr and running.stderr.read()
        yield tmp_path
    finally:
        running.terminate()
        running.wait(60)


def test_a_node_needs_the_base_alone(agent: Path) -> None:
    ran = cotenant(agent, "run", "--name", "x", "--request", "30%", "--", sys.executable, "-c", "print('hello')")
    assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr
    listed = cotenant(agent, "ps", "--json")
    assert listed.returncode == 0, listed.stderr
    assert "tenants" in json.loads(listed.stdout)


def test_the_training_loop_needs_the_base_alone(tmp_path: Path) -> None:
    program = (
        "import base_install; base_install.hide()\nimport cotenant\nprint(sum(cotenant.loop([1, 2, 3], epochs=2)))\n"
    )
    env = environment(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(Path(base_install.__file__).parent)
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr
