/* Sets and clears the activity flag of a latency-sensitive (LS) program on the gate page. The program itself is not
 * modified.
 *
 * Each launch takes the slow path (cot_gate_slow), which sets the flag before the launch. A thread clears the flag
 * after all streams have been idle for LINGER_NS. It does not clear it earlier, because a request that waited for
 * another one is launched within that time and would otherwise have to wait for a best-effort kernel. While a thread
 * waits for a turn, the flag stays set.
 *
 * A launch increments `started`, sets the flag, which increments `raises`, and at last increments `finished`. So no
 * kernel runs if started == finished, all streams are idle, and `raises` is the same before and after this check. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "abi/floor.h"
#include "shim.h"

#define LOOK_UP_NS 150000    /* time between two polls of the process's streams while its LS-activity flag is set */
#define LINGER_NS 60000
#define LOOK_DOWN_NS 1000000

struct holder {
    struct cotenant_floor *page;
    /* the wait-flag page, on which streams of other processes wait; NULL: the agent has none */
    struct cotenant_floor_words *words;
    uint32_t index;
    int fd;
    struct work stated; /* the tenant's work class, as the tenant has stated it */
    struct gpu *gpu;
    pthread_mutex_t lock;
    /* drained_ns: time at which all streams were found idle for the first time since `raises` had the value
     * drained_raises; 0: they were not all idle yet */
    uint64_t raises, drained_raises, drained_ns;
    bool up;
};

/* Returns the work class of the last launch. A kernel has its own class in the profile; a graph has the class of the
 * tenant. */
static uint8_t class_now(const struct holder *holder)
{
    bool asked = holder->page->scheme == COTENANT_SCHEME_ORION;
    struct work work = asked ? cot_work_now(holder->stated) : holder->stated;
    return (uint8_t)work.work_class;
}

/* Sets or clears this process's flag on the wait-flag page. Streams of other processes wait until it is cleared. */
static void show(struct holder *holder, uint8_t up)
{
    if (holder->words)
        __atomic_store_n(&holder->words->raised[holder->index], up, __ATOMIC_SEQ_CST);
}

/* true if the flag of some GPU is or may be set, so that each synchronisation checks whether it can be cleared */
bool cot_holding;

void cot_holder_raise(struct holder *holder)
{
    pthread_mutex_lock(&holder->lock);
    struct cotenant_floor *page = holder->page;
    __atomic_store_n(&page->raised_ns[holder->index], cot_now_ns(), __ATOMIC_RELAXED);
    if (!holder->up)
        __atomic_store_n(&page->raises[holder->index], page->raises[holder->index] + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&page->raised[holder->index], class_now(holder), __ATOMIC_SEQ_CST);
    show(holder, 1);
    holder->up = true;
    holder->raises++;
    pthread_mutex_unlock(&holder->lock);
}

/* Clears the flag if all launched work ended at least LINGER_NS ago; otherwise renews its heartbeat. */
static void settle(struct holder *holder)
{
    pthread_mutex_lock(&holder->lock);
    uint64_t raises = holder->raises;
    bool up = holder->up;
    pthread_mutex_unlock(&holder->lock);
    if (!up)
        return;
    struct call_counts counts = cot_calls_sum(holder->gpu);
    bool over = holder->gpu->waiting == 0 && counts.started == counts.finished && cot_streams_drained(holder->gpu);
    pthread_mutex_lock(&holder->lock);
    uint64_t now_ns = cot_now_ns();
    if (!over || raises != holder->raises)
        holder->drained_ns = 0;
    else if (!holder->drained_ns || holder->drained_raises != raises) {
        holder->drained_ns = now_ns;
        holder->drained_raises = raises;
    }
    if (holder->drained_ns && now_ns - holder->drained_ns >= LINGER_NS) {
        holder->drained_ns = 0;
        show(holder, 0);
        __atomic_store_n(&holder->page->raised[holder->index], 0, __ATOMIC_RELEASE);
        holder->up = false;
    } else {
        __atomic_store_n(&holder->page->raised_ns[holder->index], cot_now_ns(), __ATOMIC_RELEASE);
        /* another process may have cleared this flag because the heartbeat had expired, so it is set again */
        show(holder, 1);
    }
    pthread_mutex_unlock(&holder->lock);
}

void cot_holders_settle(void)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->holder)
            settle(cot_gpu_at(i)->holder);
}

static void *watch(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "cotenant-floor");
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    while (!cot_exiting()) {
        bool up = false, drained = false;
        for (uint32_t i = 0; i < cot_gpu_count(); i++) {
            const struct holder *holder = cot_gpu_at(i)->holder;
            up = up || (holder && holder->up);
            drained = drained || (holder && holder->up && holder->drained_ns);
        }
        nanosleep(&(struct timespec){.tv_nsec = drained ? LINGER_NS : up ? LOOK_UP_NS : LOOK_DOWN_NS}, NULL);
        if (up)
            cot_holders_settle();
    }
    return NULL;
}

static void start_watch(void)
{
    static pid_t runs_in;
    if (runs_in == getpid())
        return;
    runs_in = getpid();
    cot_start_thread(watch, NULL);
}

/* Called after the GPU was attached to the agent, or again to a restarted agent. */
void cot_holder_join(struct gpu *gpu)
{
    if (!(gpu->page_slot->flags & COTENANT_SLOT_HOLDS_FLOOR))
        return;
    struct cotenant_message reply;
    struct cotenant_floor_reply terms;
    int fd;
    struct cotenant_floor_words *words;
    struct cotenant_floor *page = cot_floor_page(gpu, COTENANT_FLOOR_LATENCY_SENSITIVE, &fd, &reply, &words);
    if (!page)
        return;
    if (reply.header.slot >= COTENANT_FLOOR_HOLDERS) {
        munmap(page, COTENANT_FLOOR_BYTES);
        close(fd);
        return;
    }
    struct holder *holder = gpu->holder;
    if (!holder) {
        if (!(holder = calloc(1, sizeof *holder))) {
            close(fd);
            return;
        }
        pthread_mutex_init(&holder->lock, NULL);
        holder->fd = -1;
        holder->gpu = gpu;
    }
    pthread_mutex_lock(&holder->lock);
    if (holder->fd >= 0)
        close(holder->fd);
    holder->fd = fd;
    holder->page = page; /* the page of the previous agent stays mapped, since another thread may still use it */
    holder->words = words;
    holder->index = reply.header.slot;
    memcpy(&terms, reply.body.bytes, sizeof terms);
    /* on the gate page, the value 0 would mean that the process has no active work, so another work class is used */
    holder->stated.work_class = terms.work_class ? terms.work_class : COTENANT_WORK_UNKNOWN;
    bool up = holder->up;
    pthread_mutex_unlock(&holder->lock);
    __atomic_store_n(&gpu->holder, holder, __ATOMIC_RELEASE);
    cot_holding = true;
    if (up)
        cot_holder_raise(holder);
    start_watch();
}

void cot_holder_after_fork(struct gpu *gpu)
{
    if (gpu->holder && gpu->holder->fd >= 0)
        close(gpu->holder->fd);
    gpu->holder = NULL;
}
