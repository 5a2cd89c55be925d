"""Batching of the requests of one language model, decided for each step (iteration), as a pure state machine.

In every step each running request whose prompt is in the KV cache decodes one token. The rest of the step's token
budget goes to prompts, first come, first served; long prompts are computed in chunks. A request is admitted when its
prompt fits into the cache in addition to all others. When the cache has no space for the next tokens, the request
admitted last is preempted; later its prompt and the tokens that it has produced are computed again. An engine that
schedules ahead decides what a step computes when the step before begins, and admits no request that has arrived since.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cotenant.core.errors import InputError
from cotenant.profiles.llm.profile import LlmProfile, Step, pairs_of


@dataclass
class Sequence:
    """A request with `total` tokens (prompt and produced ones), of which `computed` are in the cache."""

    id: int
    total: int
    left: int  # number of tokens that the request must still produce
    computed: int = 0

    @property
    def decodes(self) -> bool:
        """Whether all tokens but the one produced last are in the cache, so that the request decodes in the next step.
        """
        return self.computed > 0 and self.total - self.computed == 1


@dataclass(frozen=True)
class Token:
    """The request produced a token; `last`: its answer is complete."""

    id: int
    last: bool


class Batcher:
    """The requests of one model. Call `begin` for the work of the next step and `end` when the step is done."""

    def __init__(self, profile: LlmProfile) -> None:
        self._limits = profile
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.held = 0  # number of tokens of all running requests; each token needs space in the cache
        self.preempted = 0
        self._new = 0  # number of requests at the end of `waiting` that arrived after the last step began
        self._chunks: list[tuple[Sequence, int]] = []
        self._gone: set[int] = set()
        self._stepping = False

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, id_: int, prompt: int, output: int, cached: int = 0) -> None:
        """Add a request of `prompt` tokens, of which `cached` need not be computed, for `output` tokens. Raises
        InputError if it can never run.
        """
        limits = self._limits
        most = min(limits.max_context, limits.kv_tokens)
        if prompt < 1 or output < 1:
            raise InputError(f"prompt and output need at least 1 token each, not {prompt} and {output}")
        if prompt + output > most:
            raise InputError(f"{prompt} prompt and {output} output tokens are more than the model's {most}")
        self.waiting.append(Sequence(id_, prompt, output, min(cached, prompt - 1)))
        self._new += 1

    def cancel(self, id_: int) -> None:
        """Remove a request whose client has disconnected. A running step is not interrupted."""
        if self._stepping:
            self._gone.add(id_)
            return
        self._drop({id_})

    def begin(self) -> Step | None:
        """Return the work of the next step; None: there is nothing to do."""
        assert not self._stepping
        if not (self._limits.schedules_ahead and self.running):
            self._new = 0  # an idle engine schedules at once
        self._make_room()
        decoding = [one for one in self.running if one.decodes]
        self._chunks = [(one, 1) for one in decoding]
        context = sum(one.total for one in decoding)
        budget = self._limits.step_tokens - len(decoding)
        tokens = pairs = 0
        prompts = [one for one in self.running if not one.decodes]
        at = 0
        while budget > 0:
            one = prompts[at] if at < len(prompts) else self._admit()
            if one is None:
                break
            at += 1
            part = min(budget, one.total - one.computed)
            budget -= part
            tokens += part
            pairs += pairs_of(part, one.computed)
            self._chunks.append((one, part))
        self._new = 0
        if not self._chunks:
            return None
        self._stepping = True
        return Step(tokens, pairs, len(decoding), context)

    def end(self) -> list[Token]:
        """Called when the step is done. Returns the tokens that the step produced, in the order of admission."""
        assert self._stepping
        self._stepping = False
        produced, ended = [], set()
        for one, part in self._chunks:
            one.computed += part
            if one.computed < one.total:
                continue
            one.total += 1
            one.left -= 1
            self.held += 1
            if one.id not in self._gone:
                produced.append(Token(one.id, one.left == 0))
            if one.left == 0:
                ended.add(one.id)
        self._chunks = []
        if ended or self._gone:
            self._drop(ended | self._gone)
            self._gone.clear()
        return produced

    def _admit(self) -> Sequence | None:
        """Admit the first waiting request if cache and step have space for it, and return it; otherwise None."""
        if len(self.waiting) <= self._new or len(self.running) >= self._limits.max_sequences:
            return None
        one = self.waiting[0]
        if self.held + one.total > self._limits.kv_tokens:
            return None
        self.waiting.popleft()
        self.running.append(one)
        self.held += one.total
        return one

    def _make_room(self) -> None:
        """Preempt the requests admitted last until the cache has space for the others."""
        while self.held > self._limits.kv_tokens and len(self.running) > 1:
            one = self.running.pop()
            self.held -= one.total
            one.computed = 0
            self.preempted += 1
            self.waiting.appendleft(one)

    def _drop(self, ids: set[int]) -> None:
        kept = [one for one in self.running if one.id not in ids]
        if len(kept) < len(self.running):
            self.held -= sum(one.total for one in self.running if one.id in ids)
            self.running = kept
        if any(one.id in ids for one in self.waiting):
            earlier = len(self.waiting) - self._new
            self._new -= sum(one.id in ids for one in list(self.waiting)[earlier:])
            self.waiting = deque(one for one in self.waiting if one.id not in ids)
