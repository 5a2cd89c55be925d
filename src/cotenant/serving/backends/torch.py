"""Backend torch: exported programs (model.pt2) and TorchScript (model.pt), on a GPU's share or on CPU cores.

On a GPU every batch size of GRAPH_SIZES has a CUDA graph with fixed buffers; a batch runs the smallest graph that holds
it. If the backend itself enforces the share (mechanism `green`), graphs are captured on a green context of the share's
size, and another share uses another context from the next batch on. Other mechanisms enforce the share from outside the
process.
"""

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

# batch sizes for which a CUDA graph is captured; they are close to each other, so that little padding is computed
GRAPH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WARM_RUNS = 3
TORCH_NAMES = {
    "BOOL": "bool", "UINT8": "uint8", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip


class _Graph:
    """The CUDA graph of one batch size, the device buffers that the graph reads and writes, and pinned host buffers."""

    def __init__(self, graph: Any, inputs: list[Any], outputs: list[Any], torch: Any) -> None:
        self.graph, self.inputs, self.outputs = graph, inputs, outputs
        self.host_inputs = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in inputs]
        self.host_outputs = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in outputs]


class TorchModel(Backend):
    """A model that PyTorch runs."""

    def __init__(self, spec: ModelSpec, share: Share) -> None:
        import torch

        began = time.monotonic()
        self._torch, self._share = torch, share
        on_gpu = torch.cuda.is_available() and share.on_gpu
        self._device = torch.device("cuda" if on_gpu else "cpu")
        # with a GPU, the CPU only copies batches, and starting several threads for that would take longer than the copy
        torch.set_num_threads(len(share.cores) if share.cores else 1)
        self._contexts: Any = None
        self._stream: Any = torch.cuda.Stream() if on_gpu else None
        before = torch.cuda.mem_get_info()[0] if on_gpu else 0
        self._module, inputs, free = _load(torch, spec, self._device)
        limit = spec.config.get("max_batch_size")
        batchable = free if limit is None else limit > 0
        self.info = ModelInfo(inputs, (), batchable, "pytorch")
        outputs = self._probe(spec)
        self._sizes = [n for n in GRAPH_SIZES if n < spec.batch] + [spec.batch] if batchable else [1]
        static = on_gpu and all(size >= 0 for x in inputs for size in x.shape)
        no_graphs = spec.config.get("parameters", {}).get("no_graphs", {}).get("string_value") == "true"
        self._captured = static and not no_graphs
        self._graphs: dict[int, dict[int, _Graph]] = {}
        self._sms = 0
        self.info = ModelInfo(inputs, outputs, batchable, "pytorch")
        if on_gpu:
            self.resize(share.fraction)
        used = before - torch.cuda.mem_get_info()[0] if on_gpu else 0
        self.info = ModelInfo(inputs, outputs, batchable, "pytorch", time.monotonic() - began, max(0, used))

    # ---- loading ----

    def _probe(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Run one item to find the outputs. Their names come from the configuration if it has any."""
        shapes = [tuple(1 if size < 0 else size for size in x.shape) for x in self.info.inputs]
        zeros = [np.zeros((1, *s) if self.info.batchable else s, DTYPES[x.datatype])
                 for s, x in zip(shapes, self.info.inputs, strict=True)]  # fmt: skip
        with self._torch.inference_mode():
            found = self._eager([self._tensor(array, x) for array, x in zip(zeros, self.info.inputs, strict=True)])
        entries = spec.config.get("output", [])
        names = [e["name"] for e in entries] if entries else [f"OUTPUT{i}" for i in range(len(found))]
        if len(names) != len(found):
            raise ValueError(f"the configuration names {len(names)} outputs; the model has {len(found)}")
        shown = {getattr(self._torch, name): key for key, name in TORCH_NAMES.items()}
        out = []
        for i, (name, tensor) in enumerate(zip(names, found, strict=True)):
            sizes = tuple(tensor.shape[1:] if self.info.batchable else tensor.shape)
            wanted = tuple(entries[i].get("dims", sizes)) if entries else sizes
            free = any(size < 0 for x in self.info.inputs for size in x.shape)
            out.append(TensorSpec(name, shown[tensor.dtype], wanted if free else sizes))
        return tuple(out)

    def _tensor(self, array: np.ndarray, spec: TensorSpec) -> Any:
        """An array (possibly read-only) as a tensor of the input's type on the device."""
        torch = self._torch
        with np.errstate(all="ignore"):
            tensor = torch.from_numpy(np.array(array))
        if spec.datatype == "BF16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._device)

    def _eager(self, inputs: list[Any]) -> list[Any]:
        found = self._module(*inputs)
        if isinstance(found, dict):
            return list(found.values())
        return list(found) if isinstance(found, list | tuple) else [found]

    # ---- shares ----

    def resize(self, fraction: float) -> bool:
        """Use another share (see Backend). Graphs for a number of SMs are captured when that number is first used."""
        if self._share.resizes and self._device.type == "cuda":
            if self._contexts is None:
                from cotenant.devices.green import GreenContexts

                self._contexts = GreenContexts(self._torch.cuda.current_device(), self._share.start)
            context = self._contexts.of(fraction)
            self._sms = context.sms
            self._stream = self._torch.cuda.ExternalStream(context.stream)
        elif fraction != self._share.fraction:
            return False
        if self._captured and self._sms not in self._graphs:
            # the largest graph is captured first, because the smaller ones then fit into its memory pool
            pool = self._torch.cuda.graph_pool_handle()
            self._graphs[self._sms] = {n: self._capture(n, pool) for n in sorted(self._sizes, reverse=True)}
        return True

    def _capture(self, count: int, pool: Any) -> _Graph:
        torch = self._torch
        lead = (count,) if self.info.batchable else ()
        inputs = [
            torch.zeros((*lead, *x.shape), dtype=getattr(torch, TORCH_NAMES[x.datatype]), device=self._device)
            for x in self.info.inputs
        ]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for _ in range(WARM_RUNS):
                self._eager(inputs)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                outputs = self._eager(inputs)
        return _Graph(graph, inputs, outputs, torch)

    # ---- batches ----

    def run(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        torch = self._torch
        with torch.inference_mode():
            if self._captured:
                return self._replayed(inputs, count if self.info.batchable else 1)
            tensors = [self._tensor(array, x) for array, x in zip(inputs, self.info.inputs, strict=True)]
            if self._stream is None:
                return [_array(x) for x in self._eager(tensors)]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                return [_array(x.cpu()) for x in self._eager(tensors)]

    def _replayed(self, inputs: list[np.ndarray], count: int) -> list[np.ndarray]:
        graphs = self._graphs[self._sms]
        held = graphs[min(n for n in graphs if n >= count)]
        torch = self._torch
        with torch.cuda.stream(self._stream):
            for array, x, host, device in zip(inputs, self.info.inputs, held.host_inputs, held.inputs, strict=True):
                source = torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else np.array(array))
                if x.datatype == "BF16":
                    source = source.view(torch.bfloat16)
                part = host[:count] if self.info.batchable else host
                part.copy_(source)
                (device[:count] if self.info.batchable else device).copy_(part, non_blocking=True)
            held.graph.replay()
            for host, device in zip(held.host_outputs, held.outputs, strict=True):
                part = host[:count] if self.info.batchable else host
                part.copy_(device[:count] if self.info.batchable else device, non_blocking=True)
            self._stream.synchronize()
        return [_array(host[:count] if self.info.batchable else host) for host in held.host_outputs]

    def lost(self) -> bool:
        """Whether the CUDA context has a sticky error, after which every synchronisation fails; see Backend."""
        if self._device.type != "cuda":
            return False
        try:
            self._torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        self._graphs.clear()
        del self._module


def _array(tensor: Any) -> np.ndarray:
    """Convert a tensor in host memory to an array; BF16 becomes 16-bit words."""
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        tensor = tensor.view(torch.uint16)
    found: np.ndarray = tensor.numpy()
    return found


def _load(torch: Any, spec: ModelSpec, device: Any) -> tuple[Any, tuple[TensorSpec, ...], bool]:
    """Load the model of a version's folder: (callable, its inputs, whether the batch dimension is free)."""
    assert spec.path is not None
    named = spec.config.get(FILE_FIELD, "")
    exported = Path(spec.path) / (named if named.endswith(".pt2") else "model.pt2")
    script = Path(spec.path) / (named if named.endswith(".pt") else "model.pt")
    configured = tuple(_from_config(entry) for entry in spec.config.get("input", []))
    if exported.is_file() and not named.endswith(".pt"):
        program = torch.export.load(str(exported))
        found, free = _signature(torch, program)
        if device.type == "cuda":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, str(device))
        return program.module(), configured or found, free
    if not configured:
        raise ValueError(
            "TorchScript does not describe its inputs: config.pbtxt must have input { name data_type dims }"
        )
    module = torch.jit.load(str(script), map_location=device).eval()
    return module, configured, int(spec.config.get("max_batch_size", 0)) > 0


def _from_config(entry: dict[str, Any]) -> TensorSpec:
    kind = str(entry.get("data_type", "")).removeprefix("TYPE_")
    kind = "BYTES" if kind == "STRING" else kind
    if kind not in TORCH_NAMES:
        raise ValueError(
            f"input {entry.get('name')!r} has data_type {entry.get('data_type')!r}, which PyTorch does not have"
        )
    dims = entry["reshape"].get("shape", ()) if "reshape" in entry else entry.get("dims", ())
    return TensorSpec(str(entry.get("name", "")), kind, tuple(dims))


def _signature(torch: Any, program: Any) -> tuple[tuple[TensorSpec, ...], bool]:
    """Return the inputs of an exported program, and whether the first dimension of all of them may have any size."""
    shown = {getattr(torch, name): key for key, name in TORCH_NAMES.items()}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    tensors = [(name, values[name]) for name in program.graph_signature.user_inputs]
    free = bool(tensors) and all(t.dim() > 0 and not isinstance(t.shape[0], int) for _, t in tensors)
    found = []
    for name, tensor in tensors:
        sizes = tensor.shape[1:] if free else tensor.shape
        shape = tuple(size if isinstance(size, int) else -1 for size in sizes)
        found.append(TensorSpec(name, shown[tensor.dtype], shape))
    return tuple(found), free


def open_model(spec: ModelSpec, share: Share) -> TorchModel:
    """Load version-folder/model.pt2 or model.pt."""
    return TorchModel(spec, share)
