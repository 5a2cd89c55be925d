/* Generated from rules.toml by native/abi/generate.py: change the TOML file, then run the script.
 * Arguments of two rules that C and Python call: when best-effort (BE) work may be launched, and which copy is next.  docs/protocol.md explains it. */
#ifndef COTENANT_ABI_RULES_H
#define COTENANT_ABI_RULES_H

#include <stdbool.h>
#include <stdint.h>

/* BE work with a duty cycle pauses so that the GPU is idle for part of the time; short pauses are combined into one
 * pause of this length, so that the kernels between two pauses can be timed */
#define FLOOR_REST_NS 200000

/* Parameters of the rule for BE launches, constant between launches. */
struct floor_rule {
    int64_t budget_ns; /* largest predicted GPU time that this process may have in flight */
    /* scheme tidal: a kernel longer than the budget is launched this long before the predicted end of the previous
     * kernel */
    int64_t lead_ns;
    uint32_t scheme; /* RuleKind */
    uint32_t overlap_permille;
    uint32_t sm_threshold;
    uint32_t work_class; /* WorkClass of the BE work */
    uint32_t work_sms; /* number of SMs that the BE work would fill; may exceed the GPU's; 0: not known */
    /* scheme tidal: while the BE work leaves the GPU idle, budget_ns grows up to this factor, in thousandths; 1000:
     * no growth */
    uint32_t stretch_permille;
    /* scheme tidal: fraction of the time for which BE work may keep the GPU busy; 0 or 1000: always */
    uint32_t duty_cycle_permille;
    uint8_t reserved[4];
};
_Static_assert(sizeof(struct floor_rule) == 48, "floor_rule does not have 48 bytes");

/* State of the rule for BE launches: work in flight, and counters. */
struct floor_state {
    /* predicted GPU time of the work in flight: work that was launched and is not known to have ended */
    int64_t outstanding_ns;
    int64_t unfinished; /* number of launch batches (groups of launches, see pieces.h) in flight */
    int64_t busy_until_ns; /* predicted end of all work in flight */
    int64_t batch_ns; /* scheme orion: predicted time of work launched since the GPU last finished all BE work */
    /* scheme tidal: time for which BE work may run while latency-sensitive (LS) work is active; below 0 if it ran
     * for too long */
    int64_t credit_ns;
    int64_t credit_at_ns; /* scheme tidal: time up to which credit_ns is counted */
    int64_t open_ns; /* scheme tidal: length of the current measuring window, a time without active LS work */
    int64_t dry_ns; /* scheme tidal: part of the current measuring window in which no BE work was on the GPU */
    int64_t area_ns2; /* scheme tidal: integral of the work in flight over the time of the current measuring window */
    /* scheme tidal: time up to which open_ns, dry_ns and area_ns2 are counted; 0: LS work was active, so counting
     * starts anew */
    int64_t open_at_ns;
    int64_t stretch_permille; /* present factor on budget_ns, in thousandths; 0 stands for 1000 */
    int64_t owed_ns; /* scheme tidal with a duty cycle: for how much longer BE work must leave the GPU idle */
    bool batch_full; /* scheme orion: enough work was launched, so further launches wait until all of it has ended */
    bool starved; /* the GPU was idle for part of the last measuring window */
    uint8_t reserved[6];
};
_Static_assert(sizeof(struct floor_state) == 104, "floor_state does not have 104 bytes");

/* A process's claim of a slot of a link; each chunk (part of a copy) needs a slot while it is in flight. */
struct copy_ticket {
    uint64_t word; /* the value that the process wrote to the slot */
    uint32_t slot;
    uint8_t reserved[4];
};
_Static_assert(sizeof(struct copy_ticket) == 16, "copy_ticket does not have 16 bytes");

#endif
