"""The environment variables that load the shim into a tenant's programs."""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.native.libraries import DRIVER_SHIM, NVML_SHIM, library_path

PASSED_ON = (
    "COTENANT_SOFTGPU_STATE",
    "COTENANT_SOFTGPU_COUNT",
    "COTENANT_SOFTGPU_MEMORY",
    "COTENANT_SOFTGPU_LINK_MBPS",
    "COTENANT_SOFTGPU_CGROUPS",
)


def tenant_environment(
    socket: Path | str, token: str, driver: Path | str, *, nvml: Path | None = None
) -> dict[str, str]:
    """Return the variables that the launcher adds to the environment of a tenant's program: paths and the token. Limits
    are not among them, because a program can change its own variables.

    `driver` and `nvml`: the libraries of the tenant's GPU; without `nvml` the program has no NVML. Libraries that
    LD_PRELOAD already names are loaded after the shim. Raises InputError for a path that LD_PRELOAD cannot name.
    """
    driver = Path(driver).resolve()
    preload = [str(library_path(DRIVER_SHIM))]
    environment = {"COTENANT_SOCKET": str(socket), "COTENANT_TOKEN": token, "COTENANT_DRIVER": str(driver)}
    if nvml is not None:
        preload.append(str(library_path(NVML_SHIM)))
        environment["COTENANT_NVML"] = str(nvml.resolve())
    preload += [entry for entry in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if entry]
    preload = list(dict.fromkeys(preload))
    if any(sign in path for path in preload for sign in " :"):
        raise InputError(f"the loader cannot preload from {preload[0]!r}: the path must have no blank or colon")
    environment["LD_PRELOAD"] = ":".join(preload)
    environment.update({name: os.environ[name] for name in PASSED_ON if name in os.environ})
    return environment
