/* Opens the real driver at the first call, and finds the entry points of the driver and of the shim.
 *
 * This library replaces libcuda.so.1: it is preloaded with that SONAME, so dlopen("libcuda.so.1") returns it.
 * cuGetProcAddress first calls the driver's own function with the caller's arguments. If the address that it returns
 * is that of an export for which the shim has a wrapper, the shim returns the wrapper instead. So the driver itself
 * interprets versions and flags.
 *
 * A driver may have exports that exports.S does not list. They are not wrapped: dlsym finds them in the driver, and
 * cuGetProcAddress returns the driver's own address. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "paths.h"
#include "shim.h"

/* exports.S defines these tables; each has cot_export_count entries. */
extern HIDDEN void *cot_real_table[];
extern HIDDEN const char *const cot_names[];
extern HIDDEN struct {
    void *exported, *jump; /* the two addresses of an entry point are equal if the shim has no wrapper for it */
} const cot_own_table[];
extern HIDDEN const uint32_t cot_export_count;

#define SUBSTITUTES 2048 /* size of the hash table of wrappers: a power of two, well above the number of wrappers */
static struct {
    void *real;
    void *wrapper;
} substitutes[SUBSTITUTES];

static pthread_once_t open_once = PTHREAD_ONCE_INIT;
static void *driver_handle;
static void *(*next_dlopen)(const char *, int);
static void *(*next_dlsym)(void *, const char *);


void cot_say(const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length < 0)
        return;
    if ((size_t)length > sizeof line - 2)
        length = sizeof line - 2;
    line[length] = '\n';
    char whole[640];
    length = snprintf(whole, sizeof whole, "cotenant: %.*s", length + 1, line);
    if (write(STDERR_FILENO, whole, (size_t)length) < 0)
        return;
}

uint64_t cot_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static CUresult absent(void)
{
    return CUDA_ERROR_NOT_FOUND; /* the function has no entry point in this driver */
}

static CUresult no_driver(void)
{
    return CUDA_ERROR_NO_DEVICE;
}

static uint32_t substitute_index(const void *address)
{
    return (uint32_t)(((uintptr_t)address * UINT64_C(0x9e3779b97f4a7c15)) >> 53) & (SUBSTITUTES - 1);
}

static void add_substitute(void *real, void *wrapper)
{
    uint32_t i = substitute_index(real);
    while (substitutes[i].real && substitutes[i].real != real)
        i = (i + 1) & (SUBSTITUTES - 1);
    if (!substitutes[i].real) {
        substitutes[i].wrapper = wrapper;
        substitutes[i].real = real;
    }
}

static void *substitute_for(void *real)
{
    for (uint32_t i = substitute_index(real); substitutes[i].real; i = (i + 1) & (SUBSTITUTES - 1))
        if (substitutes[i].real == real)
            return substitutes[i].wrapper;
    return real;
}

static void find_next(void)
{
    /* any version of the C library's dlsym serves, and all C libraries have this one */
    if (!next_dlsym)
        next_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!next_dlopen)
        next_dlopen = (void *(*)(const char *, int))next_dlsym(RTLD_NEXT, "dlopen");
}

static void open_driver(void)
{
    find_next();
    char place[COTENANT_PATH_BYTES];
    const char *given = getenv(COTENANT_ENV_DRIVER), *path = cot_first_file(given, place);
    if (!given || given[0] != '/')
        cot_say("%s must be the absolute path of the real CUDA driver; start programs with `cotenant run`",
                COTENANT_ENV_DRIVER);
    else if (!path)
        cot_say("no CUDA driver was found at %s: does this container have a GPU?", given);
    else if (!(driver_handle = next_dlopen(path, RTLD_NOW | RTLD_LOCAL)))
        cot_say("the CUDA driver could not be opened: %s", dlerror());
    if (driver_handle)
        cot_channels_driver((int (*)(int, unsigned long, void *))dlsym(driver_handle, "cotenant_soft_ioctl"));
    for (uint32_t i = 0; i < cot_export_count; i++) {
        void *real = driver_handle ? next_dlsym(driver_handle, cot_names[i]) : NULL;
        void *own = cot_own_table[i].exported;
        if (real && own != cot_own_table[i].jump && real != own)
            add_substitute(real, own);
        if (!real)
            real = driver_handle ? (void *)absent : (void *)no_driver;
        __atomic_store_n(&cot_real_table[i], real, __ATOMIC_RELEASE);
    }
}

int cot_open_driver(void)
{
    pthread_once(&open_once, open_driver);
    return driver_handle ? 0 : -1;
}

/* ---- entry points ---- */

EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags)
{
    cot_open_driver();
    CUresult result =
        REAL(cuGetProcAddress)(symbol, pfn, version, flags);
    if (result == CUDA_SUCCESS && pfn && *pfn)
        *pfn = substitute_for(*pfn);
    return result;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, int *status)
{
    cot_open_driver();
    CUresult result = REAL(cuGetProcAddress_v2)(symbol, pfn, version, flags, status);
    if (result == CUDA_SUCCESS && pfn && *pfn)
        *pfn = substitute_for(*pfn);
    return result;
}

/* Returns whether cuGetProcAddress returns the addresses of the driver's exports. If it does not, the shim cannot
 * replace an address by that of a wrapper, and the program would run without limits. */
HIDDEN bool cot_driver_is_substitutable(void)
{
    static const struct {
        const char *name;
        int version;
        uint64_t flags;
    } probes[] = {
        {"cuLaunchKernel", 4000, 0}, {"cuLaunchKernel", 7000, 2}, {"cuMemAlloc", 3020, 0},
        {"cuGraphLaunch", 10000, 0}, {"cuGetProcAddress", 12000, 0},
    };
    for (size_t i = 0; i < sizeof probes / sizeof probes[0]; i++) {
        void *address = NULL;
        int status = 0;
        CUresult result = CUDA_ERROR_NOT_FOUND;
        if (next_dlsym(driver_handle, "cuGetProcAddress_v2"))
            result = REAL(cuGetProcAddress_v2)(
                probes[i].name, &address, probes[i].version, probes[i].flags, &status);
        else if (next_dlsym(driver_handle, "cuGetProcAddress"))
            result = REAL(cuGetProcAddress)(probes[i].name, &address, probes[i].version, probes[i].flags);
        if (result == CUDA_SUCCESS && address && substitute_for(address) == address)
            return false;
    }
    return true;
}

/* ---- dlopen: other names of the same driver also return the shim ---- */

static bool names_library(const char *file, const char *stem)
{
    const char *base = strrchr(file, '/');
    base = base ? base + 1 : file;
    size_t length = strlen(stem);
    return strncmp(base, stem, length) == 0 && (base[length] == '\0' || base[length] == '.');
}

static const char *path_of(const void *address)
{
    Dl_info info;
    return address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : NULL;
}

static const char *stand_in_for(const char *file)
{
    if (names_library(file, "libcuda.so"))
        return path_of((void *)cuGetProcAddress_v2);
    if (names_library(file, "libnvidia-ml.so"))
        return path_of(next_dlsym(RTLD_DEFAULT, "cotenant_nvml_symbol"));
    return NULL;
}

/* The C library must be called by a tail call (a jump), because it derives its search path from the caller's return
 * address. */
EXPORT __attribute__((optimize("O2", "optimize-sibling-calls"))) void *dlopen(const char *file, int mode)
{
    if (UNLIKELY(!next_dlopen))
        find_next();
    if (file && strstr(file, ".so")) {
        const char *stand_in = stand_in_for(file);
        if (stand_in)
            file = stand_in;
    }
    return next_dlopen(file, mode);
}

/* ---- dlsym: exports that are not in the list come from the driver ---- */

static __attribute__((noinline)) void *symbol_of(void *handle, const char *name)
{
    static void *own;
    void *found = next_dlsym(handle, name);
    if (found)
        return found;
    if (strncmp(name, "nvml", 4) == 0) {
        void *(*of_nvml)(void *, const char *) =
            (void *(*)(void *, const char *))next_dlsym(RTLD_DEFAULT, "cotenant_nvml_symbol");
        return of_nvml ? of_nvml(handle, name) : next_dlsym(handle, name);
    }
    if (strncmp(name, "cu", 2) != 0)
        return NULL;
    if (!own)
        own = next_dlopen(path_of((void *)cuGetProcAddress_v2), RTLD_LAZY | RTLD_NOLOAD);
    return handle == own && cot_open_driver() == 0 ? next_dlsym(driver_handle, name) : next_dlsym(handle, name);
}

/* The C library is called by a tail call (a jump), because the meaning of RTLD_NEXT depends on the caller's return
 * address. */
EXPORT __attribute__((optimize("O2", "optimize-sibling-calls"))) void *dlsym(void *handle, const char *name)
{
    if (UNLIKELY(!next_dlsym))
        find_next();
    if (handle == RTLD_DEFAULT || handle == RTLD_NEXT)
        return next_dlsym(handle, name);
    return symbol_of(handle, name);
}
