"""models.yaml: what is read from it, and one sentence for each thing that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.core.yamlfile import parse_yaml
from cotenant.serving.config.models import check_kept, is_models_file, parse_models, read_models

GIB = 1 << 30
EXAMPLE = """
gpus: {count: 1}
models:
  - {name: chat-8b, command: "vllm serve /models/chat-8b --port {port}", memory: 30GiB, ttft_ms: 200, tpot_ms: 30, keep: 1}
  - {name: code-4b, command: "transformers serve /models/code-4b --port {port}", memory: 20GiB, ttft_ms: 300}
  - {name: night-batch, command: "batch --listen=127.0.0.1:{port}", class: best-effort, memory: 60GiB}
"""  # noqa: E501


def test_the_example() -> None:
    config = parse_models(parse_yaml(EXAMPLE).content)
    chat, code, night = config.facts()
    assert (chat.name, chat.memory_bytes, chat.late_s, chat.kept) == ("chat-8b", 30 * GIB, 0.2, True)
    assert (code.late_s, code.kept, code.best_effort) == (0.3, False, False)
    assert (night.best_effort, night.memory_bytes) == (True, 60 * GIB)
    assert [m.tpot_ms for m in config.models] == [30.0, 100.0, 100.0]
    assert [m.known_name for m in config.models] == [None, "/models/code-4b", None]
    assert config.services is None


def test_services_may_stand_beside_models() -> None:
    content = parse_yaml(
        EXAMPLE.replace("{count: 1}", "{count: 1, model: H100, memory: 80GiB, mechanism: mps}")
        + "mechanism: whole\nservices: [{name: mnist, slo_ms: 5, model: here/mnist}]\n"
    ).content
    config = parse_models(content)
    assert config.services == {
        "gpus": {"count": 1, "model": "H100"},
        "mechanism": "whole",
        "services": [{"name": "mnist", "slo_ms": 5, "model": "here/mnist"}],
    }
    assert config.raw.gpus.mechanism == "mps"
    assert is_models_file(content)
    assert not is_models_file({"models": "folder", "services": []})


ONE = "models:\n- name: a\n  command: serve --port {port}\n  memory: 4GiB\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("models: []", "line 1, field models: [] is too short: at least 1 entry is needed"),
        (ONE.replace("memory", "memry"), "line 4, field models[0].memry: unknown setting 'memry'; did"),
        (ONE.replace("  memory: 4GiB\n", ""), "line 2, field models[0].memory: is missing"),
        (ONE.replace("{port}", "80"), "line 3, field models[0].command: must contain {port}, for the port"),
        (
            ONE.replace("serve --port", "serve 'x"),
            "line 3, field models[0].command: is not a valid command line: no closing",
        ),
        (
            ONE.replace("serve --port {port}", "'{port}'"),
            "field models[0].command: must begin with the program's name, and {port} must come after it",
        ),
        (ONE + ONE.removeprefix("models:\n"), "line 5, field models[1].name: a is declared twice"),
        (ONE.replace("name: a", "name: 'a b'"), "line 2, field models[0].name: 'a b' is not a tenant name"),
        (ONE + "  keep: 2\n", "line 5, field models[0].keep: a model has one program, so keep is 0 or 1, not 2"),
        (ONE + "  class: gold\n", "line 5, field models[0].class: 'gold' is not"),
        (ONE + "  ttft_ms: 0\n", "line 5, field models[0].ttft_ms: 0 is not above 0"),
        (ONE + "gpus: {memory: 2GiB}\n", "a needs 4.00 GiB, but the models may use only 2.00 GiB of each GPU"),
        (ONE + "gpus: {model: cpu}\n", "needs memory: the host memory that all programs together may use"),
        (ONE + "gpus: {model: cpu, memory: 8GiB, mechanism: mps}\n", "leave it out with model: cpu, because no GPU is"),
        (
            ONE + "listen: {origins: [https://chat.example, chat.example]}\n",
            "line 5, field listen.origins: 'chat.example' is not an origin such as https://chat.example or http://local",
        ),
        (ONE + "listen: {origins: ['https://chat.example/']}\n", "'https://chat.example/' is not an origin"),
        (ONE + "listen: {origins: ['https://Chat.example']}\n", "write 'https://chat.example', as browsers send it"),
        (ONE + "listen: {origins: ['https://a.example:443']}\n", "write 'https://a.example', as browsers send it"),
        (ONE + "  request: 120%\n", "line 5, field models[0].request: "),
        (ONE + "  request: fast\n", "line 5, field models[0].request: "),
        (
            ONE + "  request: 70%\n" + ONE.removeprefix("models:\n").replace("name: a", "name: b") + "  request: 0.4\n",
            "line 9, field models[1].request: with it the requests of all models are 110%; they must be 100% at most",
        ),
        (ONE + "  request: 70%\n  class: best-effort\n", "models[0].request: leave it out for a best-effort model"),
        (ONE + "  request: 70%\ngpus: {mechanism: mps}\n", "models[0].request: leave it out with mechanism: mps"),
        (ONE + "  request: 7%\ngpus: {model: cpu, memory: 8GiB}\n", "models[0].request: leave it out with model: cpu"),
        (ONE + "gpus: {mechanism: mig}\n", "field gpus.mechanism: 'mig' is not auto, time, slices or mps"),
        (ONE + "listen: {http: none}\n", "line 5, field listen.http: language models are served over HTTP only"),
        (ONE + "gpus: {model: sofd}\n", "line 5, field gpus.model: 'sofd' is neither soft, nor cpu, nor a known GPU"),
        ("models: {a: 3}\n", "line 1, field models: must be a list: each model an entry with name, command and memory"),
        (ONE.replace("models:", "model:"), "line 1, field model: unknown setting for a list of models; did you mean"),
        (ONE + "evict: soon\n", "line 5, field evict: unknown setting; known: gpus, models, listen"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as found:
        read_models(path)
    assert complaint in str(found.value)
    assert "\n" not in str(found.value)


def test_models_that_are_kept_fit_together() -> None:
    two = ONE + "  keep: 1\n" + ONE.removeprefix("models:\n").replace("name: a", "name: b") + "  keep: 1\n"
    models = parse_models(parse_yaml(two).content).models
    check_kept(models, [8 * GIB])
    check_kept(models, [4 * GIB, 4 * GIB])
    with pytest.raises(InputError, match="the models to keep do not fit together: there is no room for b"):
        check_kept(models, [7 * GIB])
    with pytest.raises(InputError, match=r"a needs 4\.00 GiB and no GPU has more than 3\.00 GiB"):
        check_kept(models, [3 * GIB])
