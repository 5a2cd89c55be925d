"""An LS worker's side of the floor while the agent changes under it."""

from __future__ import annotations

from agent_harness import AgentProcess

from cotenant.node import floor_page
from cotenant.node.floor_client import Floor
from cotenant.policy.colocation.gate import WorkClass


def test_who_lowers_while_another_agent_is_found_stays_down(agent: AgentProcess) -> None:
    """The thread that goes over to the next agent's page has just read that the floor is up."""

    class Racing(Floor):
        up, reads = 0, -1

        @property  # type: ignore[override]
        def _class(self) -> int:
            up, self.reads = self.up, self.reads - 1
            if self.reads == 0:
                self.lower()  # another thread
            return up

        @_class.setter
        def _class(self, up: int) -> None:
            self.up = up

    floor = Racing(agent.folder / floor_page.SOCKET, str(agent.call("status")["gpus"][0]["uuid"]))
    floor.raise_()
    assert floor._mapping.raised[0] == WorkClass.UNKNOWN
    floor.reads = 1
    floor._moved_to(floor._mapping)
    assert floor._mapping.raised[0] == 0
    floor.close()
