"""Machines multiply some recipes' operands themselves: which, PyTorch and vendors say.

A run takes the same decision by asking the device (`lpkit.precision.backends.choose`); this is what
is known of machines that are not here: for predictions, and for `lpkit.measure.matrix`.
"""

import functools

from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import ALL, Recipe

TORCH = "https://github.com/pytorch/pytorch/blob/main/test/test_scaled_matmul_cuda.py"
ISSUE = "https://github.com/pytorch/pytorch/issues/192707"
FNUZ = ("MI300's FP8 is the FNUZ variant, with other largest values than E4M3FN",
        "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/fp8_numbers.html")
UNTRIED = ("no run here has seen ROCm multiply these formats", FNUZ[1])

Capability = tuple[int, int] | None     # None: not an NVIDIA GPU
CAPABILITY: dict[str, Capability] = {   # https://developer.nvidia.com/cuda-gpus
    "cpu": None, "v100": (7, 0), "t4": (7, 5), "a100-40": (8, 0), "a100-80": (8, 0),
    "a10g": (8, 6), "a6000": (8, 6), "rtx-3090": (8, 6), "l4": (8, 9), "l40s": (8, 9),
    "rtx-4090": (8, 9), "h100": (9, 0), "h100-pcie": (9, 0), "h200": (9, 0), "gh200": (9, 0),
    "b200": (10, 0), "gb200": (10, 0), "b300": (10, 3), "gb300": (10, 3), "rtx-5090": (12, 0),
    "mi300x": None, "mi325x": None, "mi355x": None,
}

# Which products PyTorch hands to tensor cores, by the blocks of both operands: the least compute
# capability and whether a CPU does it too.
# Sources: pytorch/test/test_scaled_matmul_cuda.py; CUTLASS and cuBLAS 12.9 release notes.

Kind = tuple[tuple[int, int], tuple[int, int]]
_FLOAT8 = {
    ((ALL, ALL), (ALL, ALL)): ((8, 9), True, "one scale a tensor"),
    ((1, ALL), (1, ALL)): ((8, 9), True, "a scale a row"),
    ((1, 128), (128, 128)): ((9, 0), False, "scales in blocks of 128"),
    ((1, 128), (1, 128)): ((9, 0), False, "scales in blocks of 128"),
    ((1, 32), (1, 32)): ((10, 0), False, "E8M0 scales per 32"),
}
_FLOAT4 = {((1, 16), (1, 16)): ((10, 0), False, "E4M3 scales per 16"),
           ((1, 16), (16, 16)): ((10, 0), False, "E4M3 scales per 16")}
_INT8 = {((1, ALL), (1, ALL)): ((7, 5), True, "torch._int_mm")}
HARDWARE: dict[str, dict[Kind, tuple[tuple[int, int], bool, str]]] = {
    "e4m3fn": _FLOAT8, "e5m2": _FLOAT8, "e2m1": _FLOAT4, "int8": _INT8}


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def known_as(machine: Machine) -> str | None:
    """The catalogue row that answers for this machine: its own, or that of a GPU with the same
    compute capability. None: its user described it, and nobody knows more."""
    has = machine.details.get("capability")
    same = (name for name, capability in CAPABILITY.items() if has and capability == tuple(has))
    return machine.name if machine.name in CAPABILITY else next(same, None)


@functools.cache
def multiplied(machine: str, recipe: Recipe) -> tuple[str, str, str]:
    """Status (native, emulated, no), why, source, of a row of CAPABILITY under PyTorch."""
    capability = CAPABILITY[machine]
    for product, (a, b) in recipe.products.items():
        both_wide = (a.format, b.format) == ("e5m2", "e5m2")
        if both_wide or (a.block, b.block) not in HARDWARE.get(a.format, {}):
            return ("no", f"PyTorch has no product of {a.format} {a.block} and {b.format} "
                    f"{b.block}, as {product} needs", TORCH)
        needed, on_cpu, what = HARDWARE[a.format][a.block, b.block]
        if machine == "cpu":
            if not on_cpu:
                return "no", f"{what}: PyTorch has it on GPUs alone", TORCH
        elif capability is None:
            eight = machine != "mi355x" and a.format in ("e4m3fn", "e5m2")
            return "no", *(FNUZ if eight else UNTRIED)
        elif capability < needed:
            return "no", f"{what}: needs compute capability {dotted(needed)}", TORCH
        elif a.block == (1, 128) and capability >= (10, 0):
            return ("no", f"{what}: PyTorch has them on 9.0 alone",
                    "https://github.com/pytorch/pytorch/pull/158037")
        elif a.block == (1, 128) and (a.format, b.format) != ("e4m3fn", "e4m3fn"):
            return "no", f"{what}: PyTorch multiplies them in E4M3 alone", TORCH
        elif a.block == b.block == (1, ALL) and a.format != "int8" and capability == (12, 0):
            return ("no", "with torch 2.10 a scale a row ends in CUBLAS_STATUS_NOT_SUPPORTED on "
                    "12.0", ISSUE)
    if machine == "cpu":
        return "emulated", "PyTorch's CPU kernel takes these formats and converts them", TORCH
    return "native", f"compute capability {dotted(capability)}", TORCH
