// Host time of one launch of an empty kernel: the median over blocks of 1000 launches, ns.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>
__global__ void nothing() {}
int main()
{
    std::vector<double> blocks;
    for (int i = 0; i < 2000; i++)
        nothing<<<1, 32>>>();
    cudaDeviceSynchronize();
    for (int block = 0; block < 100; block++) {
        auto began = std::chrono::steady_clock::now();
        for (int i = 0; i < 1000; i++)
            nothing<<<1, 32>>>();
        auto ended = std::chrono::steady_clock::now();
        cudaDeviceSynchronize();
        blocks.push_back(std::chrono::duration<double, std::nano>(ended - began).count() / 1000);
    }
    std::sort(blocks.begin(), blocks.end());
    printf("{\"ok\": true, \"launch_ns\": %.1f, \"best_ns\": %.1f}\n", blocks[blocks.size() / 2], blocks[0]);
    return 0;
}
