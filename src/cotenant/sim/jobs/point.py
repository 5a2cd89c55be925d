"""One run of a sweep (a point of it). The point's option `policy` names an elastic or partition policy; a point without
this option is run under a job policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError
from cotenant.core.work import Trace
from cotenant.policy.elastic.registry import ELASTIC
from cotenant.policy.mig.decide import POLICIES
from cotenant.policy.names import check_policy
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.elastic import ElasticOptions, elastic_options, run_elastic
from cotenant.sim.jobs.elastic_models import classes_for, needs_no_models
from cotenant.sim.jobs.options import TrainingConfig, training_config
from cotenant.sim.jobs.training import policy_of, simulate
from cotenant.sim.mig.run import named_rules, run_partition
from cotenant.sim.partition_options import SHARED, PartitionOptions

Kind = Literal["jobs", "elastic", "partition"]


@dataclass(frozen=True)
class Models:
    """What is needed to read or generate traces: the models of each class of jobs (such as image or language), the
    seconds per iteration of each model, and whether every job must state its work (`lengths`)."""

    classes: Mapping[str, Sequence[str]] | None
    iteration_s: Mapping[str, float] | None = None
    lengths: bool = True
    named_gpus: bool = False  # jobs that name their GPU models need no model


@dataclass(frozen=True)
class PolicyRun:
    """The policy of a point and its validated options."""

    kind: Kind
    models: Models
    config: TrainingConfig | None = None
    elastic: ElasticOptions | None = None
    partition: PartitionOptions | None = None
    shared: Mapping[str, Any] | None = None  # options of ordinary job policies that partition policies have, too

    @classmethod
    def of(cls, point: Mapping[str, Any]) -> PolicyRun:
        """Create the run from a sweep point's options. InputError names an option that is invalid, or that belongs to
        another kind of policy.
        """
        name = None if point.get("policy") is None else str(point["policy"])
        given = {option: point[option] for option in TrainingConfig.model_fields if option in point}
        cuts = {option: point[option] for option in PartitionOptions.__dataclass_fields__ if option in point}
        cuts.pop("policy", None)
        if cuts and name not in POLICIES:
            option = next(iter(cuts))
            raise InputError(f"{option} is for partition policies, such as policy: miso", field=option)
        if name is None:
            config = training_config(given)
            profiles = load_profiles(config.profiles)
            policy_of(config, profiles)
            return cls("jobs", Models(profiles.classes, profiles.iteration_s), config=config)
        if name in ELASTIC:
            options = elastic_options(name, given)
            chosen = (name, options.profiles, options.default_profile)
            classes = classes_for(*chosen, split="split" in point, drawn="jobs" in point)
            models = Models(classes, lengths=False, named_gpus=needs_no_models(*chosen))
            return cls("elastic", models, elastic=options)
        check_policy(name)
        for option in given:
            if option not in SHARED:
                raise InputError(f"{option} is for job policies; policy {name} does not have it", field=option)
        partition = PartitionOptions.read({"policy": name, **cuts})
        partition.rules(given.get("placement"))
        drawn = "jobs" in point
        models = Models(load_profiles().classes if drawn else None)
        return cls("partition", models, partition=partition, shared=given)

    def run(self, trace: Trace, cluster: Cluster, out: Path, more: dict[str, object], seed: int) -> None:
        """Simulate the trace on the cluster under the point's policy. The record is written to folder `out`; in it,
        `more` describes how trace and cluster were made.
        """
        if self.config is not None:
            known = load_profiles(self.config.profiles)
            simulate(trace, cluster, self.config, profiles=known, out=out, more_options=more)
        elif self.elastic is not None:
            run_elastic(trace, cluster, self.elastic, out=out, more_options=more)
        elif self.partition is not None:
            shared = self.shared or {}
            options: dict[str, Any] = {
                "default_profile": shared.get("default_profile"),
                "double_memory": self.partition.double_memory,
                "seed": seed,
            }
            chosen = {**options, **self.partition.rules(shared.get("placement"))}
            policy, layout = str(self.partition.policy), self.partition.layout or ""
            rules, _ = named_rules(trace, cluster, policy, layout=layout, **chosen)
            run_partition(trace, cluster, rules, out=out, more_options=more, **options)
