// Kernels of the channel probe: which lines of memory share a slice of the L2 cache, and with it a memory channel.
//
// A slice carries out so many reductions per clock.  All SMs add to a few chosen lines at once, far faster than one slice
// can: the time says how many slices those lines lie in.  Reductions are carried out in L2 and never merged on the way.

static __device__ __forceinline__ void add(const unsigned char *address)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(1u) : "memory");
}

// Test n of a launch: `rounds` additions by one lane of every warp, to the lines at offsets a and b in turn.  Lines in one
// slice take twice as long as lines in two.  The first block's clocks go to clocks[n].
extern "C" __global__ void pair(const unsigned char *base, const unsigned long long *tests, unsigned n, unsigned rounds,
                                unsigned long long *clocks)
{
    const unsigned char *a = base + tests[2 * n], *b = base + tests[2 * n + 1];
    unsigned long long begin = clock64();
    if ((threadIdx.x & 31) == 0)
        for (unsigned i = 0; i < rounds; i++) {
            add(a);
            add(b);
        }
    __threadfence();
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        clocks[n] = clock64() - begin;
}

// Blocks of a crowd add to its lines without a pause; meanwhile one lane of each of the first `listeners` blocks takes the time
// of additions to lines[n] that wait for their answer.  Those are slow where the crowd keeps the slice busy.  `ended` counts
// listeners that are through; it is 0 at the start.
extern "C" __global__ void listen(const unsigned char *base, const unsigned long long *crowd, unsigned crowd_count,
                                  const unsigned long long *lines, unsigned count, unsigned listeners, unsigned rounds,
                                  unsigned *clocks, unsigned *ended)
{
    if (blockIdx.x < listeners) {
        if (threadIdx.x)
            return;
        unsigned long long settle = clock64();
        while (clock64() - settle < 200000)
            ;
        for (unsigned n = blockIdx.x; n < count; n += listeners) {
            const unsigned char *line = base + lines[n];
            unsigned value = 0;
            unsigned long long begin = clock64();
            for (unsigned i = 0; i < rounds; i++) // each at an address that depends on the answer before
                asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                             : "=r"(value) : "l"(line + (value >> 31)) : "memory");
            clocks[n] = (unsigned)((clock64() - begin) / rounds) + (value >> 31);
        }
        atomicAdd(ended, 1u);
        return;
    }
    unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, at = warp * 7 % crowd_count;
    unsigned long long begin = clock64();
    if ((threadIdx.x & 31) == 0)
        while (*(volatile unsigned *)ended < listeners && clock64() - begin < 4000000000ull)
            for (unsigned i = 0; i < 64; i++) {
                add(base + crowd[at]);
                at = at + 1 < crowd_count ? at + 1 : 0;
            }
}

// One thread: clocks of a read of each line, which lies in L2: eight reads, each at an address that the one before gave.
// The lines hold zeros.
extern "C" __global__ void latency(const unsigned char *page, unsigned lines, unsigned line_bytes, unsigned *clocks,
                                   unsigned *sm)
{
    unsigned id, sum = 0;
    for (unsigned n = 0; n < lines; n++) {
        const unsigned char *line = page + (unsigned long long)n * line_bytes;
        unsigned least = 0xffffffffu;
        for (unsigned again = 0; again < 3; again++) {
            unsigned value = 0;
            unsigned long long begin = clock64();
            for (unsigned i = 0; i < 9; i++)
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(line + value) : "memory");
            unsigned taken = (unsigned)((clock64() - begin) / 8);
            sum += value;
            least = taken < least ? taken : least;
        }
        clocks[n] = least;
    }
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    *sm = id + sum;
}
