"""Selects the elastic profiles and models of a run under an elastic policy, for jobs that state no model, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cotenant.core import work
from cotenant.core.cluster import Cluster
from cotenant.core.gpus import find_gpu
from cotenant.core.units import counted
from cotenant.policy.elastic.registry import find_elastic
from cotenant.profiles.training.elastic import ElasticModel, ElasticProfiles, load_elastic
from cotenant.workloads.jobs.split import CLASSES

EQUAL = "equal"  #: name of the profiles, and of their one model, under which every GPU has speed 1


def classes_for(
    policy: str, profiles: str | None, default_profile: str | None, *, split: bool, drawn: bool = False
) -> Mapping[str, Sequence[str]] | None:
    """Return the models of each class (image, language, speech) for jobs that state no model; None: these jobs stay
    without one and have the default profile. `split`: the user gave shares of the classes. `drawn`: the jobs are
    generated, so they need models.
    """
    known = load_elastic(profiles or find_elastic(policy).profiles).classes
    if default_profile is None or split:
        return known
    return {**dict.fromkeys(CLASSES, (default_profile,)), **known} if drawn else None


def needs_no_models(policy: str, profiles: str | None, default_profile: str | None) -> bool:
    """Whether jobs that name their GPU models need no models: under a policy whose decisions need no speeds, if the
    user names no profiles.
    """
    return find_elastic(policy).speeds_optional and profiles is None and default_profile is None


def profiles_for(policy: str, name: str | None, default_profile: str | None, trace: work.Trace, cluster: Cluster) -> (
    tuple[ElasticProfiles, str | None]
):  # fmt: skip
    """Return the elastic profiles of a run, and the default profile: those that the user names, else the policy's, or
    equal speeds for jobs that name their GPU models but no model, where the policy needs no speeds. InputError names a
    job with equal speeds whose GPUs the cluster lacks.
    """
    jobs = trace.jobs
    unnamed = bool((jobs.model == "").all() and (jobs.gpu_models != "").all())
    if not (unnamed and needs_no_models(policy, name, default_profile)):
        return load_elastic(name or find_elastic(policy).profiles), default_profile
    have: dict[str, int] = {}
    for group in cluster.groups:
        have[group.gpu.name] = have.get(group.gpu.name, 0) + group.count * group.gpus
    wants = np.maximum(np.ceil(jobs.gpus), 1).astype(np.int64).tolist()
    for job, count, models in sorted(set(zip(jobs.id.tolist(), wants, jobs.gpu_models.tolist(), strict=True))):
        if count > max(have.get(find_gpu(gpu, "gpu_models").name, 0) for gpu in models.split("|") if gpu):
            what = f"job {job} asks for {counted(count, 'GPU')} of model {models}; the cluster has "
            raise trace.wrong(job, "gpus", what + (", ".join(f"{n} {gpu}" for gpu, n in have.items() if n) or "none"))
    rate = {gpu: {n: np.array([float(n)]) for n in sorted(set(wants))} for gpu in have}
    model = ElasticModel(EQUAL, "other", rate)
    return ElasticProfiles(EQUAL, "speed 1 for every GPU", 1, {EQUAL: model}, {}), EQUAL
