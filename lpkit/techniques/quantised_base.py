"""What adapters leave frozen, in few bits (QLoRA). A row of `model.changes`, after theirs. No torch."""

from dataclasses import dataclass
from typing import Any, Literal

from lpkit.techniques.operation import Kind
from lpkit.techniques.row import Settings


@dataclass(frozen=True, kw_only=True)
class QuantisedBaseSettings(Settings):
    """`double`: scales in 8 bits, less their mean, with a float32 for 256 of them."""

    where = "model.changes."

    format: Literal["nf4", "e4m3fn", "int8", "int4"] = "nf4"
    block: Literal[32, 64, 128, 256, 512, 1024] = 64    # numbers that share a scale
    double: bool = True


def _problem(config: Any, recipe: Any) -> str:
    if recipe.products or recipe.loss_scaling:
        return ("multiplies what its codes stand for in bf16 or float32, and precision.recipe="
                f"{recipe.settings.name} casts operands; set precision.recipe=bf16")
    return "" if config.parallel.stage < 2 else (
        f"keeps codes that no rank has rows of, and ZeRO {config.parallel.stage} gathers whole "
        f"matrices from rows; set parallel.zero=1")


QUANTISED_BASE = {"quantised-base": Kind(
    operations="lpkit.predict.quantised_base:in_codes", settings=QuantisedBaseSettings(),
    why="frozen matrices of blocks as codes and scales, made anew for each product",
    source="Dettmers et al. 2023, arXiv:2305.14314", problem=_problem,
    implementation="lpkit.memory.quantised_base:quantise_base")}
