"""A stand-in for a model's program, with as much of OpenAI's API as the tests of the models endpoint need. It uses only
the standard library.

Each answer names the model of the program and the request's own prompt. `max_tokens` tokens come `gap` seconds apart.
A prompt of `die` ends the program at once, `die-once` where the named file is not there yet, `die-late` after two
tokens, `hold` after one token until the client goes, `until` is answered when the named file is there. `--until`: the
program listens when that file is there. `--each N`: events have N tokens each, and the number of all tokens follows if
the request asks for it. `--strict`: a request that asks for it is refused. Lines of standard output say what has
happened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: {}\r\nx-program: stand-in\r\n{}\r\n\r\n"


async def answer(given: argparse.Namespace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.readuntil(b"\r\n\r\n"):
        method = head.partition(b" ")[0]
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(lines.get(b"content-length", b"0")))
        if method == b"GET" and given.status:
            writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % given.status)
            continue
        if method == b"GET":
            if given.no_list and b" /health " not in head:
                writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n")
                writer.close()  # uvicorn also closes the connection without announcing it in a header
                return
            short(writer, {"object": "list", "data": [{"id": given.model}]})
            continue
        content = json.loads(body)
        if content["model"] != given.model:
            short(writer, {"error": {"message": f"no model {content['model']}", "type": "invalid_request_error"}})
            continue
        prompt = content.get("prompt") or content.get("input") or content["messages"][-1]["content"]
        print("asked", prompt, flush=True)
        if prompt == "die" or (prompt.startswith("die-once ") and not Path(prompt[9:]).exists()):
            if prompt != "die":
                Path(prompt[9:]).touch()
            os._exit(3)
        while prompt.startswith("until ") and not Path(prompt[6:]).exists():
            await asyncio.sleep(0.01)
        count = content.get("max_tokens", 3)
        usage = content.get("stream_options", {}).get("include_usage") and given.each > 0
        if given.strict and "stream_options" in content:
            print("refused", flush=True)
            text = '{"error": {"message": "unknown field stream_options"}}'
            head = f"HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
            writer.write((head + text).encode())
        elif content.get("stream"):
            await stream(given, reader, writer, prompt, count, usage)
        else:
            await asyncio.sleep(given.gap * count)
            revision = "@main" if given.no_list else ""
            short(writer, {"model": given.model + revision, "text": f"{given.model} {prompt}", "usage": {"n": count}})


def short(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    text = json.dumps(content)
    writer.write((HEAD.format("application/json", f"content-length: {len(text)}") + text).encode())


async def stream(
    given: argparse.Namespace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: str, count: int,
    usage: bool,
) -> None:  # fmt: skip
    writer.write(HEAD.format("text/event-stream", "transfer-encoding: chunked").encode())
    try:
        for i in range(count):
            text = f"{prompt} {i}"
            event = f"data: {json.dumps({'model': given.model, 'text': text, 'choices': [{'text': text}]})}\n\n"
            writer.write(f"{len(event):x}\r\n{event}\r\n".encode())
            await writer.drain()
            if prompt == "die-late" and i == 1:
                await asyncio.sleep(0.1)
                os._exit(4)
            while prompt == "hold":
                await asyncio.sleep(0.01)
                if reader.at_eof() or writer.transport.is_closing():
                    raise ConnectionResetError
            await asyncio.sleep(given.gap)
            if reader.at_eof() or writer.transport.is_closing():
                raise ConnectionResetError
        if usage:
            report = {"model": given.model, "choices": [], "usage": {"completion_tokens": count * given.each}}
            event = f"data: {json.dumps(report)}\n\n"
            writer.write(f"{len(event):x}\r\n{event}\r\n".encode())
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    except ConnectionError:
        print("client gone", flush=True)
        raise


async def connection(given: argparse.Namespace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await answer(given, reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--each", type=int, default=0)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--fail")
    parser.add_argument("--status", type=int, help="status with which a GET is answered")
    parser.add_argument("--no-list", action="store_true", help="as transformers serve 5.17 without a cache of models")
    given = parser.parse_args()
    if given.fail:
        raise SystemExit(given.fail)
    while given.until and not given.until.exists():
        await asyncio.sleep(0.01)
    server = await asyncio.start_server(lambda r, w: connection(given, r, w), "127.0.0.1", given.port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
