"""Kernels: functions that the kit computes in more than one way. A row's implementation is a
`lpkit.kernels.kernel.Kernel`: the definition, the other versions, and what judges them."""

from lpkit.techniques.row import Row

KERNELS: dict[str, Row] = {
    "rms-norm": Row(
        why="reads and writes each number once, forward; backward reads x and dy once",
        source="https://arxiv.org/abs/1910.07467",
        implementation="lpkit.kernels.rms_norm:KERNEL"),
    "amax": Row(
        why="the largest magnitude of a tensor, and how many of its elements are not finite",
        source="https://arxiv.org/abs/2209.05433",
        implementation="lpkit.kernels.amax:KERNEL"),
    "cast-tensor": Row(
        why="a tensor to FP8 under one scale, as it lies and transposed, by one read; with a "
            "history it finds the next amax on its way",
        source="https://arxiv.org/abs/2209.05433",
        implementation="lpkit.kernels.cast_tensor:KERNEL"),
    "cast-rows": Row(
        why="rows to FP8 or INT8, each under a scale of its own, found by the same read",
        source="https://github.com/pytorch/ao",
        implementation="lpkit.kernels.cast_rows:KERNEL"),
    "cast-blocks": Row(
        why="blocks of 1 x 128 and 128 x 128 to FP8, as they lie and transposed, by one read",
        source="https://arxiv.org/abs/2412.19437",
        implementation="lpkit.kernels.cast_blocks:KERNEL"),
    "cast-mx": Row(
        why="MX: blocks of 1 x 32 to FP8 under E8M0 scales, both ways by one read, scales in the "
            "tiles that Blackwell reads",
        source="https://arxiv.org/abs/2310.10537",
        implementation="lpkit.kernels.cast_blocks:MX_KERNEL"),
    "cast-nvfp4": Row(
        why="NVFP4: 4-bit values two to a byte under two levels of scales, after a random "
            "Hadamard transform where the recipe has it",
        source="https://arxiv.org/abs/2509.25149",
        implementation="lpkit.kernels.cast_nvfp4:KERNEL"),
}
