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

- In a notebook, `handle = lpkit.launch(config, processes=2)` returns the same handle as
  `lpkit.start`.
- A checkpoint continues in any layout: use `--resume` with another `parallel`.
- `lpkit.predict_trace(config, world, layout=...)` simulates a layout in one process. `messages`
  of its result has what each rank sends.
- `--processes` needs no network port. If torchrun fails with EADDRINUSE, add `--standalone`.
- `accelerate launch --multi_gpu --num_processes 2 -m lpkit train` (`pip install accelerate`)
  works like torchrun, also on CPUs. `accelerate launch --cpu` starts only one process there, so
  `lpkit` refuses and prints the command that starts two.

## How ranks meet

Another user of the same machine can connect to any port on which a rank listens, and gloo
accepts the first connection as the rank that it expects. lpkit therefore does the following:

- Ranks exchange only tensors and JSON of bounded length. They never unpickle or execute what
  arrives.
- Ranks on one machine listen only on loopback. They find each other through a file in a folder
  that only their user can open; the first rank writes 32 random bytes (the secret) there.
- In each group, before any other message, every pair of ranks exchanges an HMAC of the secret,
  the group and both rank numbers. If another program answers, or nobody answers within 30 s,
  the launch ends with one sentence.
- After this handshake, the listening sockets drop every packet (Linux), so nobody can connect
  to a running training.

An attacker on the same machine can still prevent the ranks from connecting while he attacks;
the only effect is an error message on your terminal. `python -m tests.attack ranks` tries this
in 50 launches.

torchrun and `accelerate launch` open their own store. It listens on all interfaces without a
password, and everyone who can reach it can read and write it. If all ranks are on one machine,
they read only the name of a private folder from the store, and connect on loopback.

With `--nnodes 2`, the store is all that the ranks share, and it contains the secret. The
handshake then stops only those who cannot reach the store. Whoever can reach it may replace a
rank, end the run or change its numbers, but cannot execute code. Use several machines only in a
private network. Gloo listens there on the address of the host name, or on the interface in
GLOO_SOCKET_IFNAME. NCCL identifies its ranks by an id from the store and listens on
NCCL_SOCKET_IFNAME.

## How a model is split

| `parallel` | part of a rank | messages of a layer and micro-batch | source |
|---|---|---|---|
| `tensor` | a part of each matrix, and between the matrices a part of each sequence \
| two gathers and two scatters of the residual stream forward, and as many backward; the \
gathered inputs once more for weight gradients, because a rank keeps only its part \
| Korthikanti et al. 2022, \
https://arxiv.org/abs/2205.05198 |
| `context` | an early and a late chunk of each sequence | its keys and values c - 1 times \
forward, twice as many bytes backward; or all-to-all | Liu et al. 2023, \
https://arxiv.org/abs/2310.01889 |
| `pipeline` | some layers, in `interleave` chunks | once for each stage: the residual stream to \
the next stage, its gradient to the previous stage | Narayanan et al. 2021, \
https://arxiv.org/abs/2104.04473 |

They combine with `data`, with ZeRO and with each other; a pipeline combines with ZeRO 0 and 1
only. Tensor ranks read the same batch. Context ranks read parts of the same sequences, and
their gradients are averaged like those of replicas. Weights are plain tensors, so every recipe
casts a part like a whole matrix: each part has its own scale. A checkpoint stores each piece
with its place, and any other layout can read it. Ranks that exchange the most are neighbours:
`tensor` counts fastest, then `context`, `shard`, `data` and `pipeline`.

## Where model states are stored

`parallel.data` is the number of replicas. `parallel.shard` is the number of ranks that each
keep a part, as `parallel.zero` defines. With both, each group shards the model, and the groups
are replicas (hybrid sharding).

"""


RECORDED = {
    "launch": "\n## Faults and starts\n\n`lpkit bench launch` kills and stops ranks. It counts how "
              "often the wrong rank (or none in time) was named, and how often a process or a "
              "folder was left. [`layouts`](reliability.md) does this in every layout, and also "
              "with ranks that never enter a message.\n\n",
    "fsdp2": "\n## Compared with accelerate\n\n`lpkit bench fsdp2` alternates the same updates by "
             "ZeRO 3 and by accelerate's FSDP2, and compares their losses. Seconds are medians; "
             "the last column judges the median ratio of pairs.\n\n"}

# setting of `parallel`, its meaning with the import that adds rows, and its table
FAMILIES = (
    ("reduction", "how whole gradients are sent (ZeRO 0 and 1); `--import lessons.rows.reductions` "
     "adds the last ten rows, for ZeRO 0", REDUCTIONS),
    ("gathered", "the format in which weights are gathered (ZeRO 2 and 3); `--import "
     "lessons.rows.cast_gather` adds the last row", GATHERED),
    ("schedule", "the order in which pipeline stages process micro-batches; `--import "
     "lessons.rows.pipelines` adds the last four rows", PIPELINES),
    ("attention", "how context ranks attend to each other's tokens; `--import "
     "lessons.rows.context` adds the second row", CONTEXT))


def page() -> str:
    """Returns the page. Parity is computed now, by up to 8 processes; the other numbers are from
    records."""
    rows = lambda table: [(f"`{name}`", row.why, row.source) for name, row in table.items()]
    settings: dict[tuple[str, ...], list[str]] = {}     # by what they must be, with what, and why
    for row in UNSHARDED:
        ranks = (f"`parallel.{row.several}`" if isinstance(row.several, str) else
                 f"ZeRO {row.several} or more" if row.several else "several ranks")
        settings.setdefault((f"`{row.only}`", ranks, row.why), []).append(f"`{row.key}`")
    refused = [(", ".join(keys), *row) for row, keys in settings.items()]
    parts = [
        INTRODUCTION,
        markdown_table(("`parallel.zero`", "meaning", "source"), rows(STAGES)),
        *(part for name, is_what, table in FAMILIES for part in (
            f"\n\n`parallel.{name}` is {is_what}:\n\n",
            markdown_table((f"`parallel.{name}`", "meaning", "source"), rows(table)))),
        "\n\nTensor ranks gather tokens before the matmul that needs them, and scatter its sum.",
        "\n\nSome settings do not support several ranks yet:\n\n",
        markdown_table(("setting", "must be", "with", "because it"), refused),
        "\n\n## Agreement with one process\n\n", parity.page(parity.measure(),
                                                     parity.measure(["fp32"], parity.AXES,
                                                         orders=1,
                                                                    changes=parity.FOUR_LAYERS))]
    for bench, words in RECORDED.items():
        parts += _recorded(bench, words)
    return "".join(parts).rstrip("\n") + "\n"


def _recorded(bench: str, words: str) -> list[str]:
    """Returns the parts of the page with a benchmark's records; an empty list without a record."""
    parts = []
    for path in sorted(resource("data/measured").glob(f"{bench}-*.json")):
        result = json.loads(path.read_text())
        lines = [(quantised["case"], f"{quantised['ours_median']:.3g} {quantised['unit']}",
                  f"{quantised['peer_median']:.3g} {quantised['peer']}", quantised["verdict"])
                 for quantised in result["cases"]]
        parts += ["#", "\n".join(recorded(result)), "\n",
                  markdown_table(("case", "median", "compared with", "result"), lines), "\n"]
    return [words, *parts] if parts else []
