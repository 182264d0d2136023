"""Training objectives: one module each, found by its name, which is that of its group of keys in the configuration.

A module holds `Options`, the dataclass of its keys (`weight` among them); pure functions of arrays, which know no model
and give one value per example; and `objective`, which makes an `Objective` of its options and the configuration (or
None, where they say that it takes no part). Nothing else names it: `docs/extending.md` adds one.
"""

import abc
import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.forward import Computation, SharedForward
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.parameters import Build, Params
from diffcse_jax.models.teachers import Teacher

Metrics = dict[str, jax.Array]

NEEDS = frozenset(
    {
        "vectors",  # sentence vectors of all views
        "dropout",  # by which alone views of the same text differ
        "anchors",  # their vectors in a further pass, with dropout or without
        "mask_token",  # of the tokenizer
        "generator",  # the frozen masked LM: networks `generator` and `generator_head`
        "next_sentence",  # of every example, in its document: `views.next`
        "labels",  # of the examples of a task: `views.labels`, which `diffcse finetune` gives
    }
)


class Network(NamedTuple):
    """A network that an objective asks for."""

    build: Build  # makes the module, given dtype= and rngs=
    start: Params | None = None  # None: its initial weights
    frozen: bool = False


class Starts(NamedTuple):
    """The checkpoints that networks start from; `config` of each has the run's dropout rates."""

    encoder: Pretrained
    generator: Pretrained | None  # there where an objective needs it
    teachers: Mapping[str, Teacher] = MappingProxyType({})  # those that objectives name


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A term of the training loss.

    Attributes:
        options: its group of keys.
        config: the whole configuration.
        prefixes: its loss is a comparison of sentence vectors, which `matryoshka.sizes` adds of their prefixes.
    """

    options: Any
    config: RunConfig
    prefixes: ClassVar[bool] = False

    @property
    def weight(self) -> float:
        """Of its loss in the sum; 0: it takes no part."""
        return self.options.weight

    @property
    def papers(self) -> tuple[str, ...]:
        """The papers that a model card cites for it: keys of `diffcse_jax.export.card.BIBTEX`."""
        return ()

    @property
    def needs(self) -> frozenset[str]:
        """Members of `NEEDS`."""
        return frozenset({"vectors"})

    @property
    def panels(self) -> Mapping[str, tuple[str, ...]]:
        """Pictures of its own among the curves of a run: titles to names of metrics."""
        return {}

    @property
    def own_text(self) -> str:
        """Training data of its own in place of `data.train_file`, for people; empty: none."""
        return ""

    @property
    def teachers(self) -> Mapping[str, str]:
        """Sentence encoders that it asks for, as folders or hub ids, with their poolers (empty: the recorded ones).

        The objective's group has them in a key `teachers`. `networks` finds them in its `starts`. A folder of vectors
        that `diffcse embed` wrote may stand for an encoder: these are in `views.vectors`.
        """
        return {}

    def check_columns(self, count: int) -> None:
        """Refuses data of so many columns where the objective has no form for them.

        Raises:
            ConfigError: with what to do.
        """
        del count

    def networks(self, starts: Starts) -> Mapping[str, Network]:
        """Networks beside the encoder and its projector. Objectives that give the same name share the network."""
        del starts
        return {}

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> PyTree:
        """Edited inputs of a step, which carry no gradient; `loss` receives them.

        Args:
            frozen: the frozen networks.
            views: the batch.
            key: for this objective alone.
        """
        del frozen, views, key

    @abc.abstractmethod
    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        """The loss of a batch, without the weight, and named metrics.

        Args:
            forward: the batch and its sentence vectors; the trained networks.
            corrupted: what `corrupt` returned.
            key: dropout key, for this objective alone.
        """


@functools.cache
def modules() -> dict[str, ModuleType]:
    """The modules of all objectives by name."""
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names_in(__path__)}


def names_in(path: list[str]) -> tuple[str, ...]:
    """The modules in a package, in order of their names."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(path)))
