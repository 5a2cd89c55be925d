/* Wrappers of stream-ordered allocation, and of the memory nodes of graphs. The tenant is charged for the memory
 * that the driver keeps reserved, not for what the program requests: an allocation that uses free memory of a pool
 * costs nothing, and the charge decreases when the pool shrinks. */
#include "shim.h"

/* largest number of pools of a process; allocations from further pools are refused, since they could not be charged */
#define POOLS 1024
#define GRANULE (UINT64_C(2) << 20)

struct pool {
    word handle;
    struct gpu *gpu;
    bool elsewhere; /* the memory of the pool is host memory */
    uint64_t charged;
};

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pool pools[POOLS];
static _Atomic uint32_t pool_count;
static _Atomic bool graph_memory;  /* a graph of this process has memory nodes, so graph launches must be checked */
static uint64_t graph_charged[COTENANT_MAX_GPUS];


static uint64_t pool_number(word pool, int attribute)
{
    uint64_t value = 0;
    REAL(cuMemPoolGetAttribute)(pool, attribute, &value);
    return value;
}

/* the caller holds pool_lock, which protects the table of pools */
static struct pool *find_pool(word handle, struct gpu *gpu)
{
    struct pool *unused = NULL;
    for (uint32_t i = 0; i < pool_count; i++) {
        if (pools[i].handle == handle)
            return &pools[i];
        if (!pools[i].handle)
            unused = &pools[i];
    }
    if (!gpu || (!unused && pool_count >= POOLS))
        return NULL;
    if (!unused)
        unused = &pools[pool_count];
    *unused = (struct pool){.handle = handle, .gpu = gpu};
    if (unused == &pools[pool_count])
        pool_count++;
    return unused;
}

/* ---- the GPU of a pool, which need not be the current one ---- */

static bool is_pool_of(word handle, CUdevice device)
{
    word is = 0;
    return (REAL(cuDeviceGetDefaultMemPool)(&is, device) == CUDA_SUCCESS && is == handle) ||
           (REAL(cuDeviceGetMemPool)(&is, device) == CUDA_SUCCESS && is == handle);
}

/* Finds the GPU of a pool's memory. NULL: the memory is not on a GPU; or, if *refused is set, it is on a GPU that
 * this tenant may not use. */
static struct gpu *gpu_of_pool(word handle, struct gpu *current, CUresult *refused)
{
    *refused = CUDA_SUCCESS;
    pthread_mutex_lock(&pool_lock);
    struct pool *pool = find_pool(handle, NULL);
    bool known = pool != NULL;
    struct gpu *gpu = known && !pool->elsewhere ? pool->gpu : NULL;
    pthread_mutex_unlock(&pool_lock);
    if (known)
        return gpu;
    int devices = 1;
    REAL(cuDeviceGetCount)(&devices);
    for (int device = 0; device < devices && devices > 1; device++)
        if (is_pool_of(handle, device)) {
            *refused = cot_gpu_is_denied(device) ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
            return *refused == CUDA_SUCCESS ? cot_gpu_of_device(device, true) : NULL;
        }
    return current;
}

static struct gpu *gpu_of_stream(CUstream stream, struct gpu *current)
{
    if (cot_gpu_count() < 2 || (uintptr_t)stream <= CU_STREAM_PER_THREAD_VALUE)
        return current;
    CUcontext context = NULL;
    CUdevice device = current->device;
    if (REAL(cuStreamGetCtx)(stream, &context) == CUDA_SUCCESS &&
        REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS) {
        REAL(cuCtxGetDevice)(&device);
        REAL(cuCtxPopCurrent_v2)(&context);
    }
    struct gpu *gpu = cot_gpu_of_device(device, true);
    return gpu ? gpu : current;
}

#define POOL_OF_PINNED 1
EXPORT CUresult cuMemPoolCreate(word *out, const struct cu_pool_prop *properties)
{
    bool on_device = properties && properties->location.type == CU_LOCATION_DEVICE;
    if (on_device && cot_gpu_is_denied(properties->location.id))
        return CUDA_ERROR_NOT_PERMITTED;
    CUresult result = REAL(cuMemPoolCreate)(out, properties);
    if (result != CUDA_SUCCESS)
        return result;
    struct gpu *gpu = on_device ? cot_gpu_of_device(properties->location.id, true) : cot_thread_gpu();
    if (!gpu)
        return result;
    pthread_mutex_lock(&pool_lock);
    struct pool *pool = find_pool(*out, gpu);
    if (pool) { /* the driver may use the handle of a destroyed pool again for a new pool */
        pool->gpu = gpu;
        pool->elsewhere = !on_device && properties->type == POOL_OF_PINNED;
    }
    pthread_mutex_unlock(&pool_lock);
    return result;
}

/* Makes the tenant's charge equal to the memory that the driver keeps reserved for the pool. If reserved_before is set,
 * the agent had allowed the pool to grow, and `reservation` is the number that it gave to this permission. */
static void settle(word handle, struct gpu *gpu, uint64_t reservation, bool reserved_before)
{
    pthread_mutex_lock(&pool_lock);
    struct pool *pool = find_pool(handle, gpu);
    uint64_t now = pool ? pool_number(handle, CU_POOL_RESERVED_CURRENT) : 0;
    uint64_t before = pool ? pool->charged : 0;
    if (pool)
        pool->charged = now;
    pthread_mutex_unlock(&pool_lock);
    if (reserved_before)
        cot_memory_commit(gpu, COTENANT_MEMORY_POOL, reservation, now > before ? now - before : 0);
    else if (now > before)
        cot_memory_commit(gpu, COTENANT_MEMORY_POOL, 0, now - before);
    if (now < before)
        cot_memory_release(gpu, COTENANT_MEMORY_POOL, before - now);
}

/* Adjusts the charges after a synchronisation, since the driver may then have shrunk pools to their release
 * thresholds. */
void cot_pools_refresh(void)
{
    for (uint32_t i = 0; i < atomic_load(&pool_count) && atomic_load(&cot_captures) == 0; i++)
        if (pools[i].handle && !pools[i].elsewhere && pools[i].charged != pool_number(pools[i].handle, CU_POOL_RESERVED_CURRENT))
            settle(pools[i].handle, pools[i].gpu, 0, false);
}

static CUresult grow_reserve(word pool, struct gpu *gpu, uint64_t bytes, uint64_t *reservation, bool *reserved)
{
    pthread_mutex_lock(&pool_lock);
    bool watched = find_pool(pool, gpu) != NULL;
    pthread_mutex_unlock(&pool_lock);
    *reserved = false;
    if (!watched)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t used = pool_number(pool, CU_POOL_USED_CURRENT), held = pool_number(pool, CU_POOL_RESERVED_CURRENT);
    *reserved = used + bytes > held;
    if (!*reserved)
        return CUDA_SUCCESS;
    uint64_t growth = (used + bytes - held + GRANULE - 1) & ~(GRANULE - 1);
    return cot_memory_reserve(gpu, COTENANT_MEMORY_POOL, growth, reservation);
}

static bool captures_now(CUstream stream)
{
    int status = CU_CAPTURE_NONE;
    return atomic_load(&cot_captures) > 0 &&
           REAL(cuStreamIsCapturing)(stream, &status) == CUDA_SUCCESS &&
           status != CU_CAPTURE_NONE;
}

#define POOL_ALLOCATION(stream, pool_expression, call)                                  \
    struct gpu *gpu = cot_thread_gpu();                                                 \
    if (!gpu)                                                                           \
        return (call);                                                                  \
    if (captures_now(stream)) {                                                         \
        cot_graph_memory_expected();                                                    \
        return (call);                                                                  \
    }                                                                                   \
    word pool = (pool_expression);                                                      \
    CUresult result = CUDA_SUCCESS;                                                     \
    if (pool && !(gpu = gpu_of_pool(pool, gpu, &result)))                               \
        return result == CUDA_SUCCESS ? (call) : result;                                \
    uint64_t reservation = 0;                                                           \
    bool reserved = false;                                                              \
    result = pool ? grow_reserve(pool, gpu, bytes, &reservation, &reserved) : CUDA_SUCCESS; \
    if (result != CUDA_SUCCESS)                                                         \
        return result;                                                                  \
    result = (call);                                                                    \
    if (pool)                                                                           \
        settle(pool, gpu, reservation, reserved);                                       \
    return result;

static word current_pool(struct gpu *gpu)
{
    word pool = 0;
    REAL(cuDeviceGetMemPool)(&pool, gpu->device);
    return pool;
}

#define ALLOC_ASYNC(name, effective)                                                                              \
    DECLARE_REAL(name);                                                                                           \
    EXPORT CUresult name(CUdeviceptr *out, size_t bytes, CUstream stream)                                         \
    {                                                                                                             \
        POOL_ALLOCATION(effective, current_pool(gpu_of_stream(effective, gpu)),                                                             \
                        ((CUresult(*)(CUdeviceptr *, size_t, CUstream))REAL_POINTER(name))(out, bytes, stream))           \
    }
ALLOC_ASYNC(cuMemAllocAsync, stream)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, PTSZ(stream))

#define ALLOC_FROM_POOL(name, effective)                                                                          \
    DECLARE_REAL(name);                                                                                           \
    EXPORT CUresult name(CUdeviceptr *out, size_t bytes, word from, CUstream stream)                              \
    {                                                                                                             \
        POOL_ALLOCATION(effective, from,                                                                          \
                        ((CUresult(*)(CUdeviceptr *, size_t, word, CUstream))REAL_POINTER(name))(out, bytes, from, stream)) \
    }
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, stream)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, PTSZ(stream))

EXPORT CUresult cuMemPoolTrimTo(word pool, size_t keep)
{
    CUresult result = REAL(cuMemPoolTrimTo)(pool, keep);
    cot_pools_refresh();
    return result;
}

EXPORT CUresult cuMemPoolDestroy(word handle)
{
    CUresult result = REAL(cuMemPoolDestroy)(handle);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&pool_lock);
    struct pool *pool = find_pool(handle, NULL);
    struct pool gone = pool ? *pool : (struct pool){0};
    if (pool)
        *pool = (struct pool){0};
    pthread_mutex_unlock(&pool_lock);
    if (gone.charged)
        cot_memory_release(gone.gpu, COTENANT_MEMORY_POOL, gone.charged);
    return result;
}

/* Called when the last context on a GPU was destroyed and the charge for its memory removed: the pools of that GPU
 * are charged from zero again. */
void cot_pools_forget_gpu(struct gpu *gpu)
{
    pthread_mutex_lock(&pool_lock);
    for (uint32_t i = 0; i < pool_count; i++)
        if (pools[i].gpu == gpu)
            pools[i] = (struct pool){0};
    graph_charged[gpu - cot_gpu_at(0)] = 0;
    pthread_mutex_unlock(&pool_lock);
}

/* ---- graphs ---- */

void cot_graph_memory_expected(void)
{
    atomic_store(&graph_memory, true);
}

static uint64_t graph_reserve(struct gpu *gpu)
{
    uint64_t value = 0;
    REAL(cuDeviceGetGraphMemAttribute)(gpu->device, CU_GRAPH_MEM_RESERVED_CURRENT,
                                                                            &value);
    return value;
}

/* Memory of graphs is allocated during the launch, so it can be counted only afterwards. If a tenant has exceeded
 * its limit in this way, its next launch of a graph is refused. */
CUresult cot_graph_memory_check(word graph)
{
    (void)graph;
    if (!atomic_load(&graph_memory))
        return CUDA_SUCCESS;
    uint64_t limit, used;
    struct gpu *gpu = cot_thread_gpu();
    return gpu && cot_memory_view(gpu, &limit, &used) && used > limit ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static void settle_graphs(struct gpu *gpu)
{
    if (!gpu || !atomic_load(&graph_memory))
        return;
    uint64_t now = graph_reserve(gpu);
    pthread_mutex_lock(&pool_lock);
    uint64_t *charged = &graph_charged[gpu - cot_gpu_at(0)], before = *charged;
    *charged = now;
    pthread_mutex_unlock(&pool_lock);
    if (now > before)
        cot_memory_commit(gpu, COTENANT_MEMORY_GRAPH, 0, now - before);
    else if (now < before)
        cot_memory_release(gpu, COTENANT_MEMORY_GRAPH, before - now);
}

void cot_graph_memory_settle(word graph)
{
    (void)graph;
    if (atomic_load(&graph_memory))
        settle_graphs(cot_thread_gpu());
}

EXPORT CUresult cuGraphAddMemAllocNode(word node, word graph, word dependencies, size_t count, word params)
{
    cot_graph_memory_expected();
    return REAL(cuGraphAddMemAllocNode)(node, graph, dependencies, count,
                                                                                      params);
}

/* In the general function that adds a node, the parameters begin with the type of the node. */
#define NODE_TYPE_MEM_ALLOC 10
static void look_at_node(const int *params)
{
    if (params && *params == NODE_TYPE_MEM_ALLOC)
        cot_graph_memory_expected();
}

EXPORT CUresult cuGraphAddNode(word node, word graph, word dependencies, size_t count, const int *params)
{
    look_at_node(params);
    return REAL(cuGraphAddNode)(node, graph, dependencies, count,
                                                                                     params);
}

#define ADD_NODE(name)                                                                                          \
    DECLARE_REAL(name);                                                                                         \
    EXPORT CUresult name(word node, word graph, word dependencies, word edges, size_t count, const int *params) \
    {                                                                                                           \
        look_at_node(params);                                                                                   \
        return ((CUresult(*)(word, word, word, word, size_t, const int *))REAL_POINTER(name))(node, graph, dependencies, edges, \
                                                                                     count, params);            \
    }
ADD_NODE(cuGraphAddNode_v2)
ADD_NODE(cuGraphAddNode_v3)

#define GRAPH_UPLOAD(name)                                                           \
    DECLARE_REAL(name);                                                              \
    EXPORT CUresult name(word graph, CUstream stream)                                \
    {                                                                                \
        CUresult result = cot_graph_memory_check(graph);                             \
        if (result != CUDA_SUCCESS)                                                  \
            return result;                                                           \
        result = ((CUresult(*)(word, CUstream))REAL_POINTER(name))(graph, stream);           \
        cot_graph_memory_settle(graph);                                              \
        return result;                                                               \
    }
GRAPH_UPLOAD(cuGraphUpload)
GRAPH_UPLOAD(cuGraphUpload_ptsz)

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    CUresult result = REAL(cuDeviceGraphMemTrim)(device);
    settle_graphs(cot_gpu_of_device(device, false));
    return result;
}
