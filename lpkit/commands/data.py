"""Prepare a corpus once: text in, token files out. Training does this by itself when it has to.

    lpkit data prepare python-stdlib
    lpkit data prepare 'books/**/*.txt' --tokenizer bpe --vocab 8192 --out corpora/books
    lpkit data show corpora/books

SOURCE: python-stdlib, a file, a folder or a glob (.txt .md .py .jsonl .parquet), or hf:owner/name.
A prepared folder is itself a data.source.
"""

import argparse
from typing import Any

from lpkit.commands import a_folder
from lpkit.config import DataConfig
from lpkit.errors import named


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare | show")
    default = DataConfig()

    prepare = actions.add_parser("prepare", help="make the token files of a source")
    prepare.add_argument("source", metavar="SOURCE")
    prepare.add_argument("--tokenizer", default=default.tokenizer, metavar="NAME",
                         help="bytes, bpe or gpt2, or a folder with a tokenizer.json "
                         "(%(default)s)")
    prepare.add_argument("--vocab", type=int, metavar="N", help="the model's vocabulary; bpe "
                         "learns so many entries (8192)")
    prepare.add_argument("--out", type=a_folder, metavar="DIR",
                         help="a new folder; without it, the cache that training looks in")
    prepare.add_argument("--val-fraction", type=float, default=default.val_fraction, metavar="F",
                         help="share kept for validation (%(default)s)")
    prepare.add_argument("--special-tokens", action="store_true", help="text may spell them")

    show = actions.add_parser("show", help="print what a prepared folder holds, and check it")
    show.add_argument("folder", type=a_folder, metavar="DIR")

    for action in (prepare, show):
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS,
                            help="print one JSON object on standard output")


def run(args: argparse.Namespace) -> dict[str, Any]:
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
    lines.append(f"  unigram     {result['unigram_entropy']:.3f} nats per token: what knowing only "
                 f"frequencies reaches")
    return "\n".join(lines)
