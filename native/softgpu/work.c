/* Modules, kernel launches and graphs of the software GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"
#include "visible.h"

#define MODULE_HEAD "cotenant-soft-module"
#define MAX_KERNELS 64

struct soft_module {
    enum soft_kind kind;
    uint32_t count;
    struct soft_function functions[MAX_KERNELS];
};

static _Atomic uint64_t graph_reserved[SOFT_MAX_DEVICES];

/* ---- modules ---- */

static bool parse_kernel(const char *line, struct soft_function *function)
{
    char length[32], work[16] = "";
    unsigned sms = 0;
    if (sscanf(line, "%639s %31s %u %15s", function->name, length, &sms, work) < 2)
        return false;
    function->sms = sms;
    function->work = strcmp(work, "memory") == 0 ? 2 : strcmp(work, "compute") == 0 ? 3 : 1;
    function->kind = SOFT_FUNCTION;
    function->from_parameter = strcmp(length, "param") == 0;
    function->length_ns = strtoull(length, NULL, 10);
    return true;
}

EXPORT CUresult cuModuleLoadData(struct soft_module **out, const void *image)
{
    CHECK_CONTEXT();
    (void)context;
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    const char *text = image;
    if (strncmp(text, MODULE_HEAD "\n", sizeof MODULE_HEAD) != 0)
        return CUDA_ERROR_INVALID_IMAGE; /* the program's image is not a module of the software GPU */
    struct soft_module *module = calloc(1, sizeof *module);
    module->kind = SOFT_MODULE;
    for (const char *line = strchr(text, '\n'); line && line[1] && module->count < MAX_KERNELS; line = strchr(line + 1, '\n'))
        if (parse_kernel(line + 1, &module->functions[module->count]))
            module->count++;
    *out = module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(struct soft_module **out, const void *image, unsigned count, void *options, void *values)
{
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(out, image);
}

EXPORT CUresult cuModuleUnload(struct soft_module *module)
{
    if (!module || module->kind != SOFT_MODULE)
        return CUDA_ERROR_INVALID_HANDLE;
    module->kind = 0; /* the module's record is not freed, because a graph may still use its functions */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *out, struct soft_module *module, const char *name)
{
    if (!module || module->kind != SOFT_MODULE)
        return CUDA_ERROR_INVALID_HANDLE;
    for (uint32_t i = 0; i < module->count; i++)
        if (strcmp(module->functions[i].name, name) == 0) {
            *out = (CUfunction)&module->functions[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction handle)
{
    struct soft_function *function = (struct soft_function *)handle;
    if (!function || function->kind != SOFT_FUNCTION)
        return CUDA_ERROR_INVALID_HANDLE;
    *name = function->name;
    return CUDA_SUCCESS;
}

/* Always returns one block per SM, because the module itself states how many SMs a kernel fills, and the launch's
 * grid has no effect. */
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int threads, size_t shared)
{
    (void)handle, (void)threads, (void)shared;
    *blocks = 1;
    return CUDA_SUCCESS;
}

/* ---- launches ---- */

static CUresult launch(CUfunction handle, struct soft_stream *stream, void **params)
{
    struct soft_function *function = (struct soft_function *)handle;
    if (!soft_ready)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!function || function->kind != SOFT_FUNCTION)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t length = function->length_ns;
    if (function->from_parameter) {
        if (!params || !params[0])
            return CUDA_ERROR_INVALID_VALUE;
        memcpy(&length, params[0], sizeof length);
    }
    struct soft_unit unit = {.length_ns = length, .sms = function->sms, .work = function->work};
    return soft_enqueue(stream, unit, false);
}

#define LAUNCH_KERNEL(name, per_thread)                                                                              \
    EXPORT CUresult name(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                         unsigned shared, CUstream stream, void **params, void **extra)                              \
    {                                                                                                                \
        (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;                       \
        return launch(f, soft_stream_of(stream, per_thread), params);                                                \
    }
LAUNCH_KERNEL(cuLaunchKernel, false)
LAUNCH_KERNEL(cuLaunchKernel_ptsz, true)

#define LAUNCH_COOPERATIVE(name, per_thread)                                                                         \
    EXPORT CUresult name(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                         unsigned shared, CUstream stream, void **params)                                            \
    {                                                                                                                \
        (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;                                    \
        return launch(f, soft_stream_of(stream, per_thread), params);                                                \
    }
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, false)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

EXPORT CUresult cuLaunchKernelEx(const struct cu_launch_config *config, CUfunction f, void **params, void **extra)
{
    (void)extra;
    return config ? launch(f, soft_stream_of(config->stream, false), params) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const struct cu_launch_config *config, CUfunction f, void **params, void **extra)
{
    (void)extra;
    return config ? launch(f, soft_stream_of(config->stream, true), params) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream)
{
    (void)width, (void)height;
    return launch(f, soft_stream_of(stream, false), NULL);
}

EXPORT CUresult cuLaunchHostFunc(CUstream handle, void (*function)(void *), void *data)
{
    struct soft_stream *stream = soft_stream_of(handle, false);
    if (!stream || stream->capture != CU_CAPTURE_NONE)
        return stream ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_HANDLE;
    soft_settle(stream);
    soft_wait(stream->context, stream->tail_ns);
    function(data);
    return CUDA_SUCCESS;
}

/* ---- graphs ---- */

static CUresult append(struct soft_graph *graph, struct soft_node node)
{
    if (graph->count == graph->capacity) {
        uint32_t capacity = graph->capacity ? graph->capacity * 2 : 64;
        struct soft_node *grown = realloc(graph->nodes, capacity * sizeof *grown);
        if (!grown)
            return CUDA_ERROR_OUT_OF_MEMORY;
        graph->nodes = grown;
        graph->capacity = capacity;
    }
    graph->nodes[graph->count++] = node;
    return CUDA_SUCCESS;
}

CUresult soft_add_node(struct soft_stream *stream, struct soft_node node)
{
    pthread_mutex_lock(&soft_lock);
    CUresult result = append(stream->capture_graph, node);
    pthread_mutex_unlock(&soft_lock);
    return result;
}

EXPORT CUresult cuGraphCreate(struct soft_graph **out, unsigned flags)
{
    CHECK_READY();
    (void)flags;
    struct soft_graph *graph = calloc(1, sizeof *graph);
    graph->kind = SOFT_GRAPH;
    *out = graph;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(struct soft_graph *graph)
{
    if (!graph || graph->kind != SOFT_GRAPH)
        return CUDA_ERROR_INVALID_HANDLE;
    free(graph->nodes);
    graph->kind = 0;
    free(graph);
    return CUDA_SUCCESS;
}

/* Returns the numbers from 1 on instead of nodes, since programs only use how many there are. */
EXPORT CUresult cuGraphGetNodes(struct soft_graph *graph, uintptr_t *nodes, size_t *count)
{
    if (!graph || graph->kind != SOFT_GRAPH)
        return CUDA_ERROR_INVALID_HANDLE;
    for (size_t i = 0; nodes && i < *count && i < graph->count; i++)
        nodes[i] = i + 1;
    *count = graph->count;
    return CUDA_SUCCESS;
}

/* CUDA_KERNEL_NODE_PARAMS: function, grid, block, shared memory, parameters. */
struct kernel_node_params {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    void **params;
    void **extra;
};

EXPORT CUresult cuGraphAddKernelNode_v2(uintptr_t *out, struct soft_graph *graph, const uintptr_t *dependencies,
                                        size_t count, const struct kernel_node_params *params)
{
    (void)dependencies, (void)count;
    struct soft_function *function = params ? (struct soft_function *)params->function : NULL;
    if (!graph || graph->kind != SOFT_GRAPH || !function || function->kind != SOFT_FUNCTION)
        return CUDA_ERROR_INVALID_HANDLE;
    struct soft_node node = {.length_ns = function->length_ns};
    if (function->from_parameter && params->params && params->params[0])
        memcpy(&node.length_ns, params->params[0], sizeof node.length_ns);
    CUresult result = append(graph, node);
    *out = graph->count;
    return result;
}

EXPORT CUresult cuGraphInstantiateWithFlags(struct soft_exec **out, struct soft_graph *graph, unsigned long long flags)
{
    (void)flags;
    if (!graph || graph->kind != SOFT_GRAPH)
        return CUDA_ERROR_INVALID_HANDLE;
    struct soft_exec *exec = calloc(1, sizeof *exec);
    exec->kind = SOFT_EXEC;
    exec->kernels = graph->count;
    /* `parts` (the copies and memsets of the graph) is never freed, because launches that wait in the list of a held
     * stream (deferred.c) may still use it */
    struct soft_op *parts = calloc(graph->count + 1, sizeof *parts);
    exec->contents.parts = parts;
    for (uint32_t i = 0; i < graph->count; i++) {
        uint32_t sms = graph->nodes[i].sms ? graph->nodes[i].sms : SOFT_SM_COUNT;
        exec->sms = sms > exec->sms ? sms : exec->sms;
        exec->length_ns += graph->nodes[i].length_ns;
        exec->allocates += graph->nodes[i].allocates;
        if (graph->nodes[i].contents.to || graph->nodes[i].contents.part_count)
            parts[exec->contents.part_count++] = graph->nodes[i].contents;
    }
    *out = exec;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(struct soft_exec *exec)
{
    if (!exec || exec->kind != SOFT_EXEC)
        return CUDA_ERROR_INVALID_HANDLE;
    exec->kind = 0;
    free(exec);
    return CUDA_SUCCESS;
}

static CUresult launch_graph(struct soft_exec *exec, struct soft_stream *stream)
{
    if (!exec || exec->kind != SOFT_EXEC || !stream)
        return CUDA_ERROR_INVALID_HANDLE;
    int device = stream->context->device;
    if (exec->allocates && !exec->reserved) {
        if (!soft_take_memory(device, exec->allocates))
            return CUDA_ERROR_OUT_OF_MEMORY;
        atomic_fetch_add(&graph_reserved[device], exec->allocates);
        exec->reserved = true;
    }
    struct soft_unit unit = {.length_ns = exec->length_ns, .kernels = exec->kernels, .sms = exec->sms, .work = 1};
    return soft_enqueue_filling(stream, unit, exec->contents, false);
}

EXPORT CUresult cuGraphLaunch(struct soft_exec *exec, CUstream stream)
{
    return launch_graph(exec, soft_stream_of(stream, false));
}

EXPORT CUresult cuGraphLaunch_ptsz(struct soft_exec *exec, CUstream stream)
{
    return launch_graph(exec, soft_stream_of(stream, true));
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice ordinal, int attribute, uint64_t *value)
{
    CHECK_READY();
    (void)attribute;
    int device = soft_device_at(ordinal);
    if (device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *value = graph_reserved[device];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice ordinal)
{
    CHECK_READY();
    int device = soft_device_at(ordinal);
    if (device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    soft_give_memory(device, atomic_exchange(&graph_reserved[device], 0));
    return CUDA_SUCCESS;
}
