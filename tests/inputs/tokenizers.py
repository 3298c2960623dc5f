"""Tokenizers of the `tokenizers` library as hubs have them: each keeps the text of a corpus, says
where it does not, or is refused.

All are learned here, in milliseconds, on the text below. Tokens are compared with those of the
library itself, which reads the same file with truncation and padding off, and with the text.

Only these cases catch: a tokenizer of another kind that changes or cuts the text of a corpus, and
is taken without a word.
"""

import contextlib
import functools
import io
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from lpkit.config import DataConfig
from lpkit.datasets import prepare
from lpkit.datasets.tokenizers import of_folder
from tests.inputs import RIGHT, outcome, warned

CODE = "def import(folder):\n\treturn [the run of the model] in  the folder  # 100% Sure\n"
PROSE = ("The quick brown Fox jumps over 13 lazy dogs; caf\u00e9s, \u00dcber, \u6f22\u5b57, "
         "\U0001f642 and n\u00e4ive \u20ac5.\n")
LEARNED = [CODE * 8, PROSE * 8, CODE.replace("\n", "\r\n") * 2]
# words without a letter, a mark or a space that any of these tokenizers changes; for a few kinds
# alone
PLAIN = "the quick brown fox jumps over the lazy dogs"
PROTEIN = ("MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVVHSLAKWKRQT"
           "LGQHDFSAGEGLYTHMKALRPDEDRLSPLHSVYVDQWDWERVMGDGERQFSTLKSTVEAIWAGIKATEAAVSEEFGLAPF"
           "LPDQIHFVHSQELLSRYPDLDAKGRERAIAKDLGAVFLVGIGGKLSDGHRHDVRAPDYDDWSTPSELGHAGLNGDILVWN"
           "PVLEDAFELSSMGIRVDADTLKHQLALTGDEDRLELEWHQALLRGEMPQTIGGGIGQSRLTMLLLQLPHIGQVQAGVWPA"
           "AVRESVPSLL")
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
Change = Callable[[dict[str, Any]], Any]


def byte_level(special: tuple[str, ...] = ("<|endoftext|>",), split: str = "", prefix: bool = False,
               normalizer: Any = None,
               vocab: int = 340) -> Tokenizer:
    """GPT-2's kind; with `split`, that of Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"), level]) if split else level
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    (tokenizer.train_from_iterator(LEARNED, trainers.BpeTrainer(vocab_size=vocab,
       special_tokens=list(special), show_progress=False,
                                             initial_alphabet=pre_tokenizers.ByteLevel.alphabet())))
    return tokenizer


def with_template(tokenizer: Tokenizer, bos: str = "<s>", eos: str = "") -> Tokenizer:
    tokens = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}".strip(),
        pair=f"{bos} $A {bos} $B".strip(), special_tokens=tokens)
    return tokenizer


def _spaces(tokenizer: Tokenizer, kind: str) -> Tokenizer:
    """SentencePiece's pipelines, as Llama 2, Mistral and Gemma write them."""
    end = [decoders.Strip(" ", 1, 0)]
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
            normalizers.Replace(" ", "\u2581")])
    elif kind == "none":
        tokenizer.normalizer, end = normalizers.Replace(" ", "\u2581"), []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581",
            prepend_scheme=kind, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), *end])
    return tokenizer


def byte_fallback(kind: str = "prepend") -> Tokenizer:
    """BPE of characters, and bytes for what is none of them."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    learner.train_from_iterator([PROSE, CODE.replace("\n", " ")] * 4,
                                trainers.BpeTrainer(vocab_size=400,
                                                    special_tokens=[*SPECIAL, *BYTES],
                                                    show_progress=False))
    model = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>",
                                     fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return _spaces(with_template(tokenizer), kind)


def unigram(fallback: bool = True, controls: bool = False, normalizer: Any = None) -> Tokenizer:
    """SentencePiece's other model. `controls`: <s> and </s> are pieces that text may spell."""
    letters = sorted({*(CODE + PROSE), *"*0123456789\u2581\r"} - {" "})
    words = [f"\u2581{word}" for word in (CODE + PROSE).split()]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0),
              *((byte, 0.0) for byte in BYTES * fallback),
              *((letter, -8.0) for letter in letters), *((word, -5.0) for word in sorted({*words}))]
    if not controls:
        pieces[1:3] = [("\u2581<s>\u2581", -99.0), ("\u2581</s>\u2581", -99.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581",
        prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"] if controls
                                 else ["<unk>", "<bos>", "<eos>"])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.train_from_iterator(LEARNED, trainers.WordPieceTrainer(vocab_size=300,
        special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False))
    return with_template(tokenizer, "[CLS]", "[SEP]")


def word_level(pre: Any, words: str = PLAIN, decoder: Any = None, split: bool = True) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["[UNK]", "</s>",
        *sorted({*(words.split() if split else words)})])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[UNK]", "</s>"])
    return tokenizer


def old_bpe() -> Tokenizer:
    """GPT-1's and CLIP's kind: a word's last piece is marked, and spaces are not kept."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.train_from_iterator(LEARNED, trainers.BpeTrainer(vocab_size=400,
        special_tokens=["<unk>", "</s>"], end_of_word_suffix="</w>", show_progress=False))
    return tokenizer


def changed(tokenizer: Tokenizer, change: Change) -> dict[str, Any]:
    definition = json.loads(tokenizer.to_str())
    change(definition)
    return definition


def cutting(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.enable_truncation(16)
    return tokenizer


def padding(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.enable_padding(length=64, pad_id=0, pad_token="<|endoftext|>")
    return tokenizer


def by_chance(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.model.dropout = 0.5
    return tokenizer


def with_tokens(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def sparse(definition: dict[str, Any]) -> None:
    """An added token whose number is far above the others, beyond what 16 bits hold."""
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 70_000,
                                       "content": "<|far|>", "special": False})


def texts(extra: str = "") -> list[str]:
    """40 documents, no two of them alike."""
    plain = [CODE, PROSE, CODE.replace("\n", "\r\n")]
    return [f"{plain[i % 3]}{extra}def f{i}(x): return x * {i}\n" for i in range(40)]


def folder(where: Path, definition: Tokenizer | dict | str, **files: Any) -> Path:
    where.mkdir()
    text = (definition.to_str() if isinstance(definition, Tokenizer)
            else definition if isinstance(definition, str) else json.dumps(definition))
    (where / "tokenizer.json").write_text(text, encoding="utf-8")
    for name, content in files.items():
        (where / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return where


def check(definition: Any, files: dict[str, Any], documents: list[str], due: str) -> str:
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        return outcome(due, functools.partial(_check, Path(name), definition, files, documents))


def _check(root: Path, definition: Any, files: dict[str, Any], documents: list[str]) -> str:
    where = folder(root / "tokenizer", definition() if callable(definition) else definition,
                   **files)
    tokenizer, _ = warned(lambda: of_folder(where))
    source = root / "source.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    config = DataConfig(source=str(source), tokenizer=str(where), val_fraction=0.3)
    token_files, warnings = warned(lambda: prepare(config, 1 << 17, root / "cache"))
    reference = Tokenizer.from_str((where / "tokenizer.json").read_text(encoding="utf-8"))
    reference.no_truncation()
    reference.no_padding()
    if hasattr(reference.model, "dropout"):
        reference.model.dropout = None
    reference.add_special_tokens([reference.id_to_token(tokenizer.end)])
    reference.encode_special_tokens = True
    encoded = []
    for ids in (np.asarray(token_files.train).tolist(), np.asarray(token_files.val).tolist()):
        start = 0
        for at in (i for i, token in enumerate(ids) if token == tokenizer.end):
            encoded.append(tuple(ids[start:at]))
            start = at + 1
        assert start == len(ids), "the last document has no end"
    assert len(encoded) == len(documents), f"{len(encoded)} documents of {len(documents)}"
    assert (Counter(tuple(reference.encode(document, add_special_tokens=False).ids)
                    for document in documents) == Counter(encoded))
    decoded = Counter(reference.decode(list(tokens), skip_special_tokens=False)
                      for tokens in encoded)
    lost = sum((Counter(documents) - decoded).values())
    warnings = [warning for warning in warnings if " parts of " in warning]
    assert (token_files.header["altered"] == lost and bool(warnings) == bool(lost)
            and len(warnings) < 2), (lost, warnings)
    # as much text again has as many tokens again
    short, long = (len(tokenizer.encode(documents[0] * n)) for n in (4, 8))
    assert 1.8 < long / short < 2.2, (short, long)
    assert not any(tokenizer.end in tokenizer.encode(document) for document in documents)
    return "".join(warnings)


OTHER_TEXT = "parts of .* decode to another text .* comes back as .*; val_loss is of it"
GIVES = "a text gives the special token "
GPT2 = {"config": {"eos_token_id": 0}}
LLAMA = {"config": {"bos_token_id": 1, "eos_token_id": 2},
         "tokenizer_config": {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}}
BERT = {"config": {"eos_token_id": 2}}
LEVEL = {"config": {"eos_token_id": 1}}

# a name: (the tokenizer, files beside it, texts, "right" or the sentence)
KINDS: dict[str, tuple[Any, dict[str, Any], list[str], str]] = {
    "byte-level, as GPT-2": (byte_level, GPT2, texts(), RIGHT),
    "byte-level, that cuts and pads": (lambda: padding(cutting(byte_level())), GPT2, texts(),
        RIGHT),
    "byte-level, merges by chance": (lambda: by_chance(byte_level()), GPT2, texts(), RIGHT),
    "byte-level, a space before a text": (lambda: byte_level(prefix=True), GPT2, texts(),
        OTHER_TEXT),
    "byte-level, no eos but <|endoftext|>": (byte_level, {}, texts(), RIGHT),
    "byte-level, several ends": (lambda: byte_level(("<a>", "<b>")),
                                 {"config": {"eos_token_id": [1, 0]}}, texts(), RIGHT),
    "byte-level, the end in generation_config.json": (lambda: byte_level(("<a>", "<b>")),
        {"generation_config": {"eos_token_id": [1]}}, texts(), RIGHT),
    "byte-level, the end in tokenizer_config.json": (lambda: byte_level(("<a>", "<b>")),
        {"tokenizer_config": {"eos_token": {"content": "<b>"}}}, texts(), RIGHT),
    "byte-level, text with its end": (byte_level, GPT2, texts("a <|endoftext|> b"), RIGHT),
    "byte-level, its end is no special token": (lambda: changed(byte_level(),
        lambda d: d["added_tokens"][0].update(special=False)), GPT2,
                                                texts("a <|endoftext|> b"), RIGHT),
    "byte-level, a number beyond 16 bits": (lambda: changed(byte_level(), sparse), GPT2,
        texts("<|far|>"), RIGHT),
    "byte-level, a word as added token": (lambda: with_tokens(byte_level(),
        AddedToken("import", special=False)), GPT2, texts(), RIGHT),
    "byte-level, an added token takes spaces": (lambda: with_tokens(byte_level(),
        AddedToken("import", lstrip=True, rstrip=True)), GPT2, texts(), OTHER_TEXT),
    "byte-level, lower case": (lambda: byte_level(normalizer=normalizers.Lowercase()), GPT2,
                               texts(), OTHER_TEXT),
    "byte-level, lower case, text in lower case":
    (lambda: byte_level(normalizer=normalizers.Lowercase()), GPT2,
     [text.lower() for text in texts()], RIGHT),
    "byte-level, spaces cut off": (lambda: byte_level(normalizer=normalizers.Strip()), GPT2,
                                   texts(), OTHER_TEXT),
    "byte-level, NFKC, text that it changes": (lambda: byte_level(normalizer=normalizers.NFKC()),
        GPT2, texts("\ufb01ve \u2460"), OTHER_TEXT),
    "byte-level, no decoder": (lambda: changed(byte_level(), lambda d: d.update(decoder=None)),
                               GPT2, texts(), OTHER_TEXT),
    "Qwen 2: a pattern and NFC": (lambda: byte_level(split=QWEN, normalizer=normalizers.NFC()),
                                  GPT2, texts(), RIGHT),
    "Qwen 2, text in two forms of Unicode": (lambda: byte_level(split=QWEN,
        normalizer=normalizers.NFC()), GPT2, texts("e\u0301 "), OTHER_TEXT),
    "Llama 3: a pattern and a template":
    (lambda: with_template(byte_level(("<s>", "</s>"), LLAMA3)), {"config": {"eos_token_id": [1]}},
     texts(), RIGHT),
    "Llama 2: a space is put before": (byte_fallback, LLAMA, texts(), RIGHT),
    "Llama 2, text with spaces first": (byte_fallback, LLAMA, [f"  {text}" for text in texts()],
        RIGHT),
    "Llama 2, text with U+2581": (byte_fallback, LLAMA, texts("a\u2581b"), OTHER_TEXT),
    "Llama 2, text with its special tokens": (byte_fallback, LLAMA, texts("</s> <s>x<unk>"), RIGHT),
    "Mistral: a space before the first word": (lambda: byte_fallback("first"), LLAMA, texts(),
        RIGHT),
    "Mistral, text with a space first": (lambda: byte_fallback("first"), LLAMA,
        [f" {text}" for text in texts()], OTHER_TEXT),
    "Gemma: no space is put before": (lambda: byte_fallback("none"), LLAMA, texts(), RIGHT),
    "Unigram with bytes": (unigram, {"config": {"eos_token_id": 2}}, texts(), RIGHT),
    "Unigram without bytes, of known letters": (lambda: unigram(False),
        {"config": {"eos_token_id": 2}}, texts(), RIGHT),
    "Unigram without bytes, of other letters": (lambda: unigram(False),
        {"config": {"eos_token_id": 2}}, texts("\u0416"), GIVES + "<unk>"),
    "Unigram, text spells its end": (lambda: unigram(controls=True),
                                     {"config": {"eos_token_id": 2}}, texts("</s>"),
                                     GIVES + "</s>"),
    "Unigram, text spells a byte": (unigram, {"config": {"eos_token_id": 2}}, texts("<0x41>"),
                                    OTHER_TEXT),
    "Unigram, NFKC": (lambda: unigram(normalizer=normalizers.NFKC()),
                      {"config": {"eos_token_id": 2}}, texts("\ufb01ve"), OTHER_TEXT),
    "WordPiece, as BERT": (word_piece, BERT, texts(), GIVES + r"\[UNK\]"),
    "WordPiece, of words that it keeps": (word_piece, BERT,
        ["the quick brown " * (i + 1) + "the" for i in range(40)], RIGHT),
    "WordLevel by words": (lambda: word_level(pre_tokenizers.Whitespace()), LEVEL, texts(),
                           GIVES + r"\[UNK\]"),
    "WordLevel, text spells its end": (lambda: word_level(pre_tokenizers.WhitespaceSplit()), LEVEL,
        ["the </s> fox"] * 40, GIVES + "</s>"),
    "WordLevel without an unknown word": (lambda: changed(word_level(pre_tokenizers.Whitespace()),
        lambda d: d["model"].update(unk_token="<none>")), LEVEL,
                                          texts(), r"is not a tokenizer .*Missing \[UNK\] token "
                                                   r"from the vocabulary"),
    "WordLevel of amino acids": (lambda: word_level(pre_tokenizers.Split("", "isolated"), PROTEIN,
        decoders.Fuse(), False), LEVEL,
                                 [PROTEIN[i:] for i in range(40)], RIGHT),
    "GPT-1: words' ends are marked": (old_bpe, LEVEL, texts(), GIVES + "<unk>"),
    "characters without bytes": (lambda: changed(byte_fallback(),
        lambda d: d["model"].update(byte_fallback=False)), LLAMA, texts(), GIVES + "<unk>"),
    "no end anywhere": (lambda: byte_level(("<a>",)), {}, texts(),
                        "no token of this tokenizer is known to end a document; say eos_token_id "
                        "in config.json"),
    "an end that is no token": (byte_level, {"config": {"eos_token_id": 340}}, texts(),
                                "config.json has eos_token_id=340, which is no token"),
    "a list of ends that is empty": (byte_level, {"config": {"eos_token_id": []}}, texts(),
                                     r"config.json has eos_token_id=\[\], which is no token"),
    "an end that is true": (byte_level, {"generation_config": {"eos_token_id": [True]}}, texts(),
                            r"generation_config.json has eos_token_id=\[True\]"),
    "an end whose name is no token's": (byte_level, {"tokenizer_config": {"eos_token": "<x>"}},
        texts(), "tokenizer_config.json has eos_token='<x>', which is no token"),
    "WordPiece, of words whose capitals it loses": (word_piece, BERT,
        ["The Quick brown " * (i + 1) + "the" for i in range(40)], OTHER_TEXT),
    "an empty vocabulary": (lambda: Tokenizer(models.BPE()), {}, texts(), "no token of this "
        "tokenizer is known to end a document"),
    "no object": ("[1, 2]", GPT2, texts(), "tokenizer.json is not the JSON object"),
    "no JSON": ("{", GPT2, texts(), "tokenizer.json is not the JSON object"),
    "another object": ({"model": {"type": "Char"}}, GPT2, texts(), "is not a tokenizer of the "
        "`tokenizers` library"),
}


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, row in KINDS.items():
        yield name, functools.partial(check, *row)
