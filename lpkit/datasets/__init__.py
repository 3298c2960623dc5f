"""Corpora, tokenizers, token files and the order in which tokens are seen.

    files = prepare(DataConfig(), vocab=256)                # text -> token files, once
    policy = RandomWindows(tokens=files.train, batch=16, context=256, seed=0)
    x, y = policy.batch(step)                               # (B, T) int64, from the step alone

The names below load on first use, because a run with prepared tokens reads no text, and only the
policies need torch.
"""

from pkgutil import resolve_name

_WHERE = {"RandomWindows": "policies", "byte_unigram_entropy": "prepared",
          "open_tokens": "prepared", "prepare": "prepared", "prepare_into": "tokens"}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit.datasets' has no attribute {name!r}")
    return resolve_name(f"lpkit.datasets.{_WHERE[name]}:{name}")
