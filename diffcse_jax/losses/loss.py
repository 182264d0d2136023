"""What a loss is, and what it may know.

A loss has options, networks that it adds, inputs that it prepares, and a value. It is a frozen
dataclass whose fields are its options. The same object is a group of keys in the configuration:
`config.contrast.temperature` is the key `contrast.temperature`.
"""

import abc
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.models.forward import Computation, SharedForward
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import Network
from diffcse_jax.options import option

View = Float[Array, "batch dim"]  # embeddings of a batch, of one view of its sentences
Metrics = dict[str, jax.Array]


class Table(dict[str, Any]):
    """Groups of options under names that the user chooses. Hashable, because a configuration is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class PretrainedCheckpoints(NamedTuple):
    """The pretrained checkpoints of a run.

    Each `config` has the dropout rates of the run; that of the generator has its own, or 0.
    """

    encoder: Pretrained
    generator: Pretrained | None  # only if a loss needs it
    # Frozen sentence encoders, by the names that losses give.
    teachers: Mapping[str, Network] = MappingProxyType({})
    discriminator: Pretrained | None = None  # only if `difference.discriminator` names one


@dataclasses.dataclass(frozen=True)
class GeneratorOptions:
    """The frozen masked LM that fills masked tokens, and how its tokens are chosen."""

    name_or_path: str = option(
        "distilbert-base-uncased",
        "frozen masked LM (folder or hub id) with the encoder's vocabulary; `start`: the starting "
        "checkpoint with its own masked-LM head; empty: first train such a head on the frozen "
        "encoder",
    )
    decode: str = option(
        "argmax", "the likeliest token (code) or a random one (paper)", choices=("argmax", "sample")
    )
    positions: str = option(
        "all", "positions that it fills: `all` (code) or `masked`", choices=("all", "masked")
    )
    dropout: bool = option(True, "keep the generator's dropout switched on (the authors' code)")
    head_steps: int = option(
        2000,
        "steps that train a masked-LM head on the frozen encoder, but at most five for each step "
        "of the run",
        low=0,
    )
    head_mask_ratio: float = option(
        0.30, "share of tokens masked while the head trains", low=0.0, high=1.0
    )
    head_batch_size: int = option(64, "batch size while the head trains", low=1)
    head_learning_rate: float = option(1e-3, "learning rate of the head", low=0.0)


class RunInfo(NamedTuple):
    """What a loss may know about the run."""

    pooler: str  # of the encoder, before its projector
    generator: GeneratorOptions
    max_length: int  # positions of the longest sentence
    seed: int  # of new heads


# What a loss may need of the step and the data. `Loss.needs` explains them.
NEEDS = frozenset(
    (
        *("embeddings", "dropout", "hidden_size", "anchors", "mask_token", "generator"),
        *("next_sentence", "labels", "ranked"),
    )
)


@dataclasses.dataclass(frozen=True)
class Loss(abc.ABC):
    """A term of the training loss. Its fields are its options."""

    weight: float = option(0.0, "weight of this loss in the sum", low=0.0)

    # Whether the loss compares embeddings, so that `matryoshka.sizes` adds it for shortened ones.
    compares_embeddings: ClassVar[bool] = False

    def active(self) -> "Loss | None":
        """Return the loss to train with. None: the options switch it off."""
        return self if self.weight > 0 else None

    def check(self, run: RunInfo) -> None:  # noqa: B027
        """Raise a `ConfigError` if the options contradict each other or the run."""

    def check_columns(self, count: int) -> None:  # noqa: B027
        """Raise a `ConfigError` if the loss cannot use data of this many text columns."""

    @property
    def needs(self) -> frozenset[str]:
        """The names of what the loss needs from the step and the data.

        - `embeddings`: sentence embeddings of all views;
        - `dropout`: views of the same text that differ by dropout;
        - `hidden_size`: embeddings of the size of the encoder's hidden states;
        - `anchors`: a further pass over the anchors alone;
        - `mask_token`: a tokenizer that has a mask token; `generator`: the networks of the frozen
          masked LM;
        - `next_sentence`: the sentence after each example in its document, `batch.next`;
        - `labels`: the labels of the examples of one task, `batch.labels`, which only `diffcse
          finetune` provides;
        - `ranked`: passages that a teacher ranks, `batch.ranked`. Then the examples are queries
          made of documents, and only the query encoder is trained.
        """
        return frozenset({"embeddings"})

    @property
    def papers(self) -> tuple[str, ...]:
        """The papers that a model card cites for this loss, by their keys in its citations."""
        return ()

    @property
    def panels(self) -> Mapping[str, tuple[str, ...]]:
        """Panels that this loss adds to a run's curves: names of metrics by title."""
        return {}

    @property
    def data_description(self) -> str:
        """Describe the training data, if the loss does not use `data.train_file`."""
        return ""

    @property
    def named_teachers(self) -> Mapping[str, str]:
        """The poolers of the teachers that the loss needs, by the teachers' names.

        An empty pooler stands for the one that the teacher records.
        """
        return {}

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> Mapping[str, Network]:
        """Return the networks that this loss adds. Losses that name the same network share it."""
        return {}

    def prepare(  # noqa: B027
        self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo
    ) -> PyTree:
        """Compute what `loss` reads besides the batch, without gradients.

        Each loss gets the frozen networks and a random key of its own.
        """

    @abc.abstractmethod
    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """Compute the loss of a batch.

        Args:
            forward: The batch, its sentence embeddings and the trained networks.
            inputs: What `prepare` returned.
            key: A random key for the dropout of this loss alone.

        Returns:
            The loss without its weight, and further metrics by name.
        """
