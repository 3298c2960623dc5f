"""Which machines have hardware instructions that multiply the operands of a recipe under PyTorch.
The facts are from PyTorch's tests and from vendors.

A run asks its own device instead (`lpkit.precision.backends.choose`). This module answers for
machines that are not present, for predictions and for `lpkit.measure.matrix`.
"""

from lpkit.techniques.machines import CATALOGUE, Machine
from lpkit.techniques.recipes import ALL, Recipe

TORCH = "https://github.com/pytorch/pytorch/blob/main/test/test_scaled_matmul_cuda.py"
ISSUE = "https://github.com/pytorch/pytorch/issues/192707"
FNUZ = ("MI300's FP8 is the FNUZ variant, with other largest values than E4M3FN",
        "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/fp8_numbers.html")
UNTRIED = ("no run here has seen PyTorch multiply these formats on it", TORCH)

# The products that PyTorch runs on tensor cores, by the blocks of both operands (`Cast.block`):
# (lowest compute capability, whether a CPU kernel exists, what the scales are in words).
# Sources: pytorch/test/test_scaled_matmul_cuda.py; CUTLASS and cuBLAS 12.9 release notes.

Kind = tuple[tuple[int, int], tuple[int, int]]      # block of the first operand, of the second
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
    """Return a compute capability as text: (9, 0) as "9.0"."""
    return ".".join(map(str, capability))


def capability_of(machine: Machine) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, as measured or from the catalogue. None:
    another device, or not known."""
    known = (machine.details or CATALOGUE.get(machine.name, machine).details).get("capability")
    return known and tuple(known)


def multiplied(machine: Machine, recipe: Recipe) -> tuple[str, str, str]:
    """Return (status, reason, source) for the products of a recipe on a machine, under PyTorch.

    status: "native", hardware instructions multiply the format; "emulated", PyTorch converts the
            operands; "no", PyTorch has no such product on this machine
    A machine that a user has described, and that is not in the catalogue, counts as native.
    """
    capability, on_cpu_here = capability_of(machine), machine.kind == "cpu"
    if not (capability or on_cpu_here or machine.name in CATALOGUE):
        return "native", "", ""
    for product, (a, b) in recipe.products.items():
        if a is None or b is None:
            return "no", f"{product} has one operand in {recipe.compute}", TORCH
        both_wide = (a.format, b.format) == ("e5m2", "e5m2")
        if both_wide or (a.block, b.block) not in HARDWARE.get(a.format, {}):
            return ("no", f"PyTorch has no product of {a.format} {a.block} and {b.format} "
                    f"{b.block}, as {product} needs", TORCH)
        needed, on_cpu, what = HARDWARE[a.format][a.block, b.block]
        if on_cpu_here:
            if not on_cpu:
                return "no", f"{what}: PyTorch has it on GPUs alone", TORCH
        elif capability is None:
            eight = machine.name in ("mi300x", "mi325x") and a.format in ("e4m3fn", "e5m2")
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
    if on_cpu_here:
        return "emulated", "PyTorch's CPU kernel takes these formats and converts them", TORCH
    return "native", f"compute capability {dotted(capability)}", TORCH
