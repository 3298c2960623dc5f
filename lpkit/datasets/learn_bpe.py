"""Learns a BPE's merges in a process of its own: the library hears no signal while it counts and
merges, for seconds to minutes, and whoever waits for a process does.

    python -P learn_bpe.py VOCAB SPECIAL      texts as lines of JSON and `null` on standard input;
                                              the tokenizer as JSON on standard output

It imports nothing of lpkit, and ends when standard input does: its parent is gone then.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator

# Characters: learning takes time with the square of a word's length.
LONGEST_WORD = 512


def texts() -> Iterator[str]:
    for line in sys.stdin:
        if line == "null\n":
            threading.Thread(target=leave_with_parent, daemon=True).start()
            return
        if not line.endswith("\n"):     # the parent ended in the middle of it
            break
        yield json.loads(line)
    os._exit(1)


def leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def learn(vocab: int, special: str) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.FixedLength(length=LONGEST_WORD)])
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[special], show_progress=False,
                                  initial_alphabet=alphabet)
    model.train_from_iterator(texts(), trainer)
    return model.to_str()


if __name__ == "__main__":
    print(learn(int(sys.argv[1]), sys.argv[2]), flush=True)
    os._exit(0)     # the thread that waits for the parent holds standard input
