"""Activations and the optimizer's state in files of the temporary folder (TMPDIR).

    lpkit train cpu-3m --import lessons.rows.disk memory.activation_offload=disk
    lpkit train cpu-3m --import lessons.rows.disk memory.optimizer_state=disk
"""

from lpkit.techniques.memory import ACTIVATION_OFFLOAD, OPTIMIZER_STATE, Offload, OptimizerState

SOURCE = "Rajbhandari et al. 2021, arXiv:2104.07857"

ACTIVATION_OFFLOAD["disk"] = Offload(
    why="a file", source=SOURCE, number_bytes={"cpu": 0.0, "gpu": 0.0},
    implementation="lessons.rows.disk_torch:activations_on_disk")
OPTIMIZER_STATE["disk"] = OptimizerState(
    why="a memory-mapped file", leaves=("cpu", "gpu"), source=SOURCE,
    implementation="lessons.rows.disk_torch:state_on_disk")
