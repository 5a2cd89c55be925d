"""A hub on one machine: its local users log in with their passwords and choose a share of a GPU. Run it as root.

The agent beside it declares a tenant for each user, see docs/howto/jupyterhub.md.
"""

from __future__ import annotations

from pathlib import Path

c = get_config()  # noqa: F821 given by JupyterHub

c.JupyterHub.bind_url = "http://127.0.0.1:8000"  # put a proxy with TLS in front of it
c.Authenticator.allow_all = True  # every user who can log in to this machine
load_subconfig(str(Path(__file__).with_name("cotenant.py")))  # noqa: F821 given by JupyterHub
