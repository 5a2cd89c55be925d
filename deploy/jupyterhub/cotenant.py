"""JupyterHub: a choice of GPU shares for every notebook. Load it from the hub's own configuration.

On Kubernetes (KubeSpawner) a profile adds the pod's annotations; Cotenant's webhook does the rest. On one machine
(LocalProcessSpawner and its kin) the notebook server is started through `cotenant run`, as a tenant that the agent's
configuration declares for its user with ranges that these shares lie in.
"""

from __future__ import annotations

import asyncio
import hashlib
import re

c = get_config()  # noqa: F821 given by JupyterHub

SHARES = {
    "small": ("An eighth of a GPU, 8 GiB", {"request": "12%", "limit": "50%", "memory": "8Gi"}),
    "large": ("Half a GPU, 32 GiB", {"request": "50%", "limit": "100%", "memory": "32Gi"}),
}
COTENANT = "cotenant"  # the command, or its full path


def profile(name: str, title: str, share: dict[str, str]) -> dict[str, object]:
    """One entry of KubeSpawner's profile_list."""
    annotations = {f"cotenant.dev/{key}": value for key, value in share.items()}
    return {
        "slug": name,
        "display_name": title,
        "kubespawner_override": {"extra_annotations": annotations},
    }


c.KubeSpawner.profile_list = [
    {"slug": "cpu", "display_name": "No GPU", "default": True},
    *(profile(name, title, share) for name, (title, share) in SHARES.items()),
]


def escaped(text: str) -> str:
    """Letters, digits, '.' and '-' as they are, other bytes as _HH, so that no two names become one: ada_40uni.edu."""
    kept = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-"
    return "".join(chr(byte) if byte in kept else f"_{byte:02x}" for byte in text.encode())


def tenant_name(user: str, server: str = "") -> str:
    """jupyter/USER, with /SERVER for a named server; 63 characters at most, longer ones end in a hash."""
    name = "/".join(["jupyter", escaped(user), *([escaped(server)] if server else [])])
    return name if len(name) <= 63 else f"{name[:54]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def local_command(spawner: object) -> list[str]:
    """`cotenant run` for a server: its tenant is named after user and server, the spawn form gives the share."""
    chosen = (getattr(spawner, "user_options", None) or {}).get("share")  # of any type if a program sent it
    share = SHARES[chosen if isinstance(chosen, str) and chosen in SHARES else "small"][1]
    name = tenant_name(spawner.user.name, getattr(spawner, "name", ""))  # type: ignore[attr-defined]
    return [COTENANT, "run", f"--name={name}", *(f"--{key}={value}" for key, value in share.items()), "--"]


def refusal(why: str) -> Exception:
    """An error that JupyterHub shows to the user word by word, and does not count among failures of the hub itself."""
    from tornado.web import HTTPError  # JupyterHub installs tornado; this file imports nothing else of the hub

    error: Exception = HTTPError(409, why)
    error.jupyterhub_message = why  # type: ignore[attr-defined]
    return error


async def through_cotenant(spawner: object) -> None:
    """Have the server started through `cotenant run`; ask the agent beforehand whether the share can be had now."""
    command = local_command(spawner)
    try:
        asked = await asyncio.create_subprocess_exec(*command, "true", stderr=asyncio.subprocess.PIPE)
    except OSError as error:
        raise refusal(f"{COTENANT} cannot be run on the hub's machine: {error.strerror}") from None
    said = (await asked.communicate())[1].decode(errors="replace").strip()
    if asked.returncode:
        why = re.sub(r"^cotenant: (?:(?:field )?\S+: )?", "", said)
        raise refusal(why or f"cotenant run ended with {asked.returncode}")
    spawner.cmd = [*command, "jupyterhub-singleuser"]  # type: ignore[attr-defined]


c.LocalProcessSpawner.pre_spawn_hook = through_cotenant
c.LocalProcessSpawner.options_form = "\n".join(
    [
        '<label>GPU share <select name="share">',
        *(f'<option value="{name}">{title}</option>' for name, (title, _) in SHARES.items()),
        "</select></label>",
    ]
)
c.LocalProcessSpawner.options_from_form = lambda form: {"share": form.get("share", ["small"])[0]}
c.LocalProcessSpawner.apply_user_options = lambda spawner, options: None  # through_cotenant reads them
