"""Training on several processes: which ranks there are, how model states are divided over them, and
which process starts, watches and ends them.

    python: lpkit.launch(config, processes=2)       returns the handle that `lpkit.start` returns
    shell:  lpkit train cpu-3m --processes 2
            torchrun --nproc-per-node 2 -m lpkit train cpu-3m --set parallel.data=2

Only two places of a training know of several processes: `Training.build` takes `Ranks`, and
`steps.accumulate` tells the `Sharding` which backward is the last. Rank 0 writes the run folder
(`loop.fit`) and decides; the other ranks follow its decisions. Each rank reads its sequences of the
same global batch, so any number of ranks sees the same data; evaluation is split in the same way.
Ranks exchange tensors and JSON, and errors as their kind and text. Nothing is unpickled.
"""
