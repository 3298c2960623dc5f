"""What the low-precision recipes hold: bytes of the operands that a Linear keeps for its backward
pass.

`ScaledLinear` keeps x and w as they were cast. Hardware holds them in the bits of
their format; the emulation in bf16, with power-of-two and E4M3 scales folded in.
"""

import functools
import math
from dataclasses import dataclass

from lpkit.techniques.recipes import SCALES, Recipe, scale_bytes

FP32, BF16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class Low:
    """`x` and `w` are the blocks that share a scale in the operands that are kept, the contracted
    axis last: 0 spans it."""

    bits: int
    x: tuple[int, int] = (0, 0)
    w: tuple[int, int] = (0, 0)
    scale_bytes: int = FP32
    folds: bool = False         # scales go into the values of the emulation
    history: int = 0            # amaxes remembered for each of three tensors
    keep: tuple[str, ...] = ("head",)   # Linears that stay in 16 bits

    def held_bytes(self, native: bool) -> float:
        """Of one element."""
        return self.bits / 8 if native else BF16

    def scales(self, tokens: float, K: float, N: float, native: bool) -> float:
        """Bytes of the scales of one Linear's kept x (K, tokens) and w (K, N)."""
        if self.folds and not native:
            return 2 * FP32
        size = self.scale_bytes if native else FP32
        return size * sum(math.ceil(K / (block[0] or K)) * math.ceil(across / (block[1] or across))
                          for block, across in ((self.x, tokens), (self.w, N)))

    def work_bytes(self, x: float, g: float, w: float, native: bool, *, dx: float, dw: float,
                   final: float) -> float:
        """Numbers of its input, of its gradient and of its weight. The most at once while a
        Linear's backward runs, nothing of which is freed before its end: its gradient cast, in both
        layouts where one does not serve; `dx` and `dw`, and `final`, dw as the optimizer wants it.
        An emulated product may need more: its operands in float32 where scales stay inside the sum,
        its result where they vary by row."""
        held = self.held_bytes(native)
        square = self.x[0] == self.x[1]
        casts = g * held * (1 if square else 2)
        most = dx + casts + dw + final
        if native:
            return most
        # transposed, or mixed by a transform
        copied = 0 if square else g * (2 * FP32 if self.bits < 8 else BF16)
        most = max(most, dx + casts + copied)
        if self.folds or square:
            return most
        if 0 in self.x:
            return max(most, g * held + (FP32 + BF16) * x, dx + casts + (FP32 + BF16) * w)
        return max(most, g * held + FP32 * max(3 * g, g + 3 * w, g + w + x),
                   dx + casts + FP32 * max(3 * g, g + 3 * x, g + x + w))

    def forward_bytes(self, x: float, y: float, w: float) -> float:
        """While the emulation of a Linear's forward runs, beyond what it keeps: its input and the
        result; where one layout does not serve both products, x and w as the forward casts them, x
        transposed (or mixed, in float32), and what waits for the result."""
        if self.x[0] == self.x[1]:
            return BF16 * (x + y)
        turned = 2 * FP32 if self.bits < 8 else BF16
        return BF16 * (2 * x + y + w) + turned * x + (FP32 + BF16) * y


@functools.cache
def low_of(recipe: Recipe) -> Low | None:
    """None for a recipe that casts no Linear's operands."""
    if recipe.y is None:
        return None
    x = recipe.dw[1] if recipe.dw else recipe.y[0]
    w = recipe.dx[1] if recipe.dx else recipe.y[1]
    return Low(bits=x.bits, x=x.block, w=w.block, scale_bytes=scale_bytes(x),
               folds=SCALES[x.scale].folds, history=recipe.history,
               keep=recipe.high_precision_layers)
