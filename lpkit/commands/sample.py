"""Generate text with the model of a run.

  lpkit sample runs/six --prompt "def "
  lpkit sample runs/six --prompt "def " --prompt "class " --cache int8

Each prompt is continued independently of the other prompts. An int8 KV cache needs about half the
bytes of a 16-bit cache, and an int4 cache about a third.
"""

from argparse import Namespace

from lpkit.commands import a_folder, opened, options
from lpkit.errors import pick
from lpkit.tables import picked
from lpkit.techniques.caches import CACHES
from lpkit.values import Count, PositiveOrZero, Seed

arguments = options({
    "run RUN": (a_folder, "run folder"),
    "--prompt... PROMPT": "beginning of the text; repeatable (default: a line break)",
    "--tokens TOKENS=200": (Count, "tokens to generate (default 200)"),
    "--temperature TEMPERATURE=0.8": (
        PositiveOrZero, "0: take the likeliest token; above 0: sample (default 0.8)"),
    "--top-k TOP_K=50": (Count, "sample only from the likeliest TOP_K tokens (default 50)"),
    "--seed SEED=0": (Seed, "random seed (default 0)"),
    "--cache FORMAT=same": "KV cache, default same; " + "; ".join(
        f"{name}: {row.why}" for name, row in CACHES.items()),
    "--special-tokens": "read <|endoftext|> in a prompt as a special token (default: as ordinary "
                        "text)"})


def run(args: Namespace) -> dict:
    """Return the prompts and the texts: each text is its prompt and the generated continuation."""
    pick(CACHES, args.cache, "cache")
    run, prompts = opened(args.run), args.prompt or ["\n"]
    from lpkit.training.sampling import sample  # imports torch

    texts = sample(run, prompt=prompts, **picked(
        args, "tokens temperature top_k seed cache special_tokens"))
    return {"run_dir": str(args.run), "prompts": prompts, "texts": texts,
            **picked(args, "tokens seed cache")}


def text(result: dict) -> str:
    return "\n\n".join(result["texts"])
