"""Training on several processes (ranks): how they exchange messages, how model states are divided
over them, and how they are started, watched and ended.

    python: lpkit.launch(config, processes=2)       returns the handle that `lpkit.start` returns
    shell:  lpkit train cpu-3m --processes 2
            torchrun --nproc-per-node 2 -m lpkit train cpu-3m --set parallel.data=2

Only two functions of a training depend on the number of processes: `Training.build` takes `Ranks`,
and `steps.accumulate` tells the `Sharding` which backward is the last. Rank 0 writes the run folder
(`loop.fit`) and decides, for example when to stop; the other ranks follow its decisions. Each rank
reads its sequences of the same global batch, so the data of an update do not depend on the number
of ranks. Evaluation is divided in the same way. Ranks exchange tensors, JSON, and errors as their
type and text. Nothing is unpickled.
"""
