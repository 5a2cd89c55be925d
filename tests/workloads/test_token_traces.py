"""Token traces: each format with its quirks, and what is done before a replay. All lines are made up."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.llm.drawn import draw_trace, parse_lengths
from cotenant.workloads.llm.registry import FORMATS, read_tokens
from cotenant.workloads.llm.trace import TokenOptions, TokenTrace, make_trace


def rows(trace: TokenTrace) -> list[tuple[float, str, int, int]]:
    return [
        (round(t, 6), trace.models[m], int(p), int(o))
        for t, m, p, o in zip(trace.times_s, trace.model, trace.prompt, trace.output, strict=True)
    ]


def test_azure_has_seven_digits_in_2023_and_zones_in_2024(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
        "2023-11-16 18:15:49.6805900,10,1\n"
    )
    found = read_tokens(f"azure-llm:{path}")
    assert rows(found) == [(0.0, "", 374, 44), (3.0, "", 10, 1)]
    assert found.left_out == {"without an answer": 1}
    assert found.remarks == ("1 request was out of order; sorted by time",)
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 00:00:02+00:00,,8\n"
        "2024-05-10 00:00:03+00:00,7,8\n"
    )
    later = read_tokens(f"azure-llm:{path}")
    assert rows(later) == [(0.0, "", 5, 6), (2.99007, "", 7, 8)]
    assert later.left_out == {"without token counts": 1}
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,6\n")
    with pytest.raises(InputError, match=r"a\.csv, line 2, field TIMESTAMP"):
        read_tokens(f"azure-llm:{path}")


def test_azure_s_images_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.250Z,0,770,491\n"
        "2024-10-15T12:00:05.750Z,1,949,126\n2024-10-15T12:00:05.750Z,16,4564,0\n2024-10-15T12:00:06.250Z,2,,7\n"
    )
    found = read_tokens(f"azure-lmm:{path}")
    assert rows(found) == [(0.0, "", 770, 491), (5.5, "", 949, 126)]
    assert found.left_out == {"without token counts": 1, "without an answer": 1}
    assert any(remark.startswith("3 of 4 requests have 19 images") for remark in found.remarks)
    with pytest.raises(InputError, match=r"it looks like azure-lmm:.*m\.csv"):
        read_tokens(f"azure-llm:{path}")
    path.write_text("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.250Z,-1,770,491\n")
    with pytest.raises(InputError, match=r"m\.csv, line 2, field NumImages"):
        read_tokens(f"azure-lmm:{path}")


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", "azure-llm:"),
        ("b.csv", "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,472,18\n", "burstgpt:"),
        ("c.csv", "time_s,prompt_tokens,output_tokens\n0,1,1\n", "native:"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [1]}\n', "mooncake:"),
        ("s.jsonl", '{"session": "a", "turns": []}\n', "copilot:"),
        ("j.csv", "id,arrival_s,gpus,duration_s\na,0,1,5\n", "a trace of training jobs, native:"),
    ],
)
def test_the_format_that_fits_is_named(tmp_path: Path, name: str, text: str, fits: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    for form in FORMATS:
        if f"{form}:" != fits:
            with pytest.raises(InputError) as caught:
                read_tokens(f"{form}:{path}")
            assert caught.value.message == f"the file is not in the {form} format; it looks like {fits}{path}"


def test_clients_read_as_requests_are_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chunk-0-trace.csv").write_text("0,1,1\n")
    with pytest.raises(InputError, match="looks like servegen:"):
        read_tokens(f"burstgpt:{tmp_path}")


def test_burstgpt_s_failed_requests_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,1,2,ChatGPT,472,18,490,Conversation log\n45,,,GPT-4,1087,0,1087,API log\n45,,,GPT-4,10,3,13,API log\n"
    )
    found = read_tokens(f"burstgpt:{path}")
    assert rows(found) == [(0.0, "ChatGPT", 472, 18), (40.0, "GPT-4", 10, 3)]
    assert found.left_out == {"that failed": 1}


def test_mooncake_s_known_blocks_are_cached_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1030, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 600, "output_length": 6, "hash_ids": [1, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_tokens(f"mooncake:{path}")
    assert rows(found) == [(0.0, "", 1030, 4), (1.5, "", 1024, 5), (1.5, "", 600, 6)]
    assert found.cached.tolist() == [0, 1023, 512]  # the last token of a prompt is always computed


def copilot_call(at: str | None, model: str, prompt: int, completion: int, **more: object) -> dict[str, object]:
    tokens = {"prompt": prompt, "completion": completion, "cached": more.pop("cached", 0), "total": prompt + completion}
    return {"message_id": "x", "timestamp": at, "model": model, "result": "Success", "tokens": tokens, **more}


def test_copilot_s_sessions_become_calls_by_time(tmp_path: Path) -> None:
    folder = tmp_path / "date=2026-06-01"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    one = {"session_id": "s", "turns": [
        {"turn_id": "t", "llm_calls": [
            copilot_call("2026-06-01T00:00:02.500Z", "Model A", 9000, 50, cached=8000),
            copilot_call("2026-06-01T00:00:09.500Z", "Model A", 9100, 0),
        ], "tool_batches": []},
        {"turn_id": "u", "llm_calls": None},
    ]}  # fmt: skip
    two = {"session_id": "r", "turns": [{"turn_id": "v", "llm_calls": [
        copilot_call("2026-06-01T00:00:01.500", "Model B", 100, 5, result="UserCancel"),
        copilot_call(None, "Model B", 100, 5),
        copilot_call("2026-06-01T00:00:01.500", "Model B", -1, 5),
    ]}]}  # fmt: skip
    with gzip.open(folder / "shard-0000.jsonl.gz", "wt") as file:
        file.write(json.dumps(one) + "\n\n")
    with gzip.open(folder / "shard-0001.jsonl.gz", "wt") as file:
        file.write(json.dumps(two) + "\n")
    found = read_tokens(f"copilot:{tmp_path}")
    assert rows(found) == [(0.0, "Model B", 100, 5), (1.0, "Model A", 9000, 50)]
    assert found.cached.tolist() == [0, 8000]
    assert found.left_out == {"without a time": 1, "with invalid token counts": 1, "without an answer": 1}
    assert found.remarks[0] == "1 calls did not end with Success; their tokens are kept"
    (folder / "shard-0002.jsonl.gz").write_bytes(gzip.compress(b"[1]\n"))
    with pytest.raises(InputError, match="line 1: is not a JSON object"):
        read_tokens(f"copilot:{tmp_path}")


def servegen_client(folder: Path, number: int, windows: str, lengths: dict[str, dict[str, str]]) -> None:
    (folder / f"chunk-{number}-trace.csv").write_text(windows)
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(lengths))


def test_servegen_s_clients_are_drawn_by_window(tmp_path: Path) -> None:
    folder = tmp_path / "m-small"
    folder.mkdir()
    windows = "0,2.0,1.0,Gamma,1,1\n600,0,0,,,\n1200,8.0,0.5,Weibull,1,1\n"
    early = {"input_tokens": "{10: 1.0}", "output_tokens": "{3: 0.5, 4: 0.5}"}
    late = {"input_tokens": "{20: 1.0}", "output_tokens": "{5: 1.0}"}
    servegen_client(folder, 0, windows, {"0": early, "1200": late})
    servegen_client(folder, 1, windows, {"0": {"text_tokens": "{7: 1}", "image_tokens": "{100: 1}",
                                               "output_tokens": "{2: 1}"}})  # fmt: skip
    found = read_tokens(f"servegen:{folder}", TokenOptions(seed=3))
    assert found.models == ("m-small",)
    counts = [int(((found.times_s >= a) & (found.times_s < a + 600)).sum()) for a in (0, 600, 1200)]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(2 * 1200, abs=4 * np.sqrt(2400))
    assert counts[2] == pytest.approx(2 * 4800, abs=4 * np.sqrt(9600) * 0.5 + 10)
    assert set(found.prompt[found.times_s < 600]) == {10, 107}
    assert set(found.output[found.prompt == 10]) == {3, 4}
    assert set(found.prompt[found.times_s >= 1200]) == {20, 107}
    with tarfile.open(tmp_path / "s.tar.xz", "w:xz") as tar:
        tar.add(folder, "m-small")
    again = read_tokens(f"servegen:{tmp_path / 's.tar.xz'}", TokenOptions(1200, 60, 3))
    assert again.span_s < 60
    assert len(again) == pytest.approx(960, abs=120)
    (folder / "chunk-1-dataset.json").unlink()
    with pytest.raises(InputError, match="lacks its file of lengths"):
        read_tokens(f"servegen:{folder}")


def test_native_format(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text(
        "time_s,model,prompt_tokens,output_tokens,cached_tokens\n2.0,a,5,1,0\n1.0,\"b,c\",6,2,5\n4.5,a,7,3,0\n"
    )
    found = read_tokens(str(path))
    assert rows(found) == [(0.0, "b,c", 6, 2), (1.0, "a", 5, 1), (3.5, "a", 7, 3)]
    assert found.cached.tolist() == [5, 0, 0]


def test_requests_go_to_models_by_name_by_use_or_evenly() -> None:
    trace = make_trace("x", range(6), [0, 1, 1, 2, 2, 2], [5] * 6, [1] * 6, ("A", "B", "C"))
    assert [trace.onto(["B", "z"]).models, trace.onto(["B", "z"]).model.tolist()] == [("B", "z"), [0, 0]]
    by_use = trace.onto(["x", "y"])
    assert by_use.model.tolist() == [1, 1, 0, 0, 0]
    assert by_use.left_out == {"of models that are not simulated": 1}
    plain = make_trace("x", range(4000), None, [5] * 4000, [1] * 4000).onto(["x", "y"], 7)
    assert np.bincount(plain.model).tolist() == pytest.approx([2000, 2000], abs=130)


def test_windows_speed_and_context() -> None:
    trace = make_trace("x", [10, 12, 14, 16], None, [5, 50, 5, 5], [1] * 4, options=TokenOptions(2, 3))
    assert trace.times_s.tolist() == [0, 2]
    assert trace.faster(4).times_s.tolist() == [0, 0.5]
    assert trace.fitting([20]).left_out == {"longer than the model's context": 1}
    with pytest.raises(InputError, match="no requests left"):
        make_trace("x", [0.0], None, [0], [1])


def test_lengths_and_rates_that_are_drawn() -> None:
    rng = np.random.default_rng(1)
    assert set(parse_lengths("512", "p")(rng, 9)) == {512}
    even = parse_lengths("3-5", "p")(rng, 3000)
    assert (even.min(), even.max(), even.mean()) == (3, 5, pytest.approx(4, abs=0.06))
    skewed = parse_lengths("400~1.5", "p")(rng, 200_000)
    assert (skewed.mean(), skewed.std() / skewed.mean()) == (pytest.approx(400, rel=0.03), pytest.approx(1.5, rel=0.08))
    for wrong in ("0", "5-3", "x", "10~0"):
        with pytest.raises(InputError, match="field p"):
            parse_lengths(wrong, "p")
    trace = draw_trace(["a", "b"], [5, 0], "10", "3", 200, seed=1)
    assert len(trace) == pytest.approx(1000, abs=130)
    assert set(trace.model) == {0}
    more = draw_trace(["a", "b"], [5, 5], "10", "3", 200, seed=1)
    assert more.times_s[more.model == 0].tolist() == trace.times_s.tolist()


def test_an_unknown_format_is_named_with_a_near_one() -> None:
    with pytest.raises(InputError, match="did you mean burstgpt:x"):
        read_tokens("burstgtp:x")
    assert all(help_ for _, help_ in FORMATS.values())


def test_the_public_samples(shared: Path) -> None:
    azure = read_tokens(f"azure-llm:{shared / 'data/requests/azure-llm/conv.csv'}")
    assert (len(azure), azure.left_out) == (19_366, {})
    assert int(azure.prompt[0]) == 374
    moon = read_tokens(f"mooncake:{shared / 'data/requests/mooncake/synthetic_trace.jsonl'}")
    assert int(moon.prompt[0]) == 40_160
    drawn = read_tokens(
        f"servegen:{shared / 'data/requests/servegen/multimodal-mm-image.tar.xz'}", TokenOptions(0, 600)
    )
    assert drawn.models == ("mm-image",)


def test_drawn_requests_of_several_models_are_in_order_without_a_remark() -> None:
    trace = draw_trace(["a", "b"], [5, 5], "10", "3", 50, seed=1)
    assert trace.remarks == ()
    assert (np.diff(trace.times_s) >= 0).all()
    assert set(trace.model.tolist()) == {0, 1}


def test_one_request_out_of_order_is_said_in_the_singular() -> None:
    found = make_trace("t", [1.0, 0.0, 2.0], None, [1, 1, 1], [1, 1, 1], ("",))
    assert found.remarks == ("1 request was out of order; sorted by time",)
