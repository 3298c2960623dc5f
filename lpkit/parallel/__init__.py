"""Training on several processes: who starts, watches and ends them."""

from lpkit.parallel.launch import launch

__all__ = ["launch"]
