"""OpenAI's own client and LiteLLM, unchanged, on the door of language models: two models with room for one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models_door import Door, door

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    engine = f"{sys.executable} -m cotenant.cli.main timed-llm --speed 10 --port {{port}} --model"
    rows: list[dict[str, Any]] = [{"name": n, "memory": "6GiB", "command": f"{engine} {n}"} for n in ("a", "b")]
    with door(Path(tmp_path_factory.mktemp("clients")), *rows) as it:
        yield it


def test_the_openai_package(two: Door) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    base = f"http://127.0.0.1:{two.port}/v1"
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    assert [row.id for row in client.models.list()] == ["a", "b"]
    answer = client.chat.completions.create(model="a", messages=HI, max_tokens=3)
    assert answer.choices[0].message.content.startswith("a/")
    assert len(answer._request_id) == 36
    assert client.completions.create(model="a", prompt="hi", max_tokens=2).usage.completion_tokens == 2
    assert len(client.embeddings.create(model="a", input="hi").data) == 1
    with pytest.raises(openai.NotFoundError, match="does not exist") as found:
        client.chat.completions.create(model="x", messages=HI)
    assert found.value.code == "model_not_found"

    async def many() -> list[str]:
        own = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)

        async def one(i: int) -> str:
            stream = await own.chat.completions.create(model="ab"[i % 2], messages=HI, max_tokens=8, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return list(await asyncio.gather(*[one(i) for i in range(40)]))

    answers = asyncio.run(many())
    assert [answer[:2] for answer in answers] == ["a/", "b/"] * 20
    assert [answer.count("/") for answer in answers] == [8] * 40


def test_litellm(two: Door) -> None:
    litellm = pytest.importorskip("litellm", reason="the package litellm is not installed")
    given: dict[str, Any] = {"api_base": f"http://127.0.0.1:{two.port}/v1", "api_key": "none", "messages": HI}
    assert litellm.completion(model="openai/b", max_tokens=2, **given).choices[0].message.content.startswith("b/")
    stream = litellm.completion(model="openai/a", max_tokens=2, stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream).startswith("a/")
