"""Saves and restores the states of the objects that training changes, such as the model and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import InputError, WorkError


@dataclass(frozen=True)
class _Object:
    take: Callable[[], Any]
    put: Callable[[Any], Any]


@dataclass(frozen=True)
class States:
    """The named objects whose states are saved. `wanted`: whether checkpoints are written at all."""

    objects: Mapping[str, _Object]
    wanted: bool

    def take(self) -> dict[str, Any]:
        """Return the state of each object, by the object's name."""
        return {name: one.take() for name, one in self.objects.items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Restore each object's state. Raises WorkError if the saved names are not those of the objects, or if an
        object refuses its state.
        """
        if set(states) != set(self.objects):
            raise WorkError(
                f"the checkpoint holds {', '.join(sorted(states)) or 'nothing'}, and the program asks for"
                f" {', '.join(sorted(self.objects)) or 'nothing'}; use the program that wrote it, or another folder"
            )
        for name, one in self.objects.items():
            try:
                one.put(states[name])
            except Exception as error:
                raise WorkError(f"{name} does not take the state in the checkpoint: {error}") from error


def find_states(checkpoint: Any) -> States:
    """Return the objects of the argument `checkpoint` of `cotenant.loop`. Raises InputError for an object without
    state.
    """
    if checkpoint is None:
        return States({}, False)
    if not isinstance(checkpoint, Mapping):
        checkpoint = {"state": checkpoint}
    return States({str(name): _object(str(name), thing) for name, thing in checkpoint.items()}, True)


def _object(name: str, thing: Any) -> _Object:
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return _Object(thing.state_dict, thing.load_state_dict)
    if hasattr(thing, "get_state") and hasattr(thing, "set_state"):  # torch.Generator, numpy's RandomState
        return _Object(thing.get_state, thing.set_state)
    if hasattr(thing, "bit_generator"):  # numpy's Generator
        return _Object(lambda: thing.bit_generator.state, lambda state: setattr(thing.bit_generator, "state", state))
    if hasattr(thing, "getstate") and hasattr(thing, "setstate"):  # random.Random
        return _Object(thing.getstate, thing.setstate)
    raise InputError(
        f"{type(thing).__name__} has no state_dict and load_state_dict to save it with", field=f"checkpoint.{name}"
    )
