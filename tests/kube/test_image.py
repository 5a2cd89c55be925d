"""The Dockerfiles, as far as they can be tried without a container engine: what they copy is there, what they run works
on nothing but that, and what the manifests run exists in the image."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from cotenant.native.libraries import DRIVER_SHIM, NVML_SHIM

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted(ROOT.glob("deploy/docker/Dockerfile*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass
class Stage:
    """A FROM and what follows it: instructions as (word, rest)."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def rest(self, word: str) -> list[str]:
        return [rest for each, rest in self.steps if each == word]


def stages(file: Path) -> list[Stage]:
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(name or str(len(found)), base.strip()))
        else:
            found[-1].steps.append((word, rest.strip()))
    return found


def copied(stage: Stage) -> list[tuple[str | None, list[str], str]]:
    """(stage it comes from, sources, target) of each COPY."""
    out = []
    for rest in stage.rest("COPY"):
        words = shlex.split(rest)
        origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
        out.append((origin, words[:-1], words[-1]))
    return out


def ignored(path: str) -> bool:
    """Whether the builder is not given a path: the last pattern of .dockerignore that fits it or a folder above it
    decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern = line.strip().removeprefix("!")
        parts = Path(path).parts
        above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        whole = re.compile(fnmatch.translate(pattern.removeprefix("**/")))
        names = parts if pattern.startswith("**/") else above
        if any(whole.fullmatch(each) for each in names):
            out = not line.startswith("!")
    return out


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return done.stdout.split("\n")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_is_copied_is_there(file: Path) -> None:
    known, files = [], tracked()
    for stage in stages(file):
        for origin, sources, _ in copied(stage):
            if origin is not None:
                assert origin in known, f"{origin} is no stage before {stage.name}"
                continue
            for source in sources:
                own = [name for name in files if name == source or name.startswith(f"{source.rstrip('/')}/")]
                assert own, f"{source} is not in the repository"
                assert [name for name in own if ignored(name)] == []
        known.append(stage.name)


def test_only_what_is_copied_is_sent_to_the_builder() -> None:
    sources = {
        source for file in DOCKERFILES for stage in stages(file) for _, own, _ in copied(stage) for source in own
    }
    sent = [name for name in tracked() if name and not ignored(name)]
    assert sent
    assert {name for name in sent if not any(name == s or name.startswith(f"{s}/") for s in sources)} == set()
    assert all(
        ignored(name) for name in (".git/config", ".venv/bin/python", "src/cotenant/__pycache__/a.pyc", "tests/a.py")
    )


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_is_started_is_in_the_image(file: Path) -> None:
    """An entry point is one of the package's scripts; a script in a command was copied to that place."""
    last = stages(file)[-1]
    (first, *more) = yaml.safe_load((last.rest("ENTRYPOINT") + last.rest("CMD"))[0])
    targets = [target for _, _, target in copied(last)]
    assert first in PROJECT["project"]["scripts"] or more[0] in targets
    path = dict(word.split("=", 1) for rest in last.rest("ENV") for word in shlex.split(rest)).get("PATH", "")
    if first in PROJECT["project"]["scripts"]:
        # the folder of the environment that was copied
        assert any(f"{target}/bin" in path.split(":") for target in targets)
        extras = re.findall(r"\.whl\)\[(.*?)\]", " ".join(step for stage in stages(file) for step in stage.rest("RUN")))
        assert extras
        assert set(extras[0].split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_stages_of_the_image_by_hand(tmp_path: Path) -> None:
    """The first stage has an interpreter, a compiler and the sources, and makes the wheel; the last one has the wheel
    and no compiler, and installs the shims from it as the node's init container does."""
    pytest.importorskip("hatchling")
    build, _ = stages(ROOT / "deploy/docker/Dockerfile")
    source, wheels, site = (tmp_path / name for name in ("source", "wheels", "site"))
    source.mkdir()
    for _, sources, target in copied(build):
        for each in sources:
            if (ROOT / each).is_dir():
                assert target == each
                shutil.copytree(ROOT / each, source / each, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(ROOT / each, source / each)
    packing = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)]
    subprocess.run([sys.executable, "-m", *packing], check=True, timeout=240, capture_output=True)
    (wheel,) = wheels.glob("cotenant-*-manylinux_2_17_x86_64.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
        names = set(packed.namelist())
    own = [Path(name) for name in tracked() if name.startswith("src/cotenant/")]
    assert {str(path.relative_to("src")) for path in own} <= names, "a file of the package is not in the wheel"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from cotenant.kube.install import install; from pathlib import Path;"
         "print(install(Path(sys.argv[1])))", str(tmp_path / "lib")],
        env={"PATH": "/nowhere", "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in Path(done.stdout.strip()).iterdir()) == [NVML_SHIM, DRIVER_SHIM]


def test_what_the_manifests_run_is_a_command_with_those_options(call: object) -> None:
    """Containers give arguments to the image's entry point: every option of theirs is one that the command has."""
    import typer

    from cotenant.cli.main import VERBS

    documents = [d for d in yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()) if d]
    specs = [d["spec"]["template"]["spec"] for d in documents if "template" in d.get("spec", {})]
    lists = [c["args"] for spec in specs for c in [*spec.get("initContainers", []), *spec["containers"]]]
    assert len(lists) == 4
    for arguments in lists:
        verb, *rest = arguments
        module = __import__(VERBS[verb][0], fromlist=["app"])
        command = typer.main.get_command(module.app)
        if rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]  # type: ignore[attr-defined]
        known = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
        assert {option.partition("=")[0] for option in rest} <= known, arguments
