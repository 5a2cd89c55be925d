"""Moves the programs of models to host memory and back, and tells the policy how the moves have ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cotenant.core.errors import InputError, LostServerError, NothingToDoError, WorkError
from cotenant.policy.residency import ModelResidency, Place
from cotenant.serving.gateway.pages import Tell
from cotenant.serving.llm.model import Model
from cotenant.serving.llm.plain_host import Host

LOG = logging.getLogger(__name__)

AGAIN_S = 1.0  # seconds until a return that failed is tried again
MOVE_TRIES = 3
ORDER_AGAIN_S = 0.2

Found = TypeVar("Found")


class Moves:
    """Evictions and returns of a server's models. `tell` gets a sentence about each, `end` ends a model's program."""

    def __init__(
        self, host: Host, policy: ModelResidency, tell: Tell, end: Callable[[Model], Awaitable[None]]
    ) -> None:
        self._host, self._policy, self._tell, self._end = host, policy, tell, end

    async def _order(self, model: Model, order: Callable[[str], Awaitable[Found]]) -> Found | None:
        """Give the agent an order about the model's memory. While no agent answers, the order is repeated, because it
        is not known whether it was carried out. Returns the answer; None if the memory was where it should be.
        """
        place = model.row.place
        while True:
            try:
                return await order(model.entry.name)
            except NothingToDoError:
                return None
            except LostServerError:
                if model.row.place is not place:  # the program has ended meanwhile
                    raise
                await asyncio.sleep(ORDER_AGAIN_S)

    async def evict(self, model: Model, gpu: int) -> None:
        """Evict a model's program; stop it if that fails."""
        name, began_s = model.entry.name, time.monotonic()
        try:
            await self._order(model, self._host.evict)
        except (InputError, WorkError) as error:
            # if the model is not LEAVING any more, its program has ended meanwhile, and nothing is left to stop
            if model.row.place is Place.LEAVING:
                self._tell(f"{name} cannot be moved to host memory, so it is stopped: {error}", logging.WARNING)
                await self.stop(model, gpu)
            return
        self._evicted(model, time.monotonic() - began_s)

    def _evicted(self, model: Model, took_s: float) -> None:
        if model.row.place is Place.LEAVING:
            model.stats.switched("evict", took_s)
            self._policy.settled(model.entry.name, time.monotonic(), took_s)
            self._tell(f"{model.entry.name} was evicted in {took_s:.2f} s")

    async def bring(self, model: Model, gpu: int) -> None:
        """Bring a model's program back; stop it after MOVE_TRIES failures."""
        name, began_s = model.entry.name, time.monotonic()
        try:
            await self._order(model, self._host.bring)
        except (InputError, WorkError) as error:
            if model.row.place is not Place.RETURNING:
                return
            model.moves_failed += 1
            self._tell(f"{name} cannot be brought back: {error}", logging.WARNING)
            if model.moves_failed < MOVE_TRIES:
                self._policy.failed(name, time.monotonic(), AGAIN_S)
            else:
                await self._end(model)
                self._policy.died(name, time.monotonic())
            return
        self._returned(model, began_s)

    def _returned(self, model: Model, began_s: float) -> None:
        if model.row.place is Place.RETURNING:
            took_s = time.monotonic() - began_s
            model.moves_failed = 0
            model.stats.switched("bring", took_s)
            self._policy.settled(model.entry.name, time.monotonic(), took_s)
            self._tell(f"{model.entry.name} is back after {took_s:.2f} s")

    async def exchange(self, model: Model, others: list[Model], gpu: int) -> None:
        """Bring a model back, and evict others for it at the same time. What fails is done again in single steps."""
        name, began_s = model.entry.name, time.monotonic()
        leave = [other.entry.name for other in others]
        returned, took_s = True, dict[str, float]()
        try:
            took_s = await self._order(model, lambda name: self._host.exchange(name, leave)) or {}
        except (InputError, WorkError) as error:
            returned = False
            LOG.info("%s did not return while %s left: %s", name, ", ".join(leave), error)
        for other in others:
            if other.entry.name in took_s:
                self._evicted(other, took_s[other.entry.name])
            elif other.row.place is Place.LEAVING:
                await self.evict(other, gpu)
        if returned:
            self._returned(model, began_s)
        elif model.row.place is Place.RETURNING:
            await self.bring(model, gpu)

    async def stop(self, model: Model, gpu: int) -> None:
        """Stop a model's program that has to leave the GPU."""
        began_s = time.monotonic()
        await self._end(model)
        await self._host.released(model.entry.name)
        if model.row.place is Place.LEAVING:
            took_s = time.monotonic() - began_s
            model.stats.switched("stop", took_s)
            model.row.stopping = True
            self._policy.settled(model.entry.name, time.monotonic(), took_s)
            self._tell(f"{model.entry.name} was stopped to make room")
