/* The rule that decides whether a best-effort (BE) launch may go now, as arithmetic without side effects. LS is
 * latency-sensitive work on the same GPU, which sets activity flags. The rule limits the *work in flight*: the
 * predicted GPU time of launches that have not ended. The simulator calls the same functions (native/rules/gate.c). */
#ifndef COTENANT_FLOOR_RULE_H
#define COTENANT_FLOOR_RULE_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/floor.h"
#include "abi/rules.h"

#define FLOOR_WINDOW_NS INT64_C(10000000)
/* all times are limited to this value, so that the product of two times does not overflow */
#define FLOOR_LONGEST_NS INT64_C(1000000000)
/* If stretch_permille has this value, the budget grows until budget_ns is in flight on average. With another value,
 * that average is budget_ns * stretch_permille / FLOOR_STRETCH. */
#define FLOOR_STRETCH 4000
#define FLOOR_GAP_NS INT64_C(1000000)

static inline int64_t floor_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t floor_most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns the in-flight budget of one process if budget_ns is divided into `parts` equal parts
 * (policy/colocation/division.py). */
static inline int64_t floor_share(uint64_t budget_ns, uint64_t parts)
{
    return floor_most((int64_t)(budget_ns / (parts ? parts : 1)), 1);
}

/* Returns how much work may be in flight now (scheme tidal). */
static inline int64_t floor_allowed(const struct floor_rule *rule, const struct floor_state *s)
{
    int64_t permille = floor_least(s->stretch_permille, rule->stretch_permille);
    return rule->budget_ns * floor_most(permille, 1000) / 1000;
}

static inline bool floor_paced(const struct floor_rule *rule)
{
    return rule->duty_cycle_permille > 0 && rule->duty_cycle_permille < 1000;
}

/* Adapts the factor on the budget after a measuring window. A program whose host is the bottleneck launches ahead of
 * its GPU when it can; if the budget prevents that, the GPU becomes idle. LS work that arrives waits for the work in
 * flight, so its mean wait is the mean of the work in flight over time. Therefore the budget grows only if the GPU
 * was idle, and only until that mean is a quarter of the largest allowed budget. It shrinks again while the GPU is
 * busy. */
static inline void floor_adapt(const struct floor_rule *rule, struct floor_state *s)
{
    int64_t mean_ns = s->area_ns2 / s->open_ns;
    int64_t most_ns = rule->budget_ns * rule->stretch_permille / FLOOR_STRETCH;
    int64_t now_permille = floor_most(s->stretch_permille, 1000);
    s->starved = s->dry_ns * 32 > s->open_ns;
    if (s->starved && mean_ns * 4 < most_ns * 3)
        s->stretch_permille = floor_least(now_permille * 5 / 4, floor_most(rule->stretch_permille, 1000));
    else if (!s->starved || mean_ns > most_ns)
        s->stretch_permille = floor_most(now_permille * 4 / 5, 1000);
    s->open_ns = s->dry_ns = s->area_ns2 = 0;
}

/* Accounts for the time since the previous launch: until busy_until_ns the work in flight decreased, and after that
 * the GPU was idle. If it was idle for longer than FLOOR_GAP_NS, nothing is counted: the program paused, and a larger
 * budget would not shorten its pauses. With a duty cycle nothing is counted either, since the duty cycle requires idle
 * times. */
static inline void floor_look_back(const struct floor_rule *rule, struct floor_state *s, int64_t now_ns)
{
    int64_t passed_ns = floor_least(now_ns - s->open_at_ns, FLOOR_LONGEST_NS);
    int64_t left_ns = floor_least(floor_most(0, s->busy_until_ns - s->open_at_ns), FLOOR_LONGEST_NS);
    int64_t busy_ns = floor_least(passed_ns, left_ns);
    s->open_at_ns = now_ns;
    s->owed_ns = floor_most(0, s->owed_ns - (passed_ns - busy_ns));
    if (passed_ns - busy_ns > FLOOR_GAP_NS || floor_paced(rule))
        return;
    s->open_ns += passed_ns;
    s->dry_ns += passed_ns - busy_ns;
    s->area_ns2 += busy_ns * left_ns - busy_ns * busy_ns / 2;
    if (s->open_ns >= FLOOR_WINDOW_NS)
        floor_adapt(rule, s);
}

static inline bool floor_orion(const struct floor_rule *rule, struct floor_state *s, uint32_t ls_class)
{
    if (ls_class && rule->sm_threshold && rule->work_sms > rule->sm_threshold)
        return false;
    if (ls_class && ls_class != COTENANT_WORK_UNKNOWN && rule->work_class != COTENANT_WORK_UNKNOWN &&
        ls_class == rule->work_class)
        return false;
    if (!s->batch_full)
        return true;
    if (s->outstanding_ns > 0)
        return false;
    s->batch_full = false;
    s->batch_ns = 0;
    return true;
}

/* Returns the time before which a process with a duty cycle must launch nothing, so that the GPU is idle for
 * owed_ns. */
static inline int64_t floor_rested_at(const struct floor_state *s)
{
    return floor_most(s->busy_until_ns, s->open_at_ns) + s->owed_ns;
}

static inline bool floor_tidal(const struct floor_rule *rule, struct floor_state *s, uint32_t ls_class, int64_t next_ns,
                               int64_t now_ns)
{
    int64_t passed_ns = ls_class && s->credit_at_ns ? now_ns - s->credit_at_ns : 0;
    s->credit_at_ns = ls_class ? now_ns : 0;
    s->credit_ns = floor_least(s->credit_ns + passed_ns * rule->overlap_permille / 1000, rule->budget_ns);
    if (ls_class) {
        s->open_at_ns = 0;
        return rule->overlap_permille > 0 && s->outstanding_ns == 0 &&
               s->credit_ns >= floor_least(next_ns, rule->budget_ns);
    }
    if (s->open_at_ns == 0)
        s->open_at_ns = now_ns;
    if (floor_paced(rule) && s->owed_ns >= FLOOR_REST_NS && now_ns < floor_rested_at(s))
        return false;
    if (s->outstanding_ns == 0 || s->outstanding_ns + next_ns <= floor_allowed(rule, s))
        return true;
    return s->unfinished <= 1 && s->busy_until_ns - now_ns <= rule->lead_ns;
}

/* Returns whether a launch of predicted length next_ns may go. ls_class: work class of the active LS work, 0 if
 * there is none. */
static inline bool floor_may_go(const struct floor_rule *rule, struct floor_state *s, uint32_t ls_class, int64_t next_ns,
                                int64_t now_ns)
{
    switch (rule->scheme) {
    case COTENANT_SCHEME_TEMPORAL:
        return !ls_class && s->outstanding_ns == 0;
    case COTENANT_SCHEME_ORION:
        return floor_orion(rule, s, ls_class);
    case COTENANT_SCHEME_TIDAL:
        return floor_tidal(rule, s, ls_class, next_ns, now_ns);
    default:
        return true;
    }
}

/* Updates the state when a launch was allowed and is made now. */
static inline void floor_went(const struct floor_rule *rule, struct floor_state *s, uint32_t ls_class, int64_t next_ns,
                              int64_t now_ns)
{
    if (rule->scheme == COTENANT_SCHEME_TIDAL && !ls_class)
        floor_look_back(rule, s, now_ns);
    if (floor_paced(rule))
        s->owed_ns += next_ns * (1000 - rule->duty_cycle_permille) / rule->duty_cycle_permille;
    if (s->busy_until_ns < now_ns)
        s->busy_until_ns = now_ns;
    s->busy_until_ns += next_ns;
    s->outstanding_ns += next_ns;
    if (rule->scheme == COTENANT_SCHEME_ORION) {
        s->batch_ns += next_ns;
        s->batch_full = s->batch_ns > rule->budget_ns;
    }
    if (rule->scheme == COTENANT_SCHEME_TIDAL && ls_class)
        s->credit_ns -= next_ns;
}

/* Updates the state when the end of a launch batch was noticed. `predicted_ns`: predicted time of the batch. The
 * next batch began at about this time. If no batch is left, the GPU may have been idle since the predicted end. */
static inline void floor_ended(struct floor_state *s, int64_t predicted_ns, int64_t now_ns)
{
    s->outstanding_ns -= predicted_ns;
    s->unfinished--;
    s->busy_until_ns = s->outstanding_ns > 0 ? now_ns + s->outstanding_ns : floor_least(s->busy_until_ns, now_ns);
}

#endif
