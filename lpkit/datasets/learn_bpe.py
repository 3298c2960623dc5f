"""Learns a BPE's merges in a process of its own: the library hears no signal while it counts and
merges, for seconds to minutes, and whoever waits for a process does.

    python -P learn_bpe.py SOURCE TARGET VOCAB SPECIAL

SOURCE and TARGET are numbers of open files: for texts as lines of JSON, and for the tokenizer as
JSON. It imports nothing of lpkit, and its keeper ends it when its parent is gone.
"""

import json
import sys
from collections.abc import Iterable

# Characters: learning takes time with the square of a word's length.
LONGEST_WORD = 512


def learn(texts: Iterable[str], vocab: int, special: str) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.FixedLength(length=LONGEST_WORD)])
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[special], show_progress=False,
                                  initial_alphabet=alphabet)
    model.train_from_iterator(texts, trainer)
    return model.to_str()


if __name__ == "__main__":
    source, target, vocab, special = sys.argv[1:]
    with open(int(source), encoding="utf-8") as lines, open(int(target), "w") as learned:
        # of a line without end the parent is gone
        whole = (json.loads(line) for line in lines if line.endswith("\n"))
        learned.write(learn(whole, int(vocab), special))
