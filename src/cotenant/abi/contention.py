"""Constants of the software GPU and of the simulator of kernels.

Generated from contention.toml by native/abi/generate.py: change the TOML file, then run the script.
"""

from __future__ import annotations

# factor on the duration of a kernel that follows a kernel of another process under the driver's time slicing: 563.1
# instead of 619.7 matrix products/s (H100 80GB HBM3, bf16 8192^3)
SLICED_PERMILLE = 1100
# DEMAND_*: fraction of the memory bandwidth that a kernel of the work class (unknown, memory or compute) uses if it is
# alone. With these values and DENSITY_*, the model reproduces measurements on an H100 80GB HBM3: a ResNet-50 on 32 SMs
# of its own takes 3.2 times as long beside copies of 2 GiB on the other SMs as without them, and 1.1 times as long
# beside matrix products of size 8192^3. The copies are 3 % slower than without the ResNet-50
DEMAND_UNKNOWN_PERMILLE = 290
DEMAND_MEMORY_PERMILLE = 950
DEMAND_COMPUTE_PERMILLE = 200
# DENSITY_*: memory accesses in flight per SM, relative to those of a memory-bound kernel
DENSITY_UNKNOWN_PERMILLE = 300
DENSITY_MEMORY_PERMILLE = 1000
DENSITY_COMPUTE_PERMILLE = 150
# fraction of the SMs that a memory-bound kernel keeps busy. So a latency-sensitive service can run beside such a
# kernel, although it takes 3.0 to 4.4 times as long as alone (H200 and H100). Beside matrix products of the same
# duration it cannot run, because they fill all SMs
FILL_MEMORY_PERMILLE = 800
# fraction of the SMs on which a memory-bound kernel reaches its full speed; with fewer SMs its speed is proportional to
# their number. Memory-bound kernels of a training job take 1.34 times as long on 25 % of the SMs as on 75 % (H200,
# median of nine ratios), so they reach full speed on 1.34 times 25 %
REACH_MEMORY_PERMILLE = 335
TIME_SLICE_NS = 2000000  # without MPS, one process runs at a time: for this long if another process waits
# time of a switch between processes without MPS. Beside the same best-effort work, the median latency of a
# latency-sensitive service is 0.06 to 0.11 ms longer without MPS than with it (H200)
SWITCH_NS = 85000
LAUNCH_NS = 5000  # time from the host's launch call to the start of the kernel on the GPU
NOTICE_NS = 3000  # time from the end of a kernel on the GPU until a polling host sees it
# GPU time that an event between two kernels costs (H200: 2.6 us between kernels of 26 us, 1.9 us between kernels of 190
# us)
EVENT_NS = 3000
CONTEXT_BYTES = 268435456  # device memory of a context
SM_COUNT = 132
