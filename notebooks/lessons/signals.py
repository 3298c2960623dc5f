"""How the variance of tokens, the similarity of two tokens and the gradients change over the depth
of a newly initialised model: closed forms in the limit of infinite width.

The residual stream x (T, D) at one depth is described by its Gram matrix G = x x^T / D, (T, T). The
diagonal of G has the variance of each token's channels; the other elements measure how similar two
tokens are. A random matrix W with standard deviation s changes G only by a factor: the Gram matrix
of x W^T is s^2 D G on average, and the deviation shrinks with the width (Lee et al. 2018,
https://arxiv.org/abs/1711.00165). So a model of any width becomes a recursion of a (T, T) matrix:

    norm         G -> K, K_ij = G_ij / sqrt((G_ii + eps) (G_jj + eps))
    attention    K -> a A K A^T     a = s_v^2 s_o^2 D^2; initial scores are near 0, so A is the mean
                                    over the past (Noci et al. 2022, arXiv:2206.03126)
    MLP          K -> b Phi(K)      b = s_2^2 F; Phi_ij = E[phi(z_i) phi(z_j)], for Gaussians with
                                    the covariance s_1^2 D K
    skip         G -> G + branch

Phi is a power series in the correlation whose coefficients are the squared Hermite coefficients of
phi (Daniely et al. 2016, https://arxiv.org/abs/1602.05897). Gradients pass through the transposed
matrices: the gradients of skip and branch are added, a norm divides by the token's standard
deviation, attention averages by A^T, and the MLP multiplies by E[phi'(z_i) phi'(z_j)]. The
gradients that reach queries and keys are ignored; they are proportional to the variance of the
scores, which is near 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.nn.attention import sdpa
from lpkit.nn.init import initialise
from lpkit.nn.transformer import Transformer

Matrix = np.ndarray
ORDER = 60      # number of Hermite polynomials
NODES = 200     # nodes of the quadrature


def _gelu(z: Matrix) -> Matrix:
    """GPT-2's approximation of GELU."""
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def hermite(phi: Callable[[Matrix], Matrix], variance: Matrix | float,
            order: int = ORDER) -> Matrix:
    """Return the coefficients (..., order) of phi(sqrt(variance) z) in the normalised Hermite
    polynomials of a standard Gaussian z, by quadrature. `variance` has any shape (...)."""
    z, w = np.polynomial.hermite_e.hermegauss(NODES)
    w = w / w.sum()
    basis = [np.ones_like(z), z]
    for n in range(2, order):
        basis.append((z * basis[-1] - math.sqrt(n - 1) * basis[-2]) / math.sqrt(n))
    values = phi(np.sqrt(np.asarray(variance))[..., None] * z)
    return (values * w) @ np.stack(basis[:order]).T


def powers(coefficients: Matrix, correlation: Matrix) -> Matrix:
    """Return E[phi(z_i) phi(z_j)], (T, T), for Gaussians z with this correlation (T, T).
    `coefficients` (T, order) are the result of `hermite` for the variance of each token."""
    rho, total, power = np.clip(correlation, -1, 1), 0.0, np.ones_like(correlation)
    for n in range(coefficients.shape[-1]):
        total = total + coefficients[:, None, n] * coefficients[None, :, n] * power
        power = power * rho
    return total


def correlation(G: Matrix, eps: float = 0.0) -> Matrix:
    """Return G_ij / sqrt((G_ii + eps) (G_jj + eps)), (T, T): the correlation of two tokens, and
    also the Gram matrix after a norm with this `eps`."""
    size = np.sqrt(np.diag(G) + eps)
    return G / (size[:, None] * size)


def past(T: int) -> Matrix:
    """Return the matrix (T, T) whose row i averages over the tokens 0 to i: causal attention with
    equal scores."""
    return np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Standard deviations of a block's initial weights: attention's values and output projection,
    the MLP's up and down."""

    values: float
    out: float
    up: float
    down: float


STARTS: dict[str, Callable[[ModelConfig], Start]] = {      # the rules of lpkit.nn.init
    "gpt2": lambda m: Start(values=0.02, up=0.02, out=0.02 / math.sqrt(2 * m.L),
                            down=0.02 / math.sqrt(2 * m.L)),
    "llama": lambda m: Start(values=0.02, out=0.02, up=0.02, down=0.02),
    "fan-in": lambda m: Start(values=m.D**-0.5, out=m.D**-0.5, up=m.D**-0.5, down=m.F**-0.5),
}


@dataclass
class Depth:
    """One depth of the model: the Gram matrix G (T, T) of the residual stream, and what a norm,
    attention and the MLP do to a Gram matrix."""

    model: ModelConfig
    G: Matrix

    def __post_init__(self):
        m = self.model
        self.start, self.A = STARTS[m.init.name](m), past(len(self.G))

    def normed(self, norm: bool = True) -> Matrix:
        """Return the Gram matrix that a branch reads; without a norm, that of the stream itself."""
        return correlation(self.G, self.model.norm_eps) if norm else self.G

    def attention(self, K: Matrix) -> Matrix:
        """Return the Gram matrix of attention's result, given the Gram matrix of its input."""
        return (self.start.values * self.start.out * self.model.D) ** 2 * self.A @ K @ self.A.T

    def mlp(self, K: Matrix) -> Matrix:
        """Return the Gram matrix of the MLP's result, given the Gram matrix of its input."""
        inside = self.start.up**2 * self.model.D * np.diag(K)
        return self.start.down**2 * self.model.F * powers(hermite(_gelu, inside), correlation(K))


# Each function below moves a Depth through one layer: it replaces d.G.

def pre_norm(d: Depth, norm: bool = True) -> None:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    d.G = d.G + d.attention(d.normed(norm))
    d.G = d.G + d.mlp(d.normed(norm))


def parallel(d: Depth) -> None:
    """x + attention(norm(x)) + mlp(norm(x))."""
    K = d.normed()
    d.G = d.G + d.attention(K) + d.mlp(K)


def sandwich(d: Depth) -> None:
    """As `pre_norm`, with a norm also after each branch, so that a branch adds a variance of 1."""
    d.G = d.G + correlation(d.attention(d.normed()), d.model.norm_eps)
    d.G = d.G + correlation(d.mlp(d.normed()), d.model.norm_eps)


def gained(gain: float, norm: bool) -> Callable[[Depth], None]:
    """Return a layer whose branches are multiplied by `gain`."""
    def layer(d: Depth) -> None:
        d.G = d.G + gain**2 * d.attention(d.normed(norm))
        d.G = d.G + gain**2 * d.mlp(d.normed(norm))
    return layer


def unshaped(d: Depth) -> None:
    """A layer whose attention has no skip connection (not a row of the kit). All elements of G
    approach the same value, so all tokens become alike; without the MLP's skip, they do so doubly
    exponentially in depth."""
    d.G = d.attention(d.normed())
    d.G = d.G + d.mlp(d.normed())


def sas(d: Depth) -> None:
    """SAS: at the start, shaped attention returns norm(x) itself, without a skip connection, and
    the MLP is added with gain 0.1, so its Gram matrix with 0.01."""
    d.G = d.normed()
    d.G = d.G + 0.01 * d.mlp(d.normed())


def sas_parallel(d: Depth) -> None:
    """SAS-P: as `sas`, but the MLP reads the same norm(x) as attention."""
    K = d.normed()
    d.G = K + 0.01 * d.mlp(K)


# by row of blocks, and two variants that are not rows
LAYERS: dict[str, Callable[[Depth], None]] = {
    "pre-norm": pre_norm, "parallel": parallel, "sandwich": sandwich,
    "rezero": gained(0.0, norm=False), "skipinit": gained(0.0, norm=False),
    "layerscale": gained(1e-4, norm=True), "sas": sas, "sas-p": sas_parallel,
    "without skip": unshaped, "without norm": lambda d: pre_norm(d, norm=False),
}


def gram(m: ModelConfig, tokens: Tensor) -> Matrix:
    """Return the Gram matrix (T, T) of the initial embeddings of `tokens` (T,), plus those of
    learned positions. Equal tokens have equal embeddings, so they differ only in position."""
    same = (tokens[:, None] == tokens).double().numpy()
    std = m.D**-0.5 if m.init.name == "fan-in" else 0.02
    places = std**2 * np.eye(len(tokens)) if m.position == "learned" else 0.0
    return std**2 * same + places


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves over depth; index 0 is the stream before the first layer, index L after the last."""

    variance: list[float]       # of a token's channels, mean over the tokens
    cosine: list[float]         # of two tokens, mean over all pairs
    gradient: list[float]       # variance of the stream's gradient, divided by that at index L


def cosine(G: Matrix) -> float:
    """Return the mean cosine over pairs of tokens."""
    T, K = len(G), correlation(G)
    return float((K.sum() - T) / (T * (T - 1)))


def predicted(m: ModelConfig, tokens: Tensor, block: str = "") -> Curves:
    """Predict the curves of a newly initialised model that reads `tokens` (T,). `block`: a key of
    LAYERS; by default the model's block. The gradient's curve is empty for blocks without a formula
    in BACK."""
    depth = Depth(model=m, G=gram(m, tokens))
    layer, stages = LAYERS[block or m.block], [depth.G]
    for _ in range(m.L):
        layer(depth)
        stages.append(depth.G)
    variances, cosines = [float(np.diag(G).mean()) for G in stages], [cosine(G) for G in stages]
    back = BACK.get(block or m.block)
    return Curves(variance=variances, cosine=cosines, gradient=back(m, stages) if back else [])


# ---- backward

def _slope(z: Matrix) -> Matrix:
    """The derivative of `_gelu`."""
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    tanh = np.tanh(inner)
    inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
    return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * inner_slope


def _through(d: Depth, gradient: Matrix, G: Matrix, branch: Literal["attention", "mlp"],
             norm: bool) -> Matrix:
    """Return the Gram matrix (T, T) of the gradient that a branch and its norm pass to their input.

    gradient: the Gram matrix of the gradient of the branch's result
    G: the Gram matrix of the stream that the norm reads
    """
    m, s = d.model, d.start
    K, size = G, np.ones(len(G))
    if norm:
        K, size = correlation(G, m.norm_eps), np.sqrt(np.diag(G) + m.norm_eps)
    if branch == "attention":
        inner = (s.values * s.out * m.D) ** 2 * d.A.T @ gradient @ d.A
    else:
        slopes = powers(hermite(_slope, s.up**2 * m.D * np.diag(K)), correlation(K))
        inner = s.up**2 * m.F * s.down**2 * m.D * gradient * slopes
    return inner / (size[:, None] * size)


def back_pre_norm(m: ModelConfig, stages: list[Matrix], norm: bool = True) -> list[float]:
    """Return the variance of the gradient of the stream at each depth, relative to the last. The
    recursion runs from the last layer to the first; `stages` are the Gram matrices of the stream at
    each depth."""
    d, gradient, variances = Depth(model=m, G=stages[0]), np.eye(len(stages[0])), [1.0]
    for before in reversed(stages[:-1]):
        d.G = before
        middle = before + d.attention(d.normed(norm))
        gradient = gradient + _through(d, gradient, middle, "mlp", norm)
        gradient = gradient + _through(d, gradient, before, "attention", norm)
        variances.append(float(np.diag(gradient).mean()))
    return variances[::-1]


BACK: dict[str, Callable[[ModelConfig, list[Matrix]], list[float]]] = {
    "pre-norm": back_pre_norm,
    "without norm": lambda m, stages: back_pre_norm(m, stages, norm=False)}


# ---- measured

def measured(m: ModelConfig, tokens: Tensor, seeds: int = 3,
             make: Callable[[ModelConfig, Any], nn.Module] | None = None) -> Curves:
    """Measure the curves in newly initialised models that read `tokens` (T,); each curve is the
    mean over `seeds` seeds. `make(config, attend)` returns a block; if it is given, its blocks
    replace the model's."""
    curves_by_seed = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = Transformer(m, sdpa)
        if make is not None:
            model.blocks = nn.ModuleList(make(m, sdpa) for _ in range(m.L))
        initialise(model, m.init)
        curves_by_seed.append(_of_one(model, tokens))

    def means(name: str) -> list[float]:
        by_depth = zip(*(getattr(curves, name) for curves in curves_by_seed))
        return [float(np.mean(values)) for values in by_depth]

    return Curves(**{name: means(name) for name in ("variance", "cosine", "gradient")})


def _of_one(model: nn.Module, tokens: Tensor) -> Curves:
    """Measure the curves of one model. Hooks keep the input of each block and of the final norm;
    backward starts from a random gradient of variance 1 at the last of them."""
    streams: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        given[0].retain_grad()
        streams.append(given[0])

    hooks = [block.register_forward_pre_hook(keep) for block in model.blocks]
    hooks.append(model.norm.register_forward_pre_hook(keep))
    model.hidden(tokens[None])
    for hook in hooks:
        hook.remove()
    last = streams[-1]
    last.backward(torch.randn_like(last))
    units = [F.normalize(x[0].double(), dim=-1) for x in streams]
    T = len(tokens)
    return Curves(
        variance=[x.double().square().mean().item() for x in streams],
        cosine=[((u @ u.mT).sum().item() - T) / (T * (T - 1)) for u in units],
        gradient=[x.grad.double().square().mean().item() for x in streams])
