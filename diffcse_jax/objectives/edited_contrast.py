"""Edited sentences in the contrast, as further positives or negatives of their originals (DiffCSE Table 15).

What DiffCSE learns to tell from the original, this takes for the same, or for another sentence: insensitivity to an
edit where DiffCSE asks for sensitivity. The edit is of the anchor, a new one in every step. As `positive` the loss is
InfoNCE (SimCSE Eq. 4) between anchors and their edits, to be added to `contrast`, or instead of it: a second view made
by editing. As `negative` it is InfoNCE between the views in whose denominator all edits of the batch are hard negatives
(SimCSE Eq. 8 with alpha 1), to be used in place of `contrast`. The paper does not say how its terms were combined.
"""

import dataclasses

from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.edits import Edited
from diffcse_jax.edits.options import EditOptions
from diffcse_jax.models.forward import Computation, SharedForward, row_keys
from diffcse_jax.objectives import Metrics, Objective
from diffcse_jax.objectives.contrast import info_nce
from diffcse_jax.objectives.difference.rtd import edit_sentences
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options(EditOptions):
    weight: float = option(
        0.0, "weight of the contrast with edited sentences (DiffCSE Table 15, with mask_ratio 0.15)", low=0.0
    )
    role: str = option(
        "positive",
        "of an edited sentence: `positive` of its original, beside contrast.weight; or hard `negative` of all, in the "
        "place of contrast.weight",
        choices=("positive", "negative"),
    )
    temperature: float = option(0.05, "temperature of the cosine similarities", low=1e-6)


class EditedContrast(Objective):
    """The contrast of sentences with their edits."""

    options: Options
    prefixes = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("diffcse",)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"vectors"}) | self.options.edit_needs

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Edited:
        """Edits every anchor anew."""
        return edit_sentences(frozen, views.anchors, self.options, self.config, key)

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        edited: Edited = corrupted
        z1, z2, *_ = forward.projected_views
        vectors = forward.projected(edited.rows, row_keys(key, len(z1)), name="edited_contrast")
        temperature = self.options.temperature
        if self.options.role == "positive":
            return info_nce(z1, vectors, temperature=temperature).mean(), {}
        return info_nce(z1, z2, temperature=temperature, hard_negatives=[vectors]).mean(), {}


objective = EditedContrast
