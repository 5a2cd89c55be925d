"""How long a holder that is idle keeps its turn for what it is owed."""

from __future__ import annotations

from cotenant.policy.shares import MS_NS, SECOND_NS, GpuTurns, Grant, QuotaSettings, Share


def test_a_tenant_that_is_owed_keeps_its_turn_through_short_pauses() -> None:
    """One and a half times the last pause and 2 ms, up to a quarter of the quota."""
    turns = GpuTurns("0", QuotaSettings(quota_ns=100 * MS_NS))
    turns.join("a", Share(request=0.5), 0)
    now_ns = 0
    for pause_ns, patience_ns in ((4 * MS_NS, 8 * MS_NS), (16 * MS_NS, 26 * MS_NS), (17 * MS_NS, 0)):
        (grant,) = turns.request("a", now_ns)
        assert isinstance(grant, Grant)
        now_ns += MS_NS
        turns.release("a", grant.epoch, now_ns, reason="idle")
        now_ns += pause_ns
        turns.request("a", now_ns)
        assert turns.patience_ns("a", now_ns) == patience_ns
        turn = turns.turn
        assert turn is not None
        turns.release("a", turn.epoch, now_ns, reason="idle")
    account = turns.accounts["a"]
    account.gap_ns = 4 * MS_NS
    account.window.add(now_ns, now_ns + 6 * SECOND_NS)  # 6 of the last 10 s, so the tenant has got its request
    assert turns.patience_ns("a", now_ns + 6 * SECOND_NS) == 0
    turns.configure(QuotaSettings(discipline="temporal"))  # under this discipline tenants are promised nothing
    assert turns.patience_ns("a", now_ns + 60 * SECOND_NS) == 0
