"""Reading of JSON files that people write. Duplicate keys are refused, and a syntax error is reported with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.textfile import read_text


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file in UTF-8, with or without a byte order mark. Raises InputError, whose message
    is one sentence, if the file cannot be read, is not valid JSON or has a duplicate key.
    """
    try:
        return json.loads(read_text(path), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg.lower()}", file=path, line=error.lineno) from None
    except RecursionError:
        raise InputError("is not JSON: nested too deeply", file=path) from None
    except InputError as error:
        raise InputError(error.message, file=path, field=error.field) from None
    except ValueError:  # Python refuses to read integers of thousands of digits, with a ValueError
        raise InputError("has a number of thousands of digits", file=path) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError("is given twice in one object", field=twice)
    return found
