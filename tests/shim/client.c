/* A small driver-API program for tests: `client RESOLVE COMMAND ARGUMENTS...`.
 *
 * RESOLVE says how it finds entry points: dlsym, v1 (cuGetProcAddress, 11.3), v2 (cuGetProcAddress_v2), ptds (v2 with
 * per-thread default streams).  The library is $CLIENT_LIBRARY, else libcuda.so.1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uintptr_t word;
typedef int (*call)();
static void *library;
static const char *resolve_by;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void must(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "client: %s: %d\n", what, result);
        exit(3);
    }
}

/* Looks an entry point up. `base` is the name for cuGetProcAddress, `version` the CUDA version to ask for, and
 * `exported` the name for dlsym. */
static call get(const char *base, int version, const char *exported)
{
    void *found = NULL;
    int status = 0;
    if (strcmp(resolve_by, "dlsym") == 0)
        found = dlsym(library, exported);
    else if (strcmp(resolve_by, "v1") == 0) {
        int (*ask)(const char *, void **, int, uint64_t) = dlsym(library, "cuGetProcAddress");
        must(ask(base, &found, version, 0), base);
    } else {
        int (*ask)(const char *, void **, int, uint64_t, int *) = dlsym(library, "cuGetProcAddress_v2");
        must(ask(base, &found, version, strcmp(resolve_by, "ptds") == 0 ? 2 : 0, &status), base);
    }
    if (!found) {
        fprintf(stderr, "client: no %s\n", base);
        exit(4);
    }
    return (call)found;
}
#define GET(base, version) get(#base, version, #base)
#define GET2(base, version) get(#base, version, #base "_v2")

static word context, kernel_busy, kernel_timed, module;
static call launch;

static void start(const char *image)
{
    must(GET(cuInit, 2000)(0), "cuInit");
    int device;
    must(GET(cuDeviceGet, 2000)(&device, 0), "cuDeviceGet");
    must(GET(cuDevicePrimaryCtxRetain, 7000)(&context, device), "cuDevicePrimaryCtxRetain");
    must(GET(cuCtxSetCurrent, 4000)(context), "cuCtxSetCurrent");
    must(GET(cuModuleLoadData, 2000)(&module, image), "cuModuleLoadData");
    must(GET(cuModuleGetFunction, 2000)(&kernel_busy, module, "busy"), "cuModuleGetFunction");
    must(GET(cuModuleGetFunction, 2000)(&kernel_timed, module, "timed"), "cuModuleGetFunction");
    launch = GET(cuLaunchKernel, 4000);
}

static int launch_on(word stream)
{
    return launch(kernel_busy, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

static int launch_for(word stream, uint64_t length_ns)
{
    void *params[] = {&length_ns};
    return launch(kernel_timed, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

/* launches COUNT: launches a kernel COUNT times and then waits once for the GPU. */
static void do_launches(int count)
{
    uint64_t began = now_ns();
    for (int i = 0; i < count; i++)
        must(launch_on(0), "launch");
    must(GET(cuCtxSynchronize, 2000)(), "sync");
    printf("launches %d in_ns %llu\n", count, (unsigned long long)(now_ns() - began));
}

/* rate SECONDS EVERY: launches for SECONDS and waits after each EVERY launches (0: never). Prints the number of
 * launches. */
static void do_rate(double seconds, int every)
{
    uint64_t began = now_ns(), until = began + (uint64_t)(seconds * 1e9);
    long count = 0;
    call sync = GET(cuStreamSynchronize, 2000);
    while (now_ns() < until) {
        must(launch_on(0), "launch");
        if (++count && every && count % every == 0)
            must(sync(0), "sync");
    }
    must(sync(0), "sync");
    printf("count %ld seconds %.6f\n", count, (double)(now_ns() - began) / 1e9);
}

/* variants: calls each function of the launch family once. */
static void do_variants(void)
{
    struct {
        unsigned grid[3], block[3], shared;
        word stream;
        void *attributes;
        unsigned count;
    } config = {{1, 1, 1}, {1, 1, 1}, 0, 0, NULL, 0};
    must(launch_on(0), "cuLaunchKernel");
    must(GET(cuLaunchKernelEx, 11060)(&config, kernel_busy, NULL, NULL), "cuLaunchKernelEx");
    must(GET(cuLaunchCooperativeKernel, 9000)(kernel_busy, 1, 1, 1, 1, 1, 1, 0, (word)0, NULL), "cooperative");
    word stream, graph, exec;
    must(GET(cuStreamCreate, 2000)(&stream, 1), "cuStreamCreate");
    must(GET2(cuStreamBeginCapture, 10010)(stream, 0), "begin");
    must(launch_on(stream), "captured launch");
    must(launch_on(stream), "captured launch");
    must(GET(cuStreamEndCapture, 10000)(stream, &graph), "end");
    size_t nodes = 0;
    must(GET(cuGraphGetNodes, 10000)(graph, NULL, &nodes), "nodes");
    must(GET(cuGraphInstantiateWithFlags, 11040)(&exec, graph, (unsigned long long)0), "instantiate");
    must(GET(cuGraphLaunch, 10000)(exec, stream), "cuGraphLaunch");
    must(GET(cuStreamSynchronize, 2000)(stream), "sync");
    must(GET(cuCtxSynchronize, 2000)(), "sync");
    printf("variants nodes %zu\n", nodes);
}

/* capture COUNT WAIT_MS: captures COUNT launches into a graph, with a pause in the middle in which a turn may end, and
 * runs the graph. */
static void do_capture(int count, int wait_ms)
{
    word stream, other, graph, exec;
    must(GET(cuStreamCreate, 2000)(&stream, 0), "create");
    must(GET(cuStreamCreate, 2000)(&other, 1), "create");
    for (int i = 0; i < 200; i++)
        must(launch_on(other), "launch before");
    must(GET2(cuStreamBeginCapture, 10010)(stream, 0), "begin");
    for (int i = 0; i < count; i++) {
        if (i == count / 2)
            usleep((unsigned)wait_ms * 1000);
        must(launch_on(stream), "captured launch");
        if (i % 10 == 0)
            must(launch_on(other), "launch beside");
    }
    must(GET(cuStreamEndCapture, 10000)(stream, &graph), "end");
    size_t nodes = 0;
    must(GET(cuGraphGetNodes, 10000)(graph, NULL, &nodes), "nodes");
    must(GET(cuGraphInstantiateWithFlags, 11040)(&exec, graph, (unsigned long long)0), "instantiate");
    for (int i = 0; i < 20; i++)
        must(GET(cuGraphLaunch, 10000)(exec, stream), "graph");
    must(GET(cuStreamSynchronize, 2000)(stream), "sync");
    printf("capture nodes %zu\n", nodes);
}

/* overshoot LENGTH_US SECONDS: launches kernels of LENGTH_US for SECONDS and never waits for them. */
static void do_flood(int length_us, double seconds)
{
    uint64_t until = now_ns() + (uint64_t)(seconds * 1e9);
    long count = 0;
    while (now_ns() < until) {
        must(launch_for(0, (uint64_t)length_us * 1000), "launch");
        count++;
    }
    printf("count %ld\n", count);
    fflush(stdout);
}

/* phases: launches many short kernels, then long ones, over and over, and never waits for them. */
static void do_phases(double seconds)
{
    uint64_t until = now_ns() + (uint64_t)(seconds * 1e9);
    while (now_ns() < until) {
        for (int i = 0; i < 300; i++)
            must(launch_for(0, 3000), "short");
        for (int i = 0; i < 20; i++)
            must(launch_on(0), "long");
    }
    printf("phases done\n");
}

static void *thread_body(void *argument)
{
    must(GET(cuCtxSetCurrent, 4000)(context), "cuCtxSetCurrent");
    for (long i = 0; i < (long)argument; i++)
        must(launch_on(0), "launch");
    must(GET(cuStreamSynchronize, 2000)((word)0), "sync");
    return NULL;
}

static void do_threads(int threads, long each)
{
    pthread_t ids[64];
    for (int i = 0; i < threads; i++)
        pthread_create(&ids[i], NULL, thread_body, (void *)each);
    for (int i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
    printf("threads done\n");
    fflush(stdout);
    if (getenv("CLIENT_STAYS")) /* stay alive until the last turn has ended and is reported */
        getchar();
}

/* fork: the parent has a CUDA context and forks. The child must not hang, and the parent must still be able to
 * launch. */
static void do_fork(void)
{
    must(launch_on(0), "launch");
    pid_t child = fork();
    if (child == 0) {
        int count = 0;
        GET(cuDeviceGetCount, 2000)(&count);
        _exit(count > 0 ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    for (int i = 0; i < 50; i++)
        must(launch_on(0), "launch after fork");
    must(GET(cuCtxSynchronize, 2000)(), "sync");
    printf("child %d\n", WEXITSTATUS(status));
}

/* bypass REAL: launches through the real driver library REAL, so that the shim does not see the launches. */
static void do_bypass(const char *real, double seconds)
{
    void *(*plain_open)(const char *, int) = dlsym(RTLD_NEXT, "dlopen");
    void *hidden = dlmopen(LM_ID_BASE, real, RTLD_NOW);
    (void)plain_open;
    call hidden_launch = (call)dlsym(hidden, "cuLaunchKernel");
    uint64_t until = now_ns() + (uint64_t)(seconds * 1e9);
    while (now_ns() < until)
        must(hidden_launch(kernel_busy, 1, 1, 1, 1, 1, 1, 0, (word)0, NULL, NULL), "hidden launch");
    printf("bypassed\n");
}

/* many KERNELS COUNT: launches KERNELS different kernels in turn, each with three grid sizes, as a training step
 * does. */
static void do_many(int kernels, int count)
{
    char image[4096] = "cotenant-soft-module\n";
    word many, functions[64];
    for (int i = 0; i < kernels && i < 64; i++)
        snprintf(image + strlen(image), sizeof image - strlen(image), "k%d %d\n", i, 2000 + 100 * i);
    must(GET(cuModuleLoadData, 2000)(&many, image), "module");
    for (int i = 0; i < kernels && i < 64; i++) {
        char name[16];
        snprintf(name, sizeof name, "k%d", i);
        must(GET(cuModuleGetFunction, 2000)(&functions[i], many, name), "function");
    }
    for (int i = 0; i < count; i++)
        must(launch(functions[i % kernels], 1 + i % 3 * 120, 1, 1, 1, 1, 1, 0, (word)0, NULL, NULL), "launch");
    must(GET(cuCtxSynchronize, 2000)(), "sync");
    printf("many done\n");
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    resolve_by = argv[1];
    const char *command = argv[2];
    const char *name = getenv("CLIENT_LIBRARY");
    library = dlopen(name ? name : "libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "client: %s\n", dlerror());
        return 5;
    }
    char image[128];
    snprintf(image, sizeof image, "cotenant-soft-module\nbusy %s\ntimed param\n",
             getenv("CLIENT_KERNEL_NS") ? getenv("CLIENT_KERNEL_NS") : "100000");
    start(image);
    double a = argc > 3 ? atof(argv[3]) : 0, b = argc > 4 ? atof(argv[4]) : 0;
    if (strcmp(command, "launches") == 0)
        do_launches((int)a);
    else if (strcmp(command, "rate") == 0)
        do_rate(a, (int)b);
    else if (strcmp(command, "variants") == 0)
        do_variants();
    else if (strcmp(command, "capture") == 0)
        do_capture((int)a, (int)b);
    else if (strcmp(command, "flood") == 0)
        do_flood((int)a, b);
    else if (strcmp(command, "phases") == 0)
        do_phases(a);
    else if (strcmp(command, "many") == 0)
        do_many((int)a, (int)b);
    else if (strcmp(command, "threads") == 0)
        do_threads((int)a, (long)b);
    else if (strcmp(command, "fork") == 0)
        do_fork();
    else if (strcmp(command, "bypass") == 0)
        do_bypass(argv[3], b);
    else
        return 2;
    return 0;
}
