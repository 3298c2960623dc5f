"""The page docs/parallel.md: `python -m tests.pages parallel`."""

import json

import lessons.rows.cast_gather
import lessons.rows.context
import lessons.rows.pipelines
import lessons.rows.reductions  # noqa: F401  adds rows
from lpkit.files import resource
from lpkit.techniques.layouts import (
    CONTEXT,
    GATHERED,
    REDUCTIONS,
    STAGES,
    UNSHARDED,
)
from lpkit.techniques.pipelines import PIPELINES
from tests.bench.harness import recorded
from tests.pages import markdown_table
from tests.parallel import parity

INTRODUCTION = """\
# Several processes

    lpkit train cpu-3m --processes 2
    lpkit train cpu-3m --processes 2 parallel.shard=2 parallel.zero=3
    lpkit train gpt2-124m --processes 8 --import lessons.rows.cast_gather parallel.shard=8 \\
        parallel.gathered=fp8 precision.recipe=fp8-tensorwise
    torchrun --nproc-per-node 8 -m lpkit train gpt2-124m parallel.shard=8
    lpkit train cpu-3m --processes 4 parallel.tensor=2 parallel.pipeline=2 grad_accum_steps=4
    lpkit train cpu-3m --processes 4 parallel.tensor=2 parallel.context=2 parallel.zero=1

and in a notebook `handle = lpkit.launch(config, processes=2)`, which returns what `lpkit.start` \
does.
A checkpoint goes on in any layout: `--resume` with another `parallel`. `lpkit.predict_trace(config,
world, layout=...)` rehearses a layout in one process, and the `messages` of its result are what its
ranks send. `accelerate launch --multi_gpu --num_processes 2 -m lpkit train` (`pip install
accelerate`) does what torchrun does, also on CPUs; there `accelerate launch --cpu` starts one \
process and says nothing, and `lpkit` then
refuses, and says how to start two. `--processes` holds no port; where torchrun ends with \
EADDRINUSE,
`--standalone` finds a free one.

## How ranks meet

Another user of the machine can connect wherever a rank listens, and gloo takes whoever connects \
first
for the rank that it waits for. So:

- Ranks exchange tensors and JSON, with a bound on its length. Nothing that arrives is unpickled, \
and
  nothing that arrives is executed.
- Ranks of one machine listen on loopback alone. They meet by a file in a folder that only their \
user
  can open, where the first leaves 32 random bytes.
- In each group, before anything else, each rank sends each other rank an HMAC of that secret, of \
the
  group and of both their numbers. Where another answers, or nobody within 30 s, the launch ends in
  one sentence.
- Once they have met, what listens drops every packet (Linux). Nobody connects to a run that goes \
on.

A user who watches can still keep ranks from meeting, for as long as he watches: he gets a \
sentence on
your terminal, and nothing else. `python -m tests.attack ranks` is such a user, in 50 launches.

torchrun and `accelerate launch` open a store of their own. It listens on all interfaces, it has no
password, and who reaches it can read it and write into it. Where they start all ranks on one \
machine,
the ranks take from it the name of a private folder and nothing else, and meet there, on loopback.
With `--nnodes 2` the store is all that the ranks share. The secret then lies in it, and the \
handshake
stops only those who cannot reach it: who can reach it may take a rank's place, end the run or \
change
its numbers, but he cannot execute anything. Use several machines in a network of your own. Gloo
listens there on the address of the host's name, or on the interface that GLOO_SOCKET_IFNAME names.
NCCL knows its ranks by an id from the store; NCCL_SOCKET_IFNAME says where it listens.

## How a model is split

| `parallel` | a rank has | and sends, in a layer of a micro-batch | source |
|---|---|---|---|
| `tensor` | a part of each matrix, and between them of each sequence | two gathers and two \
scatters of the residual stream forward, and as many backward; and what was gathered once more for \
the gradients of weights, of which a rank keeps a part | Korthikanti et al. 2022, \
https://arxiv.org/abs/2205.05198 |
| `context` | an early and a late chunk of each sequence | its keys and values c - 1 times \
forward, twice that backward; or all-to-all | Liu et al. 2023, https://arxiv.org/abs/2310.01889 |
| `pipeline` | some layers, `interleave` chunks of them | the residual stream to the next stage, \
its gradient to the one before, once a stage | Narayanan et al. 2021, \
https://arxiv.org/abs/2104.04473 |

They go with `data`, with ZeRO and with one another; a pipeline with ZeRO 1 at most. The batch of \
tensor
ranks is the same, that of context ranks are parts of the same sequences, and their gradients are
averaged as those of replicas are. Weights are plain tensors, so that every recipe casts a part as \
it
casts a matrix: a cut matrix has a scale a part. In a checkpoint each piece has its place, and any \
other
layout reads it. Ranks are laid out so that those who talk most are neighbours: `tensor` counts \
fastest,
then `context`, `shard`, `data`, and `pipeline`.

## Where model states lie

`parallel.data` counts replicas, `parallel.shard` the ranks that keep a part each, by
`parallel.zero`. With both, a model is sharded inside groups, and the groups are replicas (hybrid
sharding).

"""


RECORDED = {
    "launch": "\n## Faults and starts\n\n`lpkit bench launch` kills and stops ranks, and counts "
             "how "
             "often the right one was not named in time, or a process or a folder was left. In "
             "every "
             "layout, with ranks that never enter a message, too: [`layouts`](reliability.md).\n\n",
    "fsdp2": "\n## Beside accelerate\n\n`lpkit bench fsdp2` takes the same updates by ZeRO 3 and "
            "by "
            "accelerate's FSDP2, in turns; their losses are held to one another. Seconds are "
            "medians; "
            "what is met is the median of the ratios of pairs.\n\n"}


def page() -> str:
    """Parity is computed now, by up to 8 processes; faults and starts are as last recorded."""
    rows = lambda table: [(f"`{name}`", row.why, row.source) for name, row in table.items()]
    refused = [(f"`{row.key}`", f"`{row.only}`",
                f"`parallel.{row.several}`" if isinstance(row.several, str) else
                f"ZeRO {row.several}" if row.several else "any", row.why) for row in UNSHARDED]
    parts = [
        INTRODUCTION,
        markdown_table(("`parallel.zero`", "", ""), rows(STAGES)),
        "\n\nWhole gradients (ZeRO 0 and 1) travel by `parallel.reduction`; `--import "
        "lessons.rows.reductions` adds the last ten ways, for ZeRO 0:\n\n",
        markdown_table(("`parallel.reduction`", "", "source"), rows(REDUCTIONS)),
        "\n\nand weights that are gathered (ZeRO 2 and 3) as `parallel.gathered` says; "
        "`--import lessons.rows.cast_gather` brings the last way:\n\n",
        markdown_table(("`parallel.gathered`", "", "source"), rows(GATHERED)),
        "\n\nThe stages of `parallel.pipeline` take micro-batches in the order of "
        "`parallel.schedule`; `--import lessons.rows.pipelines` brings the last four:\n\n",
        markdown_table(("`parallel.schedule`", "", "source"), rows(PIPELINES)),
        "\n\nRanks of `parallel.context` have a part of each sequence, an early chunk and a late "
        "one, and "
        "attend as `parallel.attention` says; `--import lessons.rows.context` brings the second "
        "way:\n\n",
        markdown_table(("`parallel.attention`", "", "source"), rows(CONTEXT)),
        "\n\nRanks of `parallel.tensor` gather tokens before the product that needs them, and "
        "scatter its sum after.",
        "\n\nNot everything goes with several ranks yet:\n\n",
        markdown_table(("setting", "must be", "from", "because it"), refused),
        "\n\n## The same numbers\n\n", parity.page(parity.measure(),
                                                     parity.measure(["fp32"], parity.AXES,
                                                         orders=1,
                                                                    changes=parity.FOUR_LAYERS))]
    for bench, words in RECORDED.items():
        parts += _recorded(bench, words)
    return "".join(parts).rstrip("\n") + "\n"


def _recorded(bench: str, words: str) -> list[str]:
    """Nothing where nobody has measured it."""
    parts = []
    for path in sorted(resource("data/measured").glob(f"{bench}-*.json")):
        result = json.loads(path.read_text())
        lines = [(one["case"], f"{one['ours_median']:.3g} {one['unit']}",
                  f"{one['peer_median']:.3g} {one['peer']}", one["verdict"])
                 for one in result["cases"]]
        parts += ["#", "\n".join(recorded(result)), "\n",
                  markdown_table(("", "median", "beside", ""), lines), "\n"]
    return [words, *parts] if parts else []
