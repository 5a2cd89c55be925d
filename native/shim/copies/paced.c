/* Makes a copy whose pieces wait in the program's stream until they may run (see copies.c). If the program's call is
 * synchronous, the calling thread waits for the whole copy. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <time.h>

#include "copies/copies.h"
#include "words.h"

/* a waiting thread polls this long without a pause, since a sleep takes 60 us, as long as a piece */
#define SPIN_NS 500000
#define WAKE_NS 200000         /* a thread that waits for a long piece polls again this long before its expected end */
#define ASK_STREAM_NS 2000000  /* at this interval a waiting thread checks whether its context still works */


static bool no_stream_waits; /* this driver does not support stream operations that wait on memory */

/* Returns the device address of the wait words in the current context; 0: not available. The caller holds
 * cot_copy_lock. */
static uint64_t device_words(void)
{
    if (!cot_copy_words) {
        void *mapped = mmap(NULL, sizeof(struct copy_words) * COPY_RECORDS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED)
            return 0;
        cot_copy_words = mapped;
    }
    CUdeviceptr address = 0;
    if (REAL(cuMemHostGetDevicePointer_v2)(&address, cot_copy_words, 0) == CUDA_SUCCESS)
        return address;
    CUresult result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0)
        result = REAL(cuMemHostRegister_v2)(
            cot_copy_words, sizeof(struct copy_words) * COPY_RECORDS, HOST_REGISTER_PORTABLE_DEVICEMAP);
    pthread_mutex_unlock(&cot_capture_lock);
    if (result != CUDA_SUCCESS ||
        REAL(cuMemHostGetDevicePointer_v2)(&address, cot_copy_words, 0) != CUDA_SUCCESS)
        return 0;
    return address;
}

static struct copy_record *take_record(void) /* the caller holds cot_copy_lock, which protects the wait words */
{
    for (uint32_t i = 0; i < COPY_RECORDS; i++)
        if (!cot_copy_records[i].taken) {
            cot_copy_records[i].taken = true;
            return &cot_copy_records[i];
        }
    return NULL;
}

static CUresult words_in_stream(CUstream stream, struct word_operation *operations, unsigned count)
{
    return REAL(cuStreamBatchMemOp_v2)(stream, count, operations, 0);
}

static CUresult write_word(CUstream stream, CUdeviceptr address, uint32_t value)
{
    return words_in_stream(stream, &(struct word_operation){.kind = WORD_WRITE, .address = address, .value = value}, 1);
}

static CUresult ask_stream(CUstream stream)
{
    CUresult state = CUDA_ERROR_NOT_READY;
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0)
        state = REAL(cuStreamQuery)(stream);
    pthread_mutex_unlock(&cot_capture_lock);
    return state;
}

static bool is_ahead(const struct copy_link *link, uint32_t direction)
{
    return link->page->links[direction].queues[link->queue].rank == COTENANT_COPY_AHEAD;
}

/* The last enqueued copy, and the number of launches and copies made until then. If the next copy is the very next
 * call, nothing lies between the two copies in their stream. */
static struct {
    CUstream stream;
    uint32_t direction;
    uint64_t calls, serial;
    const struct copy_record *record;
} last;

static uint64_t calls_so_far(void)
{
    return cot_calls_sum(cot_thread->gpu).started;
}

/* the caller holds cot_copy_lock, which protects the list of pending copies */
static void follow(struct copy_record *record, const struct host_copy *copy)
{
    bool directly = last.record && last.stream == copy->stream && last.direction == copy->direction &&
                    last.record->serial == last.serial && last.record->link.page == record->link.page &&
                    calls_so_far() == last.calls + 1;
    record->before = directly ? last.record : NULL;
    record->before_serial = last.serial;
}

/* the caller holds cot_copy_lock, which protects the list of pending copies */
static void note_last(const struct copy_record *record, uint64_t serial, const struct host_copy *copy)
{
    last.stream = copy->stream;
    last.direction = copy->direction;
    last.record = record;
    last.serial = serial;
    last.calls = calls_so_far();
}

/* Splits a copy into pieces, adds it to the list of pending copies, and grants the pieces that may run at once. The
 * caller holds cot_copy_lock. */
static void prepare(struct copy_record *record, const struct copy_link *link, const struct host_copy *copy, bool idle)
{
    const struct cotenant_copy_page *page = link->page;
    uint64_t wanted = copy_piece(page, copy->direction, link->queue, cot_now_ns());
    uint64_t unit = copy->unit ? copy->unit : 1, piece = wanted / unit * unit;
    uint64_t at_once = copy_chunk(page) * copy_most(page);
    record->free_run = is_ahead(link, copy->direction) && copy->bytes <= (wanted > at_once ? wanted : at_once);
    if (record->free_run)
        /* copies of other tenants wait for this copy, so splitting it would only delay all of them */
        piece = copy->bytes;
    if (piece < unit)
        piece = unit;
    record->link = *link;
    record->direction = copy->direction;
    record->bytes = copy->bytes;
    record->piece_bytes = piece;
    record->pieces = (uint32_t)((copy->bytes + piece - 1) / piece);
    record->granted = record->returned = record->done = 0;
    record->asked_ns = 0;
    record->moved_ns = cot_now_ns();
    record->spent = false;
    record->next = NULL;
    if (idle)
        record->before = NULL;
    else
        follow(record, copy);
    struct copy_words *mine = &cot_copy_words[record - cot_copy_records];
    __atomic_store_n(&mine->go, record->base, __ATOMIC_RELEASE);
    __atomic_store_n(&mine->ready, record->base + (idle ? 1 : 0), __ATOMIC_RELEASE);
    struct copy_record **end;
    for (end = &cot_copy_first; *end; end = &(*end)->next)
        ;
    *end = record;
    if (idle || record->free_run)
        cot_copies_advance();
}

/* Called when the driver refused a piece: grants all pieces, so that none of them waits in the stream for ever. */
static void let_go(struct copy_record *record, uint64_t serial, bool ends)
{
    cot_copies_enter();
    if (record->serial == serial) {
        __atomic_store_n(&cot_copy_words[record - cot_copy_records].go, record->base + record->pieces, __ATOMIC_RELEASE);
        cot_copy_give_back(record, record->granted);
        record->granted = record->returned = record->done = record->pieces;
        for (struct copy_record **link = &cot_copy_first; *link && !ends; link = &(*link)->next)
            /* the stream will never write the final value to `ready`, so the end of the copy is never seen: the record
             * leaves the list, and is not used again */
            if (*link == record) {
                *link = record->next;
                break;
            }
    }
    cot_copies_leave();
}

/* Enqueues all pieces at once. Each waits in the stream until it may run, unless it is granted already. */
static CUresult enqueue(struct copy_record *record, uint64_t serial, const struct host_copy *copy, CUdeviceptr address, bool begun)
{
    CUdeviceptr ready = address + (CUdeviceptr)(record - cot_copy_records) * sizeof(struct copy_words);
    CUdeviceptr go = ready + offsetof(struct copy_words, go);
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < record->pieces && result == CUDA_SUCCESS; i++) {
        struct word_operation operations[2];
        unsigned count = 0;
        if (i > 0 || !begun)
            operations[count++] = (struct word_operation){.kind = WORD_WRITE, .address = ready, .value = record->base + i + 1};
        if (!record->free_run && __atomic_load_n(&record->granted, __ATOMIC_ACQUIRE) <= i)
            operations[count++] = (struct word_operation){.kind = WORD_WAIT, .address = go, .value = record->base + i + 1};
        if (count)
            result = words_in_stream(copy->stream, operations, count);
        if (result == CUDA_SUCCESS)
            result = copy->issue(copy, record->piece_bytes * i, cot_copy_piece_bytes(record, i), copy->stream, true);
    }
    CUresult ended = write_word(copy->stream, ready, record->base + record->pieces + 1);
    if (result == CUDA_SUCCESS)
        result = ended;
    if (result != CUDA_SUCCESS)
        let_go(record, serial, ended == CUDA_SUCCESS);
    return result;
}

/* Returns whether a thread that waits for a long piece may sleep instead of polling. It must be awake before the
 * piece is expected to end. */
static bool may_nap(uint64_t now, uint64_t moved, uint64_t due)
{
    return now + WAKE_NS < due || (int64_t)(now - (due > moved ? due : moved)) > SPIN_NS;
}

/* Makes a copy for which the calling thread waits anyway. The thread issues each piece when it is granted, so
 * nothing waits in the stream. While it waits, the thread polls all copies of the process. */
static CUresult see_through(struct copy_record *record, uint64_t serial, const struct host_copy *copy, CUdeviceptr address, bool begun)
{
    CUdeviceptr ready = address + (CUdeviceptr)(record - cot_copy_records) * sizeof(struct copy_words);
    CUresult result = begun ? CUDA_SUCCESS : write_word(copy->stream, ready, record->base + 1);
    uint64_t began = cot_now_ns(), asked = began;
    uint32_t issued = 0;
    while (result == CUDA_SUCCESS) {
        if (issued == 0)
            cot_copies_enter();
        else
            /* this thread polls now, too, so the other polling threads need not let it take the lock first */
            pthread_mutex_lock(&cot_copy_lock);
        if (record->serial == serial)
            cot_copies_advance();
        bool done = record->serial != serial;
        uint32_t granted = done ? 0 : record->free_run ? record->pieces : record->granted;
        uint64_t moved = record->moved_ns > began ? record->moved_ns : began, due = done ? 0 : cot_copy_due(record);
        cot_copies_leave();
        if (done)
            return CUDA_SUCCESS;
        for (; issued < granted && result == CUDA_SUCCESS; issued++) {
            uint64_t from = record->piece_bytes * issued;
            result = copy->issue(copy, from, cot_copy_piece_bytes(record, issued), copy->stream, true);
            if (result == CUDA_SUCCESS)
                result = write_word(copy->stream, ready, record->base + issued + 2);
        }
        uint64_t now = cot_now_ns();
        if (result == CUDA_SUCCESS && now - asked > ASK_STREAM_NS) {
            asked = now;
            CUresult state = ask_stream(copy->stream);
            if (state != CUDA_SUCCESS && state != CUDA_ERROR_NOT_READY)
                /* the context of the copy has failed, so the stream will never reach the remaining pieces */
                result = state;
        }
        if (may_nap(now, moved, due))
            cot_nap_for(COPY_NAP_NS);
        else
            cot_copies_breathe();
    }
    let_go(record, serial, write_word(copy->stream, ready, record->base + record->pieces + 1) == CUDA_SUCCESS);
    return result;
}

/* Makes a copy in pieces that wait in the stream. Returns CUDA_ERROR_NOT_SUPPORTED, without having done anything, if
 * the thread must make the copy piece by piece instead. */
CUresult cot_copy_paced_by_stream(const struct copy_link *link, const struct host_copy *copy)
{
    bool idle = ask_stream(copy->stream) == CUDA_SUCCESS;
    cot_copies_enter();
    uint64_t address = no_stream_waits ? 0 : device_words();
    struct copy_record *record = address ? take_record() : NULL;
    static bool tried;
    if (record && !tried && write_word(copy->stream, address + sizeof(struct copy_words) * (size_t)(record - cot_copy_records), record->base)) {
        no_stream_waits = true;
        record->taken = false;
        record = NULL;
    }
    if (!record) {
        cot_copies_leave();
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    idle = idle && tried; /* in the first call, write_word above has put work into the stream, so it is not idle */
    tried = true;
    const uint64_t serial = record->serial;
    prepare(record, link, copy, idle);
    /* in these two cases the host knows when the first piece begins, so the stream need not write `ready` before that
     * piece */
    bool begun = idle || record->before;
    cot_copies_leave();
    if (copy->host_waits)
        return see_through(record, serial, copy, address, begun);
    CUresult result = enqueue(record, serial, copy, address, begun);
    cot_copies_enter();
    note_last(record, serial, copy);
    if (cot_copy_first)
        cot_copies_wake_worker();
    cot_copies_leave();
    return result;
}
