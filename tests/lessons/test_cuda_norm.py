"""The kernel in CUDA C++: run by a C++ compiler with a thread for each of its threads, and compiled
for Hopper and Blackwell.

Only these tests catch: a rounding of the kernel that is not PyTorch's, a build in a folder that
others may write, and source that NVIDIA's compiler refuses, or reads by fewer than 16 bytes.
"""

import ctypes
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from lessons import cuda_norm, cuda_on_cpu
from lpkit.errors import ConfigError
from lpkit.files import own_cache
from lpkit.kernels import norm
from lpkit.kernels.kernel import difference

EPS = 1e-5


@pytest.fixture(scope="module")
def on_cpu():
    run, why = cuda_on_cpu.for_cpu()
    if run is None:
        if not any(map(shutil.which, cuda_norm.COMPILERS)):
            pytest.skip(why)
        pytest.fail(why)
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("M, N", [(1, 8), (3, 120), (2, 4096)])
def test_it_is_the_definition(on_cpu, dtype, M, N):
    rng = torch.Generator().manual_seed(M * N)
    x, delta = (torch.randn(M, N, generator=rng).to(dtype) for _ in range(2))
    w = torch.randn(N, generator=rng)
    s, y, r = on_cpu(x, delta, w, EPS)
    assert torch.equal(s, x + delta)                # to the bit: one rounding, to nearest-even
    true = norm.rms_norm(s.double(), w, EPS)
    ours, its = ((t.double() - true).abs().max().item() for t in (y, norm.rms_norm(s, w, EPS)))
    assert ours <= 2 * its + 1e-6, f"{ours:.3g} from float64's, the definition {its:.3g}"
    torch.testing.assert_close(r, s.float().square().mean(1).add(EPS).rsqrt(), rtol=1e-6, atol=0)


def test_bf16_is_rounded_as_pytorch_rounds(on_cpu):
    """Ties, carries, overflow to infinity, NaN: w = rms so that y is s, and s shows each
    rounding."""
    x = torch.tensor([[1.0, 1.00390625, 3.3895e38, torch.nan, torch.inf, -0.0, 1e-40,
                       -2.5]]).bfloat16()
    delta = torch.tensor([[0.00390625, 0.00390625, 3.3895e38, 1.0, -1.0, -0.0, 1e-40,
                           0.001]]).bfloat16()
    s, want = on_cpu(x, delta, torch.ones(8), EPS)[0], x + delta
    assert torch.equal(s.isnan(), want.isnan())
    keep = ~want.isnan()
    assert torch.equal(s[keep].view(torch.int16), want[keep].view(torch.int16))


def test_rows_that_it_does_not_hold_are_refused(on_cpu):
    with pytest.raises(ConfigError, match="multiple of 16 bytes"):
        on_cpu(torch.zeros(1, 7), torch.zeros(1, 7), torch.ones(7), EPS)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(cuda_on_cpu, "COMPILERS", ("no-such-compiler",))
    run, why = cuda_on_cpu.for_cpu.__wrapped__()
    assert run is None and why == "there is no C++ compiler (no-such-compiler)"


def test_it_is_built_in_this_user_s_own_folder_or_not_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders, temporary = [], tempfile.TemporaryDirectory
    monkeypatch.setattr(tempfile, "TemporaryDirectory",
                        lambda **how: folders.append(how["dir"]) or temporary(**how))
    if any(map(shutil.which, cuda_norm.COMPILERS)):
        assert cuda_on_cpu.for_cpu.__wrapped__()[0] and folders == [own_cache()]
    monkeypatch.setattr(cuda_norm, "why_not", lambda: "")
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda **how: how["build_directory"])
    folder = Path(cuda_norm._library.__wrapped__())
    assert (folder == own_cache(f"cuda-{torch.__version__}")
            and stat.S_IMODE(folder.stat().st_mode) == 0o700)
    folder.chmod(0o777)
    own_cache().mkdir(exist_ok=True)
    own_cache().chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by others"):
        cuda_norm._library.__wrapped__()
    if any(map(shutil.which, cuda_norm.COMPILERS)):
        run, why = cuda_on_cpu.for_cpu.__wrapped__()
        assert run is None and "may be written by others" in why


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_nvidia_s_compiler_takes_it(target):
    """NVRTC needs no GPU. 16 bytes at a time in PTX: ld.global.v4 and st.global.v4."""
    nvrtc = pytest.importorskip("nvidia.cu13", reason="NVRTC is not installed")
    folder = Path(next(iter(nvrtc.__path__)), "lib")
    # it looks for them by name alone
    [ctypes.CDLL(str(path)) for path in folder.glob("libnvrtc-builtins.so.*")]
    [lib] = [ctypes.CDLL(str(path)) for path in folder.glob("libnvrtc.so.*")]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = (cuda_norm.SOURCE.read_text() + "\ntemplate __global__ void "
                                             "add_rms_norm<bits16>(const bits16*, const bits16*, " \
        "const float*, bits16*, bits16*, float*, int, float);\n")
    assert not lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"norm.cu", 0, None,
                                      None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture=compute_{target[3:]}".encode(),
                                    b"--std=c++17")
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


@pytest.mark.skipif(bool(cuda_norm.why_not()), reason=cuda_norm.why_not())
def test_on_a_gpu_it_computes_what_the_definition_says():
    kernel, device = cuda_norm.ADD_RMS_NORM, torch.device("cuda")
    for arguments in kernel.examples(torch.Generator().manual_seed(0), device):
        try:
            wrong = difference(kernel, cuda_norm.add_rms_norm, arguments)
        except ConfigError:     # rows that it does not hold
            continue
        assert not wrong, wrong
