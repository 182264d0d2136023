"""Model FLOPs of a train step, as `diffcse_jax.models.flops` counts them.

What is trained counts three times (forward, and the gradients of inputs and weights), what is frozen once.
"""

from diffcse_jax.config import Config
from diffcse_jax.models.flops import BatchSize, projector_flops, transformer_flops

TRAINED = 3  # forward, gradient of the inputs, gradient of the weights


def step_flops(config: Config, batch: BatchSize) -> float:
    """Model FLOPs of one train step on such a batch: of the sentence vectors, and what each objective adds."""
    trained = frozen = 0.0
    if config.needs("vectors"):
        trained += transformer_flops(batch.encoder, batch.rows, batch.length)
        trained += projector_flops(config.model.projector, batch.encoder.hidden_size, batch.rows)
    for objective in config.objectives.values():
        of_trained, of_frozen = objective.flops(batch)
        trained += of_trained
        frozen += of_frozen
    return TRAINED * trained + frozen
