"""Conditional difference objectives: how a sentence differs from its edit, given the sentence's vector (DiffCSE).

What is predicted of the difference is a module of this package, found by its name in `difference.objective`.
"""

import dataclasses
import importlib

from diffcse_jax.groups import RunConfig
from diffcse_jax.objectives import Objective, names_in
from diffcse_jax.options import option

KINDS = names_in(__path__)


@dataclasses.dataclass(frozen=True)
class Options:
    objective: str = option(
        "rtd",
        "prediction about an edited sentence given the sentence vector, by a module in `objectives/difference/`: "
        "`rtd`, which tokens were replaced (DiffCSE Section 3); or `none`",
        choices=(*KINDS, "none"),
    )
    weight: float = option(0.005, "lambda of DiffCSE", low=0.0)
    mask_ratio: float = option(0.30, "share of tokens masked before the generator fills them", low=0.0, high=1.0)
    mask_style: str = option(
        "bert",
        "`bert`: 80 % [MASK], 10 % random, 10 % kept (code); `mask`: always [MASK] (paper)",
        choices=("bert", "mask"),
    )
    loss_positions: str = option(
        "all",
        "mean of the RTD loss over `all` positions, padding included (code), or `real` tokens",
        choices=("all", "real"),
    )
    condition: str = option(
        "projected",
        "sentence vector the discriminator sees: after the projector (`projected`) or before (`pooled`)",
        choices=("projected", "pooled"),
    )


def objective(options: Options, config: RunConfig) -> Objective | None:
    """The objective that `difference.objective` names."""
    if options.objective == "none":
        return None
    return importlib.import_module(f"{__name__}.{options.objective}").objective(options, config)
