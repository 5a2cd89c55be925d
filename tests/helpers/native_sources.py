"""Where the C sources and headers are that tests compile."""

from __future__ import annotations

from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"
SHIM = NATIVE / "shim"
SOFTGPU = NATIVE / "softgpu"
