/* The interface of the LS gate to the shim's other directories. At the LS gate, best-effort processes wait before
 * their launches, and latency-sensitive processes set their activity flag. */
#ifndef COTENANT_FLOOR_ROOM_H
#define COTENANT_FLOOR_ROOM_H

#include "shim.h"

/* ---- floor.c ---- */
HIDDEN void cot_floor_join(struct gpu *gpu);
HIDDEN bool cot_floor_try(struct thread *t, uintptr_t key, CUstream stream);
HIDDEN bool cot_floor_goes_on(struct thread *t, struct cost *cost);
HIDDEN void cot_floor_enter(struct thread *t, struct cost *cost);
HIDDEN void cot_floor_context_gone(struct gpu *gpu, CUcontext context);
HIDDEN void cot_floor_after_fork(struct gpu *gpu);

/* ---- join.c ---- */
struct cotenant_floor;
struct cotenant_floor_words;
HIDDEN struct cotenant_floor *cot_floor_page(struct gpu *gpu, uint32_t role, int *fd, struct cotenant_message *reply,
                                             struct cotenant_floor_words **shown);

/* ---- holder.c ---- */
struct holder;
extern HIDDEN bool cot_holding;
HIDDEN void cot_holder_join(struct gpu *gpu);
HIDDEN void cot_holder_raise(struct holder *holder);
HIDDEN void cot_holders_settle(void);
HIDDEN void cot_holder_after_fork(struct gpu *gpu);

#endif
