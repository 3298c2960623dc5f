"""One process multiplies the parts of each matrix one after the other, as tensor ranks do at once:
the definition of what those compute, with no message and nothing of lpkit.parallel.tensor."""

import torch
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.nn.transformer import Transformer

# by Linear: whether rows or columns are cut, and how many matrices lie one after the other in it
CUT = {"attention.qkv": ("rows", 1), "attention.out": ("columns", 1), "mlp.up": ("rows", 1),
       "mlp.gate_up": ("rows", 2),
       "mlp.down": ("columns", 1)}


class Parts(nn.Module):
    """A Linear in `count` parts. Those of rows make the features of each rank; those of columns a
    summand each, and the first has the bias."""

    def __init__(self, linear: nn.Linear, side: str, matrices: int, count: int):
        super().__init__()
        self.side, self.matrices, self.count = side, matrices, count
        self.parts = nn.ModuleList()
        for i in range(count):
            if side == "rows":
                w, b = (None if t is None else self._rows(t, i)
                        for t in (linear.weight, linear.bias))
            else:
                w, b = linear.weight.chunk(count, 1)[i], linear.bias if i == 0 else None
            part = nn.Linear(w.shape[1], w.shape[0], bias=b is not None)
            part.weight = nn.Parameter(w.detach().clone())
            if b is not None:
                part.bias = nn.Parameter(b.detach().clone())
            self.parts.append(part)

    def _rows(self, t: Tensor, i: int) -> Tensor:
        return torch.cat([matrix.chunk(self.count)[i] for matrix in t.chunk(self.matrices)])

    def forward(self, x: Tensor) -> Tensor:
        if self.side == "columns":
            first, *others = (part(features) for part, features
                              in zip(self.parts, x.chunk(self.count, -1)))
            return sum(others, first)
        if not hasattr(self.parts[0], "recipe") and torch.is_autocast_enabled("cpu"):
            # once: gradients of all parts meet in it
            x = x.to(torch.get_autocast_dtype("cpu"))
        return self._in_order([part(x).chunk(self.matrices, -1) for part in self.parts], -1)

    def _in_order(self, by_part: list, dim: int) -> Tensor:
        return torch.cat([torch.cat(of_matrix, dim) for of_matrix in zip(*by_part)], dim)

    def whole(self) -> dict[str, Tensor]:
        weights = [part.weight.detach() for part in self.parts]
        if self.side == "columns":
            tensors = {"weight": torch.cat(weights, 1)}
            return (tensors if self.parts[0].bias is None
                    else tensors | {"bias": self.parts[0].bias.detach()})
        tensors = {"weight": self._in_order([w.chunk(self.matrices) for w in weights], 0)}
        if self.parts[0].bias is not None:
            tensors["bias"] = self._in_order([part.bias.detach().chunk(self.matrices)
                for part in self.parts], 0)
        return tensors


class HeadParts(nn.Module):
    """A head in parts, whose weight embeddings may share."""

    def __init__(self, head: nn.Linear, count: int):
        super().__init__()
        self.weight, self.count = head.weight, count

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        return torch.cat([nn.functional.linear(x, w) for w in self.weight.chunk(self.count)], -1)


class Tokens(nn.Module):
    """A Linear that multiplies the tokens of each of `count` context ranks apart, an early and a
    late chunk of each sequence, so that a scale is of those alone."""

    def __init__(self, linear: nn.Linear, count: int):
        super().__init__()
        self.linear, self.count = linear, count

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(2 * self.count, 1)
        ranks = [self.linear(torch.cat([chunks[i], chunks[-1 - i]], 1)).chunk(2, 1)
                 for i in range(self.count)]
        return torch.cat([early for early, _ in ranks] + [late for _, late in reversed(ranks)], 1)


def cut_tokens(model: nn.Module, count: int) -> nn.Module:
    for block in model.blocks:
        for name in CUT:
            parent, _, leaf = name.partition(".")
            if hasattr(of := getattr(block, parent), leaf):
                setattr(of, leaf, Tokens(getattr(of, leaf), count))
    return model


def cut(model: nn.Module, count: int) -> nn.Module:
    for block in model.blocks:
        for name, (side, matrices) in CUT.items():
            parent, _, leaf = name.partition(".")
            if hasattr(of := getattr(block, parent), leaf):
                setattr(of, leaf, Parts(getattr(of, leaf), side, matrices, count))
    return model


def whole_weights(model: nn.Module, config: ModelConfig) -> Tensor:
    """All of them in the order of their names, one after the other."""
    tensors = {name.replace(".linear.", "."): p for name, p in model.named_parameters()}
    for name, part in model.named_modules():
        if isinstance(part, Parts):
            tensors |= {f"{name}.{key}": t for key, t in part.whole().items()}
    return torch.cat([tensors[name].detach().flatten()
                      for name in sorted(dict(Transformer(config).named_parameters()))])


