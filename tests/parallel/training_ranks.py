"""What ranks do in tests of several; each is `f(place, job)`."""

import hashlib
import itertools
import math
import resource
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lessons.rows.cast_gather  # noqa: F401  adds a row
from lpkit import measure
from lpkit.config import Config
from lpkit.contracts import Batch, Choice
from lpkit.errors import ConfigError
from lpkit.kernels.choose import choose
from lpkit.measure import ranks as doctor_ranks
from lpkit.measure.tracking import MessageCount, Tracker
from lpkit.parallel.cut import Cut
from lpkit.parallel.meeting import joined
from lpkit.parallel.processes import Place
from lpkit.precision.linear import scaled_linears
from lpkit.techniques.layouts import REDUCTIONS
from lpkit.training import checkpoint
from lpkit.training.build import initial_model
from lpkit.training.data import Share
from lpkit.training.rank import train
from lpkit.training.training import RandomTokens, Training
from tests.gpu.fake_gpus import gpus, nccl
from tests.techniques import toys


def _meet(place: Place, config: Config):
    """Ranks meet, as often as they like."""
    torch.set_num_threads(1)
    place.store += "-next"
    return joined(config, local_rank=place.local_rank, **place.among)


def chain(place: Place, job: dict) -> None:
    """A run that goes on."""
    torch.set_num_threads(1)
    train(place, job)


def chains(place: Place, job: dict) -> None:
    """One run after the other: each of job["runs"] has `out`, `resume` and its own settings."""
    torch.set_num_threads(1)
    config, store = Config.from_dict(job["config"]), place.store
    for i, run in enumerate(job["runs"]):
        place.store = f"{store}-{i}"
        train(place, run | {"config": config.replace(run["settings"]).to_dict()})


def each(place: Place, job: dict) -> list:
    """What job["of"] returns with each of job["configs"], in one start of processes."""
    return [globals()[job["of"]](place, job | {"config": config}) for config in job["configs"]]


def on_gpus(place: Place, job: dict) -> dict:
    """As a rank of several GPUs trains: the losses, and what it did with its GPU."""
    config = Config.from_dict(job["config"])
    with gpus(job["gpus"]) as fake, nccl() as asked, _meet(place, config) as ranks:
        begun = list(fake.current_devices)
        training = Training.build(config, ranks=ranks)
        losses = [training.update(step).loss.item() for step in range(3)]
        devices = {str(p.device) for p in training.sharding.owned.values()}
        return {"losses": losses, "backends": asked, "mesh": ranks.device,
                "set": [index for _, index in fake.current_devices], "first": begun[0][1],
                "devices": sorted(devices), "races": fake.races}


def doctors(place: Place, job: dict) -> list:
    """A program of the doctor's over NCCL."""
    with gpus(place.world) as fake, nccl() as asked:
        doctor_ranks.run(place, {"program": job["program"], "backend": "nccl"})
        return [fake.current_device(), *asked]


def beside_ddp(place: Place, job: dict) -> list[list]:
    """By reduction: the largest distance between our averaged gradients and
    DistributedDataParallel's, of their largest, and how many all-reduces gradients take. Then all
    ranks have the same weights."""
    results = []
    for reduction in job["reductions"]:
        config = Config.from_dict(job["config"]).replace({"parallel.reduction": reduction})
        with _meet(place, config) as ranks:
            training = Training.build(config, ranks=ranks)
            batch = training.batch(0)
            model = nn.parallel.DistributedDataParallel(training.copy().model)
            training.forward_backward(batch)
            for i, piece in enumerate(batch.chunk(config.micro_batches)):
                model.require_backward_grad_sync = i == config.micro_batches - 1
                loss = nn.functional.cross_entropy(model(piece.tokens).flatten(0, 1),
                                                   piece.targets.flatten())
                (loss / config.micro_batches).backward()
            ours = dict(training.model.named_parameters())
            apart = max(((ours[name].grad - p.grad).abs().max() / p.grad.abs().max()).item()
                        for name, p in model.module.named_parameters())
            results.append([apart, len(training.sharding.messages.buckets)])
            training.update(0)
            for p in training.model.parameters():
                everybody = [torch.empty_like(p) for _ in range(ranks.world)]
                dist.all_gather(everybody, p.detach())
                assert all(torch.equal(theirs, p) for theirs in everybody)
    return results


def losses(place: Place, job: dict) -> list[float]:
    """Returns those of the first update in each of job["layouts"], settings beside those of the
    config."""
    first_losses = []
    for layout in job["layouts"]:
        config = Config.from_dict(job["config"]).replace(layout)
        with _meet(place, config) as ranks:
            training = Training.build(config, ranks=ranks)
            first_losses.append(training.update(0).loss.item())
            assert math.isfinite(training.update(1).loss.item())
    return first_losses


def beside_parallelize_module(place: Place, job: dict) -> dict[str, float]:
    """Returns, by parameter, how far its gradient is from that of PyTorch's parallelize_module over
    the same ranks, of the largest."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        training = Training.build(config, ranks=ranks)
        whole = initial_model(config, "sdpa")
        columns = {"attention.qkv": ColwiseParallel(), "mlp.up": ColwiseParallel()}
        rows = {"attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        mesh = init_device_mesh("cpu", (config.parallel.tensor,))
        for block in whole.blocks:
            names = dict(block.named_modules())
            fused = "mlp.gate_up" in names      # left whole, and so is what comes after it
            plan = {name: style for name, style in (columns | rows).items() if name in names
                    and not (fused and "mlp" in name)}
            parallelize_module(block, mesh, plan)
            block.attention.G //= config.parallel.tensor
        batch = training.batch(0)
        training.forward_backward(batch)
        nn.functional.cross_entropy(whole(batch.tokens).flatten(0, 1),
                                    batch.targets.flatten()).backward()
        distances = {}
        for name, p in whole.named_parameters():
            due, g = p.grad, training.sharding.owned[name].grad
            due, g = (t.full_tensor() if isinstance(t, (DTensor, Cut)) else t
                      for t in (due, training.sharding.whole(name, g)))
            if "q_norm" in name or "k_norm" in name:        # theirs has met this rank's heads alone
                dist.all_reduce(due)
            distances[name] = ((g - due).abs().max() / due.abs().max()).item()
        return distances


def late(place: Place, job: dict) -> list[list[float]]:
    """In each layout: of an update in which rank 1 sleeps before its backward, once all others are
    in theirs: seconds in waits, those that were over when backward was, and those of the whole
    update. Buckets are small, so that there are several."""
    REDUCTIONS["overlapped"] = replace(REDUCTIONS["overlapped"], bucket_bytes=1 << 12)
    return [_late(place, Config.from_dict(config), Path(job["folder"]) / str(i), job["seconds"])
            for i, config in enumerate(job["layouts"])]


def _late(place: Place, config: Config, folder: Path, seconds: float) -> list[float]:
    folder.mkdir(exist_ok=True)
    with _meet(place, config) as ranks:
        training = Training.build(config, ranks=ranks)
        training.update(0)

        def meets(phase: str):
            if phase == "backward" and ranks.rank != 1:
                (folder / str(ranks.rank)).touch()
            elif phase == "backward":
                while len(list(folder.iterdir())) < ranks.world - 1:
                    time.sleep(0.001)
                time.sleep(seconds)
            return nullcontext()

        in_backward, reduce = [], training.sharding.reduce
        training.sharding.reduce = lambda: in_backward.append(ranks.waits.seconds) or reduce()
        began = time.perf_counter()
        training.update(1, phases=meets)
        return [ranks.waits.seconds, *in_backward, time.perf_counter() - began]


def differs(place: Place, job: dict) -> None:
    with _meet(place, Config.from_dict(job["config"]).replace({"seed": place.rank})):
        pass


def decayed(place: Place, job: dict) -> list[str]:
    """The names of the parameters that this rank decays."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        training = Training.build(config, ranks=ranks, data=RandomTokens(config))
        names = {p: name for name, p in training.sharding.owned.items()}
        return sorted(names[p] for p in training.optimizer.param_groups[0]["params"])


def weights_and_zeros(place: Place, job: dict) -> list[float]:
    """Loss and gradient norm of a weighted batch, where one rank has less to say."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        whole = weighted(config)

        class Drawn:
            def batch(self, step):
                return whole

        training = Training.build(config, ranks=ranks,
                                  data=Share(Drawn(), ranks, config.global_batch))
        done = training.update(0)
        return [done.loss.item(), done.grad_norm.item(), training.evaluate()]


def draws(place: Place, job: dict) -> None:
    """Updates with batches of as many sequences as job["sequences"][rank] says, one after the
    other."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        each = iter(job["sequences"][place.rank])

        class Drawn:
            def batch(self, step):
                tokens = torch.zeros(next(each), config.model.context, dtype=torch.int64)
                return Batch(tokens, tokens)

        training = Training.build(config, ranks=ranks,
                                  data=Share(Drawn(), ranks, config.global_batch))
        for step in range(2):
            training.update(step)


def weighted(config: Config) -> Batch:
    rng = torch.Generator().manual_seed(1)
    shape = config.global_batch, config.model.context
    tokens, targets = (torch.randint(config.model.vocab, shape, generator=rng) for _ in range(2))
    return Batch(tokens, targets,
                 weights=(torch.rand(shape, generator=rng) > torch.linspace(0.1, 0.9, shape[0])[:,
                     None]).float())


def gathers(place: Place, job: dict) -> dict:
    """Two updates with each way to gather weights, from the same start: losses, gradients' digest,
    messages of the first update, and whether a state that was saved is gone on from."""
    results = {}
    for gathered in job["gathered"]:
        config = Config.from_dict(job["config"]).replace({"parallel.gathered": gathered})
        with _meet(place, config) as ranks:
            training = Training.build(config, ranks=ranks)
            with MessageCount() as count:
                training.update(0)
            saved = {name: _whole(t).clone() if isinstance(t, (torch.Tensor, Cut)) else t
                     for name, t in training.state_dict().items()}
            assert all(t.dtype == torch.float32 for name, t in saved.items()
                       if name.startswith("model/"))
            second = training.update(1)
            after = _weights(training)
            evaluated = training.evaluate()
            other = Training.build(config, ranks=ranks)
            other.load_state_dict(saved)
            again = other.update(1)
            assert again.loss == second.loss and torch.equal(_weights(other), after)
            results[gathered] = [second.loss.item(), second.grad_norm.item(), evaluated,
                                 _digest(after),
                                 sorted([*message, times] for message, times in count.sent.items())]
    return results


def _weights(training: Training) -> torch.Tensor:
    """Whole ones."""
    state = training.state_dict()
    return _flat(state[f"model/{name}"] for name in training.sharding.shapes
                 if f"model/{name}" in state)


def _flat(tensors) -> torch.Tensor:
    return torch.cat([_whole(t).detach().flatten() for t in tensors])


def digest_of(tensors) -> str:
    return _digest(_flat(tensors))


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, Cut) else t


def _digest(t: torch.Tensor) -> str:
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def agreed(place: Place, job: dict) -> list[str]:
    """Digests, in this order: of the state of the casts that all must have alike, of the weights,
    of what is drawn."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        training = Training.build(config, ranks=ranks)
        for step in range(2):
            training.update(step)
        layers = list(scaled_linears(training.model))
        state = [t.flatten().float() for layer in layers for name, t in layer.state_dict().items()
                 if name in ("amax_history", "draws")]
        keys = ([layer.keys.flatten() for layer in layers if layer.recipe.stochastic]
                or [torch.zeros(1)])
        assert not layers[0].recipe.delayed or layers[0].amax_history.any()
        return [_digest(torch.cat(t)) for t in (state, [_weights(training)], keys)]


def overflows(place: Place, job: dict) -> list:
    """Of an update in which rank 1 alone overflows, and of the next: whether weights moved, the
    loss scale, the loss."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        training = Training.build(config, ranks=ranks)
        results = []
        for factor in (job["factor"], 1.0):
            before, mine = _weights(training), factor if ranks.rank == 1 else 1.0
            loss = lambda model, batch, mine=mine: training.objective(model, batch) * mine
            done = replace(training, objective=loss).update(0)
            scale = training.scaler.scale.item() if training.scaler else 0
            results += [not torch.equal(before, _weights(training)), scale,
                        math.isfinite(done.loss.item()),
                        math.isfinite(done.grad_norm.item())]
        return results


def inf_in_a_row(place: Place, job: dict) -> list:
    """ZeRO 1: what arrives in the rows of rank 0 alone is infinite."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        training = Training.build(config, ranks=ranks)
        if ranks.rank == 1:
            training.model.embed.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]),
                math.inf))
        before = _weights(training)
        training.update(0)
        return [torch.equal(before, _weights(training)), training.scaler.scale.item()]


def compiled(place: Place, job: dict) -> list[list[float]]:
    """Losses and gradient norms of two updates, and gradients in full: traced, without code, and
    not. And how often a graph broke."""
    config, plain, results = Config.from_dict(job["config"]), torch.compile, []
    torch.compile = lambda f, **options: plain(f, **options | {"backend": "aot_eager"})
    counters.clear()
    for compile in (True, False):
        with _meet(place, config) as ranks:
            training = Training.build(config.replace({"system.compile": compile}), ranks=ranks)
            done = [training.update(step) for step in range(2)]
            training.forward_backward(training.batch(0))
            grads = [p.grad.flatten() for p in training.sharding.owned.values()]
            results.append([number.item() for update in done
                            for number in (update.loss, update.grad_norm)])
            results.append(torch.cat(grads).tolist())
    return [*results, sum(counters["graph_break"].values())]


def races(place: Place, job: dict) -> dict:
    """Of what this rank was asked to choose, what a layer then calls, and what it raised where the
    first one cannot choose."""
    config, asked = Config.from_dict(job["config"]), []
    with _meet(place, config) as ranks:
        def watched(name: str, *given, **how):
            asked.append(name)
            return choose(name, *given, **how)

        with patch("lpkit.execution.kernels.choose", watched):
            training = Training.build(config, data=RandomTokens(config), ranks=ranks)
        used = ["rms-norm", training.decisions.choices["kernel:rms-norm"].used,
                training.model.blocks[0].norm1.normalise.__name__]
        with patch("lpkit.execution.kernels.choose", side_effect=ConfigError("planted")):
            try:
                Training.build(config, data=RandomTokens(config), ranks=ranks)
            except ConfigError as error:
                return {"asked": asked, "used": used, "raised": f"ConfigError: {error}"}


def optimizers_race(place: Place, job: dict) -> list:
    """What of the optimizer this rank raced, and what it runs, where each would find another
    version the fastest."""
    config, asked = Config.from_dict(job["config"]), []

    def choose_by_rank(name: str, *_, **__):
        asked.append(name)
        used = ("reference", "triton")[place.among["rank"]]
        return SimpleNamespace(choice=Choice(asked="auto", used=used, why="the fastest here"))

    with _meet(place, config) as ranks, patch("lpkit.optim.one_pass.choose", choose_by_rank):
        optimizer = Training.build(config, data=RandomTokens(config), ranks=ranks).optimizer
        return [asked, optimizer.choices["kernel:lion"].used,
                all(rule.one_pass is None for rule in optimizer.rule_of.values())]


def counted(place: Place, job: dict) -> list:
    """What the second update sent, as data and as control, and what this rank held, in all and by
    row."""
    config = Config.from_dict(job["config"])
    with _meet(place, config) as ranks:
        # gloo's own thread lets a tensor go a moment after the wait for it, which counts as held
        ranks.waits.tell = lambda waits: waits or time.sleep(0.01)
        measured = measure.memory(config, ranks=ranks)
        bench = measure.Bench(config, ranks=ranks)
        with MessageCount() as count:
            bench.train()
        assert count.sent == measured.messages
        as_lists = [[[*message, times] for message, times in sent.items()]
                    for sent in (count.sent, count.control)]
        return [*as_lists, measured.peak_bytes, measured.rows]


def starts(place: Place, job: dict) -> list:
    """Of each layout: the weights' digest, the most that building held, over the weights' bytes,
    and the ranks of a shard."""
    results = []
    for layout in job["layouts"]:
        config = _sharded(job, **layout)
        with _meet(place, config) as ranks:
            training, peak = _watched(partial(Training.build, config, data=RandomTokens(config),
                ranks=ranks))
            weights = _weights(training)
            results.append([_digest(weights), peak / weights.nbytes, config.parallel.shard])
    return results


def _sharded(job: dict, **layout) -> Config:
    return Config.from_dict(job["config"]).replace(
        {f"parallel.{key}": value for key, value in layout.items()})


def _watched(work):
    """What it returned, and the most bytes that tensors made by it had at once."""
    with Tracker(nn.Module()) as tracker:
        done = work()
    return done, tracker.footprint().peak_bytes


def saves(place: Place, job: dict) -> list:
    config = _sharded(job, shard=job["shard"])
    with _meet(place, config) as ranks:
        training = Training.build(config, data=RandomTokens(config), ranks=ranks)
        training.update(0)
        state = training.state_dict()
        tensors = {name: t for name, t in state.items() if isinstance(t, (torch.Tensor, Cut))}
        numbers = {name: t for name, t in state.items() if name not in tensors}
        checkpoint.save(Path(job["out"]), 1, tensors, {"optimizer": numbers}, keep=1)
        return [_state_digest(training)]


def goes_on(place: Place, job: dict) -> list:
    """The state's digest, and the most that building and reading held, over the weights' bytes."""
    config = _sharded(job, shard=job["shard"])
    with _meet(place, config) as ranks:
        def work():
            training = Training.build(config, data=RandomTokens(config), ranks=ranks)
            loaded, _ = checkpoint.load_latest(Path(job["out"]), blank=training.blank)
            training.load_state_dict(loaded.tensors | loaded.state["optimizer"])
            return training

        training, peak = _watched(work)
        return [_state_digest(training), peak / _weights(training).nbytes]


def _state_digest(training: Training) -> str:
    return digest_of(_whole(t).double() for name, t in sorted(training.state_dict().items())
                     if isinstance(t, (torch.Tensor, Cut)) and not name.startswith("rng/"))


def out_of_memory(place: Place, job: dict) -> None:
    """A run whose rank `job["rank"]` meets the end of memory in its third update: planted, or,
    with `job["room_bytes"]`, because it may have no more than that beyond what it has."""
    torch.set_num_threads(1)
    updates, plain = itertools.count(1), Training.forward_backward

    def forward_backward(self, batch, **how):
        if next(updates) == 3 and place.rank == job["rank"]:
            if not job["room_bytes"]:
                raise MemoryError
            limit = psutil.Process().memory_info().vms + job["room_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            batch = Batch(*(t.repeat(64, 1) for t in batch.tensors))
        return plain(self, batch, **how)

    with patch.object(Training, "forward_backward", forward_backward):
        train(place, job)


def toys_train(place: Place, job: dict) -> list:
    """Updates by techniques of tests/techniques/toys.py in one layout after another: losses, whole
    weights, and whether half of the way goes on from what was saved."""
    toys.add()
    results = []
    for layout in job["layouts"]:
        config = Config.from_dict(job["config"]).replace(layout)
        with _meet(place, config) as ranks:
            results.append(toys.trained(config, ranks))
    return results
