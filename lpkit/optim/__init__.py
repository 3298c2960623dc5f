"""Optimizers and schedules. An optimizer is a frozen dataclass of hyper-parameters that builds a torch optimizer."""
