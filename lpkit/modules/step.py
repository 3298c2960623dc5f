"""Run a training step of any model on shapes only, in a copy of the model whose tensors have no
memory. Record the matmuls and the moved bytes of the forward pass, and all allocations of the
second update."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map_only

from lpkit.errors import ConfigError
from lpkit.kernels.scales import Scaled, stored_dtype
from lpkit.measure.tracking import Footprint, Tracker
from lpkit.modules.convert import Report, converted, head_names, recipe_of
from lpkit.modules.parts import optimizer
from lpkit.parallel.ranks import Ranks, shard_mesh
from lpkit.precision.backends import BACKENDS
from lpkit.precision.compute import autocast, compute_dtype
from lpkit.precision.linear import Arithmetic
from lpkit.predict.casts import why_emulated
from lpkit.predict.recipes import scale_bytes
from lpkit.techniques.formats import format_of
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import ALL, RECIPES, SCALES, Cast, Recipe

aten = torch.ops.aten
# matmul operation -> index of the argument that is its first operand
PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}
# These operations read only as many elements of their first argument as they return.
LOOK_UP = "embedding gather index index_select nll_loss_forward nll_loss2d_forward".split()
SCALE_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}    # by the bytes of one scale
# dtype of most parameters -> the precision whose speed is predicted without a recipe; else fp32
OWN_PRECISION = {torch.bfloat16: "bf16-pure", torch.float16: "bf16-pure"}
MULTIPLIES = "this machine has matmul instructions for these formats"
# name of a row of OPTIMIZERS -> the class of PyTorch that training loops of other libraries use
PYTORCHS = {"adamw": torch.optim.AdamW}
MakeLoss = Callable[[nn.Module, Any], Tensor]
# the name of a row of OPTIMIZERS, an optimizer of the model, or a function from parameters to an
# optimizer
Asked = str | torch.optim.Optimizer | Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Step:
    """A training step of a copy of the model. Use it inside `lpkit.measure.trace.fake_step`.

    model:     the copy of the model, whose tensors have shapes and no values
    copies:    parameter of the original model -> its copy
    heads:     names of the modules that compute logits
    priced_as: the row of PRECISIONS whose speed is predicted
    report:    the report of `convert`; None before it, or if the copy is not converted
    updater:   the optimizer of the copy
    """

    report: Report | None = None
    updater: torch.optim.Optimizer

    def __init__(self, model: nn.Module, batch: Any, optimizer: Asked, precision: str | None,
                 loss: MakeLoss | None):
        self.model, self.batch, self.copies = without_memory(model, batch, "cpu")
        self.loss, self.optimizer, self.precision = loss or loss_of, optimizer, precision
        self.heads = head_names(self.model)
        [(dtype, _)] = Counter(p.dtype for p in self.copies).most_common(1) or [(None, 0)]
        self.priced_as = precision or OWN_PRECISION.get(dtype, "fp32")
        self.around = nullcontext()
        if precision is not None:
            self.around = autocast(RECIPES[precision], torch.device("cpu"))

    def recorded(self) -> ForwardOperations:
        """Runs a forward and a backward pass, and returns the operations of the forward pass,
        without the casts of a recipe."""
        self.model.train()
        with Recorder(self.model, heads=self.heads) as recorder:
            self._backward()
        for p in self.model.parameters():
            p.grad = None
        return recorder.seen

    def convert(self, on: Machine, keep: Any, pad: bool) -> None:
        """Convert the copy in place, as `lpkit.convert` would convert the model on machine `on`.
        Sets `report`."""
        name, row = recipe_of(self.precision, pad)
        why = why_emulated(row, on)
        by = BACKENDS["emulated"] if why else OnShapes()
        rows = converted(self.model, name, row, by, keep)
        self.report = Report(name, "emulated" if why else "scaled_mm", why or MULTIPLIES, rows)

    def watched(self, ranks: Ranks, foreach: bool) -> Footprint:
        """Runs two updates and returns the allocations of the second update.

        ranks:   the ranks over which the copy is sharded by FSDP2; one rank: not sharded
        foreach: as for `make_optimizer`"""
        names = {p: name for name, p in self.model.named_parameters()}
        if ranks.world > 1:
            compute = compute_dtype(RECIPES[self.precision]) if self.precision else None
            # no autocast: FSDP gathers the weights in the dtype of the matmuls
            self.around = nullcontext()
            _shard(self.model, shard_mesh(ranks), MixedPrecisionPolicy(
                param_dtype=compute, reduce_dtype=torch.float32))
        # sharding replaced the parameters, so look the copies up again by their names
        now = dict(self.model.named_parameters())
        copies = {p: now[names[copied]] for p, copied in self.copies.items()}
        self.updater = make_optimizer(self.optimizer, self.model, copies, foreach)
        self._update()
        with Tracker(self.model, self.updater, heads=self.heads) as tracker:
            tracker.hold(tree_leaves(self.batch), "batch")
            self._update()
        return tracker.footprint(where="traced on shapes alone")

    def _backward(self) -> Tensor:
        """Run a forward and a backward pass, and return the loss. Raises ConfigError for any error
        of the model."""
        try:
            with self.around:
                loss = self.loss(self.model, self.batch)
        except ConfigError:
            raise
        except Exception as error:      # a model may raise anything
            shapes = type(error).__module__.startswith("torch._subclasses")
            hint = "; a size depends on values, and a prediction has only shapes" * shapes
            raise ConfigError(f"the model raised {type(error).__name__} on this batch: "
                              f"{str(error).strip().partition(chr(10))[0]}{hint}") from error
        if not loss.requires_grad:
            raise ConfigError("the loss has no gradient: every parameter of the model is frozen")
        loss.backward()
        return loss

    def _update(self) -> None:
        """Run a forward pass, a backward pass and a step of the optimizer."""
        self.updater.zero_grad()
        # as in a training loop, the variable keeps the loss alive during the optimizer's step
        _loss = self._backward()
        self.updater.step()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Call the model on a batch and return the scalar loss: the field `loss` of the output, or the
    output itself, or the first element of the output. If the batch is a mapping, its items are
    keyword arguments; if it is a tuple or a list, its elements are positional arguments. Raises
    ConfigError if there is no scalar loss."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    first = out[0] if isinstance(out, tuple | list) and out else out
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    loss = first if loss is None else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else (
            f"{type(out).__name__} without a loss")
        raise ConfigError(f"the model returned {shape}, but a training step needs a scalar loss; "
                          f"put labels into the batch, or give loss=lambda model, batch: ...")
    return loss.view(())


def make_optimizer(requested: Asked, model: nn.Module, copies: Mapping[nn.Parameter, nn.Parameter],
                   foreach: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer of the copied model, with the groups and settings of `requested`.

    requested: what the user gave as `optimizer`
    copies:    parameter of the original model -> its copy
    foreach:   let PyTorch's optimizers update all parameters in few kernels, which is their default
               on a GPU and allocates more temporaries

    Raises ConfigError.
    """
    trained = [p for p in copies.values() if p.requires_grad]
    if isinstance(requested, str):
        kind = PYTORCHS.get(requested)
        return kind(trained, lr=1e-3, foreach=foreach) if kind else optimizer(model, requested)
    if not isinstance(requested, torch.optim.Optimizer):
        return requested(trained)
    groups = []
    for group in requested.param_groups:
        if any(p not in copies for p in group["params"]):
            raise ConfigError("the optimizer updates a parameter that the model does not have; "
                              "give the optimizer of this model")
        copied = {**group, "params": [copies[p] for p in group["params"]]}
        if foreach and copied.get("foreach", 0) is None and not copied.get("fused"):
            copied["foreach"] = True
        groups.append(copied)
    # only the defaults that the class takes as arguments: AdamW's defaults have a further key
    takes = inspect.signature(type(requested)).parameters
    settings = {key: requested.defaults[key] for key in takes & requested.defaults.keys()}
    return type(requested)(groups, **settings)


def without_memory(model: nn.Module, batch: Any, device: str
                   ) -> tuple[nn.Module, Any, dict[nn.Parameter, nn.Parameter]]:
    """Copy a model and a batch to tensors that have shapes and dtypes but no memory. Call it inside
    a FakeTensorMode. Tensors that are shared in the original are shared in the copy. All copies,
    also of tensors on the meta device, are on `device`. Returns (copied model, copied batch,
    {parameter: its copy})."""
    # id of an original tensor -> its copy; `copy.deepcopy` takes it as its memo, so it uses these
    # copies and does not copy the originals
    known: dict[int, Any] = {}

    def like(t: Tensor) -> Tensor:
        """Return the copy of `t`; the same object for the same tensor."""
        if id(t) not in known:
            known[id(t)] = torch.empty_like(t.detach(), device=device)
            if isinstance(t, nn.Parameter):
                known[id(t)] = nn.Parameter(known[id(t)], requires_grad=t.requires_grad)
        return known[id(t)]

    copies = {p: like(p) for p in model.parameters()}
    for module in model.modules():
        tree_map_only(Tensor, like, [dict(module._buffers), vars(module)])
    return copy.deepcopy(model, known), tree_map_only(Tensor, like, batch), copies


# ---- matmuls and memory traffic of a forward pass

@dataclass
class ForwardOperations:
    """The operations of a model's forward pass, and how often each was called.

    products:   matmuls (M, K) times (K, N), by (module, M, N, K, is the weight trained)
    attentions: attention by (batch times heads, queries, keys, dimensions of a query, dimensions of
                a value, causal). A batched matmul counts as half of an attention, with 0
                dimensions of a value
    moved:      bytes that all other operations read and write, by "is in a block"
    kernels:    number of operations, by "is in a block"
    """

    products: Counter[tuple[str, int, int, int, bool]] = field(default_factory=Counter)
    attentions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    moved: Counter[bool] = field(default_factory=Counter)
    kernels: Counter[bool] = field(default_factory=Counter)

    def flops(self, *, backward: bool) -> int:
        """Returns the FLOPs of the forward pass, or with `backward` those of both passes. The
        backward pass has two matmuls for each matmul of the forward pass (the gradients of both
        operands), or one if the weight is frozen.

        >>> seen = ForwardOperations(products=Counter({("mlp", 8, 4, 2, True): 1}))
        >>> seen.flops(backward=False), seen.flops(backward=True)
        (128, 384)
        """
        products = sum(2 * M * N * K * calls * (1 + backward * (1 + trained))
                       for (_, M, N, K, trained), calls in self.products.items())
        return products + sum(2 * B * T * S * (E + V) * calls * (1 + 2 * backward)
                              for (B, T, S, E, V, _), calls in self.attentions.items())


class Recorder(Tracker):
    """A Tracker that also records the operations of the forward pass in `seen`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seen, self.by_name = ForwardOperations(), dict(self.model.named_modules())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented and self._where()[0] == "forward":
            self._note(func, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Record one operation `func`. `out`: its result."""
        name, packet = self._at_work, func.overloadpacket
        in_block = any(part.isdigit() for part in name.split("."))
        self.seen.kernels[in_block] += func.namespace == "aten" and not func.is_view
        if packet in PRODUCTS:
            a, b = args[PRODUCTS[packet]:][:2]
            *batch, M, K = a.shape
            if batch:       # a batched matmul: one of the two matmuls of attention
                self.seen.attentions[math.prod(batch), M, b.shape[-1], K, 0, False] += 1
            else:
                self._product(name, M, b.shape[1], K)
        elif packet is aten.convolution:
            weight = args[1]
            self._product(name, out.numel() // out.shape[1], len(weight), weight[0].numel())
        elif "scaled_dot_product" in func.__name__ and "backward" not in func.__name__:
            q, k, v = args[:3]
            causal = next((bool(argument) for argument, spec in zip(args, func._schema.arguments)
                           if spec.name == "is_causal"), kwargs.get("is_causal", False))
            B, T, E = q.shape[0] * q.shape[1], *q.shape[2:]
            self.seen.attentions[B, T, k.shape[2], E, v.shape[3], causal] += 1
        elif func.namespace != "prim" and not (
                packet is aten._to_copy and self._is_weight(args[0])):
            # a look-up reads as many bytes as it returns: count the output in place of the table
            args = (out, *args[1:]) if packet.__name__ in LOOK_UP else args
            # storages that the operation writes, and that it reads
            written, read = ({t.untyped_storage()._cdata: t for t in tree_leaves(tree)
                           if isinstance(t, Tensor)} for tree in (out, (args, kwargs)))
            # a view neither changes a tensor nor makes a new storage, so it moves no bytes
            if (func._schema.is_mutable or packet.__name__ in LOOK_UP
                    or written.keys() - read.keys()):
                self.seen.moved[in_block] += sum(
                    t.nbytes for t in (*written.values(), *read.values()))

    def _is_weight(self, t: Any) -> bool:
        """Return True if `t` is a weight or a copy of a weight in another dtype."""
        storage = self._find(t) if isinstance(t, Tensor) else None
        return storage is not None and storage.row in ("weights", "weight copies")

    def _product(self, name: str, M: int, N: int, K: int) -> None:
        """Record a matmul of the module `name`."""
        weight = getattr(self.by_name.get(name), "weight", None)
        trained = not isinstance(weight, nn.Parameter) or weight.requires_grad
        self.seen.products[name, M, N, K, trained] += 1


# ---- operands in the formats that hardware multiplies

class OnShapes(Arithmetic):
    """A backend that allocates the cast operands and the outputs of `scaled_mm`, and computes
    nothing. So a trace on a CPU counts the bytes that a GPU with these formats allocates."""

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        return ""

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, both: bool = False,
             **how: Any) -> Scaled:
        return replace(self._one(x, cast), turned=self._one(x.T, cast) if both else None)

    def _one(self, x: Tensor, cast: Cast) -> Scaled:
        """Return an operand (rows, columns), with its scales in blocks, without values."""
        (rows, columns), (high, wide) = x.shape, cast.block
        dtype = stored_dtype(format_of(cast.format))
        packed = 2 if cast.bits == 4 else 1
        size = -(-rows // (high or rows)), -(-columns // (wide or columns))
        return Scaled(
            data=x.new_empty(rows, columns // packed, dtype=dtype),
            scale=x.new_empty(size, dtype=SCALE_DTYPES[scale_bytes(cast) or 4]),
            tensor=x.new_empty((), dtype=torch.float32) if SCALES[cast.scale].levels > 1 else None,
            amax=x.new_empty(1, 1, dtype=torch.float32),
            nonfinite=x.new_empty((), dtype=torch.int64))

    def taken(self, scaled: Scaled, cast: Cast, dtype: torch.dtype, *,
              both: bool = False) -> Scaled:
        return scaled

    def shares(self, cast: Cast) -> bool:
        return cast.transposes or (ALL not in cast.block and cast.rounding != "stochastic")

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        return a.data.new_empty(len(a.data), len(b.data), dtype=dtype)


# ---- blocks

def blocks_of(model: nn.Module) -> int:
    """Return the number of blocks: the modules in the outermost ModuleLists, such as those of an
    encoder and of a decoder together. 1 if there is no ModuleList."""
    return sum(map(len, outermost_lists(model))) or 1


def outermost_lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield the ModuleLists that are not inside another ModuleList."""
    inside = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(inside):
            inside += (f"{name}." * bool(name),)
            yield module


def in_block(name: str) -> bool:
    """Return True if a module or parameter of this name is in a block: model.layers.3.mlp."""
    return any(part.isdigit() for part in name.split("."))


def _shard(model: nn.Module, mesh: Any, policy: MixedPrecisionPolicy) -> None:
    """Shard a model by FSDP2 as most training loops do: each block of the outermost lists, then the
    rest of the model."""
    for blocks in outermost_lists(model):
        for block in blocks:
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
