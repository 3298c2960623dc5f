"""Update rules, and the stepper that applies them. The stepper also manages where state is stored,
its format, and rounding. `AdamW`, `Lion`, `Muon` and others are classes like those of torch.optim
(`lpkit.optim.classes`).
"""


def __getattr__(name: str):
    from lpkit.techniques.optimizers import OPTIMIZERS

    names = {row.replace("-", ""): row for row in OPTIMIZERS}
    if name.lower() not in names or name.islower():       # lpkit.optim.muon is a module
        raise AttributeError(f"module 'lpkit.optim' has no attribute {name!r}")
    from lpkit.optim.classes import optimizer

    return optimizer(names[name.lower()])
