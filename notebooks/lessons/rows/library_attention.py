"""Attention by libraries: backends that compute what PyTorch's own and the kit's compute.

    lpkit train cpu-3m system.attention=flex --import lessons.rows.library_attention

With the import, `system.attention=auto` races them on a GPU, and `lpkit doctor` tries them.
"""

from lpkit.techniques.attention import OPERATIONS
from lpkit.techniques.attention_backends import ATTENTION, FLASH_2, HALF, MASKS, Backend, Limits

TORCH = "lessons.rows.library_attention_torch:"

ATTENTION |= {
    "flex": Backend(
        why="FlexAttention, compiled for the mask", operations=OPERATIONS + "sdpa", assumed=False,
        implementation=TORCH + "flex", source="Dong et al. 2024, https://arxiv.org/abs/2412.05496",
        why_not=Limits(rule=("causal", *MASKS, "soft_cap", "sinks"), dtypes=("float32", *HALF),
                       gpu_alone="has no backward on a CPU")),
    "flash-attn": Backend(
        why="the flash-attn package, version 2", operations=OPERATIONS + "sdpa", assumed=False,
        implementation=TORCH + "flash_attn", source=FLASH_2,
        why_not=Limits(rule=("window", "documents", "soft_cap"), widest=256, capability=(8, 0),
                       package="flash-attn")),
}
