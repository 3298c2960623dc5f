"""Attention by libraries: backends that compute what PyTorch's own and the kit's compute.

    lpkit train cpu-3m system.attention=flex --import lessons.rows.library_attention

With the import, `system.attention=auto` races them on a GPU, and `lpkit doctor` tries them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lpkit.machine_facts import versions
from lpkit.techniques.attention import OPERATIONS
from lpkit.techniques.attention_backends import (
    ATTENTION,
    FLASH_2,
    HALF,
    MASKS,
    Attending,
    Backend,
    Limits,
)

TORCH = "lessons.rows.library_attention_torch:"


@dataclass(frozen=True, kw_only=True)
class Installed(Limits):
    """The limits of a library on a GPU that has to be installed."""

    package: str

    def _problems(self, asked: Attending) -> Iterator[str]:
        there = asked.device == "gpu" and asked.here
        if there and versions([self.package])[self.package] is None:
            yield f"needs the package {self.package}, which is not installed here"
        yield from super()._problems(asked)


ATTENTION |= {
    "flex": Backend(
        why="FlexAttention, compiled for the mask", operations=OPERATIONS + "sdpa", assumed=False,
        implementation=TORCH + "flex", source="Dong et al. 2024, https://arxiv.org/abs/2412.05496",
        why_not=Limits(rule=("causal", *MASKS, "soft_cap", "sinks"), dtypes=("float32", *HALF),
                       gpu_alone="has no backward on a CPU")),
    "flash-attn": Backend(
        why="the flash-attn package, version 2", operations=OPERATIONS + "sdpa", assumed=False,
        implementation=TORCH + "flash_attn", source=FLASH_2,
        why_not=Installed(rule=("window", "documents", "soft_cap"), widest=256,
                          capability=(8, 0), package="flash-attn")),
}
