"""Training on several processes: who they are, how model states lie on them, and who starts,
watches and ends them.

    python: lpkit.launch(config, processes=2)       returns the handle that `lpkit.start` returns
    shell:  lpkit train cpu-3m --processes 2
            torchrun --nproc-per-node 2 -m lpkit train cpu-3m --set parallel.data=2

`Training.build` takes `Ranks`, `steps.accumulate` tells the `Sharding` which backward is the last,
and nothing else of a training knows of several processes: one writes (`loop.fit`), the others
follow. Decisions that are raced are raced by the first and hold for all. A rank reads its sequences
of the same batch, so any number of ranks sees the same data; evaluation is split alike. What ranks
say is tensors and JSON, errors by kind and text; nothing is unpickled.
"""
