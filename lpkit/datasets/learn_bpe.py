"""Learn the merges of a BPE in a separate process. The library handles no signals while it counts
and merges, which takes seconds to minutes; a parent that waits for this process handles them.

    python -P learn_bpe.py SOURCE TARGET VOCAB SPECIAL

SOURCE and TARGET are numbers of open files. The script reads texts as lines of JSON from SOURCE,
and writes the tokenizer as JSON to TARGET. It imports nothing of lpkit. Its keeper ends it when its
parent has ended.
"""

import json
import sys
from collections.abc import Iterable

# Characters. The time of learning grows with the square of a word's length.
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
        # a line without a line break: the parent died while it wrote
        whole = (json.loads(line) for line in lines if line.endswith("\n"))
        learned.write(learn(whole, int(vocab), special))
