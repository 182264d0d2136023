"""Ranking distillation from frozen sentence encoders (RankCSE, Liu et al. 2023): ListNet and ListMLE."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.errors import ConfigError
from diffcse_jax.groups import POOLERS, START, RunConfig
from diffcse_jax.models.forward import Computation, SharedForward
from diffcse_jax.models.pooling import similarity_lists
from diffcse_jax.models.teachers import start_as_teacher, teacher_lists
from diffcse_jax.objectives import Metrics, Network, Objective, Starts
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(0.0, "weight of ranking distillation (gamma of RankCSE)", low=0.0)
    teachers: tuple[str, ...] = option(
        (),
        "frozen sentence encoders to learn from: workdirs, folders or hub ids whose vocabulary is the encoder's; "
        "`start`, the checkpoint that the encoder starts from; or folders of vectors of the training sentences, of any "
        "encoder, that `diffcse embed` wrote",
    )
    poolers: tuple[str, ...] = option(
        (), "poolers of the teachers, one each; empty: those that they record", choices=(*POOLERS, "")
    )
    shares: tuple[float, ...] = option(
        (), "shares of the teachers in the mixed similarities, one each, scaled to sum 1; empty: equal ones", low=0.0
    )
    form: str = option(
        "listmle",
        "`listmle`: likelihood of the teachers' order; `listnet`: cross-entropy under the teachers' distribution",
        choices=("listmle", "listnet"),
    )
    temperature: float = option(0.05, "temperature of the encoder's similarities (tau2)", low=1e-6)
    teacher_temperature: float = option(0.025, "temperature of the teachers' similarities (tau3); `listnet`", low=1e-6)


class RankingDistillation(Objective):
    """The encoder ranks the other views of a batch as its teachers do, which see the text without dropout."""

    options: Options
    prefixes = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("rankcse",)

    @property
    def teachers(self) -> dict[str, str]:
        """The named ones, with their poolers."""
        names = self.options.teachers
        poolers = self.options.poolers or ("",) * len(names)
        return {name: pooler for name, pooler in zip(names, poolers, strict=True) if name != START}

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The teachers, frozen, but for those whose vectors are stored."""
        by_name = {**starts.teachers, START: start_as_teacher(starts.encoder, self.config.model.pooler)}
        teachers = {network: by_name[name] for network, name in self._names.items() if name in by_name}
        return {network: Network(teacher.build, teacher.params, frozen=True) for network, teacher in teachers.items()}

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Float[Array, "batch candidates"]:
        """The teachers' mixed similarity lists."""
        del key
        lists = jnp.stack([_lists(frozen, views, *names) for names in self._names.items()])
        shares = jnp.array(self.options.shares or (1.0,) * len(lists))
        return jnp.tensordot(shares / shares.sum(), lists, axes=1, precision="highest")

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del key
        scores, options = similarity_lists(forward.projected_views), self.options
        if options.form == "listmle":
            return list_mle(scores / options.temperature, corrupted).mean(), {}
        return list_net(scores / options.temperature, corrupted / options.teacher_temperature).mean(), {}

    @property
    def _names(self) -> dict[str, str]:
        """The networks of the teachers, and what the configuration calls them."""
        names = enumerate(self.options.teachers)
        return {START if name == START else f"teacher_{index}": name for index, name in names}


def _lists(frozen: Computation, views: Batch, network: str, name: str) -> Float[Array, "batch candidates"]:
    """The similarity lists of a teacher, whose vectors come with the batch or are computed."""
    if views.vectors and name in views.vectors:
        return similarity_lists(tuple(jnp.moveaxis(views.vectors[name], 1, 0)))
    return teacher_lists(frozen, network, views)


def list_net(
    scores: Float[Array, "rows candidates"], teacher: Float[Array, "rows candidates"]
) -> Float[Array, " rows"]:
    """Cross-entropy of the distribution over candidates under the teacher's (ListNet's top-1 form, Cao et al. 2007).

    Args:
        scores: logits of the encoder.
        teacher: logits of the teacher.
    """
    return -(jax.nn.softmax(teacher, axis=1) * jax.nn.log_softmax(scores, axis=1)).sum(axis=1)


def list_mle(
    scores: Float[Array, "rows candidates"], teacher: Float[Array, "rows candidates"]
) -> Float[Array, " rows"]:
    """Negative log-likelihood of the teacher's order of candidates (ListMLE, Xia et al. 2008).

    l = -sum_k log exp(s_k) / sum_{l >= k} exp(s_l), scores s in the teacher's order, best first (Plackett and Luce).

    Args:
        scores: logits of the encoder.
        teacher: similarities; of equal ones the first goes before.
    """
    order = jnp.argsort(-teacher, axis=1, stable=True)
    ordered = jnp.take_along_axis(scores, order, axis=1)
    return (jax.lax.cumlogsumexp(ordered, axis=1, reverse=True) - ordered).sum(axis=1)


def objective(options: Options, config: RunConfig) -> Objective:
    """Ranking distillation.

    Raises:
        ConfigError: it has a weight and no teachers, or poolers or shares that do not fit them.
    """
    if options.weight > 0:
        _check(options)
    return RankingDistillation(options, config)


def _check(options: Options) -> None:
    count = len(options.teachers)
    if not count:
        raise ConfigError(
            "distillation.weight > 0 needs teachers: name sentence encoders in distillation.teachers, or `start`"
        )
    if len(set(options.teachers)) < count:
        raise ConfigError(f"distillation.teachers names a teacher twice: {options.teachers}")
    for key, values in (("poolers", options.poolers), ("shares", options.shares)):
        if len(values) not in (0, count):
            raise ConfigError(
                f"distillation.{key} has {len(values)} values for {count} teachers; give one each, or none"
            )
    if options.shares and not sum(options.shares) > 0:
        raise ConfigError("distillation.shares are all 0; leave them out to give all teachers the same")
    if START in options.teachers and options.poolers and options.poolers[options.teachers.index(START)]:
        raise ConfigError("distillation.poolers: `start` is pooled as model.pooler says; give '' for it")
