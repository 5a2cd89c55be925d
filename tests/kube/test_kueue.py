"""The examples for Kueue: valid objects, quota that covers what the jobs ask for, and names that the driver publishes.

Kueue's objects are held against what its API (v1beta2) has of the fields that the examples use, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from dra_scheduler import COMPARED
from pods import check_object, check_pod, patched, pod, versions

from cotenant.kube.admission.mutate import mutate
from cotenant.kube.dra import claims, offer
from cotenant.kube.quantity import parse_quantity
from cotenant.kube.shares import shares_of
from cotenant.kube.units import MigSlice, NodeGpu

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "kueue"
Thing = dict[str, Any]


def shape(**fields: Any) -> Thing:
    """An object with those fields, all of them needed, and no others."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def each(items: Thing) -> Thing:
    return {"type": "array", "items": items, "minItems": 1}


TEXT: Thing = {"type": "string", "minLength": 1}
QUOTA = shape(name=TEXT, nominalQuota={"type": ["integer", "string"]})
FLAVOR = shape(name=TEXT, resources=each(QUOTA))
SPECS: dict[str, Thing] = {
    "ResourceFlavor": shape(),
    "ClusterQueue": shape(
        namespaceSelector={"type": "object"},
        resourceGroups=each(shape(coveredResources=each(TEXT), flavors=each(FLAVOR))),
    ),
    "LocalQueue": shape(clusterQueue=TEXT),
}
SOURCE = shape(name=TEXT, driver=TEXT, deviceSelector=shape(cel=shape(expression=TEXT)))
SOURCES = {"type": "array", "items": {"oneOf": [shape(capacity=SOURCE), shape(counter=SOURCE)]}}
MAPPINGS = each(shape(name=TEXT, deviceClassNames=each(TEXT), sources=SOURCES))


def objects(name: str) -> dict[str, Thing]:
    """The objects of an example by kind."""
    return {thing["kind"]: thing for thing in yaml.safe_load_all((EXAMPLES / name).read_text())}


def mappings() -> list[Thing]:
    found: list[Thing] = objects("configuration.yaml")["Configuration"]["resources"]["deviceClassMappings"]
    return found


def quota(things: dict[str, Thing]) -> dict[str, float]:
    (group,) = things["ClusterQueue"]["spec"]["resourceGroups"]
    found = {}
    for flavor in group["flavors"]:
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"], "the same, in this order"
        assert flavor["name"] == things["ResourceFlavor"]["metadata"]["name"]
        found |= {one["name"]: float(parse_quantity(one["nominalQuota"], "")) for one in flavor["resources"]}
    return found


def pod_of(job: Thing) -> Thing:
    template = job["spec"]["template"]
    thing = pod("train", annotations=template["metadata"]["annotations"])
    thing["spec"] |= template["spec"]
    thing["metadata"]["namespace"] = job["metadata"]["namespace"]
    return thing


@pytest.mark.parametrize("name", ["units.yaml", "claims.yaml"])
def test_the_objects_are_valid_and_name_each_other(name: str) -> None:
    things = objects(name)
    for kind, spec in SPECS.items():
        assert things[kind]["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        jsonschema.validate(things[kind].get("spec", {}), spec)
    job = things["Job"]
    check_object(job | {"metadata": job["metadata"] | {"name": "train-x"}}, versions()[-1])
    queue, flavored = things["LocalQueue"], things["ClusterQueue"]
    assert queue["spec"]["clusterQueue"] == flavored["metadata"]["name"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert job["metadata"]["namespace"] == queue["metadata"]["namespace"]
    selected = flavored["spec"]["namespaceSelector"]["matchLabels"]
    assert selected == {"kubernetes.io/metadata.name": queue["metadata"]["namespace"]}


def test_units_are_counted_by_what_the_job_s_template_says() -> None:
    """The webhook sees pods, Kueue the job: what is counted has to be in the template as resources."""
    things = objects("units.yaml")
    thing = pod_of(things["Job"])
    (share,) = shares_of(thing)
    assert (share.units, share.memory_units, share.limit) == (30, 8, 0.6)
    check_pod(patched(thing, mutate(thing)))
    asked = thing["spec"]["containers"][0]["resources"]["requests"]
    assert asked.keys() <= quota(things).keys(), "Kueue admits no job with a resource that its queue does not cover"
    assert all(float(parse_quantity(value, "")) <= quota(things)[key] for key, value in asked.items())


def test_claims_are_counted_by_classes_and_what_the_driver_publishes() -> None:
    things = objects("claims.yaml")
    thing, template = pod_of(things["Job"]), things["ResourceClaimTemplate"]
    check_object(template, versions()[-1])
    asked = pod("train", annotations={k: v for k, v in thing["metadata"]["annotations"].items() if "placed" not in k})
    asked["spec"]["containers"] = [{"name": "train", "image": "x"}]
    made, changed = claims.claims_of(asked, (1, 36))
    assert made["spec"] == template["spec"], "as `cotenant kube claims` makes it"
    assert changed["metadata"]["annotations"] == thing["metadata"]["annotations"]
    check_pod(patched(thing, mutate(thing)))
    assert {one["name"] for one in mappings()} <= quota(things).keys()
    classes = [name for one in mappings() for name in one["deviceClassNames"]]
    assert template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] in classes
    assert len(classes) == len(set(classes)), "Kueue refuses a class in two mappings"


def test_the_sources_of_the_configuration_are_in_the_slices() -> None:
    jsonschema.validate(mappings(), MAPPINGS)
    pieces = [MigSlice("MIG-1", "cotenant.dev/mig-3g.40gb", "GPU-b", 1)]
    devices = offer.devices([NodeGpu("GPU-a", 0, 80 << 30)], pieces, (1, 36), counters=True)
    of_class = {"share.cotenant.dev": "share", "gpu.cotenant.dev": "gpu", "mig.cotenant.dev": "mig"}
    charged = {}
    for one in mappings():
        ((kind, source),) = one["sources"][0].items()
        assert source["driver"] == offer.DRIVER
        expression = source["deviceSelector"]["cel"]["expression"]
        assert COMPARED.findall(expression.replace("!=", "=="))[0][:2] == ("gpu.cotenant.dev", "type")
        for name in one["deviceClassNames"]:
            (device,) = (d for d in devices if d["attributes"]["type"]["string"] == of_class[name])
            if kind == "capacity":
                charged[name] = device["capacity"][source["name"]]["value"]
            else:
                charged[name] = device["consumesCounters"][0]["counters"][source["name"]]["value"]
    assert charged == {"share.cotenant.dev": "100", "gpu.cotenant.dev": "7", "mig.cotenant.dev": "3"}
