/* Generated from contention.toml by native/abi/generate.py: change the TOML file, then run the script.
 * Constants of the software GPU and of the simulator of kernels.  docs/protocol.md explains it. */
#ifndef COTENANT_ABI_CONTENTION_H
#define COTENANT_ABI_CONTENTION_H

#include <stdbool.h>
#include <stdint.h>

/* factor on the duration of a kernel that follows a kernel of another process under the driver's time slicing: 563.1
 * instead of 619.7 matrix products/s (H100 80GB HBM3, bf16 8192^3) */
#define SOFT_SLICED_PERMILLE 1100
#define SOFT_SLICED_WINDOW_NS 2000000 /* a process counts as active for this long after the end of its last kernel */
#define SOFT_TO_DEVICE_BYTES_PER_US 52900 /* rate of copies from pinned host memory to the device: 52.9 GB/s */
#define SOFT_TO_HOST_BYTES_PER_US 53900 /* rate of copies from the device to pinned host memory: 53.9 GB/s */
#define SOFT_ON_DEVICE_BYTES_PER_US 1500000 /* rate of copies within the device: 2 GiB in 1.4 ms */
/* factor on the rate of copies in each direction while both directions are busy: 39.3 GB/s */
#define SOFT_BOTH_WAYS_PERMILLE 740
/* factor on the rate of copies of pageable memory: 15.1 instead of 52.9 GB/s; the calling thread is busy meanwhile */
#define SOFT_PAGEABLE_PERMILLE 285
/* size of the largest copy of pageable memory to the device for which the call returns at once: the driver has then
 * copied the data to a buffer of its own */
#define SOFT_PAGEABLE_SMALL_BYTES 65536
/* time from the moment at which all earlier work in a copy's stream has ended and the link is free, until the copy's
 * first byte moves */
#define SOFT_COPY_START_NS 1000
/* DEMAND_*: fraction of the memory bandwidth that a kernel of the work class (unknown, memory or compute) uses if it
 * is alone. With these values and DENSITY_*, the model reproduces measurements on an H100 80GB HBM3: a ResNet-50 on
 * 32 SMs of its own takes 3.2 times as long beside copies of 2 GiB on the other SMs as without them, and 1.1 times
 * as long beside matrix products of size 8192^3. The copies are 3 % slower than without the ResNet-50 */
#define SOFT_DEMAND_UNKNOWN_PERMILLE 290
#define SOFT_DEMAND_MEMORY_PERMILLE 950
#define SOFT_DEMAND_COMPUTE_PERMILLE 200
/* DENSITY_*: memory accesses in flight per SM, relative to those of a memory-bound kernel */
#define SOFT_DENSITY_UNKNOWN_PERMILLE 300
#define SOFT_DENSITY_MEMORY_PERMILLE 1000
#define SOFT_DENSITY_COMPUTE_PERMILLE 150
/* fraction of the SMs that a memory-bound kernel keeps busy. So a latency-sensitive service can run beside such a
 * kernel, although it takes 3.0 to 4.4 times as long as alone (H200 and H100). Beside matrix products of the same
 * duration it cannot run, because they fill all SMs */
#define SOFT_FILL_MEMORY_PERMILLE 800
/* fraction of the SMs on which a memory-bound kernel reaches its full speed; with fewer SMs its speed is
 * proportional to their number. Memory-bound kernels of a training job take 1.34 times as long on 25 % of the SMs as
 * on 75 % (H200, median of nine ratios), so they reach full speed on 1.34 times 25 % */
#define SOFT_REACH_MEMORY_PERMILLE 335
#define SOFT_TIME_SLICE_NS 2000000 /* without MPS, one process runs at a time: for this long if another process waits */
/* time of a switch between processes without MPS. Beside the same best-effort work, the median latency of a
 * latency-sensitive service is 0.06 to 0.11 ms longer without MPS than with it (H200) */
#define SOFT_SWITCH_NS 85000
#define SOFT_LAUNCH_NS 5000 /* time from the host's launch call to the start of the kernel on the GPU */
#define SOFT_NOTICE_NS 3000 /* time from the end of a kernel on the GPU until a polling host sees it */
/* GPU time that an event between two kernels costs (H200: 2.6 us between kernels of 26 us, 1.9 us between kernels of
 * 190 us) */
#define SOFT_EVENT_NS 3000
#define SOFT_QUEUE_DEPTH 1024 /* number of launches in a stream at which the next launch blocks the host */
#define SOFT_CONTEXT_BYTES UINT64_C(268435456) /* device memory of a context */
#define SOFT_POOL_GRANULE UINT64_C(33554432)
#define SOFT_DEFAULT_MEMORY UINT64_C(17179869184)
#define SOFT_SM_COUNT 132

#endif
