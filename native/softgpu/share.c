/* Kernels of several processes that run concurrently, as under MPS. Processes with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
 * run concurrently, and so do the clients of the simulated MPS (mps.c). profiles/kernels/contention.py has the same
 * model for single kernels. Here, the end of work is computed once, when the work is enqueued, from the work that
 * the other processes have enqueued by then.
 *
 * Each process has its own time line. When process A enqueues a unit of work (a kernel, or the kernels of a graph),
 * each other process B that has work enqueued delays the unit in one of two ways:
 * - If there are not enough SMs for the work of A and B, and neither is memory-bound, their kernels alternate, because
 *   a running kernel is not preempted: each kernel of the unit waits for one kernel of B, as long as B has work.
 * - Otherwise A and B run at the same time, and the unit is slowed according to its share of the SMs and of the memory
 *   bandwidth. */
#include <stdlib.h>

#include "softgpu.h"

#define MOST_OTHERS 8
/* fraction of the SMs that a kernel gets at least while it runs at the same time as kernels of other processes; it
 * applies if one of them is memory-bound, since then they run at the same time even if they need all SMs */
#define LEAST_SMS 0.05

static const double demand[] = {0, SOFT_DEMAND_UNKNOWN_PERMILLE / 1000.0, SOFT_DEMAND_MEMORY_PERMILLE / 1000.0,
                                SOFT_DEMAND_COMPUTE_PERMILLE / 1000.0};
static const double density[] = {0, SOFT_DENSITY_UNKNOWN_PERMILLE / 1000.0, SOFT_DENSITY_MEMORY_PERMILLE / 1000.0,
                                 SOFT_DENSITY_COMPUTE_PERMILLE / 1000.0};

struct other {
    uint64_t tail_ns, kernel_ns;
    double sms; /* fraction of the GPU's SMs that the kernels use */
    uint32_t work;
};

/* Returns the fraction of the SMs that this process may use; 0: the process does not run concurrently with others. */
static double part_of_sms(void)
{
    static double part = -1;
    if (part < 0) {
        const char *text = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
        double percent = text ? strtod(text, NULL) : 0;
        int client = soft_mps_client();
        part = client == 0 ? 0 : client > 0 ? soft_mps_sms() / (double)SOFT_SM_COUNT : percent > 100 ? 1 : percent / 100;
    }
    return part;
}

bool soft_runs_together(void)
{
    return part_of_sms() > 0;
}

static uint32_t find_others(int number, const struct soft_process *self, uint64_t now, struct other found[MOST_OTHERS])
{
    struct soft_state *state = soft_state();
    uint32_t count = 0;
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES && count < MOST_OTHERS; i++) {
        struct soft_process *process = &state->processes[i];
        uint64_t tail = atomic_load(&process->tail_ns[number]);
        uint64_t shape = atomic_load(&process->shape[number]);
        if (process != self && tail > now && shape && atomic_load(&process->owner))
            found[count++] = (struct other){.tail_ns = tail,
                                            .kernel_ns = shape >> 16,
                                            .sms = (double)(shape >> 2 & 0x3fff) / 1000,
                                            .work = (uint32_t)(shape & 3)};
    }
    return count;
}

/* Returns the speed of a unit while the work of `others` runs, relative to its speed alone on the same SMs (1: not
 * slowed). `sms`: fraction of the SMs on which it runs; `work`: its work class; `asked`: fraction of the memory
 * bandwidth that it uses if alone. The bandwidth is divided by weighted max-min fairness. */
static double speed_beside(double sms, uint32_t work, double asked, const struct other *others, uint32_t count)
{
    double weight = density[work] * sms, left = 1, weights = weight;
    bool full[MOST_OTHERS] = {false};
    for (uint32_t i = 0; i < count; i++)
        weights += density[others[i].work] * others[i].sms;
    for (bool changed = true; changed && asked > left * weight / weights;) {
        changed = false;
        for (uint32_t i = 0; i < count; i++)
            if (!full[i] && demand[others[i].work] <= left * density[others[i].work] * others[i].sms / weights) {
                full[i] = changed = true;
                left -= demand[others[i].work];
                weights -= density[others[i].work] * others[i].sms;
                break;
            }
    }
    double given = left * weight / weights;
    return given < asked ? given / asked : 1;
}

/* Reserves time for a unit of work on the time line of this process, from not_before_ns on, and returns its end. */
uint64_t soft_share(int number, struct soft_process *self, uint64_t not_before_ns, struct soft_unit unit)
{
    uint64_t now = soft_now_ns(), begin = not_before_ns > now || unit.overdue ? not_before_ns : now;
    /* the streams of one process do not overlap in this model */
    uint64_t own_tail = atomic_load(&self->tail_ns[number]);
    begin = own_tail > begin ? own_tail : begin;
    double fill = (unit.sms ? unit.sms : SOFT_SM_COUNT) / (double)SOFT_SM_COUNT, part = part_of_sms();
    double most = unit.work == 2 ? SOFT_FILL_MEMORY_PERMILLE / 1000.0 : 1;
    fill = fill > most ? most : fill;
    double sms = fill < part ? fill : part;
    double most_used = unit.work == 2 && fill > SOFT_REACH_MEMORY_PERMILLE / 1000.0 ? SOFT_REACH_MEMORY_PERMILLE / 1000.0 : fill;
    double used = sms < most_used ? sms : most_used;
    /* on fewer SMs than the work could use, it takes longer */
    double own_ns = (double)unit.length_ns * most_used / used;
    uint32_t pieces = unit.kernels ? unit.kernels : 1;
    struct other others[MOST_OTHERS], beside[MOST_OTHERS];
    uint32_t count = find_others(number, self, begin, others), together = 0;
    double held = 0, waited_ns = 0, overlap_ns = 0;
    for (uint32_t i = 0; i < count; i++) {
        double queued_ns = (double)(others[i].tail_ns - begin);
        bool room = others[i].work == 2 || unit.work == 2;
        if (!room && held + others[i].sms + sms > 1.001) {
            double each_ns = (double)pieces * (double)others[i].kernel_ns;
            waited_ns += each_ns < queued_ns ? each_ns : queued_ns;
        } else {
            held += others[i].sms;
            overlap_ns = queued_ns > overlap_ns ? queued_ns : overlap_ns;
            beside[together++] = others[i];
        }
    }
    if (together > 0) {
        double got = 1 - held < sms ? 1 - held : sms;
        got = got < LEAST_SMS ? LEAST_SMS : got;
        double part_of_speed = got < used ? got / used : 1;
        double speed = part_of_speed * speed_beside(got, unit.work, demand[unit.work] * part_of_speed, beside, together);
        double slowed_ns = own_ns / speed < overlap_ns ? own_ns / speed : overlap_ns;
        own_ns = slowed_ns + (own_ns - slowed_ns * speed);
    }
    uint64_t end = begin + (uint64_t)(own_ns + waited_ns);
    uint64_t kernel_ns = (uint64_t)own_ns / pieces;
    atomic_store(&self->shape[number], kernel_ns << 16 | (uint64_t)(sms * 1000) << 2 | unit.work);
    atomic_store(&self->tail_ns[number], end);
    atomic_fetch_add(&soft_state()->devices[number].busy_ns, (uint64_t)own_ns);
    return end;
}
