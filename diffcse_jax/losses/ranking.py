"""Losses between lists of similarities: RankCSE's two losses, and distillation into queries.

Each sentence ranks the others of the batch by similarity, or a query ranks passages. These losses
compare such lists (RankCSE: Liu et al. 2023).
"""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.errors import ConfigError, counted
from diffcse_jax.losses import Loss, Metrics, PretrainedCheckpoints, RunInfo
from diffcse_jax.models.forward import (
    STARTING_CHECKPOINT,
    Computation,
    SharedForward,
    start_as_teacher,
)
from diffcse_jax.models.heads import QUERY_PROJECTION, QueryProjection
from diffcse_jax.models.layers import Network
from diffcse_jax.models.poolers import OTHER_NAMES, POOLERS, is_pooler
from diffcse_jax.models.pooling import cosine_similarity, normalize, similarity_lists
from diffcse_jax.options import option

# Similarities of each sentence to the candidates, or logits.
Lists = Float[Array, "rows candidates"]


@dataclasses.dataclass(frozen=True)
class RankingConsistency(Loss):
    """Both views of a sentence should rank the batch alike. Hard negatives are not ranked.

    l_i = JS(softmax_j(cos(z1_i, z2_j) / tau), softmax_j(cos(z2_i, z1_j) / tau)), with JS the
    Jensen-Shannon divergence.
    """

    weight: float = option(0.0, "weight of ranking consistency (beta of RankCSE)", low=0.0)
    temperature: float = option(0.05, "temperature of the two rankings (tau1 of RankCSE)", low=1e-6)
    compares_embeddings = True
    needs = frozenset({"embeddings", "dropout"})
    papers = ("rankcse",)

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        z1, z2, *_ = forward.projected_views
        # The second matrix is not the first one's transpose, which would move between devices.
        rankings = (cosine_similarity(*pair) / self.temperature for pair in ((z1, z2), (z2, z1)))
        return jensen_shannon(*rankings).mean(), {}


def jensen_shannon(p: Lists, q: Lists) -> Float[Array, " rows"]:
    """Compute (KL(P | M) + KL(Q | M)) / 2 with M = (P + Q) / 2.

    It is in nats, from 0 to log 2. P and Q are given as logits.
    """
    log_p, log_q = jax.nn.log_softmax(p, axis=1), jax.nn.log_softmax(q, axis=1)
    log_mixture = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    terms = jnp.exp(log_p) * (log_p - log_mixture) + jnp.exp(log_q) * (log_q - log_mixture)
    return terms.sum(axis=1) / 2


@dataclasses.dataclass(frozen=True)
class RankingDistillation(Loss):
    """The encoder should rank the other views of a batch as its frozen teachers do."""

    weight: float = option(0.0, "weight of ranking distillation (gamma of RankCSE)", low=0.0)
    teachers: tuple[str, ...] = option(
        (),
        "frozen encoders with the same vocabulary: run or model folders, hub ids, or `start` (the "
        "starting checkpoint)",
    )
    poolers: tuple[str, ...] = option(
        (),
        "each teacher's pooler; empty: as recorded",
        choices=(*POOLERS, ""),
        also=is_pooler,
        aliases=OTHER_NAMES,
    )
    shares: tuple[float, ...] = option(
        (), "weight of each teacher, scaled to sum 1; empty: equal weights", low=0.0
    )
    form: str = option(
        "listmle",
        "likelihood of the teachers' order or cross-entropy",
        choices=("listmle", "listnet"),
    )
    temperature: float = option(
        0.05, "temperature of the encoder's similarities (tau2 of RankCSE)", low=1e-6
    )
    teacher_temperature: float = option(
        0.025, "temperature of the teachers (tau3 of RankCSE); for `listnet`", low=1e-6
    )
    compares_embeddings = True
    papers = ("rankcse",)

    def check(self, run: RunInfo) -> None:
        count = len(self.teachers)
        if not count:
            raise ConfigError(
                "distillation.weight > 0 needs teachers. Name some, or `start`, in "
                "distillation.teachers"
            )
        if len(set(self.teachers)) < count:
            raise ConfigError(f"distillation.teachers names a teacher twice: {self.teachers}")
        for key, values in (("poolers", self.poolers), ("shares", self.shares)):
            if len(values) not in (0, count):
                numbers = f"{counted(len(values), 'value{s}')} for {counted(count, 'teacher{s}')}"
                raise ConfigError(
                    f"distillation.{key} has {numbers}. Give one per teacher, or none."
                )
        if self.shares and not sum(self.shares) > 0:
            raise ConfigError(
                "distillation.shares are all 0. Leave them out to give all teachers the same "
                "weight."
            )
        if (
            STARTING_CHECKPOINT in self.teachers
            and self.poolers
            and self.poolers[self.teachers.index(STARTING_CHECKPOINT)]
        ):
            raise ConfigError(
                "distillation.poolers: model.pooler is the pooler of `start`. Give '' for it."
            )

    @property
    def named_teachers(self) -> dict[str, str]:
        poolers = self.poolers or ("",) * len(self.teachers)
        named = dict(zip(self.teachers, poolers, strict=True))
        named.pop(STARTING_CHECKPOINT, None)
        return named

    @property
    def _by_network(self) -> dict[str, str]:
        """The teachers by the names of their networks."""
        return {
            STARTING_CHECKPOINT if name == STARTING_CHECKPOINT else f"teacher_{index}": name
            for index, name in enumerate(self.teachers)
        }

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> dict[str, Network]:
        by_name = {
            **checkpoints.teachers,
            STARTING_CHECKPOINT: start_as_teacher(checkpoints.encoder, run.pooler),
        }
        return {network: by_name[name] for network, name in self._by_network.items()}

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Compute the weighted mean of the teachers' similarity lists."""
        lists = [
            similarity_lists(batch.by_view(frozen.map_chunks(frozen.network(name), batch.rows)))
            for name in self._by_network
        ]
        shares = jnp.array(self.shares or (1.0,) * len(lists))
        return jnp.tensordot(shares / shares.sum(), jnp.stack(lists), axes=1, precision="highest")

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        scores = similarity_lists(forward.projected_views) / self.temperature
        if self.form == "listmle":
            return list_mle(scores, inputs).mean(), {}
        return list_net(scores, inputs / self.teacher_temperature).mean(), {}


@dataclasses.dataclass(frozen=True)
class QueryDistillation(Loss):
    """A query should rank passages as a hybrid search with the starting checkpoint does.

    l_i = KL(softmax_j(t_ij / tau_t) || softmax_j(cos(q_i W, p_j) / (s_i tau))). Queries q_i are
    embeddings of passages, too. All embeddings are those of the starting checkpoint, and W is a
    matrix that starts as the identity. Passages p_j stay as they are, as in DensePhrases (Lee et
    al. 2021, query-side fine-tuning). The teacher's scores t_ij are weighted means of z-scores
    (`search.fusion`). s_i is the standard deviation of the query's similarities before training:
    that of multilingual-e5-small is a sixth of MiniLM's, so one temperature does not suit both. The
    query's own passage is left out.
    """

    weight: float = option(
        0.0,
        "weight of the passages' ranking by a hybrid search with the starting checkpoint; above 0, "
        "only a linear map of queries' embeddings is trained, and documents keep theirs",
        low=0.0,
    )
    passages: int = option(
        6400, "the largest number of passages that are queries, drawn at random", low=1
    )
    bm25: float = option(0.2, "weight of BM25 in the ranking to learn from", low=0.0, high=1.0)
    teacher_temperature: float = option(
        0.5, "temperature of that ranking's scores, which are z-scores", low=1e-6
    )
    temperature: float = option(
        0.5,
        "temperature of the query's similarities, in units of their standard deviation before "
        "training",
        low=1e-6,
    )
    needs = frozenset({"ranked"})
    papers = ("densephrases",)

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> Mapping[str, Network]:
        size = checkpoints.encoder.embedding_size(run.pooler)
        return {QUERY_PROJECTION: Network(partial(QueryProjection, size))}

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        assert forward.batch.ranked is not None  # of queries, as `needs` says
        queries, passages, teacher, spread = forward.batch.ranked
        queries = forward.computation.network(QUERY_PROJECTION)(queries)
        similarities = jnp.matmul(normalize(queries), passages.T, precision="highest")
        scores = similarities / (self.temperature * spread[:, None])
        return kl_divergence(scores, teacher / self.teacher_temperature).mean(), {}


def kl_divergence(scores: Lists, teacher: Lists) -> Float[Array, " rows"]:
    """Compute KL(teacher | scores) in nats. Both are logits.

    Candidates with -inf in the teacher's list are left out of both.
    """
    is_ranked = jnp.isfinite(teacher)
    # A large finite number, because -inf - -inf is NaN.
    log_p, log_q = (
        jax.nn.log_softmax(jnp.where(is_ranked, logits, -1e9), axis=1)
        for logits in (teacher, scores)
    )
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=1)


def list_net(scores: Lists, teacher: Lists) -> Float[Array, " rows"]:
    """Compute ListNet (Cao et al. 2007, top 1).

    It is the cross-entropy of the candidates' distribution under the teacher's. Both arguments are
    logits.
    """
    return -(jax.nn.softmax(teacher, axis=1) * jax.nn.log_softmax(scores, axis=1)).sum(axis=1)


def list_mle(scores: Lists, teacher: Lists) -> Float[Array, " rows"]:
    """Compute ListMLE (Xia et al. 2008).

    It is the negative log-likelihood of the teacher's order of candidates.

    l = -sum_k log exp(s_k) / sum_{l >= k} exp(s_l), with the scores s in the teacher's order, best
    first. Ties keep the order of the batch.
    """
    order = jnp.argsort(-teacher, axis=1, stable=True)
    ordered = jnp.take_along_axis(scores, order, axis=1)
    return (jax.lax.cumlogsumexp(ordered, axis=1, reverse=True) - ordered).sum(axis=1)
