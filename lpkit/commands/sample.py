"""Generate text from a run.

  lpkit sample runs/six --prompt "def "
  lpkit sample runs/six --prompt "def " --prompt "class " --cache int8

Each --prompt is continued as it would be alone. A cache in int8 takes about half of one in 16 bits,
int4 a third; `notebooks/lessons/decoding.py` has bytes and seconds.
"""

from argparse import ArgumentParser, Namespace

from lpkit.commands import a_folder, opened
from lpkit.errors import pick
from lpkit.techniques.caches import CACHES
from lpkit.values import Count, PositiveOrZero, Seed, checked


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=a_folder, metavar="RUN", help="a run folder")
    parser.add_argument("--prompt", action="append", help="how the text begins; as many as needed "
                        "(default: a line break)")
    parser.add_argument("--tokens", type=int, default=200,
                        help="how many to generate (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="choose among the k likeliest "
                        "(default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", default="same", metavar="FORMAT", help="of keys and values: "
                        f"{'; '.join(f'{name}, {row.why}' for name, row in CACHES.items())} "
                        "(default: same)")
    parser.add_argument("--special-tokens", action="store_true", help="prompts may spell them")


def run(args: Namespace) -> dict:
    names = ("tokens", "temperature", "top_k", "seed", "cache", "special_tokens")
    settings = _checked(**{name: getattr(args, name) for name in names})
    run, prompts = opened(args.run), args.prompt or ["\n"]
    from lpkit.training.sampling import sample  # imports torch

    texts = sample(run, prompt=prompts, **settings)
    return {"run_dir": str(args.run), "prompts": prompts, "texts": texts, "tokens": args.tokens,
            "seed": args.seed, "cache": args.cache}


@checked
def _checked(*, tokens: Count, temperature: PositiveOrZero, top_k: Count, seed: Seed, cache: str,
             special_tokens: bool) -> dict[str, int | float | str]:
    pick(CACHES, cache, "cache")
    return locals()


def text(result: dict) -> str:
    return "\n\n".join(result["texts"])
