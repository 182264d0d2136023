"""Dropout contrast (SimCSE Eq. 4) as a term of its own, beside a contrast on pairs of two different texts.

The anchors of a batch are encoded once more, with other dropout masks: each is to find itself among the others, equal
texts left out. Beside `contrast` on pairs, of titles and texts say, it keeps titles apart. Of no paper.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.errors import ConfigError
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.duplicates import equal_texts
from diffcse_jax.models.forward import SharedForward
from diffcse_jax.objectives import Metrics, Objective
from diffcse_jax.objectives.contrast import info_nce
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(
        0.0, "weight of the contrast between anchors and themselves under other dropout masks", low=0.0
    )
    temperature: float = option(0.05, "temperature of the cosine similarities", low=1e-6)


class DropoutContrast(Objective):
    """The contrast of the anchors with themselves."""

    options: Options
    prefixes = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("simcse",)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"vectors", "anchors", "dropout"})

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del corrupted, key
        anchors, *_ = forward.projected_views
        equal = equal_texts(jnp.repeat(forward.batch.input_ids[:, :1], 2, axis=1))
        per_example = info_nce(anchors, forward.anchors_again, temperature=self.options.temperature, left_out=equal)
        return per_example.mean(), {}


def objective(options: Options, config: RunConfig) -> DropoutContrast:
    """The contrast.

    Raises:
        ConfigError: no dropout, by which alone an anchor differs from itself.
    """
    model = config.model
    rates = *model.hidden_dropout, *model.attention_dropout
    if options.weight and model.dropout_schedule == "none" and rates == (0.0, 0.0):
        raise ConfigError(
            "dropout_contrast tells a text from itself by dropout alone, and there is none; set "
            "model.hidden_dropout=(0.1,) and model.attention_dropout=(0.1,)"
        )
    return DropoutContrast(options, config)
