"""Turn text into token files, or check token files. You need not call this command before `lpkit
train`, which makes missing token files itself.

    lpkit data prepare python-stdlib
    lpkit data prepare 'books/**/*.txt' --tokenizer bpe --vocab 8192 --out corpora/books
    lpkit data show corpora/books

SOURCE: python-stdlib, a file, a folder or a glob (.txt .md .py .jsonl .parquet), or hf:owner/name.
The folder that `prepare` writes can be used as data.source.
"""

import argparse
from typing import Any

from lpkit.commands import a_folder, options
from lpkit.config import DataConfig
from lpkit.errors import named

DEFAULT = DataConfig()
PREPARE = options({
    "source SOURCE": "text: see `lpkit data -h`",
    f"--tokenizer NAME={DEFAULT.tokenizer}": "bytes, bpe, gpt2, or a folder with a tokenizer.json "
                                             "(default %(default)s)",
    "--vocab N": (int, "vocabulary size of the model; bpe learns N entries (default: the size "
                       "of the tokenizer; 8192 for bpe)"),
    "--out DIR": (a_folder, "new folder (default: the cache in which `lpkit train` looks)"),
    f"--val-fraction F={DEFAULT.val_fraction}": (
        float, "fraction of the text for validation (default %(default)s)"),
    "--special-tokens": "read <|endoftext|> in text as a special token (default: as ordinary "
                        "text)"})
SHOW = options({"folder DIR": (a_folder, "folder that `prepare` wrote")})


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `prepare` and `show`, each with its arguments and --json."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare | show")
    for name, add, about in (("prepare", PREPARE, "write the token files of a source"),
                             ("show", SHOW, "check a prepared folder, and print its contents")):
        add(action := actions.add_parser(name, help=about))
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS,
                            help="print one JSON object on standard output")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prepare or check token files. Return the folder, the tokenizer, the header of the files, and
    the entropy of their token frequencies in nats per token."""
    from lpkit.datasets import byte_unigram_entropy, open_tokens, prepare, prepare_into
    from lpkit.datasets.tokenizers import builder

    if args.action == "show":
        files = open_tokens(args.folder)
    else:
        data = DataConfig(source=args.source, tokenizer=args.tokenizer,
                          val_fraction=args.val_fraction, special_tokens=args.special_tokens)
        default_vocab = builder(data.tokenizer).default_vocab
        vocab = default_vocab if args.vocab is None else args.vocab
        files = prepare_into(args.out, data, vocab) if args.out else prepare(data, vocab)
    header = {key: value for key, value in files.header.items() if key not in ("tokenizer", "end")}
    return {"folder": str(files.folder), "tokenizer": files.tokenizer.name, **header,
            "unigram_entropy": byte_unigram_entropy(files)}


def text(result: dict[str, Any]) -> str:
    source = result["source"]
    about = ", ".join(f"{source[key]} {key}" if key == "files" else f"{key} {source[key]}"
                      for key in source if key != "name")
    lines = [named(result['folder']), f"  source      {named(source['name'])}"
             + (f" ({about})" if about else ""),
             f"  tokenizer   {result['tokenizer']}, {result['vocab']} entries, {result['dtype']}"]
    for split, facts in result["splits"].items():
        lines.append(f"  {split:<11} {facts['tokens']:,} tokens in {facts['documents']:,} "
                     f"documents, sha256 {facts['sha256'][:12]}")
    return "\n".join([*lines, f"  unigram     {result['unigram_entropy']:.3f} nats per token: the "
                      f"loss of a model that knows only token frequencies"])
