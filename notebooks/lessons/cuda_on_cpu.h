// Enough of CUDA for a C++ compiler to run a block of a kernel: a thread for each of its threads, one block after the other.
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static

struct Index { int x; };
static thread_local Index threadIdx;
static Index blockIdx, blockDim;
static std::barrier<>* of_block;
static float exchanged[1024];

static void __syncthreads() { of_block->arrive_and_wait(); }
static float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
// The whole block waits where a warp would: all of its threads come here equally often.
static float __shfl_xor_sync(unsigned, float v, int step) {
    exchanged[threadIdx.x] = v;
    __syncthreads();
    float other = exchanged[threadIdx.x / 32 * 32 + (threadIdx.x % 32 ^ step)];
    __syncthreads();
    return other;
}

template <typename Kernel>
static void launch(int blocks, int threads, Kernel kernel) {
    std::barrier<> barrier(threads);
    of_block = &barrier;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        std::vector<std::thread> team;
        for (int i = 0; i < threads; i++)
            team.emplace_back([&, i] { threadIdx.x = i; kernel(); });
        for (auto& one : team) one.join();
    }
}
