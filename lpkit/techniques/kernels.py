"""Kernels: functions that the kit computes in more than one way. A row's implementation is a
`lpkit.kernels.kernel.Kernel`: the definition, the other versions, and what judges them."""

from lpkit.techniques.row import Row

KERNELS: dict[str, Row] = {
    "rms-norm": Row(
        why="reads and writes each number once, forward; backward reads x and dy once",
        source="https://arxiv.org/abs/1910.07467",
        implementation="lpkit.kernels.rms_norm:KERNEL"),
}
