from dataclasses import dataclass

from lpkit.techniques.row import Row, Settings


@dataclass(frozen=True, kw_only=True)
class W(Settings):
    warmup_steps: int = 20
    final_lr_ratio: float = 0.1

SCHEDULES = {"cosine": Row(settings=W()), "constant": Row(settings=W()), "linear": Row(settings=W()), "wsd": Row(settings=W())}
