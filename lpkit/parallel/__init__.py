"""Training on several processes: who they are, how model states lie on them, and who starts, watches
and ends them.

    python: lpkit.launch(config, processes=2)       returns the handle that `lpkit.start` returns
    shell:  lpkit train cpu-3m --processes 2
            torchrun --nproc-per-node 2 -m lpkit train cpu-3m --set parallel.data=2
"""
