"""Linears of other libraries: backends that multiply for `precision.recipe`.

    lpkit train cpu-3m precision.recipe=fp8-tensorwise precision.backend=torchao \\
        --import lessons.rows.library_linears

`lpkit doctor` tries them too, with the same import. They are taken by name alone.
"""

from lpkit.techniques.recipes import BACKENDS
from lpkit.techniques.row import Row

TORCH = "lessons.rows.library_linears_torch:"

BACKENDS |= {
    "transformer-engine": Row(
        why="NVIDIA's te.Linear under one te.autocast, when installed",
        implementation=TORCH + "TRANSFORMER_ENGINE",
        source="https://nvidia.github.io/TransformerEngine/support_matrix.html"),
    "torchao": Row(
        why="its Float8Linear and INT8 Linear, when installed", implementation=TORCH + "TORCHAO",
        source="https://docs.pytorch.org/ao/stable/workflows/training.html"),
}
