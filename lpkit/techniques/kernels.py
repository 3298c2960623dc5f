"""Kernels: functions that the kit computes in more than one way. A row's implementation is a
`lpkit.kernels.kernel.Kernel`: the definition, the other versions, and what judges them."""

from lpkit.techniques.row import Row

KERNELS: dict[str, Row] = {
    "rms-norm": Row(
        why="reads and writes each number once; backward reads x and dy once",
        source="https://arxiv.org/abs/1910.07467", implementation="lpkit.kernels.norm:RMS_NORM"),
    "layer-norm": Row(
        why="the same, and the mean of a row while the row is held",
        source="https://arxiv.org/abs/1607.06450", implementation="lpkit.kernels.norm:LAYER_NORM"),
    "add-rms-norm": Row(
        why="the residual addition on the way: the sum is not read again",
        source="https://arxiv.org/abs/2410.10989",
        implementation="lpkit.kernels.norm:ADD_RMS_NORM"),
    "add-layer-norm": Row(
        why="the residual addition on the way: the sum is not read again",
        source="https://arxiv.org/abs/2410.10989",
        implementation="lpkit.kernels.norm:ADD_LAYER_NORM"),
    "swiglu": Row(
        why="gate and up are read once, and nothing but them is kept",
        source="https://arxiv.org/abs/2002.05202", implementation="lpkit.kernels.swiglu:SWIGLU"),
    "rotary": Row(
        why="pairs are turned in place of four operations and a concatenation",
        source="https://arxiv.org/abs/2104.09864", implementation="lpkit.kernels.rotary:ROTARY"),
    "cross-entropy": Row(
        why="the gradient is written over the logits, so that nothing else of their size exists",
        source="https://arxiv.org/abs/2410.10989",
        implementation="lpkit.kernels.cross_entropy:CROSS_ENTROPY"),
}
