"""Generate text from a run.

  lpkit sample runs/six --prompt "def "
"""

from argparse import ArgumentParser, Namespace

from lpkit.commands import a_folder


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=a_folder, metavar="RUN", help="a run folder")
    parser.add_argument("--prompt", default="\n", help="how the text begins")
    parser.add_argument("--tokens", type=int, default=200,
                        help="how many to generate (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="choose among the k likeliest "
                        "(default: 50)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: Namespace) -> dict:
    from lpkit.training.sampling import sample

    text = sample(args.run, prompt=args.prompt, tokens=args.tokens, temperature=args.temperature,
                  top_k=args.top_k, seed=args.seed)
    return {"run_dir": str(args.run), "prompt": args.prompt, "text": text, "tokens": args.tokens,
            "seed": args.seed}


def text(result: dict) -> str:
    return result["text"]
