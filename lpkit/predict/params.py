"""Parameters of a model, by part. Counts, not bytes. tests/test_predict.py holds them equal to PyTorch's."""

from lpkit.config import ModelConfig

UPS = {"gelu": 1, "swiglu": 2}     # matrices that widen


def parameters(model: ModelConfig) -> dict[str, int]:
    """Numbers by part; their sum is the model's size. A tied head adds none."""
    D, E, F, G, H, L, V = model.D, model.E, model.F, model.G, model.H, model.L, model.V
    bias = int(model.bias)
    ups = UPS[model.mlp]
    gains = {"layernorm": 1 + bias, "rmsnorm": 1}[model.norm]       # vectors of a norm
    return {
        "embedding": V * D,
        "positions": {"learned": model.T * D, "rope": 0}[model.position],
        "attention": L * ((H + 2 * G) * E * (D + bias) + D * (D + bias)),
        "mlp": L * (ups * F * (D + bias) + D * (F + bias)),
        "norms": (2 * L + 1) * gains * D,
        "head": 0 if model.tied else V * D,
    }


def parameter_count(model: ModelConfig) -> int:
    return sum(parameters(model).values())


def product_weights(model: ModelConfig) -> int:
    """Parameters that sit in a matrix product (the Linear weights, a tied head included): what 2 FLOPs a token
    pay for, and what autocast copies to 16 bits."""
    D, E, F, G, H, L = model.D, model.E, model.F, model.G, model.H, model.L
    ups = UPS[model.mlp]
    return L * ((H + 2 * G) * E * D + D * D + (ups + 1) * F * D) + model.V * D
