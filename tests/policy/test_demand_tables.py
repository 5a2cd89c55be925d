"""Demand tables against values worked out by hand from the published per-model tables."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.work import Jobs
from cotenant.policy.jobs.arrays import DOWN, IDEAL, PROPORTIONAL
from cotenant.policy.jobs.demand import build_workload, runnable_jobs
from cotenant.profiles.training.tables import load_profiles

A100 = find_gpu("A100-40GB")


def cluster(nodes: int = 4, gpus: int = 8, cpus: float = 24, memory_gb: int = 500, gpu: str = "A100-40GB") -> Cluster:
    return Cluster((NodeGroup(nodes, gpus, find_gpu(gpu), cpus, memory_gb * 10**9),))


def one(model: str, gpus: float, **more: float) -> Jobs:
    columns = {name: [value] for name, value in more.items()}
    return Jobs.build(1, id=["a"], arrival_s=[0.0], model=[model], gpus=[gpus], iterations=[1000.0], **columns)


@pytest.mark.parametrize(
    ("model", "gpus", "speedup"),
    [
        ("alexnet", 1, 2.94),
        ("alexnet", 4, 1 + 1.94 * (24 - 12) / (48 - 12)),  # 1.647: the CPU share is clipped to the 24 cores of one node
        ("alexnet", 8, 1.0),  # 24 cores are the proportional share of 8 GPUs
        ("alexnet", 16, 1.0),  # a job larger than a node gets the proportional share as soon as anything is clipped
        ("m5", 4, 2.5),  # clipping 750 GB to 500 GB does not lower the speedup
        ("res50", 1, 1.15),
        ("gnmt", 16, 1.0),
    ],
)
def test_two_speed_speedup_after_clipping(model: str, gpus: int, speedup: float) -> None:
    built = build_workload(one(model, gpus), load_profiles(), cluster(), two_speed=True)
    pace = built.demand.amount["iteration_s"][:, 0, 0]
    assert pace[PROPORTIONAL] / pace[IDEAL] == pytest.approx(speedup, rel=1e-12)
    assert pace[DOWN] == pace[PROPORTIONAL]


def test_amounts_per_gpu_of_each_level() -> None:
    built = build_workload(one("alexnet", 4), load_profiles(), cluster(), two_speed=True)
    cpu, memory = (built.demand.amount[name][:3, 0, 0].tolist() for name in ("cpu", "memory"))
    assert cpu == [3000, 6000, 3000]  # 24 / 8; 48 clipped to 24 and divided by 4; the smaller of both
    assert memory == [62500, 125000, 62500]


def test_language_models_ask_for_less_than_their_share() -> None:
    demand = build_workload(one("gnmt", 2), load_profiles(), cluster()).demand
    assert demand.amount["cpu"][:3, 0, 0].tolist() == [3000, 1000, 1000]
    assert not demand.type["can_shrink"][0]


def test_matrix_speed_is_interpolated_between_table_points() -> None:
    # The table has a row for 6 cores and 125 GB per GPU: 1.75 times the speed of 3 cores and 62.5 GB.
    pace = build_workload(one("alexnet", 4), load_profiles(), cluster()).demand.amount["iteration_s"][:, 0, 0]
    assert pace[PROPORTIONAL] == pytest.approx(0.6)
    assert pace[IDEAL] == pytest.approx(0.6 / 1.75)
    # 28 cores for 8 GPUs are 3.5 per GPU, a point between 1.0 and 1.25 in the table.
    wide = build_workload(one("alexnet", 1), load_profiles(), cluster(cpus=28)).demand.amount["iteration_s"][:, 0, 0]
    assert wide[PROPORTIONAL] == pytest.approx(0.6 / 1.125)


def test_part_of_a_gpu_gets_that_part_of_a_share() -> None:
    demand = build_workload(one("gnmt", 0.25), load_profiles(), cluster()).demand
    assert (demand.type["gpus"][0], demand.type["part_milli"][0]) == (1, 250)
    assert demand.amount["cpu"][:3, 0, 0].tolist() == [750, 250, 250]


def test_stated_cpus_and_memory_are_the_ideal() -> None:
    demand = build_workload(one("alexnet", 1, cpus=6, memory_bytes=100e9), load_profiles(), cluster()).demand
    assert demand.amount["cpu"][IDEAL, 0, 0] == 6000
    assert demand.amount["memory"][IDEAL, 0, 0] == 100_000
    assert demand.amount["iteration_s"][IDEAL, 0, 0] == pytest.approx(0.6 / 1.75)  # the table's row for 6 cores


def test_duration_is_the_time_at_the_proportional_share() -> None:
    jobs = Jobs.build(1, id=["a"], arrival_s=[0.0], model=["alexnet"], gpus=[1], duration_s=[1200.0])
    built = build_workload(jobs, load_profiles(), cluster(cpus=32), two_speed=True)
    assert built.iterations[0] == pytest.approx(1200 / 0.48)  # with 4 cores per GPU an iteration takes 0.48 s
    assert built.demand.type["isolated_s"][0] * built.iterations[0] == pytest.approx(1200)


def test_a_slower_gpu_scales_by_the_catalogs_estimate() -> None:
    unlike = Cluster((NodeGroup(1, 8, A100, 24, 500 * 10**9), NodeGroup(1, 8, find_gpu("T4"), 24, 500 * 10**9)))
    pace = build_workload(one("res18", 1), load_profiles(), unlike).demand.amount["iteration_s"][PROPORTIONAL, 0]
    assert pace[1] / pace[0] == pytest.approx(1 / find_gpu("T4").relative_speed)
    only_t4 = one("res18", 1)
    only_t4.gpu_models[0] = "T4"
    allowed = build_workload(only_t4, load_profiles(), unlike).demand.allowed
    assert allowed.tolist() == [[False, True]]


def test_the_traces_gpu_is_the_yardstick() -> None:
    jobs = Jobs.build(1, id=["a"], arrival_s=[0.0], model=["res18"], gpus=[1], duration_s=[6400.0])
    h100 = cluster(gpu="H100-80GB")
    faster = find_gpu("H100-80GB").relative_speed
    own = build_workload(jobs, load_profiles(), h100)
    other = build_workload(jobs, load_profiles(), h100, trace_gpu="A100-40GB")
    # an iteration takes 0.64 s on the GPU on which the trace was measured
    assert own.iterations[0] == other.iterations[0] == pytest.approx(10_000)
    pace = [w.demand.amount["iteration_s"][PROPORTIONAL, 0, 0] for w in (own, other)]
    assert pace[0] / pace[1] == pytest.approx(faster)
    # the isolated time is that on the cluster's GPU
    assert other.demand.type["isolated_s"][0] * other.iterations[0] == pytest.approx(6400 / faster)


def test_shares_of_the_cluster_for_drf_and_tetris() -> None:
    types = build_workload(one("alexnet", 1), load_profiles(), cluster(nodes=1)).demand.type
    gpu, cpu, memory = 1 / 8, 12 / 24, 125 / 500
    assert types["dominant"][0] == pytest.approx(cpu)
    assert types["size"][0] == pytest.approx(gpu + cpu + memory)


def test_jobs_the_cluster_can_never_hold() -> None:
    jobs = Jobs.build(3, id=["a", "b", "c"], arrival_s=np.zeros(3), gpus=[32, 33, 1], model=["gnmt"] * 3)
    jobs.gpu_models[2] = "V100-16GB"
    assert runnable_jobs(jobs, cluster()).tolist() == [True, False, False]
    with pytest.raises(InputError, match="job b asks for 33 GPUs and the cluster has 32"):
        build_workload(jobs.take(np.array([0, 1])), load_profiles(), cluster())


@pytest.mark.parametrize(("gpus", "cpus"), [(1, 0.0004), (64, 0.03)])
def test_a_job_left_without_cpu_is_refused(gpus: float, cpus: float) -> None:
    """It would wait for its end for ever; amounts are thousandths of a core, rounded down."""
    with pytest.raises(InputError, match=r"job a would get less than 0\.001 CPU cores per GPU"):
        build_workload(one("res50", gpus, cpus=cpus), load_profiles(), cluster(nodes=8))
    assert build_workload(one("res50", gpus, cpus=0.001 * gpus), load_profiles(), cluster(nodes=8)).iterations[0] > 0


def test_nodes_too_small_to_share_are_refused() -> None:
    with pytest.raises(InputError, match=r"at least 0\.001 CPU cores and 1 MB"):
        cluster(cpus=0.007)
    assert cluster(cpus=0.008).total_cpus == pytest.approx(0.008 * cluster().total_nodes)


def test_a_model_without_profile_is_named_with_its_job() -> None:
    with pytest.raises(InputError, match=r"'vgg16' has no profile \(first at job a\)"):
        build_workload(one("vgg16", 1), load_profiles(), cluster())
    built = build_workload(one("vgg16", 1), load_profiles(), cluster(), default_profile="res50")
    assert built.demand.type["isolated_s"][0] == pytest.approx(0.78)
