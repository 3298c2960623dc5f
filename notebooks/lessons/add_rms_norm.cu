// The residual addition and RMSNorm in CUDA C++, beside its twin in norm.py: s = x + delta, y = s / rms(s) * w.
//
// What Triton does by itself is written out here: 16 bytes at a time, sums over a warp by shuffles and over a block
// through shared memory, bf16 as bits. A block takes a row and keeps it in shared memory as float32, so that each
// number is read from memory once and written once. float32 sums; their order depends on the block's size alone.
//
// Compiled by torch.utils.cpp_extension (cuda_norm.py). Without ATen, the kernel alone: NVRTC compiles it in the tests.

using bits16 = unsigned short;

__device__ inline float widen(float v) { return v; }
__device__ inline float widen(bits16 v) { return __uint_as_float((unsigned)v << 16); }

// To nearest-even; a NaN stays one.
__device__ inline void narrow(float v, float& to) { to = v; }
__device__ inline void narrow(float v, bits16& to) {
    unsigned bits = __float_as_uint(v);
    to = v == v ? (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 : 0x7FC0;
}

template <typename T>
struct alignas(16) Pack {
    static constexpr int SIZE = 16 / sizeof(T);
    T v[SIZE];
};

// The sum over all threads of the block, in each of them.
__device__ inline float block_sum(float v) {
    __shared__ float of_warp[32];
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xFFFFFFFF, v, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0f;
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xFFFFFFFF, v, step);
    return v;
}

// One block for each row of N numbers, N a multiple of Pack<T>::SIZE, N floats of shared memory.
template <typename T>
__global__ void add_rms_norm(const T* x, const T* delta, const float* w, T* s, T* y, float* r, int N, float eps) {
    extern __shared__ float row[];
    constexpr int SIZE = Pack<T>::SIZE;
    long long start = (long long)blockIdx.x * N;
    float squares = 0.0f;
    for (int at = threadIdx.x * SIZE; at < N; at += blockDim.x * SIZE) {
        Pack<T> a = *reinterpret_cast<const Pack<T>*>(x + start + at);
        Pack<T> b = *reinterpret_cast<const Pack<T>*>(delta + start + at);
        for (int i = 0; i < SIZE; i++) {
            narrow(widen(a.v[i]) + widen(b.v[i]), a.v[i]);
            float v = widen(a.v[i]);    // as it is stored
            row[at + i] = v;
            squares += v * v;
        }
        *reinterpret_cast<Pack<T>*>(s + start + at) = a;
    }
    float scale = rsqrtf(block_sum(squares) / N + eps);
    if (threadIdx.x == 0) r[blockIdx.x] = scale;
    for (int at = threadIdx.x * SIZE; at < N; at += blockDim.x * SIZE) {
        Pack<T> out;
        for (int i = 0; i < SIZE; i++) narrow(row[at + i] * scale * w[at + i], out.v[i]);
        *reinterpret_cast<Pack<T>*>(y + start + at) = out;
    }
}

#ifdef LPKIT_WITH_ATEN
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

template <typename T>
static void launch(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& w, at::Tensor& s, at::Tensor& y,
                   at::Tensor& r, double eps) {
    const int N = x.size(-1), threads = 256;
    if (r.numel())
        add_rms_norm<T><<<r.numel(), threads, N * sizeof(float), at::cuda::getCurrentCUDAStream()>>>(
            (const T*)x.const_data_ptr(), (const T*)delta.const_data_ptr(), w.const_data_ptr<float>(),
            (T*)s.mutable_data_ptr(), (T*)y.mutable_data_ptr(), r.mutable_data_ptr<float>(), N, eps);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// x and delta (..., N) in float32 or bf16, w (N,) float32; all contiguous. (s, y, 1 / rms).
std::vector<at::Tensor> forward(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& w, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    auto s = at::empty_like(x), y = at::empty_like(x);
    auto r = at::empty(x.sizes().slice(0, x.dim() - 1), w.options());
    if (x.scalar_type() == at::kFloat) launch<float>(x, delta, w, s, y, r, eps);
    else launch<bits16>(x, delta, w, s, y, r, eps);
    return {s, y, r};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("forward", &forward); }
#endif
