"""Updates that grow: fewer or shorter sequences first.

    lpkit train cpu-3m --import lessons.rows.sizes sizes=length-ramp
"""

from dataclasses import dataclass

from lpkit.techniques.data import SIZES, Sizes
from lpkit.techniques.row import Settings
from lpkit.values import Count, CountOrZero


@dataclass(frozen=True, kw_only=True)
class Doubling(Settings):
    doublings: CountOrZero = 2      # until an update has all sequences, or all tokens of each
    every: Count = 50               # updates between two doublings

    def left(self, step: int) -> int:
        """Return the number of doublings that are still to come after this update."""
        return max(0, self.doublings - step // self.every)


SIZES["batch-ramp"] = Sizes(
    why="sequences double", source="Smith et al. 2018, arXiv:1711.00489", settings=Doubling(),
    at=lambda step, settings, sequences, context: (sequences >> settings.left(step), context))
SIZES["length-ramp"] = Sizes(
    why="tokens of a sequence double", source="Li et al. 2022, arXiv:2108.06084",
    settings=Doubling(),
    at=lambda step, settings, sequences, context: (sequences, context >> settings.left(step)))
