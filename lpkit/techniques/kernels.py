"""Kernels: functions of which the kit has several versions, for example in PyTorch and in Triton. A
row's implementation is a `lpkit.kernels.kernel.Kernel`: the definition, the other versions, and the
test that a version computes the same numbers."""

from lpkit.errors import ConfigError, nearest, pick, shown
from lpkit.techniques.row import TechniqueRow

VERSIONS = ("auto", "reference", "pytorch", "compile", "triton")

KERNELS: dict[str, TechniqueRow] = {name: TechniqueRow(
    why=why, source=f"https://{source}", implementation=f"lpkit.{where}")
    for name, where, source, why in (
        ("rms-norm", "kernels.norm:RMS_NORM", "arxiv.org/abs/1910.07467",
         "reads and writes each number once; backward reads x and dy once"),
        ("layer-norm", "kernels.norm:LAYER_NORM", "arxiv.org/abs/1607.06450",
         "as rms-norm, with the mean of each row"),
        ("add-rms-norm", "kernels.norm:ADD_RMS_NORM", "arxiv.org/abs/2410.10989",
         "includes the residual addition, so the sum is not read again"),
        ("add-layer-norm", "kernels.norm:ADD_LAYER_NORM", "arxiv.org/abs/2410.10989",
         "includes the residual addition, so the sum is not read again"),
        ("swiglu", "kernels.swiglu:SWIGLU", "arxiv.org/abs/2002.05202",
         "reads gate and up once and saves only them"),
        ("rotary", "kernels.rotary:ROTARY", "arxiv.org/abs/2104.09864",
         "one rotation of pairs instead of four operations and a concatenation"),
        ("cross-entropy", "kernels.cross_entropy:CROSS_ENTROPY", "arxiv.org/abs/2410.10989",
         "writes the gradient over the logits, so no second tensor of their size exists"),
        ("flash-attention", "kernels.flash_attention:FLASH_ATTENTION", "arxiv.org/abs/2307.08691",
         "every kind of attention without storing scores; skips tiles that no query sees"),
        ("amax", "kernels.amax:KERNEL", "arxiv.org/abs/2209.05433",
         "largest magnitude of a tensor, and number of elements that are not finite"),
        ("cast-tensor", "kernels.fused_cast:TENSOR", "arxiv.org/abs/2209.05433",
         "a tensor to FP8 with one scale, both layouts in one read; with a history it also "
         "computes the next amax"),
        ("cast-rows", "kernels.fused_cast:ROWS", "github.com/pytorch/ao",
         "rows to FP8 or INT8, each with its own scale, in one read"),
        ("cast-blocks", "kernels.fused_cast:BLOCKS", "arxiv.org/abs/2412.19437",
         "blocks of 1 x 128 and 128 x 128 to FP8, both layouts in one read"),
        ("cast-mx", "kernels.fused_cast:MX", "arxiv.org/abs/2310.10537",
         "MX: blocks of 1 x 32 to FP8 with E8M0 scales, both layouts in one read, scales in "
         "Blackwell's tiles"),
        ("cast-nvfp4", "kernels.fused_cast:NVFP4_KERNEL", "arxiv.org/abs/2509.25149",
         "NVFP4: 4-bit values, two in a byte, with two levels of scales, after a random "
         "Hadamard transform if the recipe has it"),
        ("adamw", "optim.one_pass:ADAMW", "arxiv.org/abs/1711.05101",
         "reads and writes weight, gradient and slots once, and rounds 16-bit weights"),
        ("lion", "optim.one_pass:LION", "arxiv.org/abs/2302.06675",
         "as adamw, with one slot"),
    )}

OF_KERNEL = "kernel:"       # in a run's recorded choices, the key of a kernel is "kernel:NAME"
LOSS = "cross-entropy"      # the kernel of a chunked loss


def asked_of(asked: str, kernel: str) -> str:
    """Return the version of `kernel` that `asked` (a value of `system.kernels`) requests: the one
    for this kernel, otherwise the one for all kernels, otherwise "auto".

    >>> asked_of("triton,swiglu:compile", "swiglu"), asked_of("triton,swiglu:compile", "adamw")
    ('compile', 'triton')
    """
    each = by_name(asked)
    return each.get(kernel, each.get("", "auto"))


def by_name(asked: str) -> dict[str, str]:
    """Return the versions that `asked` requests, by kernel. The key "" is the version for all other
    kernels. Raises ConfigError if a kernel has two versions."""
    parts = [part.rpartition(":") for part in asked.split(",")]
    each = {name.strip(): version.strip() for name, _, version in parts}
    if len(each) < len(parts):
        raise ConfigError(f"system.kernels={asked} has more than one version for the same kernel; "
                          f"give one version for all kernels, and one for each kernel that differs")
    return each


def check_asked(key: str, asked: str) -> None:
    """Raise ConfigError if `asked` is not of the form "VERSION,KERNEL:VERSION,...", with known
    kernels and versions. `key`: the setting, for the error."""
    for name, version in by_name(asked).items():
        if name:
            pick(KERNELS, name, f"kernel of {key}")
        if version not in VERSIONS:
            raise ConfigError(f"{key}: there is no version {shown(version)}; "
                              f"{nearest(version, VERSIONS)}")
