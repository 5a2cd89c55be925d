"""Asks a server with the OpenAI API for its models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.loadgen.target import Target


def ask_models(target: Target) -> list[str]:
    """Return the names of the server's models. WorkError if it does not list them."""
    status, rows = _listed(target)
    if status == 401:
        raise WorkError(_without_token(target))
    if not rows:
        raise WorkError(f"{target} does not list its models (status {status})")
    return list(rows)


def check_models(target: Target, names: Sequence[str]) -> dict[str, Any]:
    """Return the server's list of models: name -> entry of the list; empty if it has no list. InputError if it has one
    without one of these names; WorkError if the server cannot be reached, or refuses the token.
    """
    status, rows = _listed(target)
    if status == 401:
        raise WorkError(_without_token(target))
    for name in names:
        if rows and name not in rows:
            raise InputError(f"{target} has no model {name!r}; it has {', '.join(rows)}", field="model")
    return rows


def _without_token(target: Target) -> str:
    what = "asks for a token: give --token FILE" if target.token is None else "refuses this token (--token)"
    return f"{target} {what}"


def _listed(target: Target) -> tuple[int, dict[str, Any]]:
    """Return the status of the server's answer to /v1/models, and the entries by the models' names."""
    status, content = replace(target, prefix=target.prefix.removesuffix("/v1")).ask("/v1/models")
    try:
        return status, {str(row["id"]): row for row in content["data"]} if status == 200 else {}
    except (KeyError, TypeError):
        return status, {}
