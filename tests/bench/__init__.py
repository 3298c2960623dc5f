"""Every performance figure that the project claims, measured beside its peer in one process.

A benchmark is a function `(rounds) -> list[Result]`, one Result for each case and peer, and one row
below. Most of them call `race`, and `check` holds the contenders to each other before any timing:

    race("sum", ours=total, peers={"torch.sum": torch.sum}, over=[(data,)], check=check, target=1.2,
         case="1Mi float32", rounds=rounds)

Nothing but the command line imports this room.
"""

BENCHES = {     # name: (module of this folder and function, what is measured)
    "adapter-peaks": ("adapter_peaks:run",
                      "peak memory of LoRA and QLoRA: predicted and published"),
    "adapter-step": ("adapters:run", "a step that trains adapters, compared with a step that "
                                     "trains all weights"),
    "attention-cpu": ("kernels:attention", "attention on a CPU, compared with PyTorch's flash "
                                           "kernel"),
    "batch-steps": ("batch_steps:run", "updates that each batch size needs to reach a loss: "
                                       "measured and predicted"),
    "blocks": ("blocks:run", "a step with each kind of block, compared with pre-norm"),
    "claim-overhead": ("overhead:run", "wall-clock time of a claim of 10 runs, compared with the "
                                       "seconds of their steps"),
    "claims": ("claims:run", "error rate of the referee of `lpkit claim`, on real runs"),
    "course": ("course:run", "run time of every notebook at tier cpu, on an idle machine and next "
                             "to four busy processes"),
    "decisions": ("decisions:run", "50 decisions in a row to keep or discard a change, by referee "
                                   "or by one run"),
    "decode": ("decode:run", "seconds per generated token, compared with transformers.generate; "
                             "both use a KV cache"),
    "evidence": ("evidence:run", "all measurements that need a GPU, in a few minutes"),
    "forgetting": ("forgetting:run", "nats that a model forgets of its first text when adapters or "
                                     "all weights are trained"),
    "fp8-linear": ("fp8:linear", "a Linear in FP8 with its casts, compared with bf16, on a GPU"),
    "fp8-products": ("fp8:products", "the three FP8 matmuls of a Linear, compared with bf16, on a "
                                     "GPU"),
    "fp8-step": ("fp8:step", "training steps in FP8, compared with bf16, on a GPU"),
    "fsdp2": ("fsdp2:run", "a step with ZeRO 3, compared with accelerate's FSDP2"),
    "growth": ("growth:run", "loss in nats of a small model that grows by each method, compared "
                             "with a large model"),
    "import": ("imports:run", "seconds of `import lpkit`, compared with `import torch`"),
    "kernels": ("fused:fused", "each kernel, compared with eager and compiled PyTorch and other "
                               "libraries"),
    "launch": ("launch:run", "seconds until a failed rank is named, and seconds to start ranks"),
    "ledger": ("ledger:run", "bytes of a step: predicted and measured"),
    "linear-cross-entropy": ("losses:run", "the chunked loss, compared with the plain loss and "
                                           "PyTorch's chunked loss"),
    "loader": ("loader:run", "random batches from token files, compared with DataLoader"),
    "low-precision-cpu": ("steps:low_precision_cpu",
                          "a step with each recipe on a CPU, compared with bf16"),
    "masked": ("masked:run", "masked pre-training: an encoder of the visible tokens, compared with "
                             "one of all tokens"),
    "muon-overhead": ("muon:run", "share of Newton-Schulz in a step: measured, and predicted from "
                                  "FLOPs"),
    "mx-qdq": ("kernels:mx_qdq", "a cast to MXFP8 and back, compared with torchao"),
    "planner": ("planner:run", "seconds until the planner's page answers in a browser, compared "
                               "with its limits"),
    "protocol": ("protocol:run", "published claims about losses, each tested with `lpkit claim`"),
    "published": ("published:run", "predicted seconds of runs that others published"),
    "qdq": ("kernels:qdq", "a cast to E4M3 and back, compared with ml_dtypes and PyTorch"),
    "recipe-losses": ("recipe_losses:run",
                      "loss of each recipe after 300 steps, compared with bf16"),
    "reliability": ("reliability:run", "attacks on runs, commands and folders, which must do no "
                                       "harm"),
    "room": ("room:run", "30 learners in one room, compared with one learner, and what learners "
                         "must not do"),
    "saved-row": ("saved:run", "updates of other configs, predicted with and without `lpkit "
                               "measure`"),
    "telemetry": ("steps:telemetry", "overhead of recording statistics of a run's tensors"),
    "tpe-random": ("batch_steps:searches", "a search by TPE, compared with a random search, on "
                                           "real runs"),
    "train-nanogpt": ("nanogpt:run", "a training step, compared with nanoGPT, eager and compiled"),
    "whole-stack": ("whole_stack:run", "updates until a loss is reached, with each combination of "
                                       "techniques, compared with the baseline"),
    "width-rates": ("batch_steps:widths", "loss of the widest model at the narrowest model's "
                                          "learning rate, with and without muP"),
    "your-model": ("your_model:run", "predictions and recipes on models from outside the kit, "
                                     "compared with peers"),
}
