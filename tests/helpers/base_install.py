"""An interpreter in which only the base of the package is installed: the modules that extras install cannot be
imported.

Run as a program: `base_install.py WORDS...` is `cotenant WORDS...` in such an interpreter. `base_install.py` alone
reads command lines as JSON (a list of lists of words), runs one after the other, and prints [code, out, err] of each.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from cotenant.core.extras import EXTRAS


def hide(*given: str) -> None:
    """Hide these modules, or every module of every extra, from this interpreter."""
    hidden = set(given) or {module for modules in EXTRAS.values() for module in modules}
    hidden |= {module.partition(".")[0] for module in hidden}

    class Base:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            return None if name in hidden else PathFinder.find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Base  # type: ignore[call-overload]


if __name__ == "__main__":
    from command import cotenant

    from cotenant.cli.main import main

    hide()
    if len(sys.argv) > 1:
        main()
    results = [cotenant(*words) for words in json.load(sys.stdin)]
    print(json.dumps([[result.code, result.out, result.err] for result in results]))
