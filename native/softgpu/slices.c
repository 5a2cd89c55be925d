/* Time slices of a device. As soon as any channel group is given a time slice, preempted, disabled or enabled
 * (channels.c), the device switches between the contexts that have work, and preempts kernels. Until then, work is
 * scheduled as in state.c.
 *
 * Each context has a clock, which stops while the context has work but does not run. All times of its work (ends of
 * streams, events) are by that clock. So they are known when the work is enqueued, whatever other contexts do later.
 *
 * A process that needs the schedule makes a copy of it, brings the copy up to the present time, and reads or changes
 * the copy. At the end it makes the copy the live schedule, which all processes use. If it is killed before that, the
 * previous schedule stays live. */
#include <string.h>

#include "softgpu.h"

#define DRIVER_SLICE_NS UINT64_C(2048000)
#define REAP_NS UINT64_C(10000000)
/* soft_expect predicts at most this far ahead, since tenants may end and time slices may be set meanwhile */
#define LOOK_AGAIN_NS UINT64_C(2000000)
#define NOBODY UINT32_MAX

static void lock(struct soft_device *device)
{
    uint64_t mine = soft_identity();
    for (uint32_t tries = 1;; tries++) {
        uint64_t holder = 0;
        if (atomic_compare_exchange_strong(&device->schedule_lock, &holder, mine))
            return;
        if (tries % 64 == 0) {
            if (soft_is_dead(holder) && atomic_compare_exchange_strong(&device->schedule_lock, &holder, mine))
                return;
            soft_sleep_until(soft_now_ns() + 20000);
        }
    }
}

static bool has_work(const struct soft_group *group, uint64_t at)
{
    return group->present && group->until_ns + group->delay_ns > at;
}

static bool may_run(const struct soft_group *group, uint64_t at)
{
    return group->off != SOFT_ALL_CHANNELS && has_work(group, at);
}

static uint32_t next_to_run(const struct soft_schedule *s, uint32_t after, uint64_t at, uint32_t *count)
{
    uint32_t found = NOBODY;
    *count = 0;
    for (uint32_t step = 1; step <= SOFT_MAX_GROUPS; step++) {
        uint32_t i = (after + step) % SOFT_MAX_GROUPS;
        if (!may_run(&s->groups[i], at))
            continue;
        ++*count;
        if (found == NOBODY)
            found = i;
    }
    return found;
}

/* Chooses the channel group that runs now, and sets *count to the number of groups that could run. */
static uint32_t choose(struct soft_schedule *s, uint64_t at, uint32_t *count)
{
    uint32_t current = s->current ? s->current - 1 : SOFT_MAX_GROUPS - 1;
    uint32_t next = next_to_run(s, current, at, count);
    bool goes_on = s->current && may_run(&s->groups[current], at) && (at < s->slice_end_ns || *count == 1);
    if (next == NOBODY)
        return NOBODY;
    if (goes_on || (s->current && next == current)) {
        struct soft_group *group = &s->groups[current];
        if (at >= s->slice_end_ns) /* no other group has work, so the slice is renewed */
            s->slice_end_ns += ((at - s->slice_end_ns) / group->slice_ns + 1) * group->slice_ns;
        return current;
    }
    if (s->current && s->groups[current].present && !has_work(&s->groups[current], at))
        s->groups[current].yields++;
    s->current = next + 1;
    s->groups[next].runs++;
    s->switched_ns = at + SOFT_GROUP_SWITCH_NS;
    s->slice_end_ns = s->switched_ns + s->groups[next].slice_ns;
    return NOBODY;
}

/* Simulates the schedule up to `until`. Returns the time at which the clock of the group `watched` reaches
 * watched_ns, or 0 if it does not. */
static uint64_t advance(struct soft_schedule *s, uint64_t until, uint32_t watched, uint64_t watched_ns)
{
    while (s->at_ns < until) {
        uint64_t at = s->at_ns, end = until;
        uint32_t running = NOBODY, count;
        if (s->switched_ns <= at)
            running = choose(s, at, &count);
        if (s->switched_ns > at)
            end = end < s->switched_ns ? end : s->switched_ns;
        if (running != NOBODY) {
            uint64_t done = s->groups[running].until_ns + s->groups[running].delay_ns;
            end = end < done ? end : done;
            if (count > 1 && end > s->slice_end_ns)
                end = s->slice_end_ns;
        }
        if (watched != NOBODY && (watched == running || !has_work(&s->groups[watched], at))) {
            uint64_t reached = watched_ns + s->groups[watched].delay_ns;
            if (reached <= end)
                return reached > at ? reached : at;
        }
        for (uint32_t i = 0; i < SOFT_MAX_GROUPS; i++) {
            if (s->current == i + 1 && s->switched_ns <= at && s->groups[i].off != SOFT_ALL_CHANNELS)
                /* the time counts as busy even if the group has no work, as it does in a GPU's log of context
                 * switches */
                s->groups[i].busy_ns += end - at;
            if (i != running && has_work(&s->groups[i], at))
                s->groups[i].delay_ns += end - at;
        }
        s->at_ns = end;
    }
    return 0;
}

/* Locks the schedule and returns an up-to-date copy of it. close_schedule makes the copy the live schedule. */
static struct soft_schedule *open_schedule(struct soft_device *device, uint64_t *now)
{
    lock(device);
    uint32_t live = atomic_load(&device->schedule_live) & 1;
    struct soft_schedule *copy = &device->schedules[1 - live];
    memcpy(copy, &device->schedules[live], sizeof *copy);
    *now = soft_now_ns();
    if (copy->at_ns == 0)
        copy->at_ns = *now;
    if (*now > copy->reaped_ns + REAP_NS) {
        copy->reaped_ns = *now;
        for (uint32_t i = 0; i < SOFT_MAX_GROUPS; i++) {
            uint64_t owner = atomic_load(&device->group_owner[i]);
            if (owner && soft_is_dead(owner)) {
                copy->groups[i].present = 0;
                atomic_store(&device->group_owner[i], 0);
            }
        }
    }
    advance(copy, *now, NOBODY, 0);
    return copy;
}

static void close_schedule(struct soft_device *device)
{
    atomic_store(&device->schedule_live, 1 - (atomic_load(&device->schedule_live) & 1));
    atomic_store(&device->schedule_lock, 0);
}

/* ---- channel groups ---- */

int soft_group_new(int number)
{
    struct soft_device *device = &soft_state()->devices[number];
    uint64_t now;
    for (uint32_t i = 0; i < SOFT_MAX_GROUPS; i++) {
        uint64_t nobody = 0;
        if (!atomic_compare_exchange_strong(&device->group_owner[i], &nobody, soft_identity()))
            continue;
        struct soft_schedule *s = open_schedule(device, &now);
        s->groups[i] = (struct soft_group){.present = 1, .slice_ns = DRIVER_SLICE_NS};
        close_schedule(device);
        return (int)i;
    }
    return -1;
}

void soft_group_gone(int number, int group)
{
    struct soft_device *device = &soft_state()->devices[number];
    uint64_t now;
    if (group < 0)
        return;
    struct soft_schedule *s = open_schedule(device, &now);
    s->groups[group].present = 0;
    close_schedule(device);
    atomic_store(&device->group_owner[group], 0);
}

/* Returns a copy of a channel group. If `change` is not NULL, it is called for the group first. */
struct soft_group soft_group_change(int number, int group, void (*change)(struct soft_schedule *, int, uint64_t), uint64_t value)
{
    struct soft_device *device = &soft_state()->devices[number];
    uint64_t now;
    if (change)
        atomic_store(&device->sliced, 1);
    struct soft_schedule *s = open_schedule(device, &now);
    if (change)
        change(s, group, value);
    struct soft_group found = s->groups[group];
    close_schedule(device);
    return found;
}

/* ---- the clocks of contexts ---- */

static bool is_sliced(const struct soft_context *context)
{
    return context && context->group >= 0 && atomic_load(&soft_state()->devices[context->device].sliced);
}

static uint64_t delay_of(const struct soft_context *context, uint64_t *now)
{
    *now = soft_now_ns();
    if (!is_sliced(context))
        return 0;
    struct soft_device *device = &soft_state()->devices[context->device];
    struct soft_schedule *s = open_schedule(device, now);
    uint64_t delay = s->groups[context->group].delay_ns;
    close_schedule(device);
    return delay;
}

uint64_t soft_clock(const struct soft_context *context)
{
    uint64_t now, delay = delay_of(context, &now);
    return now - delay;
}

/* Returns by how many ns a context's clock is behind the host's clock. */
uint64_t soft_delay(const struct soft_context *context)
{
    uint64_t now;
    return delay_of(context, &now);
}

/* Predicts when a context's clock will reach clock_ns; the returned time is at most LOOK_AGAIN_NS from now. */
uint64_t soft_expect(const struct soft_context *context, uint64_t clock_ns)
{
    if (!is_sliced(context))
        return clock_ns;
    struct soft_device *device = &soft_state()->devices[context->device];
    uint64_t now;
    struct soft_schedule *s = open_schedule(device, &now), ahead = *s;
    close_schedule(device);
    uint64_t reached = advance(&ahead, now + LOOK_AGAIN_NS, (uint32_t)context->group, clock_ns);
    return reached ? reached : now + LOOK_AGAIN_NS;
}

void soft_wait(const struct soft_context *context, uint64_t clock_ns)
{
    if (!is_sliced(context)) {
        soft_sleep_until(clock_ns);
        if (!is_sliced(context))
            return;
    }
    while (soft_clock(context) < clock_ns)
        soft_sleep_until(soft_expect(context, clock_ns));
}

/* Appends work to the context's earlier work. Returns the end of the work by the context's clock. */
uint64_t soft_schedule_work(const struct soft_context *context, uint64_t not_before_ns, struct soft_unit unit)
{
    if (!is_sliced(context) || soft_runs_together())
        return soft_reserve(context->device, not_before_ns, unit);
    struct soft_device *device = &soft_state()->devices[context->device];
    uint64_t now;
    struct soft_schedule *s = open_schedule(device, &now);
    struct soft_group *group = &s->groups[context->group];
    uint64_t begin = group->until_ns > not_before_ns ? group->until_ns : not_before_ns, clock = now - group->delay_ns;
    if (begin < clock && !unit.overdue)
        begin = clock;
    uint64_t end = group->until_ns = begin + unit.length_ns;
    close_schedule(device);
    atomic_fetch_add(&device->busy_ns, unit.length_ns);
    return end;
}
