"""Which GPU a worker sees and what enforces its part, without a GPU: the finding of GPUs is a stand-in."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import Card, StandIn
from serve_setup import deployment, plan
from server_thread import running

from cotenant.bench.onnx_model import perceptron
from cotenant.core.errors import WorkError
from cotenant.devices import mig, nvml
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of
from cotenant.serving.worker import WorkerSpec
from cotenant.serving.workers.devices import Devices
from cotenant.serving.workers.local import LocalWorkers

GPUS = (Gpu("GPU-aaaa", "X", 1, 0), Gpu("GPU-bbbb", "X", 1, 1))


def spec(name: str, gpu: int = 0, partition: str = "1g", fraction: float = 0.4, mechanism: str = "mig") -> WorkerSpec:
    return WorkerSpec(name, gpu, "X", partition, fraction, mechanism, ())


def test_mig_instances_are_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Card(uuid="GPU-aaaa"), Card(uuid="GPU-bbbb")
    library = StandIn(first, second)
    original = nvml.Nvml
    monkeypatch.setattr(nvml, "Nvml", lambda: original(library))
    with nvml.Nvml() as session:
        mig.apply(session, "GPU-aaaa", "3,1,1")
        mig.apply(session, "GPU-bbbb", "1")
    found = {gpu.uuid: device_of(gpu).mig_instances(gpu.uuid) for gpu in GPUS}
    assert sorted(profile for profile, _ in found["GPU-aaaa"]) == ["1g.5gb", "1g.5gb", "3g.20gb"]
    small = [uuid for profile, uuid in found["GPU-aaaa"] if profile == "1g.5gb"]
    ((_, other),) = found["GPU-bbbb"]
    made = Devices("mig", 2, lambda: GPUS)
    given = [made.environment(spec(name))["CUDA_VISIBLE_DEVICES"] for name in "ab"]
    assert given == small
    with pytest.raises(WorkError, match="GPU 0 has no free MIG instance 1g"):
        made.environment(spec("c"))
    assert made.environment(spec("d", 1))["CUDA_VISIBLE_DEVICES"] == other
    made.released(spec("a"))
    assert made.environment(spec("e"))["CUDA_VISIBLE_DEVICES"] == small[0]
    made.close()


def test_whole_gpus_and_too_few_of_them() -> None:
    made = Devices("time", 2, lambda: GPUS)
    assert made.environment(spec("a", 1, "100%", 1.0, "time")) == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}
    made.close()
    with pytest.raises(WorkError, match="has 3 GPUs; 2 can be used here"):
        Devices("time", 3, lambda: GPUS)


def test_mps_percentages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, str]] = []

    def grant(self: Any, tenant: Any, gpus: Any) -> Any:
        asked.append((tenant.limit, gpus[0].uuid))

        class Enforcement:
            environment = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{tenant.limit * 100:g}"}  # noqa: RUF012

        return Enforcement()

    monkeypatch.setattr("cotenant.agent.mechanisms.mps.Mps.grant", grant)
    for mechanism, limit in (("mps", 0.4), ("green", 1.0)):  # the mechanism `green` limits with its own means
        made = Devices(mechanism, 1, lambda: GPUS)
        assert made.environment(spec("a", 0, "40%", 0.4, mechanism))["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa"
        assert asked.pop() == (limit, "GPU-aaaa")
        made.close()


def test_the_folder_of_a_killed_server_is_removed_after_its_mps_daemons_were_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "cotenant-gpu-left"
    left.mkdir()
    ended: list[Any] = []
    monkeypatch.setattr("cotenant.agent.mechanisms.mps.Mps.taken_over", lambda self: ended.append(self.folder))
    monkeypatch.setattr("cotenant.agent.mechanisms.mps.Mps.close", lambda self: ended.append(left.exists()))
    made = Devices("time", 1, lambda: GPUS)
    assert (set(ended), left.exists()) == ({left, True}, False)
    made.close()
    assert not list(tmp_path.iterdir())


def test_cores_stand_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores as two GPUs of four; shares are whole cores, those that nobody has first."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    made = LocalWorkers("cores", 2)
    assert made.cores_of_gpu(0) == [0, 1, 2, 3]
    assert made.cores_of_gpu(1) == [4, 5, 6, 7]
    listener: Any = None
    found = [made.create(spec(n, gpu, "p", f, "cores"), listener).cores  # type: ignore[attr-defined]
             for n, gpu, f in (("a", 0, 0.5), ("b", 0, 0.25), ("c", 0, 0.1), ("d", 1, 1.0))]  # fmt: skip
    assert found == [(0, 1), (2,), (3,), (4, 5, 6, 7)]


def test_no_gpu_is_said_with_what_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.serving.workers.devices.discover", _nothing)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(perceptron(4))
    services = deployment([{"name": "a", "model": str(tmp_path / "m"), "slo_ms": 60_000, "backend": "auto"}], tmp_path)
    with (
        pytest.raises(WorkError, match="no NVIDIA GPU was found here: use `mechanism: cores`"),
        running(services, plan=plan({"a": 1})),
    ):
        pass


def _nothing(wanted: Any) -> Any:
    raise WorkError("none")
