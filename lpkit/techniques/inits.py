"""Initialisations. The implementation is f(model), which fills every parameter in place."""

from lpkit.techniques.row import Row

INITS = {
    "gpt2": Row(why="N(0, 0.02), smaller by 1/sqrt(2 layers) where the residual stream is written",
                source="Radford et al. 2019, section 2.3", implementation="lpkit.nn.init:gpt2"),
    "llama": Row(why="N(0, 0.02) everywhere", source="initializer_range of transformers' Llama",
                 implementation="lpkit.nn.init:llama"),
    "fan-in": Row(why="N(0, 1 / inputs), for models that are narrow",
                  source="LeCun et al. 1998, Efficient BackProp",
                  implementation="lpkit.nn.init:fan_in"),
}
