"""The kernel in CUDA C++: run by a C++ compiler with a thread for each of its threads, and compiled for Hopper and Blackwell."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lpkit.kernels import cuda_norm, norm

HERE = Path(__file__).parent
EPS = 1e-5
HOST = """
#include "cuda_on_cpu.h"
static float row[12288];
%s
template <typename T>
static void all(const T* x, const T* delta, const float* w, T* s, T* y, float* r, int M, int N, float eps) {
    launch(M, 64, [&] { add_rms_norm<T>(x, delta, w, s, y, r, N, eps); });
}
extern "C" void in_float32(const float* x, const float* d, const float* w, float* s, float* y, float* r, int M, int N, float eps)
{ all(x, d, w, s, y, r, M, N, eps); }
extern "C" void in_bf16(const bits16* x, const bits16* d, const float* w, bits16* s, bits16* y, float* r, int M, int N, float eps)
{ all(x, d, w, s, y, r, M, N, eps); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("cuda")
    kernel = cuda_norm.SOURCE.read_text().replace("extern __shared__ float row[];", "")     # memory of the launch: one array
    (folder / "norm.cpp").write_text(HOST % kernel)
    done = subprocess.run([compiler, "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", f"-I{HERE}",
                           str(folder / "norm.cpp"), "-o", str(folder / "norm.so")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "norm.so"))


@pytest.mark.parametrize("dtype, name", [(torch.float32, "in_float32"), (torch.bfloat16, "in_bf16")])
@pytest.mark.parametrize("M, N", [(1, 8), (3, 120), (4, 512), (2, 4096)])
def test_it_is_the_definition(library, dtype, name, M, N):
    rng = torch.Generator().manual_seed(M * N)
    x, delta = (torch.randn(M, N, generator=rng).to(dtype) for _ in range(2))
    w = torch.randn(N, generator=rng)
    s, y, r = torch.full_like(x, 7), torch.full_like(x, 7), torch.zeros(M)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, delta, w, s, y, r)]
    getattr(library, name)(*pointers, M, N, ctypes.c_float(EPS))
    assert torch.equal(s, x + delta)                # to the bit: one rounding, to nearest-even
    true = norm.rms_norm(s.double(), w, EPS)
    ours, its = ((t.double() - true).abs().max().item() for t in (y, norm.rms_norm(s, w, EPS)))
    assert ours <= 2 * its + 1e-6, f"{ours:.3g} from float64's, the definition {its:.3g}"
    torch.testing.assert_close(r, s.float().square().mean(1).add(EPS).rsqrt(), rtol=1e-6, atol=0)


def test_bf16_is_rounded_as_pytorch_rounds(library):
    """Ties, carries, overflow to infinity, NaN: w = rms so that y is s, and s shows each rounding."""
    x = torch.tensor([1.0, 1.00390625, 3.3895e38, torch.nan, torch.inf, -0.0, 1e-40, -2.5]).bfloat16()
    delta = torch.tensor([0.00390625, 0.00390625, 3.3895e38, 1.0, -1.0, -0.0, 1e-40, 0.001]).bfloat16()
    s, y, r, w = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(1), torch.ones(8)
    library.in_bf16(*(ctypes.c_void_p(t.data_ptr()) for t in (x, delta, w, s, y, r)), 1, 8, ctypes.c_float(EPS))
    want = x + delta
    assert torch.equal(s.isnan(), want.isnan())
    keep = ~want.isnan()
    assert torch.equal(s[keep].view(torch.int16), want[keep].view(torch.int16))


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_nvidia_s_compiler_takes_it(target):
    """NVRTC needs no GPU. 16 bytes at a time in PTX: ld.global.v4 and st.global.v4."""
    nvrtc = pytest.importorskip("nvidia.cu13", reason="NVRTC is not installed")
    folder = Path(next(iter(nvrtc.__path__)), "lib")
    [ctypes.CDLL(str(one)) for one in folder.glob("libnvrtc-builtins.so.*")]      # it looks for them by name alone
    [lib] = [ctypes.CDLL(str(one)) for one in folder.glob("libnvrtc.so.*")]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = cuda_norm.SOURCE.read_text() + "\ntemplate __global__ void add_rms_norm<bits16>(const bits16*, const bits16*, " \
        "const float*, bits16*, bits16*, float*, int, float);\n"
    assert not lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"norm.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture=compute_{target[3:]}".encode(), b"--std=c++17")
    failed = lib.nvrtcCompileProgram(program, 2, options)
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    text = ptx.value.decode()
    assert "ld.global.v4" in text and "st.global.v4" in text
    assert "shfl.sync" in text and "div.full" not in text


def test_where_it_cannot_run_it_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cuda_norm.why_not() == "needs a GPU"
