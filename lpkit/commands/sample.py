"""Generate text with the model of a run.

  lpkit sample runs/six --prompt "def "
  lpkit sample runs/six --prompt "def " --prompt "class " --cache int8

The text after one prompt does not depend on the other prompts. An int8 cache needs about half the
bytes of a 16-bit cache, an int4 cache about a third.
"""

from argparse import ArgumentParser, Namespace

from lpkit.commands import a_folder, opened
from lpkit.errors import pick
from lpkit.tables import picked
from lpkit.techniques.caches import CACHES
from lpkit.values import Count, PositiveOrZero, Seed


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=a_folder, metavar="RUN", help="run folder")
    parser.add_argument("--prompt", action="append", help="beginning of the text; repeatable "
                        "(default: a line break)")
    parser.add_argument("--tokens", type=Count, default=200, help="tokens to generate (default 200)")
    parser.add_argument("--temperature", type=PositiveOrZero, default=0.8, help="0 takes the "
                        "likeliest token; above 0 samples (default 0.8)")
    parser.add_argument("--top-k", type=Count, default=50, help="sample only from the likeliest "
                        "TOP_K tokens (default 50)")
    parser.add_argument("--seed", type=Seed, default=0, help="random seed (default 0)")
    parser.add_argument("--cache", default="same", metavar="FORMAT", help="KV cache, default same; "
                        + "; ".join(f"{name}: {row.why}" for name, row in CACHES.items()))
    parser.add_argument("--special-tokens", action="store_true", help="read <|endoftext|> in a "
                        "prompt as a special token (default: as ordinary text)")


def run(args: Namespace) -> dict:
    pick(CACHES, args.cache, "cache")
    run, prompts = opened(args.run), args.prompt or ["\n"]
    from lpkit.training.sampling import sample  # imports torch

    texts = sample(run, prompt=prompts, **picked(
        args, "tokens temperature top_k seed cache special_tokens"))
    return {"run_dir": str(args.run), "prompts": prompts, "texts": texts,
            **picked(args, "tokens seed cache")}


def text(result: dict) -> str:
    return "\n\n".join(result["texts"])
