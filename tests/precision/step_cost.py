"""What casts buy that are no row of RECIPES, so that no config can name them."""

from lpkit.config import Config
from lpkit.measure.advice import StepCost, compared
from lpkit.predict.casts import CastRecipe
from lpkit.predict.roofline import Efficiency
from lpkit.predict.time import rank_products, step_time
from lpkit.techniques.machines import Machine


def step_cost(config: Config, recipe: CastRecipe, machine: Machine,
                  efficiency: Efficiency | None = None, *, base: str = "bf16") -> StepCost:
    """Compares an update on one `machine` under casts that are no row of RECIPES with one in
    `base`. Raises ConfigError when the machine lacks the recipe's dtype."""
    how = {"precision": base, "efficiency": efficiency}
    plain = step_time(config, machine, **how)
    return compared(plain,
                    step_time(config, machine, recipe=recipe, **how),
                    rank_products(config.model, plain.layout, plain.sequences), recipe)
