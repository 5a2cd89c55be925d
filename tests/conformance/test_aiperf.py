"""AIPerf against a model of strings, by its template of payloads; skipped where aiperf is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_setup import deployment, plan
from server_thread import running

onnx = pytest.importorskip("onnx")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
AIPERF = shutil.which("aiperf", path=str(Path(sys.executable).parent))

TEMPLATE = {
    "inputs": [{"name": "s", "shape": [1, 1], "datatype": "BYTES", "data": ["TEXT"]}],
    "outputs": [{"name": "t"}],
}  # fmt: skip


def tokenizer(folder: Path) -> None:
    """A tokenizer that needs no download."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", bos_token="[UNK]", eos_token="[UNK]"
    ).save_pretrained(folder)


@pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed")
def test_forty_requests_of_strings(tmp_path: Path) -> None:
    kind = onnx.TensorProto.STRING
    sides = [onnx.helper.make_tensor_value_info(x, kind, ["n", 1]) for x in "st"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["s"], ["t"])], "g", sides[:1], sides[1:])
    made = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 13)])
    model = tmp_path / "echo"
    (model / "1").mkdir(parents=True)
    onnx.save(made, model / "1" / "model.onnx")
    tokenizer(tmp_path / "tokenizer")
    (tmp_path / "payload.jinja").write_text(json.dumps(TEMPLATE).replace('"TEXT"', "{{ text|tojson }}"))
    (tmp_path / "texts.jsonl").write_text('{"text": "hello"}\n' * 4)
    services: Any = deployment([{"name": "a", "model": str(model), "backend": "onnx", "slo_ms": 20_000}], tmp_path)
    with running(services | {"mechanism": "cores"}, plan=plan({"a": 8})) as server:
        command = [
            AIPERF, "profile", "-m", "a", "--url", server.http_url, "--endpoint-type", "template",
            "--custom-endpoint", "/v2/models/a/infer", "--extra-inputs", "payload_template:payload.jinja",
            "--extra-inputs", "response_field:outputs[0].data[0]", "--input-file", "texts.jsonl",
            "--custom-dataset-type", "single_turn", "--request-count", "40", "--concurrency", "4",
            "--tokenizer", "./tokenizer", "--ui", "none", "--artifact-dir", "out",
        ]  # fmt: skip
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        answered = server.call(lambda: server.server.stats.services["a"].requests.times["success"].count)
    assert answered >= 40
    report = next((tmp_path / "out").rglob("profile_export_aiperf.json"))
    assert json.loads(report.read_text())["request_count"]["avg"] == 40
