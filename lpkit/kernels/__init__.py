"""One kernel per file: `reference` in plain PyTorch, the fast one, tested against each other."""
