/* The one table of constants of the software GPU.  Where a number stands for the behaviour of a real card, the card and
 * the figure are named; docs/benchmarks/ holds the measurements. */
#ifndef COTENANT_SOFTGPU_CONTENTION_H
#define COTENANT_SOFTGPU_CONTENTION_H

/* Two processes that interleave kernels by the driver's time slicing reach 563.1 of 619.7 products/s together (H100 80GB
 * HBM3, bf16 8192^3): each kernel that follows another process's takes 1.10 times as long. */
#define SOFT_SLICED_PERMILLE 1100
/* A process counts as interleaving while its last kernel ended less than this long ago. */
#define SOFT_SLICED_WINDOW_NS 2000000

/* Copies over the link and on the card: 52.9 GB/s pinned host to device, 53.9 back, 1500 GB/s on the card (read and
 * write of a 2 GiB copy in 1.4 ms). */
#define SOFT_TO_DEVICE_BYTES_PER_US 52900
#define SOFT_TO_HOST_BYTES_PER_US 53900
#define SOFT_ON_DEVICE_BYTES_PER_US 1500000
/* With both directions at work each moves 39.3 GB/s. */
#define SOFT_BOTH_WAYS_PERMILLE 740
/* Pageable memory: 15.1 of 52.9 GB/s; the calling thread is busy for as long. */
#define SOFT_PAGEABLE_PERMILLE 285
#define SOFT_PAGEABLE_SMALL_BYTES 65536 /* up to that much the driver keeps for itself */
/* From the head of its stream to its first byte. */
#define SOFT_COPY_START_NS 1000

/* Kernels of several processes at once.  What a kernel of a class asks of the memory bandwidth when it runs alone, and how
 * many accesses it has under way per SM, against a memory-bound one.  Fitted to two tables of one H100 80GB HBM3: beside
 * 2 GiB copies a ResNet-50 on 32 SMs of its own takes 3.2 times as long and the copies lose 3 %; beside 8192^3 products it
 * takes 1.1 times as long. */
#define SOFT_DEMAND_UNKNOWN_PERMILLE 290
#define SOFT_DEMAND_MEMORY_PERMILLE 950
#define SOFT_DEMAND_COMPUTE_PERMILLE 200
#define SOFT_DENSITY_UNKNOWN_PERMILLE 300
#define SOFT_DENSITY_MEMORY_PERMILLE 1000
#define SOFT_DENSITY_COMPUTE_PERMILLE 150
/* A kernel that waits for memory leaves room on the SMs: an LS service gets in beside it (3.0 to 4.4 times as long on an H200 and
 * an H100), which it does not beside products of the same length. */
#define SOFT_FILL_MEMORY_PERMILLE 800
/* With so many of the SMs it is as fast as with all: on 25 % of them such kernels of a training job take 1.34 times as long as on
 * 75 % (H200, median of nine), and beside a memory-bound one on the other 25 % 1.27 to 1.77 times. */
#define SOFT_REACH_MEMORY_PERMILLE 335
/* Without MPS one process at a time, for so long while another one waits. */
#define SOFT_TIME_SLICE_NS 2000000
/* Giving it from one to another: beside the same work LS's median is 0.06 to 0.11 ms more without MPS than with it (H200). */
#define SOFT_SWITCH_NS 85000
/* From the host's call to the GPU's start, and from the GPU's end until a host that polls knows. */
#define SOFT_LAUNCH_NS 5000
#define SOFT_NOTICE_NS 3000

/* What an event with time takes of the GPU between two kernels (H200: 2.6 us between kernels of 26 us, 1.9 between those of 190). */
#define SOFT_EVENT_NS 3000

/* Launches a stream may hold before the next one blocks the host. */
#define SOFT_QUEUE_DEPTH 1024
/* What one context takes on the device. */
#define SOFT_CONTEXT_BYTES (UINT64_C(256) << 20)
#define SOFT_POOL_GRANULE (UINT64_C(32) << 20)
#define SOFT_DEFAULT_MEMORY (UINT64_C(16) << 30)
#define SOFT_SM_COUNT 132

#endif
