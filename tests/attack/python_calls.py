"""Wrong calls of the public Python functions: each raises ConfigError (or RunFailedError) with one
sentence, and changes nothing.

A trial is a line of Python, drawn by rules from a seed; `NAMES` are what it may name.
"""

import random
import time
from pathlib import Path

from tests.attack import Outcome, patience
from tests.attack._nursery import nursery, tell_of_writes

COUNT, FEW = 270, 30
SECONDS = 10.0
# as many have a name of 80, every machine of the catalogue, and what a file of one's own needs
MOST_CHARACTERS = 480
# of values that no setting takes
NEVER = ["float('nan')", "float('inf')", "-1", "10**400", "-10**400", "'x' * 10**6", "'9' * 5000",
         "[1, [2]]", "{'a': {}}", "object()",
         "b'1'", "'\\x1b[31mred'", "'\\u202egnp'", "{1, 2}", "print", "(x for x in ())", "loop",
         "Config", "1j", "['a'] * 10**6", "Rude()"]
NO_COUNT = [*NEVER, "0", "2.5", "True", "'many'", "None", "''"]
NO_NUMBER = [*NEVER, "True", "'many'", "''"]
NO_NAME = [*NEVER[:3], "5", "None", "['adamw']", "''", "'adamv' * 20", "'\\x1b[31mred'",
           "'x' * 10**6", "10**400", "object()", "loop", "True"]
NO_CONFIG = [*NO_NAME, "{'model': 1}", "ModelConfig()", "Config"]
NO_PLACE = ["''", "' '", "5", "['a']", "b'a'", "'x' * 300", "'x' * 5000", "'a\\0b'", "object()",
            "1.5", "'/dev/null'", "'/dev/null/x'", "{}"]


def each(template: str, names: str) -> list[str]:
    """`template` with each of `names` for its @."""
    return [template.replace("@", name) for name in names.split()]


# The ? of a call is one of the values beside it.
CONFIGS = [
    (each("Config(@=?)", "steps global_batch grad_accum_steps eval_batches keep_checkpoints"),
     NO_COUNT),
    (["Config(seed=?)"], [*NEVER, "2**63", "0.5", "True", "None"]),
    (each("Config(@=?)", "model optimizer schedule data memory"), NO_NAME),
    (["Config(transforms=?)"], [*NEVER, "[5]", "None"]),
    (["Config(version=?)"], [*NO_COUNT, "99"]),
    (each("Config(@=?)", "eval_every checkpoint_every"), [*NEVER, "0.5", "None"]),
    (["Config.from_dict(?)"], [*NO_NAME, "[1]"]),
    (["Config.from_dict({?: 1})"], ["-1", "None", "'x' * 10**6", "()", "'\\x1b[31m'"]),
    (["Config.from_dict({'model': ?})", "Config().replace({'model': ?})"], NO_NAME),
    (["Config().replace(?)"], [*NO_NAME, "[1]"]),
    (each("Config().replace({'@': ?})", "steps seed model.layers schedule.warmup_steps "
                                        "precision.telemetry_every"), NEVER),
    (["Config.from_yaml(?)"], [
        "5", "None", "b'a: 1'", "[1]", "'a: &a [x]\\nb: *a'", "'[' * 10**5", "'steps: ' + '9' * "
            "5000", "'model: {layers: 1\\n'",
        "'steps: 1\\nsteps: 2'", "'\\x00'", "'steps: 1:1:1'", "'steps: 2001-99-99'",
        "'? [a]\\n: 1'", "'model: [1]'", "'\\ud800'"]),
]
GROUPS = [
    (each("ModelConfig(@=?)", "layers width heads vocab context"), NO_COUNT),
    (each("ModelConfig(@=?)", "norm position mlp block attention init"), NO_NAME),
    (each("ModelConfig(@=?)", "norm_eps rope_theta rope_factor"), [*NO_NUMBER, "0"]),
    (["ModelConfig(bias=?)"], [*NEVER, "2", "None"]),
    (["ModelConfig(kv_heads=?)"], ["3", "0", "2.5", *NEVER]),
    (["ModelConfig(?)"], ["width=250", "heads=2**31-1", "head_dim=3, position='rope'"]),
    (["DataConfig(val_fraction=?)"], [*NO_NUMBER, "0", "1", "None"]),
    (["DataConfig(source=?)"], ["''", "' '", "5", "None", "[1]", "'x' * 5000", "'a\\0b'"]),
    (["SystemConfig(threads=?)"], [*NEVER, "0", "10**6", "True", "1.5"]),
    (["SystemConfig(device=?)"], [*NO_NAME, "'cuda:x'", "'cuda:\u00b2'", "'tpu'"]),
    (["SystemConfig(compile=?)"], NO_NAME[:-1]),
    (each("PrecisionConfig(@=?)", "recipe"), NO_NAME),
    (["PrecisionConfig(telemetry_every=?)"], [*NEVER, "0.5"]),
    (each("MemoryConfig(@=?)", "recompute cross_entropy param_dtype moment_format optimizer_state"),
     NO_NAME),
    (each("Layout(@=?)", "data shard tensor pipeline context"), NO_COUNT),
    (["Layout(zero=?)"], [*NEVER, "4", "1.5", "None"]),
]
ROWS = [
    (each("Config(optimizer={'@': ?})", "lr eps beta1 beta2 clip"), NO_NUMBER),
    (each("AdamWSettings(@=?)", "lr eps beta1 beta2 weight_decay"), NO_NUMBER),
    (["AdamWSettings(groups=?)"], ["5", "[1]", "'x'", "['a:b=c']", "None", "10**400",
                                   "['a:lr_scale=nan']"]),
    (["Config(optimizer={?: 1})"], ["'betas'", "5", "None", "'x' * 10**6"]),
    (each("DelayedSettings(@=?)", "history margin"), [*NEVER, "10**6", "0.5", "True"]),
    (["Config(memory={'recompute': {'name': 'block', 'every': ?}})"], NO_COUNT),
    (["Config(schedule={'name': 'cosine', 'final_lr_ratio': ?})"], [*NO_NUMBER, "1.5"]),
    (["LossScaledSettings(loss_scale=?)"], [*NO_NUMBER, "0", "1e300"]),
]
FORMULAS = [
    (["predict(?)", "plan(?, 1e9, devices=8)", "advise(?)"], NO_CONFIG),
    (["predict(Config(), ?)", "advise(Config(), ?)", "lpkit.preset(?)"], NO_NAME),
    (["predict(Config(), devices=?)", "plan(Config(), 1e9, devices=?)"], NO_COUNT[:-2]),
    (["predict(Config(), mfu=?)"], [*NO_NUMBER[:-1], "0", "2"]),
    (["predict(Config(), zero=?)"], [*NEVER, "4", "0.5"]),
    (["predict(Config(), price_per_hour=?)"], NO_NUMBER[:-1]),
    (each("predict(Config(), @=?)", "precision optimizer recompute"),
     ["5", "[1]", "'x' * 10**6", "'adamv'", "loop", "10**400", "''"]),
    (["plan(Config(), ?, devices=8)"], [*NO_NUMBER, "0", "None"]),
    (each("plan(Config(), 1e9, @=?)", "budget deadline_seconds price_per_hour"),
     [*NO_NUMBER[:-1], "0"]),
    (["plan(Config(), 1e9, devices=8, precisions=?)"],
     ["5", "[5]", "'bf61'", "['bf61']", "loop", "{'a': 1}"]),
    (["advise(Config(), base=?)"], ["5", "'bf61'", "[1]", "loop"]),
    (["advise(Config(), recipes=?)"], ["5", "[5]", "'mxfp9'", "['bf16']", "loop"]),
    (each("advise(Config(), @=?)", "seeds steps"), NO_COUNT),
    (["resolve('cpu-3m', ?)"], ["5", "[5]", "['steps']", "['steps=x']", "loop"]),
    (["resolve(?)"], [*NO_NAME, "'none.yaml'"]),
    (["machine_from_dict(?)"], [*NO_NAME, "{}", "{'memory_bytes': 1}"]),
    (["machine_from_dict({'memory_bytes': ?, 'bytes_per_second': 1e9, 'flops': {'bf16': 1e12}})"],
     NO_COUNT),
    (["machine_from_dict({'memory_bytes': 1e9, 'bytes_per_second': 1e9, 'flops': ?})"],
     [*NO_NAME, "{'bf61': 1}", "{'bf16': -1}"]),
]
RUNS = [
    (["lpkit.train(?)", "lpkit.start(?)", "lpkit.start_each({'a': ?})", "lpkit.predict_trace(?)",
      "lpkit.reconcile(?)", "prepare(?, 256)"],
     NO_CONFIG),
    (["lpkit.train(Config(), out=?)", "lpkit.start(Config(), out=?)", "lpkit.start_each({'a': "
        "Config()}, out=?)"], NO_PLACE),
    (["lpkit.train(?)", "lpkit.start(?)", "predict(?)", "advise(?)", "prepare(?)"],
     ["", "Config(), lr=1", "steps=5", "1, 2, 3, 4, 5, 6"]),
    (["lpkit.train(Config(), resume=?)"], [*NEVER, "2"]),
    (["lpkit.start_each(?)"], [*NO_NAME, "{}", "[]", "{5: Config()}"]),
    (["lpkit.Run.open(?)", "lpkit.sample(?)", "open_tokens(?)"], [*NO_PLACE, "'none'"]),
    (["lpkit.sample('none', tokens=?)"], NO_COUNT),
    (["lpkit.sample('none', temperature=?)"], NO_NUMBER),
    (["lpkit.sample('none', top_k=?)"], [*NEVER, "0"]),
    (["lpkit.sample('none', seed=?)"], [*NEVER, "2**63", "0.5"]),
    (["lpkit.sample('none', prompt=?)"], ["5", "None", "[1]", "b'a'"]),
    (["lpkit.predict_trace(Config(), ?)"], [*NO_COUNT, "3", "10**6"]),
    (["lpkit.predict_trace(Config(), device=?)"], NO_NAME),
    (["prepare(DataConfig(source='none'), ?)"], NO_COUNT),
    (["prepare(DataConfig(source='none'), 256, ?)", "prepare_into(?, DataConfig(source='none'), "
                                                    "256)"], NO_PLACE),
]
ROOMS = [CONFIGS, GROUPS, ROWS, FORMULAS, FORMULAS, RUNS, RUNS]


def drawn(seed: str, room: list[tuple[list[str], list[str]]]) -> str:
    draw = random.Random(seed)
    templates, values = draw.choice(room)
    return draw.choice(templates).replace("?", draw.choice(values))


def warm() -> None:
    global NAMES
    import lpkit
    import lpkit.measure.trace
    import lpkit.training.loop
    import lpkit.training.sampling
    from lpkit import config, datasets
    from lpkit.predict import predict
    from lpkit.predict.plan import plan
    from lpkit.presets import resolve
    from lpkit.techniques import layouts, machines, optimizers, recipes

    class Rude:
        def __repr__(self):
            raise KeyError("no words")

    loop: list = []
    loop.append(loop)
    NAMES = {**vars(config), **vars(optimizers), **vars(recipes), "Layout": layouts.Layout,
             "machine_from_dict": machines.from_dict,
             "lpkit": lpkit, "predict": predict, "plan": plan, "resolve": resolve,
             "advise": lpkit.advise, "loop": loop, "Rude": Rude,
             "prepare": datasets.prepare, "prepare_into": datasets.prepare_into,
             "open_tokens": datasets.open_tokens}


def trial(words: list[str]) -> int:
    """In the nursery: 0 for a sentence, which is then on standard output; 1 for none; 2 for another
    error."""
    from lpkit.errors import ConfigError
    from lpkit.training.runs import RunFailedError

    [line] = words
    tell_of_writes()
    try:
        result = eval(line, dict(NAMES))
        if line.startswith("lpkit.start"):
            result.result()
    except (ConfigError, RunFailedError) as error:
        print(error)
        return 0
    except Exception as error:
        # as Python says it, with what there is
        if isinstance(error, TypeError) and "; it takes " in str(error):
            print(error)
            return 0
        print(f"{type(error).__name__}: {error}")
        return 2
    print("nothing was raised")
    return 1


def complaints(code: int, printed: str, seconds: float, left: set[Path], wrote: str) -> list[str]:
    """What is wrong about how a wrong call ended."""
    printed = printed.removesuffix("\n")
    problems = {
        "hangs": seconds > SECONDS * patience(),
        "nothing raised": code == 1,
        "another error": code not in (0, 1),
        "not one sentence": "\n" in printed or not printed,
        "a long sentence": len(printed) > MOST_CHARACTERS,
        "control characters": not printed.replace("\n", "").isprintable(),
        "writes elsewhere": bool(wrote),
        "leaves something": bool(left),
    }
    return [what for what, so in problems.items() if so]


def trials(count: int, seed: int) -> list[str]:
    return [drawn(f"{seed} {i}", ROOMS[i % len(ROOMS)]) for i in range(count)]


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, home, slowest = Outcome(), folder / "cache", 0.0
    home.mkdir()
    with nursery(folder, f"{__name__}:trial", f"{__name__}:warm", HOME=str(home),
                 TMPDIR=str(home)) as forks:
        forks.lpkit("Config(steps=0)")      # leaves the files of every trial
        for line in trials(count, seed):
            before, begun = set(folder.rglob("*")), time.monotonic()
            code, seconds = forks.lpkit(line), time.monotonic() - begun
            left = {path for path in set(folder.rglob("*")) - before if home not in path.parents}
            outcome.tried += 1
            slowest = max(slowest, seconds)
            for what in complaints(code, forks.printed, seconds, left, forks.wrote):
                outcome.failed(what, f"{line} -> {code} {forks.printed.strip()!r:.300} "
                                     f"{forks.wrote or left or ''}")
    outcome.facts["slowest_seconds"] = round(slowest, 2)
    return outcome
