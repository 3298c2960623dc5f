"""Text becomes the tokens of a folder's tokenizer, part by part, and records of before stay
readable.

Only these tests catch: a space or a document that the join of two parts adds or loses, a marker
that ends no document, a record of an older version that is read otherwise, and a folder whose files
are of the wrong kind, unreadable or partly closed without a sentence.
"""

import copy
import errno
import json
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpkit import records
from lpkit.config import DataConfig
from lpkit.datasets import open_tokens, prepare, prepare_into, sources
from lpkit.datasets.tokenizers import of_folder, tokenizer_from_dict
from lpkit.errors import ConfigError
from tests.inputs import texts, warned

pytest.importorskip("tokenizers")
from tests.inputs import tokenizers


def documents(files) -> list[str]:
    """Return the texts of both splits, each decoded by itself."""
    texts_of_both = []
    for ids in (np.asarray(files.train), np.asarray(files.val)):
        ends = np.flatnonzero(ids == files.tokenizer.end)
        texts_of_both += [files.tokenizer.decode(ids[a:b])
                          for a, b in zip([0, *ends[:-1] + 1], ends)]
    return texts_of_both


# no line begins with a space, which tokenizers like Mistral's lose at the start of a part
LONG = "".join(f"line {i} of  a long text\ndef f(x):{'  ' * (i % 5)}\n" + "\n" * (i % 4)
               for i in range(300))


@pytest.mark.parametrize("make", [tokenizers.byte_level, tokenizers.byte_fallback,
                                  lambda: tokenizers.byte_fallback("first"), tokenizers.unigram,
                                  lambda: tokenizers.byte_fallback("none")],
    ids=["GPT-2", "Llama 2", "Mistral", "Unigram", "Gemma"])
def test_a_text_that_is_read_in_parts_gets_no_spaces_between_them(make, tmp_path, monkeypatch):
    """A tokenizer that puts a space before a text would put a space before each part."""
    monkeypatch.setattr(sources, "PIECE_CHARS", 500)
    monkeypatch.setattr(sources, "BLOCK_CHARS", 500)
    where = tokenizers.folder(tmp_path / "tokenizer", make(),
                              config={"eos_token_id": make().token_to_id("</s>") or 0})
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i}{LONG}")
    (tmp_path / "one.txt").write_text(LONG)
    for source, due in (("texts", [f"{i}{LONG}" for i in range(12)]), ("one.txt", None)):
        files = prepare(DataConfig(source=str(tmp_path / source), tokenizer=str(where),
                                   val_fraction=0.3), 1 << 17, tmp_path / "cache")
        parts = documents(files)
        assert files.header["altered"] == 0
        if due:
            assert Counter(parts) == Counter(due)
        else:       # successive blocks of one file are in different splits
            assert (all(part in LONG for part in parts) and sum(map(len, parts)) == len(LONG)
                    and 2 < len(parts) < 20)


def test_a_part_that_cannot_be_joined_is_counted(tmp_path):
    """If a line break and the next characters are one token, a space is added between two parts,
    and the header counts the part."""
    library = tokenizers.changed(tokenizers.unigram(),
                              lambda values: values["model"]["vocab"].append(["\n\n", -1.0]))
    tokenizer = of_folder(tokenizers.folder(tmp_path / "tokenizer", library,
        config={"eos_token_id": 1}))
    ids, differs = tokenizer.part("\nthe", False, continued=True)
    assert "comes back as" in differs and tokenizer.decode(ids) == "\nthe"
    assert tokenizer.part("the", False, continued=True)[1] == ""


@pytest.mark.parametrize("make, end", [(tokenizers.byte_level, "<|endoftext|>"),
    (lambda: tokenizers.byte_fallback("none"), "</s>")], ids=["GPT-2", "Gemma"])
def test_special_tokens_in_text_where_they_are_asked_for(make, end, tmp_path):
    """Markers in the text separate documents: there are as many documents as markers, each with one
    end token."""
    where = tokenizers.folder(tmp_path / "tokenizer", make(),
                              config={"eos_token_id": make().token_to_id(end)})
    (tmp_path / "texts").mkdir()
    stories = [f"story {i} of {j}\n" for i in range(20) for j in range(3)]
    for i in range(20):
        last = end if i % 2 else ""
        (tmp_path / "texts" / f"{i}.txt").write_text(end.join(stories[3 * i:3 * i + 3]) + last)
    data = DataConfig(source=str(tmp_path / "texts"), tokenizer=str(where), val_fraction=0.3)
    plain = prepare(data, 1 << 17, tmp_path / "cache")
    assert len(documents(plain)) == 20 and sum(text.count(end) for text in documents(plain)) == 50
    data = DataConfig(source=data.source, tokenizer=data.tokenizer, val_fraction=0.3,
                      special_tokens=True)
    files = prepare(data, 1 << 17, tmp_path / "cache")
    assert Counter(documents(files)) == Counter(stories) and files.folder != plain.folder
    assert sum(files.header["splits"][split]["documents"] for split in ("train", "val")) == 60
    with pytest.raises(ConfigError, match="bytes have no special tokens; leave special_tokens out"):
        prepare(DataConfig(source=data.source, special_tokens=True), 256, tmp_path / "cache")
    with pytest.raises(ConfigError,
                      match=r"prepared with special_tokens True, but data.special_tokens is False"):
        prepare(DataConfig(source=str(files.folder), tokenizer=str(where), val_fraction=0.3),
                1 << 17, tmp_path / "cache")


def test_records_of_before_are_read_and_stay_what_they_were():
    """run.json has the digest of records that older versions wrote for a learned BPE and for an
    imported folder, without the field `files`."""
    model = json.loads(tokenizers.byte_level().to_str())
    cut = model | {"truncation": {"direction": "Right", "max_length": 4,
                                  "strategy": "LongestFirst", "stride": 0}}
    for record in ({"name": "bpe", "model": model}, {"name": "bpe", "model": model, "end": 7},
                   {"name": "bpe", "model": cut, "end": 0},
                   {"name": "bpe", "model": json.loads(tokenizers.unigram().to_str()), "end": 2},
                   {"name": "bytes"}):
        tokenizer = tokenizer_from_dict(json.loads(json.dumps(
            {**record, "sha256": "0", "run": "0"})))
        assert (tokenizer.to_dict() == record and tokenizer.end == record.get("end", 0)
                and tokenizer.ends == frozenset())
        assert len(tokenizer.encode("the quick brown fox")) > 4


def test_tokens_that_were_cut_before_are_made_again(tmp_path):
    """An older version prepared this corpus, and its tokenizer.json truncated the texts: the header
    has no field `altered`."""
    texts.files(".txt", where="source/")(tmp_path)
    where = tokenizers.folder(tmp_path / "tokenizer", tokenizers.cutting(tokenizers.byte_level()),
                              config={"eos_token_id": 0})
    data = DataConfig(source=str(tmp_path / "source"), tokenizer=str(where), val_fraction=0.5)
    files = prepare_into(tmp_path / "out", data, 340, tmp_path / "cache")
    cached = prepare(data, 340, tmp_path / "cache")
    for path in (files.folder / "header.json", cached.folder / "header.json"):
        records.write(path, {key: value for key, value in records.read(path).items()
                             if key != "altered"})
    with pytest.raises(ConfigError, match="its tokenizer cut texts, or padded them; make one with"):
        open_tokens(files.folder)
    again, warnings = warned(lambda: prepare(data, 340, tmp_path / "cache"))
    assert Counter(documents(again)) == Counter(texts.DOCUMENTS) and "made again" in warnings[0]


WRONG = st.sampled_from([None, [], ["a"], [1], "a", "", 3, -1, 1.5, True, {}, {"content": 3},
                         {"a": 1}, [[]], 1 << 70, float("nan")])
KEYS = ([("config", key) for key in ("eos_token_id", "bos_token_id", "pad_token_id")]
        + [("generation_config", "eos_token_id")] + [
    (name, key) for name in ("tokenizer_config", "special_tokens_map")
    for key in ("eos_token", "bos_token", "auto_map", "chat_template", "add_bos_token")])
BASE = json.loads(tokenizers.byte_fallback().to_str())


@given(st.lists(st.tuples(st.sampled_from(KEYS), WRONG), max_size=3),
       st.lists(st.tuples(st.sampled_from([*BASE]), WRONG), max_size=1))
@settings(deadline=None, max_examples=60)
def test_the_wrong_kind_in_any_key_is_a_sentence(tmp_path_factory, keys, parts):
    files = {"config": {"eos_token_id": 2}, "generation_config": {},
             "tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {}}
    for (name, key), value in keys:
        files[name] = files[name] | {key: value}
    library = copy.deepcopy(BASE) | dict(parts)
    where = tokenizers.folder(tmp_path_factory.mktemp("wrong") / "tokenizer", library, **files)
    try:
        tokenizer, _ = warned(lambda: of_folder(where))
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert (tokenizer.encode("the quick") and tokenizer.prompt("the quick")
                and all(type(token) is int for token in tokenizer.ends))


@pytest.mark.parametrize("name, data", [
    *((name, b"[]") for name in ("config.json", "generation_config.json", "tokenizer_config.json",
                                 "special_tokens_map.json")),
    *(("tokenizer.json", data) for data in (b"null", b'"a"', b"{", b"", b"\xff\xfe",
                                            b"[" * 99_999))], ids=lambda data: repr(data[:9]))
def test_a_file_that_is_no_object_is_a_sentence(name, data, tmp_path):
    where = tokenizers.folder(tmp_path / "tokenizer", BASE, config={"eos_token_id": 2})
    (where / name).write_bytes(data)
    with pytest.raises(ConfigError,
                 match=f"{name} (is not the JSON object that it should be|is not UTF-8)") as caught:
        of_folder(where)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_read_whole_is_named_wherever_its_tokens_go(tmp_path):
    """With --out, the name of a cache folder is not computed, which would read the folder."""
    texts.link_to_nothing(texts.put(tmp_path, "source/a.txt", "abc").parent)
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.txt: No such file"):
        prepare_into(tmp_path / "out", DataConfig(source=str(tmp_path / "source")), 256,
                     tmp_path / "cache")
    assert not (tmp_path / "out").exists()


def test_a_folder_below_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """A run must not train on the readable part of a folder without a message."""
    texts.files(".txt", where="source/")(tmp_path)
    texts.put(tmp_path, "source/closed/more.txt", "abc")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*source/closed: Permission denied"):
        prepare(DataConfig(source=str(tmp_path / "source")), 256, tmp_path / "cache")
