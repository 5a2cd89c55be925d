/* The cost of the shim per launch, inside one process: blocks of launches through the shim and through the driver itself
 * in turn, so that nothing but the path differs.  Prints medians and the ratio native / tenant with its 95 % interval.
 *
 *     cc -O2 launch_pair.c -o launch_pair -ldl -lm && cotenant run --name pair -- ./launch_pair */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef uintptr_t word;
typedef int (*call)();
#define PAIRS 301
static const char PTX[] = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n";
static const char SOFT[] = "cotenant-soft-module\nnothing 1\n";

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void must(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "launch_pair: %s: %d\n", what, result);
        exit(3);
    }
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static word function, graph_run, stream;
static call synchronize;

static double block(call launch, int graph, int count)
{
    double began = now_ns();
    for (int i = 0; i < count; i++)
        if (graph)
            launch(graph_run, stream);
        else
            launch(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
    must(synchronize(stream), "cuStreamSynchronize");
    return (now_ns() - began) / count;
}

static void measure(const char *name, call shim, call driver, int graph, int count)
{
    double ratio[PAIRS], native[PAIRS], tenant[PAIRS];
    for (int i = -20; i < PAIRS; i++) { /* pairs before number 0 are not counted: they warm up */
        int first = i & 1;
        double a = block(first ? shim : driver, graph, count), b = block(first ? driver : shim, graph, count);
        if (i < 0)
            continue;
        tenant[i] = first ? a : b;
        native[i] = first ? b : a;
        ratio[i] = native[i] / tenant[i];
    }
    qsort(ratio, PAIRS, sizeof *ratio, compare);
    qsort(native, PAIRS, sizeof *native, compare);
    qsort(tenant, PAIRS, sizeof *tenant, compare);
    int half = (int)(0.98 * sqrt(PAIRS)); /* order statistics that enclose the median with 95 % */
    printf("\"%s\": {\"ratio\": %.4f, \"low\": %.4f, \"high\": %.4f, \"native_ns\": %.0f, \"tenant_ns\": %.0f}", name,
           ratio[PAIRS / 2], ratio[PAIRS / 2 - half], ratio[PAIRS / 2 + half], native[PAIRS / 2], tenant[PAIRS / 2]);
}

int main(void)
{
    void *shim = dlopen("libcuda.so.1", RTLD_NOW), *driver = dlmopen(LM_ID_BASE, getenv("COTENANT_DRIVER"), RTLD_NOW);
    if (!shim || !driver)
        return 2;
    word context, module, graph;
    must(((call)dlsym(shim, "cuInit"))(0), "cuInit");
    must(((call)dlsym(shim, "cuDevicePrimaryCtxRetain"))(&context, 0), "cuDevicePrimaryCtxRetain");
    must(((call)dlsym(shim, "cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    if (((call)dlsym(shim, "cuModuleLoadData"))(&module, PTX))
        must(((call)dlsym(shim, "cuModuleLoadData"))(&module, SOFT), "cuModuleLoadData");
    must(((call)dlsym(shim, "cuModuleGetFunction"))(&function, module, "nothing"), "cuModuleGetFunction");
    must(((call)dlsym(shim, "cuStreamCreate"))(&stream, 1), "cuStreamCreate");
    must(((call)dlsym(shim, "cuStreamBeginCapture_v2"))(stream, 0), "begin");
    for (int i = 0; i < 60; i++)
        must(((call)dlsym(shim, "cuLaunchKernel"))(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL), "launch");
    must(((call)dlsym(shim, "cuStreamEndCapture"))(stream, &graph), "end");
    must(((call)dlsym(shim, "cuGraphInstantiateWithFlags"))(&graph_run, graph, 0ull), "instantiate");
    synchronize = (call)dlsym(driver, "cuStreamSynchronize");
    printf("{\"ok\": true, ");
    measure("launch", (call)dlsym(shim, "cuLaunchKernel"), (call)dlsym(driver, "cuLaunchKernel"), 0, 1000);
    printf(", ");
    measure("graph", (call)dlsym(shim, "cuGraphLaunch"), (call)dlsym(driver, "cuGraphLaunch"), 1, 50);
    printf("}\n");
    return 0;
}
