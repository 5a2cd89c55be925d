/* Wrappers of launches: kernels, cooperative kernels, graphs, and the old launch interface. */
/* This file is compiled without vector registers. The program has just written the arguments on the stack one by
 * one, and a wide load of two of them would have to wait for both stores. */
#ifdef __GNUC__
#pragma GCC target("general-regs-only")
#endif
#include "shim.h"

/* The arguments that the calling convention passes on the stack, after the first six in registers. They are passed
 * on as one structure, which occupies no registers, so the hot path need not save any. */
struct launch_tail {
    word bz, shared;
    CUstream stream;
    void **params, **extra;
};
struct cooperative_tail {
    word bz, shared;
    CUstream stream;
    void **params;
};
typedef CUresult (*launch_fn)(CUfunction, word, word, word, word, word, struct launch_tail);
typedef CUresult (*launch_ex_fn)(const struct cu_launch_config *, CUfunction, void **, void **);
typedef CUresult (*cooperative_fn)(CUfunction, word, word, word, word, word, struct cooperative_tail);
typedef CUresult (*graph_fn)(word, CUstream);

/* The key by which launches are timed: the kernel and the width of its grid. It is never 0, even if the function is
 * NULL, because 0 marks an unused entry of the cost table. */
#define KERNEL_KEY(function, gx) ((uintptr_t)(function) + 1 + ((uintptr_t)(gx) << 20))

#define SHAPE(f, gx, gy, gz, bx, by, bz, shared)                                               \
    (&(struct kernel_shape){(f),                                                               \
                            {(uint32_t)(gx), (uint32_t)(gy), (uint32_t)(gz)},                   \
                            {(uint32_t)(bx), (uint32_t)(by), (uint32_t)(bz)},                   \
                            (uint32_t)(shared),                                                \
                            0})
static const struct cu_launch_config no_config;

/* The wrapper itself holds only the hot path. Everything else is in a second function with the same arguments, which
 * the compiler reaches by a jump. */
#define LAUNCH(name, type, parameters, arguments, key, effective, shape)                       \
    DECLARE_REAL(name);                                                                        \
    static __attribute__((noinline, cold)) CUresult name##_slow parameters                     \
    {                                                                                          \
        cot_launching = cot_kernels_known ? shape : NULL;                                      \
        struct calls *call = cot_gate_slow(key, effective) == GATE_GO ? cot_thread->calls : NULL; \
        cot_launching = NULL;                                                                  \
        struct pair *timed = cot_profiling && call ? cot_kernels_before(shape, effective) : NULL; \
        CUresult result = ((type)REAL_POINTER(name))arguments;                                         \
        if (timed)                                                                             \
            cot_kernels_after(timed, effective);                                               \
        cot_gate_exit(call);                                                                   \
        return result;                                                                         \
    }                                                                                          \
    EXPORT __attribute__((aligned(64))) CUresult name parameters                               \
    {                                                                                          \
        struct calls *call = cot_gate_try(key, effective);                                     \
        if (UNLIKELY(!call))                                                                   \
            return name##_slow arguments;                                                      \
        CUresult result = ((type)REAL_POINTER(name))arguments;                                         \
        cot_count(&call->finished, 1);                                                         \
        return result;                                                                         \
    }

#define LAUNCH_KERNEL(name, type, tail_type, effective)                                                   \
    LAUNCH(name, type, (CUfunction f, word gx, word gy, word gz, word bx, word by, tail_type tail), \
           (f, gx, gy, gz, bx, by, tail), KERNEL_KEY(f, gx), effective, SHAPE(f, gx, gy, gz, bx, by, tail.bz, tail.shared))
LAUNCH_KERNEL(cuLaunchKernel, launch_fn, struct launch_tail, tail.stream)
LAUNCH_KERNEL(cuLaunchKernel_ptsz, launch_fn, struct launch_tail, PTSZ(tail.stream))
LAUNCH_KERNEL(cuLaunchCooperativeKernel, cooperative_fn, struct cooperative_tail, tail.stream)
LAUNCH_KERNEL(cuLaunchCooperativeKernel_ptsz, cooperative_fn, struct cooperative_tail, PTSZ(tail.stream))

/* If the program passes no configuration, the driver returns an error, so it does not matter which stream the turn
 * gate uses. */
#define EX_STREAM(config) ((config) ? (config)->stream : NULL)
#define EX_KEY(config, f) KERNEL_KEY(f, (config) ? (config)->grid[0] : 0)
#define EX_SHAPE(f, c) \
    SHAPE(f, (c)->grid[0], (c)->grid[1], (c)->grid[2], (c)->block[0], (c)->block[1], (c)->block[2], (c)->shared_bytes)
#define LAUNCH_KERNEL_EX(name, effective)                                                      \
    LAUNCH(name, launch_ex_fn, (const struct cu_launch_config *config, CUfunction f, void **params, void **extra), \
           (config, f, params, extra), EX_KEY(config, f), effective, EX_SHAPE(f, config ? config : &no_config))
LAUNCH_KERNEL_EX(cuLaunchKernelEx, EX_STREAM(config))
LAUNCH_KERNEL_EX(cuLaunchKernelEx_ptsz, PTSZ(EX_STREAM(config)))

/* A launch on several devices in one call. Each device has its own stream, but the call passes only the turn gate of
 * the current GPU. */
EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(word list, unsigned count, unsigned flags)
{
    struct calls *call = cot_gate_enter((uintptr_t)cuLaunchCooperativeKernelMultiDevice, NULL);
    CUresult result =
        REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    cot_gate_exit(call);
    return result;
}

EXPORT CUresult cuLaunch(CUfunction f)
{
    struct calls *call = cot_gate_enter(KERNEL_KEY(f, 0), NULL);
    CUresult result = REAL(cuLaunch)(f);
    cot_gate_exit(call);
    return result;
}

EXPORT CUresult cuLaunchGrid(CUfunction f, int width, int height)
{
    struct calls *call = cot_gate_enter(KERNEL_KEY(f, width), NULL);
    CUresult result = REAL(cuLaunchGrid)(f, width, height);
    cot_gate_exit(call);
    return result;
}

EXPORT CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream)
{
    struct calls *call = cot_gate_enter(KERNEL_KEY(f, width), stream);
    CUresult result =
        REAL(cuLaunchGridAsync)(f, width, height, stream);
    cot_gate_exit(call);
    return result;
}

/* A launch of a graph counts as one launch, whose cost is learned from earlier launches of the same graph. */
#define GRAPH_LAUNCH(name, effective)                                     \
    DECLARE_REAL(name);                                                   \
    EXPORT CUresult name(word graph, CUstream stream)                     \
    {                                                                     \
        CUresult refused = cot_graph_memory_check(graph);                 \
        if (UNLIKELY(refused != CUDA_SUCCESS))                            \
            return refused;                                               \
        struct calls *call = cot_gate_enter(graph + 1, effective);           \
        CUresult result = ((graph_fn)REAL_POINTER(name))(graph, stream);          \
        cot_gate_exit(call);                                               \
        cot_count_graph(call);                                             \
        cot_graph_memory_settle(graph);                                   \
        return result;                                                    \
    }
GRAPH_LAUNCH(cuGraphLaunch, stream)
GRAPH_LAUNCH(cuGraphLaunch_ptsz, PTSZ(stream))
