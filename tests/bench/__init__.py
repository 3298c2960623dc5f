"""Every performance figure that the project claims, measured beside its peer in one process.

A benchmark is a function `(rounds) -> list[Result]`, one Result for each case and peer, and one row
below. Most of them call `race`, and `check` holds the contenders to each other before any timing:

    race("sum", ours=total, peers={"torch.sum": torch.sum}, over=[(data,)], check=check, target=1.2,
         case="1Mi float32", rounds=rounds)

Nothing but the command line imports this room.
"""

BENCHES = {     # module of this folder and function, and what is beside what
    "adapter-peaks": ("adapter_peaks:run", "predicted peaks of LoRA and QLoRA beside published ones"),
    "adapter-step": ("adapters:run", "a step with adapters beside one of the whole model"),
    "attention-cpu": ("kernels:attention", "attention on a CPU beside PyTorch's flash kernel"),
    "batch-steps": ("batch_steps:run", "updates to a loss by batch size, beside their prediction"),
    "blocks": ("blocks:run", "a step of each block beside pre-norm's"),
    "claim-overhead": ("overhead:run", "a claim of 10 runs beside the seconds of their steps"),
    "claims": ("claims:run", "how often the referee of `lpkit claim` errs, on real runs"),
    "course": ("course:run", "every notebook at tier cpu, alone and beside four busy processes"),
    "decisions": ("decisions:run", "50 changes kept or discarded in a row, by referee or by one run"),
    "decode": ("decode:run", "a generated token beside transformers.generate, with the same cache"),
    "evidence": ("evidence:run", "everything that only a GPU can tell, for minutes on one"),
    "forgetting": ("forgetting:run", "what adapters and all weights forget of the first text, in nats"),
    "fp8-linear": ("fp8:linear", "a Linear in FP8 with its casts beside bf16, on a GPU"),
    "fp8-products": ("fp8:products", "the three FP8 products of a Linear beside bf16's, on a GPU"),
    "fp8-step": ("fp8:step", "whole training steps in FP8 beside bf16, on a GPU"),
    "fsdp2": ("fsdp2:run", "ZeRO 3 beside accelerate's FSDP2"),
    "growth": ("growth:run", "a small model that grows by each row beside a large one, in nats"),
    "import": ("imports:run", "`import lpkit` beside `import torch`"),
    "kernels": ("fused:fused", "each kernel beside eager and compiled PyTorch and other libraries"),
    "launch": ("launch:run", "how soon a rank that failed is named, and what starting ranks costs"),
    "ledger": ("ledger:run", "predicted bytes of a step beside what it really held"),
    "linear-cross-entropy": ("losses:run", "the chunked loss beside the plain one"),
    "loader": ("loader:run", "random batches from token files beside DataLoader"),
    "low-precision-cpu": ("steps:low_precision_cpu", "a step of each recipe beside bf16's"),
    "masked": ("masked:run", "masked pre-training: an encoder of visible tokens beside one of all"),
    "muon-overhead": ("muon:run", "seconds of Newton-Schulz beside its predicted FLOPs"),
    "mx-qdq": ("kernels:mx_qdq", "MXFP8 and back beside torchao"),
    "planner": ("planner:run", "the planner's page in a browser, against its budgets"),
    "protocol": ("protocol:run", "published claims about losses, each settled by `lpkit claim`"),
    "published": ("published:run", "predicted seconds beside runs that others published"),
    "qdq": ("kernels:qdq", "E4M3 and back beside ml_dtypes and PyTorch"),
    "recipe-losses": ("recipe_losses:run", "what each recipe costs in loss after 300 steps"),
    "reliability": ("reliability:run", "attacks on runs, commands and folders: none may do harm"),
    "room": ("room:run", "thirty learners in one room, beside one alone, and what they may not do"),
    "saved-row": ("saved:run", "updates of other configs, predicted with and without `lpkit measure`"),
    "telemetry": ("steps:telemetry", "what looking at a run's tensors costs"),
    "tpe-random": ("batch_steps:searches", "a search by TPE beside one at random, on real runs"),
    "train-nanogpt": ("nanogpt:run", "a training step beside nanoGPT's, eager and compiled"),
    "width-rates": ("batch_steps:widths", "the best learning rate over widths, beside muP's"),
    "your-model": ("your_model:run", "predictions and recipes on other people's models, beside peers"),
}
