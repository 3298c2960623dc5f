"""Initialisations. The implementation is f(model), which fills every parameter in place."""

from dataclasses import dataclass

from lpkit.techniques.row import Row


@dataclass(frozen=True, kw_only=True)
class Init(Row):
    """`shape`: alpha, beta and gamma of shaped attention (`lpkit.nn.blocks.Shape`) at the start;
    `zero_queries`: its queries are 0, so that softmax is the mean over the past."""

    shape: tuple[float, float, float] = (1.0, 1.0, 1.0)
    zero_queries: bool = True
    again: bool = False     # it changes what it has filled


OF, BEGINS = "lpkit.nn.init:", "lpkit.nn.starts:"
INITS: dict[str, Row] = {
    "gpt2": Init(why="N(0, 0.02), smaller by 1/sqrt(2 layers) where the residual stream is written",
                 source="Radford et al. 2019, section 2.3", implementation=OF + "gpt2"),
    "llama": Init(why="N(0, 0.02) everywhere", source="initializer_range of transformers' Llama",
                  implementation=OF + "llama"),
    "fan-in": Init(why="N(0, 1 / inputs), for models that are narrow",
                   source="LeCun et al. 1998, Efficient BackProp", implementation=OF + "fan_in"),
    "fixup": Init(
        again=True, why="fan-in; each branch ends with 0, and its other matrices are smaller by "
        "1/sqrt(2 layers), so that model.norm=none trains; without Fixup's added biases",
        source="Zhang et al. 2019, https://arxiv.org/abs/1901.09321",
        implementation=BEGINS + "fixup"),
    "t-fixup": Init(
        again=True, why="Xavier's; values, projections and MLPs times 0.67 layers^-1/4, embeddings "
        "N(0, 1 / width), so that model.norm=none trains without warm-up",
        source="Huang et al. 2020, Improving Transformer Optimization Through Better "
               "Initialization, section 3.2: of encoders, whose block this is",
        implementation=BEGINS + "t_fixup"),
    "mup": Init(why="fan-in; embeddings of one size at every width, and a head of 0; its rates are "
                "those of optimizer.groups (notebook 21)",
                source="Yang et al. 2022, https://arxiv.org/abs/2203.03466, table 3",
                implementation=BEGINS + "mup"),
    "value-skipinit": Init(
        again=True, why="fan-in with orthogonal values and projections; shaped attention begins as "
        "v alone", shape=(1.0, 0.0, 0.0), zero_queries=False,
        source="He et al. 2023, https://arxiv.org/abs/2302.10322, section 3",
        implementation=BEGINS + "orthogonal_values"),
    "shaped": Init(
        again=True, why="fan-in with the identity as values and projections; shaped attention "
        "begins as v, with softmax and mean that cancel",
        source="He and Hofmann 2023, https://arxiv.org/abs/2311.01906, section 4",
        implementation=BEGINS + "identity_values"),
}
