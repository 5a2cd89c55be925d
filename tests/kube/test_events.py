"""Events that cannot be written, and pods that are listed by two threads."""

from __future__ import annotations

from typing import Any

import pytest
from pods import pod

from cotenant.kube.binding.events import PodEvents, pod_event
from cotenant.kube.binding.pods import NodePods
from cotenant.kube.client import ApiError


class Refusing:
    """An API server that takes no event."""

    def __init__(self, status: int) -> None:
        self.status, self.asked = status, 0

    def create(self, path: str, thing: Any) -> Any:
        self.asked += 1
        raise ApiError(self.status, "no")


@pytest.mark.parametrize(("status", "asked"), [(403, 1), (404, 1), (409, 1), (422, 1), (0, 3), (429, 3), (503, 3)])
def test_what_will_never_be_accepted_is_tried_once(status: int, asked: int) -> None:
    """A namespace that is being deleted takes no events; the binder would say it again every second."""
    api = Refusing(status)
    events = PodEvents(api, "node-a")  # type: ignore[arg-type]
    thing = pod("train")
    for _ in range(3):
        events.say(thing, "ShareRefused", "no room", warning=True)
    assert api.asked == asked


def test_the_name_of_an_event_is_one_whatever_the_pods_is() -> None:
    thing = pod("p" * 229 + "-" + "q" * 20)
    assert "-." not in pod_event(thing, "n", "r", "m", warning=False)["metadata"]["name"]


def test_a_listing_that_is_overtaken_replaces_no_later_one() -> None:
    """The kubelet's threads list the pods, too: a pod that the binder knew would be taken for one that has ended."""
    first, second = pod("first"), pod("second")

    class Overtaken:
        """An API server whose first answer comes after the second one."""

        def __init__(self) -> None:
            self.asked = 0

        def get(self, path: str, **asked: str) -> Any:
            self.asked += 1
            if self.asked > 1:
                return {"items": [first, second]}
            assert pods.refresh((), force=True)
            return {"items": [first]}

    pods = NodePods(Overtaken(), "node-a")  # type: ignore[arg-type]
    assert pods.refresh(())
    assert {name for _, name in pods.by_key} == {"first", "second"}
