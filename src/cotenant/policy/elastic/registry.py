"""The registry of elastic policies: `cotenant simulate --policy NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cotenant.core.errors import unknown_name
from cotenant.policy.elastic.gandiva import Gandiva
from cotenant.policy.elastic.gavel import Gavel
from cotenant.policy.elastic.pollux import Pollux
from cotenant.policy.elastic.sia import Sia
from cotenant.policy.elastic.spot import MEMORY, Spot
from cotenant.policy.elastic.tesserae import Tesserae
from cotenant.policy.elastic.view import ElasticPolicy


@dataclass(frozen=True)
class Entry:
    """One elastic policy. `make(limit_s)` creates it, with a time limit in seconds for each program that it solves;
    `round_s`: length of a round in its paper; `profiles`: the built-in elastic profiles that it uses by default;
    `rigid`: jobs run only on as many GPUs as they request; `needs_price`: it needs the price of every GPU model;
    `packs`: two jobs may share a GPU; `patience`: number of rounds on an idle cluster after which the policy has
    started a waiting job, or never does; `speeds_optional`: if jobs name their GPU models, the policy needs no speeds.
    """

    summary: str
    make: Callable[[float], ElasticPolicy]
    round_s: float
    profiles: str
    rigid: bool
    needs_price: bool = False
    packs: bool = False
    patience: int = 0
    speeds_optional: bool = False


ELASTIC: dict[str, Entry] = {
    "gavel": Entry("max-min fairness over GPU models (Gavel)", lambda _: Gavel(), 360.0, "gavel", True),
    "gavel-makespan": Entry(
        "least time until the last job ends, over GPU models (Gavel)", lambda _: Gavel("makespan"), 360.0, "gavel", True
    ),
    "gavel-cost": Entry(
        "most work per price, over GPU models (Gavel)", lambda _: Gavel("cost"), 360.0, "gavel", True, True
    ),
    "gavel-agnostic": Entry(
        "max-min fairness that treats all GPU models as equal: Gavel's baseline",
        lambda _: Gavel("agnostic"), 360.0, "gavel", True,
    ),
    "sia": Entry(
        "GPU model and number of GPUs of each job by goodput, the optimum (Sia)",
        lambda s: Sia(True, s), 60.0, "sia", False,
    ),
    "sia-fast": Entry(
        "Sia's objective, approximated with prices of the GPU models; on fewer than hundreds of GPUs, use sia",
        lambda s: Sia(False, s), 60.0, "sia", False,
    ),
    "pollux": Entry(
        "number of GPUs of each job by goodput, on one GPU model (Pollux)", lambda _: Pollux(), 60.0, "sia", False
    ),
    "tesserae": Entry(
        "least attained service, and a matching that packs two jobs on a GPU (Tesserae)",
        lambda _: Tesserae(), 360.0, "gavel", True, packs=True,
    ),
    "gandiva": Entry(
        "jobs take turns, least run time first; two jobs share a GPU if together they do more than one (Gandiva)",
        lambda _: Gandiva(), 360.0, "gavel", True, packs=True,
    ),
    "tesserae-alone": Entry(
        "least attained service without sharing GPUs: the baseline of tesserae",
        lambda _: Tesserae(packs=False), 360.0, "gavel", True,
    ),
    "spot": Entry(
        "guaranteed jobs first; spot jobs get the GPUs that guaranteed jobs are predicted to leave free (GFS)",
        lambda _: Spot(), 300.0, "gavel", True, patience=MEMORY, speeds_optional=True,
    ),
    "spot-greedy": Entry(
        "guaranteed jobs first, spot jobs on all free GPUs: the baseline of spot",
        lambda _: Spot(predicts=False), 300.0, "gavel", True, speeds_optional=True,
    ),
}  # fmt: skip


def find_elastic(name: str) -> Entry:
    """Return the entry of the elastic policy of that name; the InputError for an unknown name lists the known ones."""
    if name not in ELASTIC:
        raise unknown_name("policy", name, ELASTIC, "policy")
    return ELASTIC[name]
