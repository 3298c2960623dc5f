"""Learn the merges of a byte-pair encoding (BPE) in a separate process.

The `tokenizers` library learns for seconds to minutes, and handles no signals meanwhile. The parent
process, which waits for this process, does handle them.

    python -P learn_bpe.py SOURCE TARGET VOCAB SPECIAL

SOURCE and TARGET are file descriptors. The script reads texts from SOURCE, each as a line of JSON,
and writes the tokenizer as JSON to TARGET. VOCAB is the number of entries to learn, and SPECIAL is
the token that ends a document. The script imports nothing of lpkit. Its keeper (`lpkit.processes`)
ends it if its parent has ended.
"""

import json
import sys
from collections.abc import Iterable

# Longer words are split after this many characters, because the time of learning grows with the
# square of a word's length.
LONGEST_WORD = 512


def learn(texts: Iterable[str], vocab: int, special: str) -> str:
    """Return a byte-level BPE as the library's JSON. It has `vocab` entries, which include the 256
    bytes and the token `special`."""
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
        # A line without a line break is incomplete: the parent ended while it wrote.
        whole = (json.loads(line) for line in lines if line.endswith("\n"))
        learned.write(learn(whole, int(vocab), special))
