"""Optional dependencies: what each extra of the package brings, and the sentence that names the one that is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_REPORT = ("numpy", "polars", "orjson")
_SIM = (*_REPORT, "numba", "highspy")
# extra -> modules, as they are imported; a test compares with pyproject.toml
EXTRAS: dict[str, tuple[str, ...]] = {
    "report": _REPORT,
    "sim": _SIM,
    "plan": _SIM,
    "fleet": _SIM,
    "serve": (*_SIM, "uvicorn", "httptools", "uvloop", "hpack", "google.protobuf", "onnxruntime"),
    "kube": ("cryptography", "grpc", "google.protobuf", "orjson", "uvicorn", "httptools", "uvloop"),
    "ray": (*_SIM, "ray"),
    "postgres": (*_SIM, "psycopg"),
    "torch": ("torch",),
}


class MissingExtraError(ModuleNotFoundError):
    """A module that an extra brings is not installed. `name`: the module; `extra`: the extra to install."""

    def __init__(self, who: str, extra: str, module: str) -> None:
        super().__init__(f"{who} needs the extra \"{extra}\": pip install 'cotenant[{extra}]'", name=module)
        self.extra = extra


def require(extra: str, *modules: str) -> None:
    """MissingExtraError unless these modules can be imported: for packages that do nothing without them."""
    for module in modules:
        if module not in sys.modules and not _exists(module):
            raise MissingExtraError(_caller(), extra, module)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of a module whose package works without them."""
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtraError) or error.name is None or extra_of(error.name) is None:
            raise
        raise MissingExtraError(_caller(3), extra, error.name) from None


def extra_of(module: str, preferred: str | None = None) -> str | None:
    """The extra that brings a module: the preferred one where it does, else the smallest; None: no extra does."""
    found = [extra for extra, modules in EXTRAS.items() if any(_within(module, each) for each in modules)]
    return preferred if preferred in found else next(iter(found), None)


def _within(module: str, other: str) -> bool:
    """Whether one is the other or a package of it: what is missing may be google alone."""
    return f"{module}.".startswith(f"{other}.") or f"{other}.".startswith(f"{module}.")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def _caller(depth: int = 2) -> str:
    """The module that called the function that calls this."""
    return str(sys._getframe(depth).f_globals["__name__"])
