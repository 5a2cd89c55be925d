/* Exports the rule for best-effort launches (floor_rule.h) as plain functions, for cotenant.native.rules. */
#include "shim/floor/floor_rule.h"

#define EXPORT __attribute__((visibility("default")))
EXPORT bool gate_may_go(const struct floor_rule *rule, struct floor_state *state, uint32_t ls_class, int64_t next_ns,
                        int64_t now_ns)
{
    return floor_may_go(rule, state, ls_class, next_ns, now_ns);
}
EXPORT void gate_went(const struct floor_rule *rule, struct floor_state *state, uint32_t ls_class, int64_t next_ns,
                      int64_t now_ns)
{
    floor_went(rule, state, ls_class, next_ns, now_ns);
}
EXPORT void gate_ended(struct floor_state *state, int64_t predicted_ns, int64_t now_ns)
{
    floor_ended(state, predicted_ns, now_ns);
}
EXPORT int64_t gate_allowed_ns(const struct floor_rule *rule, const struct floor_state *state)
{
    return floor_allowed(rule, state);
}
EXPORT int64_t gate_rested_at_ns(const struct floor_state *state)
{
    return floor_rested_at(state);
}
EXPORT int64_t gate_share_ns(uint64_t budget_ns, uint64_t parts)
{
    return floor_share(budget_ns, parts);
}
