"""Corpora, tokenizers, token files and the order in which tokens are seen.

    files = prepare(DataConfig(), vocab=256)                # text -> token files, once
    policy = RandomWindows(tokens=files.train, batch=16, context=256, seed=0)
    x, y = policy.batch(step)                               # (B, T) int64, from the step alone

Only the policies need torch, so they load on first use.
"""

from lpkit.datasets.sources import find as find_source
from lpkit.datasets.tokenizers import TOKENIZERS, tokenizer_from_dict
from lpkit.datasets.tokens import byte_unigram_entropy, open_tokens, prepare, prepare_into

_POLICIES = ("RandomWindows", "SpreadWindows")
__all__ = ["TOKENIZERS", "byte_unigram_entropy", "find_source", "open_tokens", "prepare",
           "prepare_into", "tokenizer_from_dict", *_POLICIES]


def __getattr__(name: str):
    if name not in _POLICIES:
        raise AttributeError(f"module 'lpkit.datasets' has no attribute {name!r}")
    from lpkit.datasets import policies

    return getattr(policies, name)
