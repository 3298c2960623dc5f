from dataclasses import dataclass

from lpkit.techniques.row import Row, Settings


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(Settings):
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

OPTIMIZERS = {"adamw": Row(settings=AdamWSettings())}
MOMENT_FORMATS = {"float32": Row(), "int8": Row()}
