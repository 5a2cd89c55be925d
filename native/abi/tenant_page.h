/* Generated from tenant_page.toml by native/abi/generate.py: change the TOML file, then run the script.
 * The shared page, which the agent and the shim in a tenant's process both map: it has a slot for each GPU.  docs/protocol.md explains it. */
#ifndef COTENANT_ABI_TENANT_PAGE_H
#define COTENANT_ABI_TENANT_PAGE_H

#include <stdbool.h>
#include <stdint.h>

#define COTENANT_PAGE_BYTES 8192u
#define COTENANT_MAX_GPUS 16u /* number of slots of a shared page */

/* Flags of a GPU's slot on the shared page, written by the agent. */
enum cotenant_slot_flag {
    COTENANT_SLOT_ATTACHED = 1, /* the slot belongs to a GPU */
    /* another tenant waits for this GPU, so the process returns its turn as soon as it is idle */
    COTENANT_SLOT_CONTENDED = 2,
    /* this tenant needs no turns on this GPU: its launches are counted but do not wait. Set for all sharing
     * mechanisms except time */
    COTENANT_SLOT_UNGATED = 4,
    /* the shim does not limit the work in flight (used with UNGATED, for the lowest overhead) */
    COTENANT_SLOT_UNFENCED = 8,
    /* best-effort tenant: its launches wait at the LS gate while latency-sensitive work is active */
    COTENANT_SLOT_BEST_EFFORT = 16,
    /* latency-sensitive tenant: the shim sets its LS-activity flag while the process has work */
    COTENANT_SLOT_HOLDS_FLOOR = 32,
    /* copies on this GPU's link are scheduled, so the process sends COPY_ATTACH to get the copy page, which holds
     * the schedule */
    COTENANT_SLOT_COPIES = 256,
};

/* Slot of a GPU on the shared page of a process. */
struct cotenant_slot {
    /* The agent writes these fields. */
    /* number of the tenant's present turn (a time slice that the agent grants); 0: the tenant has no turn */
    uint64_t epoch;
    uint64_t deadline_ns;
    uint64_t inflight_allowed_ns; /* largest predicted GPU time of the work that the process may have in flight */
    uint64_t idle_release_ns;
    uint64_t drain_timeout_ns;
    uint64_t memory_limit_bytes; /* NO_LIMIT: no limit */
    uint64_t memory_used_bytes; /* memory of all processes of the tenant on this GPU, contexts included */
    uint32_t flags; /* SlotFlag */
    uint32_t reserved_0;
    uint8_t uuid[16];
    /* memory within the tenant's limit that it cannot get because it is reserved for other tenants */
    uint64_t memory_withheld_bytes;
    uint64_t memory_kept_bytes; /* memory of the GPU that is free but reserved for other tenants */
    /* number of parts into which the in-flight budget of the GPU's best-effort work is divided; 0: into as many
     * parts as the gate page (floor.toml) has in `tenants` */
    uint64_t floor_parts;
    uint8_t reserved_agent[24];
    /* The shim writes these fields. */
    uint64_t epoch_seen; /* number of the turn that the shim uses; 0: launches wait for a turn */
    uint64_t calls_in_flight; /* number of host threads in a driver call that needs a turn */
    uint64_t launches; /* number of launches since the start of the process */
    uint64_t copies;
    uint64_t graph_launches;
    uint64_t fences;
    uint64_t last_submit_ns; /* time of the last launch; the shim updates it about once per millisecond of GPU work */
    uint64_t predicted_busy_ns; /* sum of the predicted GPU times of all launches since the start of the process */
    uint64_t waited_ns; /* sum of the times that threads have waited for a turn since the start of the process */
    uint64_t turns; /* number of turns in which work was launched */
    uint64_t contexts; /* number of CUDA contexts of the process on this GPU */
    /* best-effort processes: time of the last launch that checked whether latency-sensitive work is active */
    uint64_t floor_ns;
    /* best-effort processes: time of the last launch of a kernel that takes 0.5 ms or more, or whose duration is not
     * known yet; 0: none */
    uint64_t long_kernel_ns;
    uint8_t reserved[24];
};
_Static_assert(sizeof(struct cotenant_slot) == 256, "cotenant_slot does not have 256 bytes");

/* The shared page of a process; its memfd has PAGE_BYTES. */
struct cotenant_page {
    uint32_t magic;
    uint32_t version;
    uint32_t page_bytes;
    uint32_t slot_count; /* MAX_GPUS */
    uint32_t fail_mode; /* FailMode; the agent may change it while the tenant runs */
    uint32_t reserved_0;
    uint64_t connection_id;
    uint8_t reserved[224];
    struct cotenant_slot slots[COTENANT_MAX_GPUS];
};
_Static_assert(sizeof(struct cotenant_page) == 4352, "cotenant_page does not have 4352 bytes");

#endif
