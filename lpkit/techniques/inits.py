"""Initialisations. The implementation is f(model), which fills every parameter of the model."""

from dataclasses import dataclass

from lpkit.techniques.row import TechniqueRow


@dataclass(frozen=True, kw_only=True)
class Init(TechniqueRow):
    """An initialisation of another package."""

    again: bool = False     # it changes parameters that it has filled before


OF = "lpkit.nn.init:"
INITS: dict[str, TechniqueRow] = {
    "gpt2": Init(why="N(0, 0.02); times 1 / sqrt(2 layers) in Linears that write the stream",
                 source="Radford et al. 2019, section 2.3", implementation=OF + "gpt2"),
    "llama": Init(why="N(0, 0.02) everywhere", source="initializer_range of transformers' Llama",
                  implementation=OF + "llama"),
    "fan-in": Init(why="N(0, 1 / inputs), for models that are narrow",
                   source="LeCun et al. 1998, Efficient BackProp", implementation=OF + "fan_in"),
}
