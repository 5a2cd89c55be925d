"""Optional dependencies: the modules of each extra, and the error that names a missing extra."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_REPORT = ("numpy", "polars", "orjson")
_SIM = (*_REPORT, "numba", "highspy")
# extra of the package -> modules that it installs; a test compares the table with pyproject.toml
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
    """Raised if a module of an optional extra is not installed. `name`: the module; `extra`: the extra to install."""

    def __init__(self, who: str, extra: str, module: str) -> None:
        super().__init__(f"{who} needs the extra \"{extra}\": pip install 'cotenant[{extra}]'", name=module)
        self.extra = extra


def require(extra: str, *modules: str) -> None:
    """Raise MissingExtraError unless these modules can be imported. Called by packages that are useless without
    them."""
    for module in modules:
        if module not in sys.modules and not _exists(module):
            raise MissingExtraError(_caller(), extra, module)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Return a context for imports of optional modules: a missing module raises MissingExtraError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtraError) or error.name is None or extra_of(error.name) is None:
            raise
        raise MissingExtraError(_caller(3), extra, error.name) from None


def extra_of(module: str, preferred: str | None = None) -> str | None:
    """Return the extra that installs a module: `preferred` if that extra installs it, else the first one in EXTRAS;
    None if no extra installs it.
    """
    found = [extra for extra, modules in EXTRAS.items() if any(_within(module, each) for each in modules)]
    return preferred if preferred in found else next(iter(found), None)


def _within(module: str, other: str) -> bool:
    """Whether the modules are equal, or one contains the other: a failed import may name only a parent, such as
    google."""
    return f"{module}.".startswith(f"{other}.") or f"{other}.".startswith(f"{module}.")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains the module is missing
        return False


def _caller(depth: int = 2) -> str:
    """Return the name of the module that called the function that calls this one."""
    return str(sys._getframe(depth).f_globals["__name__"])
