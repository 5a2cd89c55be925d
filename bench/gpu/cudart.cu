// A plain runtime-API program, to be linked with the static and with the shared cudart.
#include <cstdio>
__global__ void add_one(float *x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }
int main()
{
    const int n = 1 << 20;
    float *x, first = 0;
    cudaMalloc(&x, n * sizeof(float));
    cudaMemset(x, 0, n * sizeof(float));
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    for (int i = 0; i < 100; i++)
        add_one<<<n / 256, 256, 0, stream>>>(x);
    cudaStreamSynchronize(stream);
    cudaMemcpy(&first, x, sizeof first, cudaMemcpyDeviceToHost);
    printf("{\"ok\": %s, \"error\": %d}\n", first == 100 ? "true" : "false", (int)cudaGetLastError());
    return 0;
}
