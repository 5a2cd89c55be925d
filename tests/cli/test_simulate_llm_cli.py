"""`cotenant simulate --serving`: figures of a small file, and sentences for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import cotenant

MODELS = """
gpus: {count: 1, memory: 80GiB}
models:
  - {name: chat, command: "engine --port {port}", memory: 30GiB, ttft_ms: 100, tpot_ms: 30}
  - {name: code, command: "engine --port {port}", memory: 30GiB, ttft_ms: 100, tpot_ms: 30}
"""
PROFILE = {"format": "cotenant-llm-profile-1", "models": {
    "chat": {"prefill_ms": {"base": 10, "per_token": 1}, "decode_ms": {"base": 20}},
    "code": {"prefill_ms": {"base": 10, "per_token": 1}, "decode_ms": {"base": 20}},
}}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    models, profile, trace = tmp_path / "models.yaml", tmp_path / "profile.json", tmp_path / "trace.csv"
    models.write_text(MODELS)
    profile.write_text(json.dumps(PROFILE))
    trace.write_text(
        "time_s,model,prompt_tokens,output_tokens\n0,chat,20,2\n1,code,20,1\n1,chat,20,1\n2,chat,99999,1\n"
    )
    return models, profile, trace


def test_a_trace_by_hand(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    models, profile, trace = files
    out = tmp_path / "out.csv"
    done = cotenant("simulate", "--serving", models, "--profile", profile, "--trace", trace, "--csv", out, "--json")
    assert done.code == 0, done.err
    content = json.loads(done.out)
    assert content["models"]["chat"]["requests"] == 2
    # the second request runs beside one for `code`
    assert content["models"]["chat"]["ttft_ms"]["mean"] == pytest.approx((30 + 60) / 2)
    assert content["models"]["code"]["ttft_ms"]["mean"] == pytest.approx(60)
    assert content["models"]["chat"]["tpot_ms"]["mean"] == pytest.approx(20)
    assert content["total"]["attainment"] == 1
    assert content["trace"]["left_out"] == {"longer than the model's context": 1}
    assert out.read_text().splitlines()[1] == "chat,0.000000,0.030000,0.050000,20,2,30.000000,20.000000"
    shown = cotenant("simulate", "--serving", models, "--profile", profile, "--trace", trace)
    assert "GPUs busy" in shown.out
    assert "1 request left out: longer than the model's context" in shown.err
    assert "no request of" not in shown.err


def test_refused_requests_are_counted_in_a_note(files: tuple[Path, Path, Path]) -> None:
    """The program takes one request at a time, one waits, and a third one is refused."""
    models, profile, trace = files
    models.write_text(MODELS.replace("tpot_ms: 30}", "tpot_ms: 30, max_queue: 1, max_concurrency: 1}", 1))
    trace.write_text("time_s,model,prompt_tokens,output_tokens\n" + "0,chat,20,9\n" * 3)
    shown = cotenant("simulate", "--serving", models, "--profile", profile, "--trace", trace)
    assert "note: 1 request of chat refused: 1 waited already (max_queue)" in shown.err


def test_a_model_that_never_has_room_is_named(files: tuple[Path, Path, Path]) -> None:
    models, profile, trace = files
    models.write_text(MODELS.replace("tpot_ms: 30}", "tpot_ms: 30, keep: 1}", 1).replace("80GiB", "40GiB"))
    shown = cotenant("simulate", "--serving", models, "--profile", profile, "--trace", trace)
    assert (shown.code, shown.err.splitlines()[-1][:39]) == (0, "note: no request of code is answered: i"), shown.err


def test_fixed_fractions_and_rates_by_name(files: tuple[Path, Path, Path]) -> None:
    models, profile, _ = files
    asked = (
        "simulate",
        "--serving",
        models,
        "--profile",
        profile,
        "--prompt",
        "20",
        "--output",
        "1",
        "--duration",
        "9s",
    )
    one = json.loads(cotenant(*asked, "--rate", "chat=0.5", "--arrivals", "constant", "--json").out)
    assert one["models"]["chat"]["requests"] == 5
    assert one["models"]["chat"]["ttft_ms"]["p50"] == pytest.approx(30)
    half = json.loads(
        cotenant(*asked, "--rate", "chat=0.5", "--arrivals", "constant", "--sharing", "fixed", "--json").out
    )
    assert half["models"]["chat"]["ttft_ms"]["p50"] == pytest.approx(60)


def test_a_models_request_is_its_part_of_a_busy_gpu(files: tuple[Path, Path, Path]) -> None:
    """A decode step of chat takes 20 ms alone, and 20 / 0.8 ms beside steps of code, which has the rest."""
    models, profile, trace = files
    models.write_text(MODELS.replace("tpot_ms: 30}", "tpot_ms: 30, request: 80%}", 1))
    trace.write_text("time_s,model,prompt_tokens,output_tokens\n0,code,20,500\n1,chat,20,101\n")
    done = cotenant("simulate", "--serving", models, "--profile", profile, "--trace", trace, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["models"]["chat"]["tpot_ms"]["mean"] == pytest.approx(25, rel=0.01)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "cotenant: give the requests: --trace FORMAT:PATH, or --rate R"),
        (("--rate", "1", "--prompt", "40000"), "no request fits into the 32,768 tokens"),
        (("--rate", "x=1"), "there is no model 'x'; the models are chat, code"),
        (("--rate", "1", "--prompt", "many"), "--prompt: 'many' is not a length"),
        (("--rate", "1", "--sharing", "half"), "sharing: 'half' is not conserving or fixed"),
        (("--rate", "1", "--share", "chat"), "share: 'chat' is not NAME=FRACTION"),
        (("--rate", "1", "--profile", "nowhere=8b"), "there is no model 'nowhere'"),
        (("--rate", "1", "--profile", "chat=70b"), "chat of 70B needs more than 30.0 GiB"),
    ],
)
def test_what_is_wrong_is_said(files: tuple[Path, Path, Path], words: tuple[str, ...], sentence: str) -> None:
    models, profile, _ = files
    done = cotenant("simulate", "--serving", models, "--profile", profile, *words)
    assert done.code == 2
    assert sentence in done.err


def test_programs_without_a_gpu_are_stopped_where_others_are_evicted(files: tuple[Path, Path, Path]) -> None:
    models, profile, trace = files
    trace.write_text("time_s,model,prompt_tokens,output_tokens\n0,chat,20,1\n10,code,20,1\n")
    asked = ("simulate", "--serving", models, "--profile", profile, "--trace", trace, "--start-up", "3s", "--json")
    found = {}
    for kind in ("soft", "cpu"):
        models.write_text(MODELS.replace("{count: 1, memory: 80GiB}", f"{{model: {kind}, memory: 40GiB}}"))
        done = cotenant(*asked)
        assert done.code == 0, done.err
        found[kind] = json.loads(done.out)["models"]
    assert [(found[k]["chat"]["evictions"], found[k]["chat"]["stops"]) for k in ("soft", "cpu")] == [(1, 0), (0, 1)]
    # the times of the stop, the start and the prefill
    assert found["cpu"]["code"]["ttft_ms"]["mean"] == pytest.approx(1000 + 3000 + 30)


def test_a_model_without_a_profile_is_named(files: tuple[Path, Path, Path]) -> None:
    done = cotenant("simulate", "--serving", files[0], "--profile", "chat=8b", "--rate", "1")
    assert "code has no profile; give --profile code=FILE or =8b" in done.err


def test_the_memory_of_a_gpu_is_that_of_its_model_and_is_printed(files: tuple[Path, Path, Path]) -> None:
    models, profile, trace = files
    asked = ("simulate", "--serving", models, "--profile", profile, "--trace", trace)
    for gpus, gib, source, why in (
        ("count: 1", 80, "default", "assumed"),
        ("count: 1, model: A100-40GB", 40, "gpus.model", "the memory of A100-40GB"),
        ("count: 1, model: NVIDIA H200", 141, "gpus.model", "the memory of H200"),
        ("count: 1, model: H200, memory: 70GiB", 70, "gpus.memory", "as gpus.memory states"),
    ):
        models.write_text(MODELS.replace("count: 1, memory: 80GiB", gpus))
        done = cotenant(*asked, "--json")
        assert done.code == 0, done.err
        content = json.loads(done.out)
        assert (content["gpu_memory_bytes"], content["gpu_memory_from"]) == (gib << 30, source)
        shown = cotenant(*asked)
        assert f"models may use {gib} GiB of each GPU ({why}" in shown.out


def test_step_times_are_estimated_for_the_gpu_model_of_the_file(files: tuple[Path, Path, Path]) -> None:
    """The L40S has more arithmetic than the A30, and less bandwidth: prompts get shorter, decode steps longer."""
    models, profile, trace = files
    trace.write_text("time_s,model,prompt_tokens,output_tokens\n0,chat,20,2\n")
    asked = ("simulate", "--serving", models, "--profile", profile, "--trace", trace)
    memory, arithmetic = 933 / 864, 165 / 362
    plain = (30.0, 20.0)
    scaled = (10 * memory + 20 * arithmetic, 20 * memory)
    there = "L40S, estimated from times on A30"
    for gpu, of, times, said in (
        ("A30", "count: 1", plain, "step times: those of A30\n"),
        ("A30", "model: A30", plain, "step times: those of A30\n"),
        ("A30", "model: L40S", scaled, f"step times: those of {there}\n"),
        ("A30", "model: L40S, memory: 40GiB", scaled, f"step times: those of {there}\n"),
        ("mine", "model: L40S", plain,
         "step times: those of mine (not scaled to L40S: the profile of chat, code names no GPU of the catalog)\n"),
    ):  # fmt: skip
        rows = {name: {**row, "gpu": gpu} for name, row in PROFILE["models"].items()}  # type: ignore[attr-defined]
        profile.write_text(json.dumps(PROFILE | {"models": rows}))
        models.write_text(MODELS.replace("count: 1, memory: 80GiB", of).replace("30GiB", "10GiB"))
        done = cotenant(*asked, "--json")
        assert done.code == 0, done.err
        content = json.loads(done.out)
        row = content["models"]["chat"]
        assert (row["ttft_ms"]["mean"], row["tpot_ms"]["mean"]) == pytest.approx(times)
        assert content["step_times_of"]["chat"] == (there if times == scaled else gpu)
        assert said in cotenant(*asked).out


def test_a_model_without_room_on_any_gpu_is_refused_as_by_the_server(files: tuple[Path, Path, Path]) -> None:
    models, profile, trace = files
    asked = ("simulate", "--serving", models, "--profile", profile, "--trace", trace)
    models.write_text(MODELS.replace("memory: 80GiB", "model: A10"))
    done = cotenant(*asked)
    where = f"{models}, line 4, field models[0].memory"
    sentence = "chat needs 30.00 GiB, but the models may use only 24.00 GiB of each GPU"
    assert (done.code, done.err) == (2, f"cotenant: {where}: {sentence}\n")
    models.write_text(MODELS.replace("memory: 80GiB", "model: A10, memory: 32GiB"))
    done = cotenant(*asked)
    assert (done.code, "gpus.memory: 32 GiB are too much: A10 has only 24 GiB" in done.err) == (2, True), done.err
    kept = MODELS.replace("tpot_ms: 30}", "tpot_ms: 30, keep: 1}")
    models.write_text(kept.replace("memory: 80GiB", "model: A100-40GB"))
    done = cotenant(*asked)
    assert (done.code, "the models to keep do not fit together" in done.err) == (2, True), done.err
    models.write_text(MODELS.replace("memory: 80GiB", "model: A100-50GB"))
    done = cotenant(*asked)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    for text in ("gpus.model: 'A100-50GB'", "A100-40GB, A100-80GB", "gpus.memory"):
        assert text in done.err
