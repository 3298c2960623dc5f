"""Sources of text as users bring them: the tokens decode to the source's text, in as many documents
as it has, or one sentence refuses it.

Only these cases catch: a text that is lost, cut, read twice or read in another encoding while it is
prepared.
"""

import contextlib
import functools
import gzip
import io
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lpkit.config import DataConfig
from lpkit.datasets import open_tokens, prepare, prepare_into
from lpkit.datasets.tokens import TokenFiles
from tests.inputs import RIGHT, outcome, warned

Texts = list[str]
Write = Callable[[Path], Texts]     # makes a source in a folder, and returns its documents
WORDS = ("the cat sat on a mat and na\u00efve caf\u00e9 \u6f22\u5b57 \U0001f642 def return None "
         "0x1F".split())
LINE = "one two three\n"


def prose(seed: int, words: int = 60) -> str:
    drawn = random.Random(seed)
    return " ".join(drawn.choices(WORDS, k=words)) + f" {seed}.\n"


DOCUMENTS = [prose(i) for i in range(24)]


def put(where: Path, name: str | bytes, data: str | bytes) -> Path:
    path = where / os.fsdecode(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def files(suffix: str, change: Callable[[str], str] = str, where: str = "") -> Write:
    """24 files, each a document."""
    def write(root: Path) -> Texts:
        texts = [change(document) for document in DOCUMENTS]
        for i, text in enumerate(texts):
            put(root, f"{where}{i}{suffix}", text)
        return texts

    return write


def beside(name: str | bytes, data: str | bytes, text: str | None = None) -> Write:
    """24 files, and one more, whose documents are `text`; None: none."""
    def write(root: Path) -> Texts:
        texts = files(".txt")(root)
        put(root, name, data)
        return texts + ([] if text is None else [text])

    return write


def rows(*more: str, text: tuple[str, ...] = (), newline: str = "\n",
         name: str = "a.jsonl") -> Write:
    """A .jsonl of 24 documents and `more` lines, which have the documents `text`."""
    def write(root: Path) -> Texts:
        lines = [json.dumps({"text": document, "id": i}) for i, document in enumerate(DOCUMENTS)]
        put(root, name, newline.join([*lines, *more]))
        return [*DOCUMENTS, *text]

    return write


def table(column: object = None, name: str = "text", **how: object) -> Write:
    def write(root: Path) -> Texts:
        import pyarrow
        from pyarrow import parquet

        values = DOCUMENTS if column is None else column() if callable(column) else column
        parquet.write_table(values if isinstance(values, pyarrow.Table)
                            else pyarrow.table({"id": list(range(len(values))), name: values}),
                            root / "a.parquet", **how)
        return DOCUMENTS

    return write


def columns(kind: str) -> Callable[[], object]:
    def make() -> object:
        import pyarrow as pa

        texts = pa.array(DOCUMENTS)
        return {"large": lambda: texts.cast(pa.large_string()),
                "dictionary": texts.dictionary_encode,
                "chunks": lambda: pa.chunked_array([texts[:7], texts[7:]]),
                "null": lambda: pa.array([*DOCUMENTS, None]),
                "numbers": lambda: pa.array(range(24)),
                "structs": lambda: pa.array([{"text": document} for document in DOCUMENTS]),
                "twice": lambda: pa.Table.from_arrays([texts, texts], names=["text", "text"])}[
                    kind]()

    return make


def links(root: Path) -> Texts:
    """As a hub's cache has files."""
    files(".txt", where="../blobs/")(root)
    for path in (root / "../blobs").iterdir():
        (root / path.name).symlink_to(path)
    return DOCUMENTS


def link_to_nothing(root: Path) -> Texts:
    files(".txt")(root)
    (root / "gone.txt").symlink_to(root / "nothing")
    return DOCUMENTS


def circle(root: Path) -> Texts:
    files(".txt")(root)
    (root / "round.txt").symlink_to(root / "round.txt")
    return DOCUMENTS


def linked_folder(root: Path) -> Texts:
    files(".txt")(root)
    put(root, "../other/more.txt", prose(99))
    (root / "other").symlink_to(root / "../other")
    return DOCUMENTS


def pipe(root: Path) -> Texts:
    files(".txt")(root)
    os.mkfifo(root / "pipe.txt")
    return DOCUMENTS


def directory_called_text(root: Path) -> Texts:
    put(root, "b.txt/inner.txt", prose(77))
    return [*files(".txt")(root), prose(77)]


def alone(data: str | bytes, name: str = "one.txt") -> Write:
    def write(root: Path) -> Texts:
        put(root, name, data)
        return [data if isinstance(data, str) else data.decode()]

    return write


LONG = "".join(f"{i}: {prose(i)}" for i in range(1500))
NESTED = "[" * 100_000

# a name: (what writes it, what is named below the folder, "right" or the sentence)
KINDS: dict[str, tuple[Write, str, str]] = {
    "a folder of .txt": (files(".txt"), "", RIGHT),
    "a folder of .TXT": (files(".TXT"), "", RIGHT),
    "a folder of .Md in folders": (files(".Md", where="deep/er/"), "", RIGHT),
    "a glob": (files(".txt"), "*.txt", RIGHT),
    "a glob, beside other files": (beside("a.csv", "a,b"), "*.txt", RIGHT),
    "a glob that finds a folder": (directory_called_text, "**/*.txt", RIGHT),
    "a glob that finds nothing": (files(".txt"), "*.md", "there is nothing to read in"),
    "a glob of a suffix that nobody reads": (files(".rst"), "*.rst", RIGHT),
    "a folder called b.txt": (directory_called_text, "", RIGHT),
    "a folder, beside a hidden file": (beside(".hidden.txt", "secret"), "", RIGHT),
    "a folder of other files alone": (files(".csv"), "", "there is nothing to read in"),
    "an empty folder": (lambda root: [], "", "there is nothing to read in"),
    "nothing at all": (lambda root: [], "none", "there is no file, folder or glob"),
    "a line break of Windows": (files(".txt", lambda text: text.replace(" ", "\r\n")), "", RIGHT),
    "other line breaks": (files(".txt", lambda text: text.replace(" ", "\u2028\x0b\x0c\x85")), "",
                          RIGHT),
    "no line break": (files(".txt", str.strip), "", RIGHT),
    "a mark of byte order": (files(".txt", lambda text: f"\ufeff{text}"), "", RIGHT),
    "control characters": (files(".txt", lambda text: f"\x1b[31m\x07{text}\x7f"), "", RIGHT),
    "characters that are none yet": (files(".txt", lambda text: f"\ufffe\U0010ffff\ue000{text}"),
                                     "", RIGHT),
    "an empty file among others": (beside("empty.txt", ""), "", RIGHT),
    "a file of one line break": (beside("break.txt", "\n", "\n"), "", RIGHT),
    "a line of a million characters": (beside("long.txt", "x" * 1_000_000, "x" * 1_000_000), "",
        RIGHT),
    "a text of a million characters": (beside("long.txt", LONG, LONG), "", RIGHT),
    "a text that spells an end": (beside("end.txt", "a <|endoftext|> b", "a <|endoftext|> b"), "",
                                  RIGHT),
    "a name that is not UTF-8": (beside(b"caf\xe9.txt", "abc", "abc"), "", RIGHT),
    "a name with a line break": (beside("a\nb.txt", "abc", "abc"), "", RIGHT),
    "Latin-1": (beside("latin.txt", "caf\xe9 ".encode("latin-1")), "",
                r"latin.txt is not UTF-8 text \(byte 0xe9\)"),
    "UTF-16 without a mark": (beside("wide.txt", "abc".encode("utf-16-le")), "",
                              "wide.txt is not text .it holds a NUL byte"),
    "UTF-8 that is cut off": (beside("cut.txt", "caf\xe9".encode()[:-1]), "",
                              "cut.txt is not UTF-8 text"),
    "a NUL": (beside("nul.txt", "a\0b"), "", "nul.txt is not text .it holds a NUL byte"),
    "a picture called .txt": (beside("picture.txt", b"\x89PNG\r\n\x1a\n\0\0"), "",
                              "picture.txt is not UTF-8 text"),
    "a packed file": (beside("b.txt.gz", gzip.compress(b"abc")), "",
                      "b.txt.gz is packed, and nothing is unpacked here"),
    "a packed file, called .txt": (beside("b.txt", gzip.compress(b"abc")), "",
                                   "b.txt is not UTF-8 text"),
    "links to files": (links, "", RIGHT), "a link to nothing": (link_to_nothing, "",
        "cannot read .*gone.txt"),
    "a link to itself": (circle, "", "cannot read .*round.txt"),
    "a link to a folder": (linked_folder, "", "other is a link to a folder"),
    "a pipe": (pipe, "", "pipe.txt"),
    "one file": (alone(LONG), "one.txt", RIGHT),
    "one file of Windows": (alone(LONG.replace("\n", "\r\n")), "one.txt", RIGHT),
    "one file of long lines": (alone(LONG.replace("\n", " ")), "one.txt", RIGHT),
    "one small file": (alone(LINE), "one.txt", "too small to split"),
    "one empty file": (alone(""), "one.txt", "there is no text in"),
    ".jsonl": (rows(), "a.jsonl", RIGHT), ".jsonl of Windows": (rows(newline="\r\n"), "a.jsonl",
        RIGHT),
    ".JSONL": (rows(name="A.JSONL"), "", RIGHT),
    ".jsonl with empty lines": (rows("", "  ", ""), "a.jsonl", RIGHT),
    ".jsonl of texts alone": (rows('"abc"', text=("abc",)), "a.jsonl", RIGHT),
    ".jsonl with an empty text": (rows('{"text": ""}', text=("",)), "a.jsonl", RIGHT),
    ".jsonl with a pair of surrogates": (rows('{"text": "\\ud83d\\ude42"}', text=("\U0001f642",)),
        "a.jsonl", RIGHT),
    ".jsonl with half a pair": (rows('{"text": "\\ud83d"}'), "a.jsonl",
                                "line 25 of .*a.jsonl is not valid text .half of a surrogate pair"),
    ".jsonl with an escaped NUL": (rows('{"text": "a\\u0000"}'), "a.jsonl",
                                   "line 25 of .*a.jsonl is not text"),
    ".jsonl with null": (rows('{"text": null}'), "a.jsonl",
                         r"line 25 of .*a.jsonl has None \(NoneType\) in the place of its text"),
    ".jsonl with NaN": (rows('{"text": NaN}'), "a.jsonl", r"line 25 of .* has nan \(float\)"),
    ".jsonl with an object": (rows('{"text": {"text": "a"}}'), "a.jsonl",
                              r"line 25 of .* \(dict\)"),
    ".jsonl of lists": (rows('["a"]'), "a.jsonl", r"line 25 of .* has \['a'\] \(list\)"),
    ".jsonl without text": (rows('{"body": "a"}'), "a.jsonl",
                            "has no field 'text' .its fields are body"),
    ".jsonl that is cut off": (rows('{"text": "a'), "a.jsonl", "line 25 of .*a.jsonl is not JSON"),
    ".jsonl, nested without end": (rows(NESTED), "a.jsonl", "line 25 of .*a.jsonl is not JSON"),
    ".jsonl that is one list":
    (lambda root: [str(put(root, "a.jsonl", json.dumps(DOCUMENTS, indent=1)))], "a.jsonl",
     "line 1 of .*a.jsonl is not JSON"),
    ".jsonl with a mark of byte order": (lambda root: [str(put(root, "a.jsonl", '\ufeff{"text": '
        '"a"}'))], "a.jsonl", "line 1 of .*a.jsonl is not JSON .*BOM"),
    ".parquet": (table(), "a.parquet", RIGHT),
    ".parquet, packed inside": (table(compression="zstd"), "a.parquet", RIGHT),
    ".parquet of large texts": (table(columns("large")), "a.parquet", RIGHT),
    ".parquet of a dictionary": (table(columns("dictionary")), "a.parquet", RIGHT),
    ".parquet of small groups": (table(columns("chunks"), row_group_size=5), "a.parquet", RIGHT),
    ".parquet with a null": (table(columns("null")), "a.parquet",
                             r"row 25 of .*a.parquet has None \(NoneType\)"),
    ".parquet of numbers": (table(columns("numbers")), "a.parquet",
                            r"row 1 of .*a.parquet has 0 \(int\)"),
    ".parquet of structs": (table(columns("structs")), "a.parquet",
                            r"row 1 of .*a.parquet has .*\(dict\)"),
    ".parquet with two columns of that name": (table(columns("twice")), "a.parquet",
        "a.parquet has 2 columns 'text'"),
    ".parquet without text": (table(name="body"), "a.parquet",
                              "a.parquet has no columns 'text' .its columns are 'id, body'"),
    ".parquet that is none": (beside("a.parquet", "abc"), "", "cannot read .*a.parquet"),
}


def written(where: TokenFiles) -> Texts:
    """Returns the documents of both splits, read from the files by hand."""
    documents = []
    for name in ("train", "val"):
        ids = np.fromfile(where.folder / f"{name}.bin", "<u2")
        # the tokenizer `bytes`, whose end is 0
        parts = bytes(ids.astype(np.uint8)).decode().split("\0")
        assert parts.pop() == "", "the last document has no end"
        assert where.header["splits"][name]["documents"] == len(parts)
        documents += parts
    return documents


def check(write: Write, below: str, due: str) -> str:
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        return outcome(due, functools.partial(_check, Path(name), write, below))


def _check(root: Path, write: Write, below: str) -> None:
    (root / "source").mkdir()
    documents = write(root / "source")
    source = root / "source" / below
    token_files, warnings = warned(lambda: prepare(
        DataConfig(source=str(source), val_fraction=0.5), 256, root / "cache"))
    assert not warnings, warnings
    texts = written(token_files)
    if source.is_file() and len(documents) == 1:        # its blocks are split, where lines end
        assert (all(text in documents[0] for text in texts)
                and Counter("".join(texts)) == Counter(documents[0]))
        assert len(texts) > 2 and sum(map(len, texts)) == len(documents[0])
    else:
        assert Counter(texts) == Counter(documents)


def prepared(harm: Callable[[Path], object], due: str, **settings: object) -> str:
    """A prepared folder as a source, after `harm`."""
    def use(root: Path) -> None:
        files(".txt", where="source/")(root)
        token_files = prepare_into(root / "made", DataConfig(source=str(root / "source"),
            val_fraction=0.5), 256, root / "cache")
        harm(token_files.folder)
        again = prepare(DataConfig(source=str(token_files.folder),
                                   **{"val_fraction": 0.5, **settings}), 256, root / "cache")
        assert (Counter(written(again)) == Counter(DOCUMENTS)
                and open_tokens(token_files.folder).header == again.header)

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        return outcome(due, functools.partial(use, Path(name)))


def header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        record = json.loads((folder / "header.json").read_text())
        change(record)
        (folder / "header.json").write_text(json.dumps(record))

    return harm


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


def flip(folder: Path) -> None:
    data = bytearray((folder / "train.bin").read_bytes())
    data[10] ^= 1
    (folder / "train.bin").write_bytes(data)


def moved(folder: Path) -> None:
    for path in (folder / "../source").iterdir():       # the source is not asked for any more
        path.unlink()


PREPARED: dict[str, tuple[Callable[[Path], object], str, dict[str, object]]] = {
    "a prepared folder": (lambda folder: None, RIGHT, {}),
    "a prepared folder whose source is gone": (moved, RIGHT, {}),
    "a prepared folder, cut off": (cut("train.bin", 100),
                                   "train.bin has 100 bytes where its header says .*truncated", {}),
    "a prepared folder, cut to half a token": (cut("val.bin", 101), "val.bin has 101 bytes", {}),
    "a prepared folder with a flipped bit": (flip,
        "train.bin does not have the checksum of its header", {}),
    "a prepared folder without val.bin": (lambda folder: (folder / "val.bin").unlink(),
        "cannot read .*val.bin", {}),
    "a prepared folder with another header": (header(lambda record: record.update(vocab=10)),
        "header.json does not match its checksum", {}),
    "a prepared folder with half a header": (cut("header.json", 80),
        "header.json is not a whole record", {}),
    "a prepared folder with a header of nothing": (cut("header.json", 0),
        "header.json is not a whole record", {}),
    "a prepared folder, other share": (lambda folder: None,
        "prepared with val_fraction 0.5, but data.val_fraction is 0.1", {"val_fraction": 0.1}),
    "a prepared folder, other tokenizer": (lambda folder: None,
        "prepared with tokenizer bytes, but data.tokenizer is bpe", {"tokenizer": "bpe"}),
    "a prepared folder, special tokens": (lambda folder: None,
        "prepared with special_tokens False, but data.special_tokens is True",
        {"special_tokens": True}),
}


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, row in KINDS.items():
        yield name, functools.partial(check, *row)
    for name, (harm, due, settings) in PREPARED.items():
        yield name, functools.partial(prepared, harm, due, **settings)
