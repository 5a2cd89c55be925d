"""Worked examples of the token broker: each expected number follows from the rule named in the test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.policy.shares import (
    DISCIPLINES,
    ENDLESS_NS,
    MS_NS,
    SECOND_NS,
    Account,
    Crowd,
    Ended,
    GpuTurns,
    Grant,
    Move,
    NodeTurns,
    QuotaSettings,
    Revoke,
    Share,
    Stuck,
    Window,
    discipline,
)

# The first and the smallest quota are the published ones.
GEMINI = QuotaSettings(quota_ns=250 * MS_NS, min_quota_ns=100 * MS_NS, max_quota_ns=SECOND_NS)
PLAIN = replace(GEMINI, idle_credit_ns=10 * SECOND_NS)  # idle time never counts as used, as in Gemini's own window


def kinds(instructions: list) -> list[type]:
    return [type(step) for step in instructions]


def test_window_cuts_the_oldest_span_at_its_edge() -> None:
    window = Window(10 * SECOND_NS)
    window.add(0, 4 * SECOND_NS)
    window.add(6 * SECOND_NS, 7 * SECOND_NS)
    window.trim(10 * SECOND_NS)
    assert window.held_ns == 5 * SECOND_NS
    window.trim(13 * SECOND_NS)  # of the window [3, 13] it held one second of the first span and all of the second
    assert window.held_ns == 2 * SECOND_NS
    window.trim(30 * SECOND_NS)
    assert window.held_ns == 0
    assert not window.spans


def test_a_limit_frees_the_tenant_when_its_oldest_time_leaves_the_window() -> None:
    account = Account("a", Share(limit=0.25), Window(10 * SECOND_NS), Crowd())
    account.window.add(1 * SECOND_NS, 4 * SECOND_NS)
    # It held 3 s of the allowed 2.5 s. It is eligible again when more than 0.5 s have left the window, which is after
    # 1.5 s + 10 s.
    at_ns = account.eligible_at_ns(5 * SECOND_NS)
    assert at_ns == pytest.approx(11.5 * SECOND_NS, abs=2000)
    assert account.budget_ns(at_ns - 2000) <= 0
    assert account.budget_ns(at_ns) > 0


def test_quota_is_half_burst_half_last_quota_clamped() -> None:
    rule = discipline("request-limit")
    settings = replace(GEMINI, max_quota_ns=8 * SECOND_NS)
    account = Account("a", Share(limit=0.5), Window(settings.window_ns), Crowd())
    assert rule.quota(account, settings) == 250 * MS_NS  # without earlier bursts the quota is the base quota
    account.burst_ns, account.quota_ns = 50 * MS_NS, 250 * MS_NS
    assert rule.quota(account, settings) == 150 * MS_NS
    account.burst_ns, account.quota_ns = 10 * MS_NS, 100 * MS_NS
    assert rule.quota(account, settings) == 100 * MS_NS  # 55 ms, raised to the minimum
    account.burst_ns, account.quota_ns = 30 * SECOND_NS, 100 * MS_NS
    assert rule.quota(account, settings) == 5 * SECOND_NS  # limit x window


def test_largest_relative_deficit_goes_first() -> None:
    turns = GpuTurns("0", PLAIN)
    now = 0
    for name, request in (("hold", 0.1), ("big", 0.6), ("small", 0.2)):
        turns.join(name, Share(request=request), now)
    grant = turns.request("hold", now)[0]
    assert isinstance(grant, Grant)
    turns.accounts["big"].window.add(-5 * SECOND_NS, -2 * SECOND_NS)  # 3 of 6 s, a deficit of 1/2
    turns.accounts["small"].window.add(-2 * SECOND_NS, 0)  # 2 of 2 s, no deficit
    turns.accounts["small"].window.add(0, 0)
    turns.request("small", now)
    turns.request("big", now)
    out = turns.release("hold", grant.epoch, 10 * MS_NS)
    assert [s.tenant for s in out if isinstance(s, Grant)] == ["big"]


def test_nobody_in_deficit_means_least_used_first() -> None:
    turns = GpuTurns("0", PLAIN)
    for name in ("hold", "more", "less"):
        turns.join(name, Share(), 0)
    grant = turns.request("hold", 0)[0]
    assert isinstance(grant, Grant)
    turns.accounts["more"].window.add(-2 * SECOND_NS, -1 * SECOND_NS)
    turns.accounts["less"].window.add(-1 * SECOND_NS, -SECOND_NS // 2)
    turns.request("more", 0)
    turns.request("less", 0)
    out = turns.release("hold", grant.epoch, MS_NS)
    assert [s.tenant for s in out if isinstance(s, Grant)] == ["less"]


def test_alone_a_tenant_never_stops() -> None:
    turns = GpuTurns("0", GEMINI)
    turns.join("a", Share(), 0)
    grant = turns.request("a", 0)[0]
    assert isinstance(grant, Grant)
    assert grant.deadline_ns == 250 * MS_NS
    wake = turns.wake_ns()
    assert wake is not None
    assert wake < grant.deadline_ns
    (move,) = turns.advance(wake)
    assert isinstance(move, Move)
    assert move.epoch == grant.epoch
    assert move.deadline_ns == wake + 250 * MS_NS
    moves = 1
    while (wake := turns.wake_ns()) is not None:
        (move,) = turns.advance(wake)
        assert isinstance(move, Move)
        moves += 1
    assert move.deadline_ns == ENDLESS_NS  # no other tenant has wanted the GPU for 2 s
    assert moves == 9  # 2 s in steps of 230 ms


def endless(name: str = "a", **shares: Share) -> tuple[GpuTurns, Grant]:
    """`name` holds the GPU without an end, at 1 s; the others of `shares` are there and idle."""
    turns = GpuTurns("0", replace(GEMINI, alone_ns=200 * MS_NS))
    for tenant, share in shares.items():
        turns.join(tenant, share, 0)
    (grant,) = turns.request(name, 770 * MS_NS)
    (move,) = turns.advance(SECOND_NS)
    assert isinstance(grant, Grant)
    assert isinstance(move, Move)
    assert move.deadline_ns == ENDLESS_NS
    return turns, grant


def test_a_turn_has_no_end_only_after_two_seconds_alone() -> None:
    turns, grant = endless(a=Share(), b=Share())
    turns.configure(GEMINI)
    assert kinds(turns.request("b", 5 * SECOND_NS)) == [Revoke]
    (_, second) = turns.release("a", grant.epoch, 5001 * MS_NS)
    turns.release("b", second.epoch, 5002 * MS_NS)  # after this no other tenant wants the GPU
    turns.request("a", 5100 * MS_NS)
    moved = []
    while (wake := turns.wake_ns()) is not None:
        moved += [(wake, step.deadline_ns) for step in turns.advance(wake) if isinstance(step, Move)]
    finite = [deadline - wake for wake, deadline in moved[:-1]]
    assert finite == [250 * MS_NS] * len(finite)
    at_ns, deadline_ns = moved[-1]
    assert deadline_ns == ENDLESS_NS
    assert 7001 * MS_NS <= at_ns <= 7001 * MS_NS + 250 * MS_NS  # at the first deadline after 2 s without other tenants


def test_whoever_comes_ends_an_endless_turn_at_once_and_its_whole_length_alone_costs_nothing() -> None:
    turns, grant = endless(a=Share(), b=Share())
    (revoke,) = turns.request("b", 60 * SECOND_NS)
    assert isinstance(revoke, Revoke)
    ended, granted = turns.release("a", grant.epoch, 60_064 * MS_NS, again=True)
    assert isinstance(ended, Ended)
    assert isinstance(granted, Grant)
    assert granted.tenant == "b"
    window = turns.accounts["a"].window
    window.trim(60_064 * MS_NS)
    # Of the time alone, only the last 64 ms count against the tenant, which were still queued when another tenant
    # asked. During the rest of the window no other tenant wanted the GPU.
    assert window.sums[0] == 64 * MS_NS
    assert window.sums[1] == window.window_ns - 64 * MS_NS
    assert turns.accounts["a"].overrun_ns == 64 * MS_NS


def test_a_turn_without_an_end_gets_one_when_it_must_be_counted() -> None:
    turns, _ = endless(a=Share(), capped=Share(limit=0.2))
    turns.accounts["capped"].window.add(-SECOND_NS, 2 * SECOND_NS)
    # the tenant has used up its limit and may not run yet, so the holder continues, but in turns
    (move,) = turns.request("capped", 3 * SECOND_NS)
    assert isinstance(move, Move)
    assert move.deadline_ns == 3250 * MS_NS
    turns, _ = endless(a=Share())
    (move,) = turns.resize("a", Share(limit=0.5), SECOND_NS)
    assert isinstance(move, Move)
    # Of the last 10 s, 9.52 s count as idle (all idle time but the credit of 0.25 s). The tenant may hold the GPU for
    # half of the other 0.48 s, of which it has held it 0.23 s. So 10 ms are left.
    assert move.deadline_ns == 1010 * MS_NS
    turns, _ = endless("low", low=Share(), high=Share(priority=1))
    assert kinds(turns.request("high", 3 * SECOND_NS)) == [Revoke]
    turns, _ = endless(a=Share())
    (move,) = turns.join("a", Share(gang=("0", "1")), 3 * SECOND_NS)
    assert isinstance(move, Move)


def test_a_limited_tenant_alone_keeps_its_deadlines() -> None:
    turns = GpuTurns("0", GEMINI)
    turns.join("a", Share(limit=0.99), 0)
    turns.request("a", 0)
    for _ in range(200):
        wake = turns.wake_ns()
        assert wake is not None
        turns.advance(wake)
        if turns.turn is not None and turns.turn.revoked_ns is not None:
            turns.release("a", turns.turn.epoch, wake, again=True)
        assert turns.turn is None or turns.turn.deadline_ns < ENDLESS_NS


def test_idle_tenants_and_an_idle_holder_need_nothing() -> None:
    """A thousand tenants that came and went idle, one of them holding: no timer is due, and a newcomer is served by one
    message to the holder."""
    turns, _ = endless("t0", **{f"t{n}": Share() for n in range(1000)})
    assert turns.wake_ns() is None
    assert kinds(turns.request("t999", 100 * SECOND_NS)) == [Revoke]


def test_a_late_broker_does_not_stop_a_lone_tenant() -> None:
    turns = GpuTurns("0", GEMINI)
    turns.join("a", Share(), 0)
    grant = turns.request("a", 0)[0]
    assert isinstance(grant, Grant)
    (move,) = turns.advance(grant.deadline_ns + 300 * MS_NS)
    assert isinstance(move, Move)


def test_a_limit_ends_a_lone_turn_in_few_steps() -> None:
    """The budget shrinks while it is used; extending by what is left of it again and again would never end."""
    turns = GpuTurns("0", GEMINI)
    turns.join("a", Share(limit=0.6), 0)
    grant = turns.request("a", 0)[0]
    moves = 0
    while (wake := turns.wake_ns()) is not None and wake < 2 * SECOND_NS:
        out = turns.advance(wake)
        moves += sum(isinstance(step, Move) for step in out)
        if any(isinstance(step, Revoke) for step in out):
            break
    assert moves <= 4
    # The credit of 250 ms at 60 % gives a budget of 150 ms. So the first quota uses it up, and leaves a debt.
    assert turns.turn is not None
    assert turns.turn.deadline_ns <= grant.deadline_ns + 400 * MS_NS


def test_a_newcomer_ends_an_extended_turn_at_once() -> None:
    turns = GpuTurns("0", GEMINI)
    turns.join("a", Share(), 0)
    turns.join("b", Share(), 0)
    grant = turns.request("a", 0)[0]
    turns.advance(240 * MS_NS)
    turns.advance(480 * MS_NS)
    out = turns.request("b", 500 * MS_NS)
    assert kinds(out) == [Revoke]
    out = turns.release("a", grant.epoch, 501 * MS_NS)
    assert kinds(out) == [Ended, Grant]
    assert out[0].reason == "contended"


def test_overuse_is_debt() -> None:
    """A turn of 100 ms overrun to 500 ms: at a limit of 25 % of 1 s the tenant waits until half of it has left."""
    settings = QuotaSettings(
        quota_ns=100 * MS_NS, min_quota_ns=100 * MS_NS, window_ns=SECOND_NS, idle_credit_ns=SECOND_NS
    )
    turns = GpuTurns("0", settings)
    turns.join("a", Share(limit=0.25), 0)
    grant = turns.request("a", 0)[0]
    out = turns.release("a", grant.epoch, 500 * MS_NS, again=True)
    assert kinds(out) == [Ended]
    assert turns.accounts["a"].overrun_ns == 400 * MS_NS
    wake = turns.wake_ns()
    assert wake == pytest.approx(1250 * MS_NS, abs=2000)  # 250 of the 500 ms have left the window of 1 s
    assert kinds(turns.advance(wake)) == [Grant]


def test_a_holder_that_does_not_release_is_revoked_then_passed_over() -> None:
    settings = GEMINI
    turns = GpuTurns("0", settings)
    turns.join("hung", Share(), 0)
    turns.join("next", Share(), 0)
    hung = turns.request("hung", 0)[0]
    turns.request("next", 1)
    wake = turns.wake_ns()
    seen = []
    while wake is not None and wake < 60 * SECOND_NS:
        out = turns.advance(wake)
        seen += out
        wake = turns.wake_ns()
        if any(isinstance(s, Grant) for s in out):
            break
    assert kinds(seen) == [Revoke, Stuck, Grant]
    assert seen[0].reason == "expired"
    assert seen[2].tenant == "next"
    # a tenant that hangs gets no turn, whatever it requests
    turns.request("hung", 7 * SECOND_NS)
    assert all(s.tenant != "hung" for s in turns.advance(8 * SECOND_NS) if isinstance(s, Grant))
    # when it answers again, all of the time is charged to it
    out = turns.release("hung", hung.epoch, 9 * SECOND_NS)
    ended = next(s for s in out if isinstance(s, Ended))
    assert ended.end_ns - ended.start_ns == 9 * SECOND_NS
    assert turns.accounts["hung"].held_ns == 9 * SECOND_NS


def test_a_death_frees_the_gpu_in_the_same_step() -> None:
    turns = GpuTurns("0", GEMINI)
    turns.join("a", Share(), 0)
    turns.join("b", Share(), 0)
    turns.request("a", 0)
    turns.request("b", 0)
    out = turns.leave("a", 3 * MS_NS)
    assert kinds(out) == [Ended, Grant]
    assert out[0].reason == "gone"
    assert out[1].tenant == "b"
    assert turns.leave("a", 4 * MS_NS) == []


def test_a_late_release_of_an_old_epoch_changes_nothing() -> None:
    turns = GpuTurns("0", GEMINI)
    turns.join("a", Share(), 0)
    first = turns.request("a", 0)[0]
    turns.release("a", first.epoch, MS_NS)
    second = turns.request("a", 2 * MS_NS)[0]
    assert turns.release("a", first.epoch, 3 * MS_NS) == []
    assert turns.turn is not None
    assert turns.turn.epoch == second.epoch


def test_priority_ends_a_lower_turn_at_once() -> None:
    turns = GpuTurns("0", replace(GEMINI, discipline="priority"))
    turns.join("low", Share(priority=0), 0)
    turns.join("high", Share(priority=5), 0)
    low = turns.request("low", 0)[0]
    out = turns.request("high", 5 * MS_NS)
    assert kinds(out) == [Revoke]
    assert out[0].reason == "preempted"
    out = turns.release("low", low.epoch, 6 * MS_NS, again=True)
    assert [s.tenant for s in out if isinstance(s, Grant)] == ["high"]
    # a request of the lower tenant does not end the turn of the higher one
    assert kinds(turns.request("low", 7 * MS_NS)) == []


def test_a_raised_limit_acts_at_once() -> None:
    turns = GpuTurns("0", PLAIN)
    turns.join("a", Share(limit=0.1), 0)
    turns.accounts["a"].window.add(-2 * SECOND_NS, 0)
    assert turns.request("a", 0) == []
    out = turns.resize("a", Share(limit=0.8), MS_NS)
    assert kinds(out) == [Grant]
    out = turns.resize("a", Share(limit=0.1), 2 * MS_NS)
    assert kinds(out) == [Revoke]
    assert out[0].reason == "limit"


def test_a_gang_gets_all_of_its_gpus_or_none() -> None:
    node = NodeTurns(("0", "1"), GEMINI)
    gang = Share(request=0.5, gang=("0", "1"))
    node.join("0", "solo", Share(request=0.5), 0)
    for gpu in ("0", "1"):
        node.join(gpu, "gang", gang, 0)
    solo = node.request("0", "solo", 0)[0]
    assert node.request("1", "gang", MS_NS) == []  # GPU 1 is free and GPU 0 is not, so the gang gets neither
    assert node.holders() == {"0": "solo"}
    out = node.release("0", "solo", solo.epoch, 50 * MS_NS)
    assert {(s.gpu, s.tenant) for s in out if isinstance(s, Grant)} == {("0", "gang"), ("1", "gang")}
    # when a gang loses one GPU, its turn on the other one ends
    epoch = node.gpus["0"].turn.epoch  # type: ignore[union-attr]
    out = node.release("0", "gang", epoch, 90 * MS_NS)
    assert [(s.gpu, s.reason) for s in out if isinstance(s, Revoke)] == [("1", "gang")]


def test_two_gangs_that_overlap_do_not_wait_for_each_other() -> None:
    node = NodeTurns(("0", "1", "2"), GEMINI)
    for name, members in (("x", ("0", "1")), ("y", ("1", "2"))):
        for gpu in members:
            node.join(gpu, name, Share(request=0.4, gang=members), 0)
    node.request("0", "x", 0)
    node.request("2", "y", 0)
    now = 0
    got: dict[str, int] = {"x": 0, "y": 0}
    for _ in range(40):
        now += 50 * MS_NS
        held = node.holders()
        assert sum(1 for g in ("0", "1") if held.get(g) == "x") in (0, 2)
        assert sum(1 for g in ("1", "2") if held.get(g) == "y") in (0, 2)
        for gpu in ("0", "1", "2"):
            turn = node.gpus[gpu].turn
            if turn is not None and (turn.revoked_ns is not None or now >= turn.deadline_ns):
                got[turn.account.name] += 1
                node.release(gpu, turn.account.name, turn.epoch, now, again=True)
    assert got["x"] > 4
    assert got["y"] > 4


def test_wrong_settings_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="min_quota"):
        QuotaSettings(quota_ns=10, min_quota_ns=20)
    with pytest.raises(ValueError, match="known: request-limit"):
        QuotaSettings(discipline="fair")
    with pytest.raises(ValueError, match="above the limit"):
        Share(request=0.5, limit=0.2)
    assert len({d.name for d in DISCIPLINES}) == len(DISCIPLINES)
