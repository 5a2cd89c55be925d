/* The interface of the accounts of the process's memory, by kind of allocation (family). */
#ifndef COTENANT_MEMORY_ROOM_H
#define COTENANT_MEMORY_ROOM_H

#include "shim.h"

/* ---- memory.c ---- */
HIDDEN CUresult cot_memory_reserve(struct gpu *gpu, uint32_t family, uint64_t bytes, uint64_t *reservation);
/* called if the driver could not provide memory that the agent had allowed: asks the agent to evict other tenants'
 * memory */
HIDDEN bool cot_memory_make_room(struct gpu *gpu, uint64_t bytes);
HIDDEN void cot_memory_commit(struct gpu *gpu, uint32_t family, uint64_t reservation, uint64_t bytes);
HIDDEN void cot_memory_release(struct gpu *gpu, uint32_t family, uint64_t bytes);
HIDDEN void cot_memory_remember(uint64_t address, uint64_t bytes, struct gpu *gpu, uint32_t family);
struct holding;
HIDDEN struct holding *cot_memory_take_out(uint64_t address, uint32_t family);
HIDDEN void cot_memory_taken_out(struct holding *holding, bool freed);
HIDDEN void cot_memory_forget_gpu(struct gpu *gpu);
HIDDEN void cot_memory_agent_lost(void);
HIDDEN void cot_memory_report_state(struct gpu *gpu);
HIDDEN void cot_memory_report_host(void);
HIDDEN void cot_memory_reset_after_fork(void);
HIDDEN bool cot_memory_view(struct gpu *gpu, uint64_t *limit_bytes, uint64_t *used_bytes);
/* returns the part of the free memory that the driver reports that is reserved for other tenants */
HIDDEN uint64_t cot_memory_kept(struct gpu *gpu);
HIDDEN void cot_pools_refresh(void);
HIDDEN void cot_pools_forget_gpu(struct gpu *gpu);
HIDDEN CUresult cot_graph_memory_check(word graph);
HIDDEN void cot_graph_memory_settle(word graph);
HIDDEN void cot_graph_memory_expected(void);

#endif
