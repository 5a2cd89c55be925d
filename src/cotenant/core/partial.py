"""Finished measurements of a long run, kept beside its output file so that an interrupted run continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cotenant.core.files import atomic_file


class Partial:
    """Finished measurements, kept in FILE.partial until the profile FILE is complete.

    `key`: the settings of the run, as a value that JSON can hold. Measurements made with other settings are not used;
    `other_key` is then the key of these settings, else None.
    """

    def __init__(self, out: Path, key: Any) -> None:
        self.path = out.with_name(out.name + ".partial")
        self.rows: dict[str, Any] = {}
        self.key = key
        self.other_key: Any = None
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            found, rows = kept["key"], dict(kept["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # there is no such file, or it is no file of this kind
        if found == json.loads(json.dumps(key)):
            self.rows = rows
        else:
            self.other_key = found

    def put(self, name: str, row: Any) -> None:
        """Store a measurement in the partial file."""
        self.rows[name] = row
        with atomic_file(self.path) as file:
            file.write(json.dumps({"key": self.key, "rows": self.rows}))

    def remove(self) -> None:
        """Remove the partial file, because the profile is complete."""
        self.path.unlink(missing_ok=True)
