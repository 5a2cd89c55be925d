"""--empty-cache: the program's own thread empties PyTorch's cache at the right steps; a small stand-in plays torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.agent.tenants.launcher import cache_hook

TORCH = {
    "torch/__init__.py": "from . import optim, cuda\n",
    "torch/cuda.py": (
        "calls = 0\ncapturing = False\ndef is_initialized(): return True\n"
        "def is_current_stream_capturing(): return capturing\n"
        "def empty_cache():\n    global calls; calls += 1\n"
    ),
    "torch/optim/__init__.py": "from . import optimizer\n",
    "torch/optim/optimizer.py": (
        "hooks = []\ndef register_optimizer_step_post_hook(hook): hooks.append(hook)\n"
        "def step():\n    for hook in hooks: hook(None, (), {})\n"
    ),
    "sitecustomize.py": "import builtins\nbuiltins.own_site_ran = True\n",
}


STEPS = (
    "import torch; from importlib import import_module\n"
    "for _ in range(5): import_module('torch.optim.optimizer').step()\n"
    "print(torch.cuda.calls)"
)


def run(folder: Path, mode: str, program: str) -> str:
    for name, text in TORCH.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = dict(os.environ) | cache_hook(mode)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), str(folder)]))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_after_every_step(tmp_path: Path) -> None:
    assert run(tmp_path, "iteration", STEPS) == "5"


def test_never_while_a_graph_is_captured(tmp_path: Path) -> None:
    """PyTorch fails with an internal error then."""
    program = STEPS.replace("import torch;", "import torch; torch.cuda.capturing = True;")
    assert run(tmp_path, "iteration", program) == "0"


def test_something_else_called_torch_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "first" / "torch").mkdir(parents=True)
    (tmp_path / "first" / "torch" / "__init__.py").write_text("answer = 42\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'first')!r}); import torch; print(torch.answer)"
    assert run(tmp_path, "turn", program) == "42"


def test_once_before_the_turn_ends(tmp_path: Path) -> None:
    """Steps of 10 ms; the turn has 100 s, 100 s, then 1 ms twice (one turn's end), 100 s, then 1 ms left: two ends."""
    program = (
        "import torch, time; from importlib import import_module\n"
        "steps = import_module('torch.optim.optimizer').hooks[0]\n"
        "scope = type(steps).__call__.__globals__\n"
        "left = iter([10**11, 10**11, 10**6, 10**6, 10**11, 10**6])\n"
        "scope['_ask'] = lambda: next(left)\n"
        "for _ in range(6):\n    time.sleep(0.01)\n    import_module('torch.optim.optimizer').step()\n"
        "print(torch.cuda.calls)"
    )
    assert run(tmp_path, "turn", program) == "2"


def test_without_the_shim_a_turn_never_ends(tmp_path: Path) -> None:
    assert run(tmp_path, "turn", STEPS) == "0"


@pytest.mark.parametrize("mode", ["turn", "iteration"])
def test_the_installation_s_own_hook_still_runs(tmp_path: Path, mode: str) -> None:
    assert run(tmp_path, mode, "print(own_site_ran)") == "True"


def test_programs_without_torch_notice_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "turn", "import json, sys; print('torch' in sys.modules)") == "False"


def test_off_changes_nothing() -> None:
    assert cache_hook("off") == {}
