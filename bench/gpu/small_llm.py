"""A small engine with OpenAI's streamed chat API, for measurements: random weights of Qwen3-4B's or an 8B shape.

    python small_llm.py --port 8001 [--shape 8b|tiny]

Each word of the prompt is one token. Before a step, the engine processes the whole prompts of new requests, one after
the other, like engines without chunked prefill. The step of all running requests is one CUDA graph. Nothing is compiled
or read from a disk, so the engine is ready within seconds. `--shape tiny` runs on a CPU.

The engine prints, each with the time of time.monotonic: `prompt TIME WAITED_MS PREFILL_MS` after each prompt, where a
prompt waits until the step before it has ended; and `busy TIME SECONDS`, the GPU time of all steps so far, about once a
second while it works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

Found = TypeVar("Found")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `length`: the most tokens of a request, prompt and answer."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    slots: int = 32
    length: int = 2432
    head: int = 128


SHAPES = {
    "4b": Shape(2560, 9728, 36, 32, 8, 151_936),
    "8b": Shape(4096, 14336, 32, 32, 8, 151_936, slots=8),
    "tiny": Shape(64, 128, 2, 4, 2, 512, slots=8, length=512, head=16),
}

PAD = 128


class Model:
    """The weights, the keys and values of all slots, and the two kinds of step: prefill and decode."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.kind = {"dtype": torch.bfloat16, "device": device}
        s, rows = shape, (shape.heads + 2 * shape.kv_heads) * shape.head
        torch.manual_seed(0)
        self.words = self._weight(s.vocabulary, s.width)
        self.layers = [
            (self._weight(s.width, rows), self._weight(s.heads * s.head, s.width),
             self._weight(s.width, 2 * s.inner), self._weight(s.inner, s.width))
            for _ in range(s.layers)
        ]  # fmt: skip
        kept = (s.slots, s.kv_heads, s.length, s.head)
        self.keys = [torch.zeros(kept, **self.kind) for _ in self.layers]
        self.values = [torch.zeros(kept, **self.kind) for _ in self.layers]
        angles = torch.outer(torch.arange(s.length), 1e6 ** -(torch.arange(0, s.head, 2) / s.head))
        self.cos, self.sin = angles.cos().to(**self.kind), angles.sin().to(**self.kind)
        self.places = torch.arange(s.length, device=device)
        self.tokens = torch.zeros(s.slots, dtype=torch.long, device=device)
        self.at = torch.zeros(s.slots, dtype=torch.long, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        sizes = [1 << i for i in range(s.slots.bit_length())]
        self.sizes = [size for size in sizes if size <= s.slots]

    def _weight(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, **self.kind).normal_(0.0, 0.02)

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _heads(self, x: torch.Tensor, weight: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of [n, width] at positions `at`: [n, heads, head]."""
        s = self.shape
        found = (rms_norm(x, (s.width,)) @ weight).view(len(x), -1, s.head)
        q, k, v = found.split((s.heads, s.kv_heads, s.kv_heads), 1)
        cos, sin = self.cos[at].unsqueeze(1), self.sin[at].unsqueeze(1)
        return self._turned(q, cos, sin), self._turned(k, cos, sin), v

    def _rest(self, x: torch.Tensor, had: torch.Tensor, layer: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Compute the part of a layer that follows the attention."""
        x = x + had.reshape(len(x), -1) @ layer[1]
        gate, up = (rms_norm(x, (self.shape.width,)) @ layer[2]).chunk(2, -1)
        return x + (silu(gate) * up) @ layer[3]

    def _next(self, x: torch.Tensor) -> torch.Tensor:
        return (rms_norm(x, (self.shape.width,)) @ self.words.T).argmax(-1)

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: list[int]) -> int:
        """Process a prompt; returns the first token of its answer. The prompt is padded to a multiple of PAD tokens,
        because the libraries choose kernels for each new shape, which takes up to 60 ms on the host.
        """
        n, m = len(prompt), -(-len(prompt) // PAD) * PAD
        x = self.words[torch.tensor(prompt + [0] * (m - n), device=self.device)]
        for i, layer in enumerate(self.layers):
            q, k, v = (part.transpose(0, 1)[None] for part in self._heads(x, layer[0], self.places[:m]))
            self.keys[i][slot, :, :m], self.values[i][slot, :, :m] = k[0], v[0]
            had = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._rest(x, had[0].transpose(0, 1), layer)
        token = self._next(x[n - 1 : n])
        self.tokens[slot], self.at[slot] = token[0], n
        return int(token)

    @torch.inference_mode()
    def _step(self, size: int) -> None:
        s, at = self.shape, self.at[:size]
        each, hidden = torch.arange(size, device=self.device), self.places[None, :] > at[:, None]
        x = self.words[self.tokens[:size]]
        for i, layer in enumerate(self.layers):
            q, k, v = self._heads(x, layer[0], at)
            self.keys[i][each, :, at], self.values[i][each, :, at] = k, v
            q = q.view(size, s.kv_heads, -1, s.head)
            fit = (q @ self.keys[i][:size].transpose(-1, -2)) * s.head**-0.5
            fit = fit.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
            x = self._rest(x, fit @ self.values[i][:size], layer)
        self.tokens[:size] = self._next(x)
        self.at[:size] = (at + 1).clamp(max=s.length - 1)

    def record(self) -> None:
        """Compute a prompt of each padded length once, and record the graphs of the step."""
        for tokens in range(PAD, self.shape.length + 1, PAD):
            self.prefill(0, [0] * (tokens - 1))
        for size in self.sizes if self.device != "cpu" else ():
            self._step(size)
            torch.cuda.synchronize()
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size]):
                self._step(size)

    def timed(self, work: Callable[[], Found]) -> tuple[Found, float]:
        """Do work that ends with a result on the host; returns the result, and its time on the GPU in seconds."""
        if self.device == "cpu":
            begun_s = time.monotonic()
            return work(), time.monotonic() - begun_s
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        found = work()
        end.record()
        end.synchronize()
        return found, begin.elapsed_time(end) / 1e3

    def step(self, most: int) -> list[int]:
        """Compute the next token of the slots up to `most`."""
        size = next(size for size in self.sizes if size > most)
        if size in self.graphs:
            self.graphs[size].replay()
        else:
            self._step(size)
        found: list[int] = self.tokens[:size].tolist()
        return found


@dataclass(eq=False)
class Asked:
    """A request."""

    prompt: list[int]
    left: int
    writer: asyncio.StreamWriter
    ended: asyncio.Event
    slot: int = -1
    came_s: float = 0.0


class Engine:
    """Runs the model in a thread."""

    def __init__(self, model: Model, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.model, self.name, self.loop = model, name, loop
        self.busy_s = self._said_s = 0.0
        self._waiting: list[Asked] = []
        self._running: dict[int, Asked] = {}
        self._wake = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, asked: Asked) -> None:
        asked.came_s = time.monotonic()
        with self._wake:
            self._waiting.append(asked)
            self._wake.notify()

    def _run(self) -> None:
        slots = self.model.shape.slots
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._running)
                free = [slot for slot in range(slots) if slot not in self._running]
                new, self._waiting = self._waiting[: len(free)], self._waiting[len(free) :]
            for asked, slot in zip(new, free, strict=False):
                asked.slot, self._running[slot] = slot, asked
                self._tell([(asked, self._prefill(asked))])
            if self._running:
                tokens, took_s = self.model.timed(lambda: self.model.step(max(self._running)))
                self._tell([(asked, tokens[slot]) for slot, asked in self._running.items()])
                self._count(took_s)

    def _prefill(self, asked: Asked) -> int:
        if asked.writer.transport.is_closing():
            return 0
        begun_s = time.monotonic()
        token, took_s = self.model.timed(lambda: self.model.prefill(asked.slot, asked.prompt))
        print(f"prompt {begun_s:.4f} {(begun_s - asked.came_s) * 1e3:.2f} {took_s * 1e3:.2f}", flush=True)
        self._count(took_s)
        return token

    def _count(self, took_s: float) -> None:
        self.busy_s += took_s
        if time.monotonic() - self._said_s > 1.0:
            self._said_s = time.monotonic()
            print(f"busy {self._said_s:.4f} {self.busy_s:.4f}", flush=True)

    def _tell(self, found: list[tuple[Asked, int]]) -> None:
        events = []
        for asked, token in found:
            asked.left -= 1
            over = asked.left <= 0 or asked.writer.transport.is_closing()
            if over:
                self._running.pop(asked.slot, None)
            events.append((asked, event(self.name, f" w{token}", over), over))
        self.loop.call_soon_threadsafe(self._send, events)

    def _send(self, events: list[tuple[Asked, bytes, bool]]) -> None:
        for asked, data, over in events:
            if not asked.writer.transport.is_closing():
                asked.writer.write(data)
            if over:
                asked.ended.set()


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


def event(name: str, text: str, over: bool) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "length" if over else None}
    head = {"id": "a", "object": "chat.completion.chunk", "created": 0, "model": name, "choices": [choice]}
    return chunk(f"data: {json.dumps(head)}\n\n") + (chunk("data: [DONE]\n\n") + b"0\r\n\r\n" if over else b"")


async def answer(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    kind = "HTTP/1.1 200 OK\r\ncontent-type: "
    while head := await reader.readuntil(b"\r\n\r\n"):
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(lines.get(b"content-length", b"0")))
        if head.startswith(b"GET"):
            row = {"id": engine.name, "max_model_len": engine.model.shape.length}
            text = json.dumps({"object": "list", "data": [row], "busy_s": engine.busy_s})
            writer.write(f"{kind}application/json\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            continue
        given: dict[str, Any] = json.loads(body)
        words = given["messages"][-1]["content"].split()
        shape = engine.model.shape
        most = int(given.get("max_tokens", 16))
        prompt = [zlib.crc32(word.encode()) % shape.vocabulary for word in words[: shape.length - min(most, 64)]]
        most = min(most, shape.length - len(prompt))
        writer.write(f"{kind}text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        asked = Asked(prompt, most, writer, asyncio.Event())
        engine.add(asked)
        await asked.ended.wait()


async def connection(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await answer(engine, reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="small")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--slots", type=int, help="requests at a time; by default as many as the shape has")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    model = Model(replace(shape, slots=given.slots or shape.slots), "cpu" if given.shape == "tiny" else "cuda:0")
    model.record()
    engine = Engine(model, given.name, asyncio.get_running_loop())
    server = await asyncio.start_server(lambda r, w: connection(engine, r, w), "127.0.0.1", given.port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
