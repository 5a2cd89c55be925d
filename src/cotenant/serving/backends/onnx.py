"""Backend onnx: models run by ONNX Runtime, on the share's CPU cores or by its CUDA provider if installed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.serving.backends.base import Backend, Share
from cotenant.serving.config.backends import FILE_FIELD
from cotenant.serving.protocol.tensors import DTYPES, ModelInfo, TensorSpec

if TYPE_CHECKING:
    from cotenant.serving.worker import ModelSpec

PLATFORM = "onnxruntime_onnx"
# maps ONNX Runtime's names of element types to the names of the Open Inference Protocol
TYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}  # fmt: skip


class OnnxModel(Backend):
    """A model in one ONNX Runtime session. The model is batchable if the first dimension of every input and output is
    free, or if its configuration sets max_batch_size.
    """

    def __init__(self, spec: ModelSpec, share: Share) -> None:
        import onnxruntime as ort

        began = time.monotonic()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        providers: list[Any] = ["CPUExecutionProvider"]
        if share.cores:
            options.intra_op_num_threads = len(share.cores)
            options.inter_op_num_threads = 1
            # idle threads of the runtime must not spin, since they would use the CPU time of other workers
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        elif "CUDAExecutionProvider" in ort.get_available_providers():
            providers.insert(0, "CUDAExecutionProvider")
        assert spec.path is not None
        file = Path(spec.path) / spec.config.get(FILE_FIELD, "model.onnx")
        self._session = ort.InferenceSession(str(file), options, providers=providers)
        ins, outs = self._session.get_inputs(), self._session.get_outputs()
        unknown = next((x for x in (*ins, *outs) if x.type not in TYPES), None)
        if unknown is not None:
            raise ValueError(f"{unknown.name} is a {unknown.type}, a type that the protocol does not have")
        limit = spec.config.get("max_batch_size")
        free = all(x.shape and not isinstance(x.shape[0], int) for x in (*ins, *outs))
        batchable = free if limit is None else limit > 0
        self._names = [x.name for x in ins]
        self._wanted = [x.name for x in outs]
        inputs, outputs = (tuple(_spec(x, batchable) for x in side) for side in (ins, outs))
        self.info = ModelInfo(inputs, outputs, batchable, PLATFORM, text=True)
        self._strings = any(x.datatype == "BYTES" for x in inputs)
        self._warm(spec.batch if batchable else 1)
        self.info = ModelInfo(inputs, outputs, batchable, PLATFORM, time.monotonic() - began, text=True)

    def _warm(self, batch: int) -> None:
        """Warm the model up: run the smallest and the largest batch once."""
        for count in sorted({1, batch}):
            inputs = []
            for x in self.info.inputs:
                shape = tuple(1 if size < 0 else size for size in x.shape)
                shape = (count, *shape) if self.info.batchable else shape
                fill = "" if x.datatype == "BYTES" else 0
                inputs.append(np.full(shape, fill, DTYPES[x.datatype]))
            try:
                self.run(inputs, count)
            except Exception:  # the model may refuse a size that its input types allow; then it is not warmed up
                return

    def run(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        if self._strings:
            inputs = [_text(x) if x.dtype == object else x for x in inputs]
        found: list[np.ndarray] = self._session.run(self._wanted, dict(zip(self._names, inputs, strict=True)))
        return found

    def close(self) -> None:
        del self._session


def _text(array: np.ndarray) -> np.ndarray:
    """Convert strings from bytes to str, as ONNX Runtime requires them."""
    out = np.empty(array.size, object)
    out[:] = [x.decode() if isinstance(x, bytes) else x for x in array.ravel().tolist()]
    return out.reshape(array.shape)


def _spec(x: Any, batchable: bool) -> TensorSpec:
    sizes = list(x.shape)[1:] if batchable else list(x.shape)
    return TensorSpec(x.name, TYPES[x.type], tuple(size if isinstance(size, int) else -1 for size in sizes))


def open_model(spec: ModelSpec, share: Share) -> OnnxModel:
    """Load version-folder/model.onnx, or the file that the configuration names."""
    return OnnxModel(spec, share)
