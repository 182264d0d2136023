"""The networks of a run: starting checkpoint, generator, teachers, and what is trained.

Networks that are not trained are frozen.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import OWN_POOLER, Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.hosts import log_line
from diffcse_jax.losses import PretrainedCheckpoints
from diffcse_jax.models import layers, sentence_folder
from diffcse_jax.models.forward import Networks, SentenceNetwork, fold_in_name
from diffcse_jax.models.heads import (
    PROJECTORS,
    QUERY_PROJECTION,
    SENTENCE_HEAD,
    MaskedLMHead,
    SentenceHead,
)
from diffcse_jax.models.hf import Pretrained, read
from diffcse_jax.models.layers import Network, Params
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.models.text_settings import max_length_of
from diffcse_jax.models.tokenizer import check_token_ids, has_tokenizer, load_tokenizer
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.run_folder.finding import model_of

# For model.pooler="own" if the checkpoint records none, as in sentence-transformers.
DEFAULT_POOLER = "avg"


@dataclasses.dataclass(frozen=True)
class StartingCheckpoint:
    """The starting checkpoint. With the pooler that it records, it is the baseline of the run.

    Attributes:
        name: As the configuration names it.
        checkpoint: Its parts.
        tokenizer: Its tokenizer.
        recorded: Its pooler (none for a raw masked LM), its prompts, and those of `data.prompts`.
    """

    name: str
    checkpoint: Pretrained
    tokenizer: PreTrainedTokenizerFast
    recorded: RecordedPooler

    @property
    def pooler_head(self) -> Params | None:
        """The dense + tanh head that is recorded or in the checkpoint, if there is one."""
        return self.recorded.head or self.checkpoint.pooler

    def pooler(self, config: Config) -> str:
        """Return the pooler that the checkpoint records, or else the run's."""
        pooler = self.recorded.pooler or config.encoding_pooler
        return "cls_before_pooler" if pooler == "cls" and self.pooler_head is None else pooler

    def encoder(self, config: Config, trained: Params | None = None) -> SentenceEncoder:
        """Return the starting checkpoint, with whole embeddings, or the encoder trained from it.

        If queries alone are trained, it has both: documents keep the starting checkpoint.
        """
        start = self.checkpoint
        record = self.recorded._replace(
            pooler=self.pooler(config), head=self.pooler_head, truncate_dim=None
        )
        if trained is None:
            return self._made(start.transformer, record, mlm_head=start.mlm_head)
        pooler = config.encoding_pooler
        if config.trains_queries:
            kernel = layers.subset(trained, QUERY_PROJECTION)["kernel"]
            head = record.sentence_head.with_projection(pooler, kernel)
            queries = self._made(start.transformer, record._replace(sentence_head=head))
            return self._made(start.transformer, record, queries=queries)
        return self._made(
            layers.subset(trained, "encoder"),
            record._replace(
                pooler=pooler,
                head=layers.subset(trained, "projector"),
                sentence_head=record.sentence_head.of(pooler, trained),
            ),
            trained_length=config.data.max_length,
            mlm_head=layers.subset(trained, "mlm_head") if config.keeps_mlm_head else None,
        )

    def _made(
        self, transformer: Params, record: RecordedPooler, trained_length: int = 0, **options: Any
    ) -> SentenceEncoder:
        """Return an encoder. Encoders of the same sizes share one compiled function."""
        start = self.checkpoint
        longest = max_length_of(start.folder, start.config.max_length, trained_length)
        return SentenceEncoder(
            start.config,
            transformer,
            self.tokenizer,
            record,
            max_length=longest,
            name=self.name,
            languages=start.languages,
            **options,
        )

    def with_mlm_head(self, params: Params) -> "StartingCheckpoint":
        """Return the checkpoint with the masked-LM head that a run starts from.

        It is the checkpoint's own head, or a new one.
        """
        initial = layers.subset(params, "mlm_head")
        head = {name: np.asarray(array) for name, array in initial.items()}
        checkpoint = dataclasses.replace(self.checkpoint, mlm_head=head)
        return dataclasses.replace(self, checkpoint=checkpoint)

    def is_trained_embedding(self, config: Config) -> bool:
        """Return whether the run trains the embedding that the checkpoint starts with.

        A masked LM is trained and measured without a pooler.
        """
        if config.trains_masked_lm:
            return True
        has_its_weights = config.encoding_pooler != "cls" or self.recorded.head is not None
        return has_its_weights and self.pooler(config) == config.encoding_pooler

    def describe_pooler(self, asked: str, config: Config) -> str:
        """Return how the run pools the checkpoint, as a message.

        It is empty unless the user asked for `own` or the two poolers differ.
        """
        recorded = self.recorded.pooler
        if asked == OWN_POOLER and recorded:
            applied = self.recorded.sentence_head.applied(recorded)
            return f"Starting from {self.name}, with its own pooler ({applied})."
        if asked == OWN_POOLER:
            return (
                f"{self.name} records no pooler. It is trained as a raw masked LM, with the mean "
                f"over tokens ({DEFAULT_POOLER}). configs/base/from_masked_lm.py has settings for "
                "it."
            )
        if not recorded or self.is_trained_embedding(config):
            return ""
        return (
            f"notice: {self.name} has the pooler {recorded}, but this run trains "
            f"{config.encoding_pooler}, because of model.pooler={asked!r} and the projector. "
            "configs/base/sentence_encoder.py keeps its pooler."
        )


def open_start(config: Config, mesh: Mesh) -> tuple[Config, StartingCheckpoint, Vocabulary]:
    """Read the starting checkpoint that the configuration names, and `prepare_start` it."""
    name = model_of(config.model.name_or_path)
    encoder = _read("model.name_or_path", name, needs_mlm_head=config.generator_is_start)
    return prepare_start(config, mesh, encoder, sentence_folder.recorded(encoder))


def prepare_start(
    config: Config, mesh: Mesh, encoder: Pretrained, recorded: RecordedPooler
) -> tuple[Config, StartingCheckpoint, Vocabulary]:
    """Place an encoder on the devices as the starting checkpoint of a run that can train it.

    Returns:
        The configuration with its pooler resolved, the starting checkpoint and the tokenizer's
        vocabulary.
    """
    name, asked = config.model.name_or_path, config.model.pooler
    encoder = dataclasses.replace(encoder, sentence_head=recorded.sentence_head)
    encoder = encoder.on(mesh.devices.flat[0], mesh.shape["data"])
    base = StartingCheckpoint(name, encoder, load_tokenizer(encoder.folder), recorded)
    check_token_ids(base.tokenizer, encoder.config.vocab_size, encoder.config.type_vocab_size, name)
    config = with_own_pooler(config, recorded)
    if description := base.describe_pooler(asked, config):
        log_line(description)
    if recorded.truncate_dim:
        log_line(
            f"notice: {name} cuts its embeddings to {recorded.truncate_dim} dimensions. A run "
            "trains, compares and exports whole ones. `diffcse export --truncate_dim "
            f"{recorded.truncate_dim}` cuts those."
        )
    _check_embedding_size(encoder, config)
    _check_length(config, f"model.name_or_path={name!r}", sizes_for_run(encoder.config, config))
    return config, base, vocabulary_of(config, base.tokenizer)


def with_own_pooler(config: Config, recorded: RecordedPooler) -> Config:
    """Return the configuration with the checkpoint's pooler for `model.pooler="own"`."""
    if config.model.pooler != OWN_POOLER:
        return config
    model = dataclasses.replace(config.model, pooler=recorded.pooler or DEFAULT_POOLER)
    if model.pooler == "cls":  # its dense + tanh head is trained as a projector that is kept
        if model.projector == "batchnorm":
            raise ConfigError(
                f"model.projector={model.projector!r} with model.pooler={OWN_POOLER!r}: "
                f"{model.name_or_path} records a dense + tanh head, which would be trained. Use "
                "model.projector='none'."
            )
        model = dataclasses.replace(model, projector="mlp", projector_train_only=False)
    return Config.from_dict(config.to_dict() | {"model": dataclasses.asdict(model)})


class Built(NamedTuple):
    """The networks of a run, and the initial arrays of trained and frozen parameters."""

    networks: Networks
    params: Params
    frozen: Params


def build(
    config: Config,
    encoder: Pretrained,
    generator: Pretrained | None,
    vocabulary: Vocabulary,
    *,
    teachers: Mapping[str, Network] = MappingProxyType({}),
    projector: Params | None = None,
    discriminator: Pretrained | None = None,
) -> Built:
    """Return the networks and their initial arrays.

    Args:
        config: Decides which networks exist.
        encoder: The starting checkpoint.
        generator: The frozen masked LM with its head; None if no loss needs one.
        vocabulary: The tokenizer's vocabulary.
        teachers: The sentence encoders that losses name.
        projector: The weights that a kept projector starts from; None: random ones.
        discriminator: The checkpoint that DiffCSE's discriminator starts from; None: the encoder.
    """
    sizes = sizes_for_run(encoder.config, config)
    networks: dict[str, Network] = {}
    if not config.trains_queries:  # whose embeddings are an input
        networks["encoder"] = Network(partial(Transformer, sizes), encoder.transformer)
        if (modules := encoder.sentence_head.of(config.encoding_pooler)).layers:
            networks[SENTENCE_HEAD] = Network(partial(SentenceHead, modules.layers), modules.params)
    if config.model.projector != "none":
        size = encoder.embedding_size(config.encoding_pooler)
        of_embeddings = dataclasses.replace(sizes, hidden_size=size)
        networks["projector"] = Network(
            partial(PROJECTORS[config.model.projector], of_embeddings),
            projector if config.keeps_projector else None,
        )
    generator = generator if config.needs("generator") else None
    if generator is not None:
        sizes_of_generator = generator.config
        if not config.generator.dropout:
            sizes_of_generator = sizes_of_generator.with_dropout((0.0,), (0.0,))
        generator = dataclasses.replace(generator, config=sizes_of_generator)
        transformer = partial(Transformer, sizes_of_generator)
        head = partial(MaskedLMHead, sizes_of_generator)
        networks["generator"] = Network(transformer, generator.transformer, frozen=True)
        networks["generator_head"] = Network(head, generator.mlm_head, frozen=True)
    if discriminator is not None:
        discriminator = dataclasses.replace(
            discriminator, config=sizes_for_run(discriminator.config, config)
        )
    checkpoints = PretrainedCheckpoints(
        dataclasses.replace(encoder, config=sizes), generator, teachers, discriminator
    )
    for loss in config.losses.values():
        networks |= loss.networks(checkpoints, config.run_info)

    dtype = jnp.dtype(config.precision)
    key = fold_in_name(jax.random.key(config.train.seed_of("heads")), "initial weights")
    definitions: dict[str, nnx.GraphDef] = {}
    params, frozen = Params(), Params()
    for name, network in networks.items():
        module = partial(network.build, dtype=dtype)
        definitions[name] = layers.definition(module)
        start = network.params
        if start is None:
            start = layers.initial(module, fold_in_name(key, name))
        (frozen if network.frozen else params).update(layers.prefixed(start, name))
    return Built(Networks(vocabulary, definitions), params, frozen)


def sizes_for_run(sizes: TransformerConfig, config: Config) -> TransformerConfig:
    """Return the encoder's sizes with the run's dropout rates and recomputation."""
    model = config.model
    sizes = dataclasses.replace(sizes, recompute=config.train.recompute == "on")
    try:
        return sizes.with_dropout(model.hidden_dropout, model.attention_dropout)
    except ValueError as error:
        raise ConfigError(f"model.hidden_dropout, model.attention_dropout: {error}") from error


def _check_embedding_size(encoder: Pretrained, config: Config) -> None:
    """Raise ConfigError if the run needs another embedding size than the pooler gives."""
    name = config.model.name_or_path
    pooler = config.encoding_pooler
    hidden = encoder.config.hidden_size
    size = encoder.embedding_size(pooler)
    if max(config.matryoshka.sizes, default=0) >= size:
        raise ConfigError(
            f"matryoshka.sizes={config.matryoshka.sizes}: {name} has embeddings of {size}. Give "
            "smaller sizes."
        )
    if size != hidden and (needing := config.settings_that_need("hidden_size")):
        raise ConfigError(
            f"{' and '.join(needing)} puts embeddings among hidden states, which have {hidden} "
            f"features, but those of {name} with the pooler {pooler} have {size}. Set the weight "
            "to 0, or choose another model.pooler."
        )


def describe_equal_views(sizes: TransformerConfig, config: Config) -> str:
    """Return a warning if both views of a sentence have the same embedding.

    Rows of SimCSE's Table 3 have such views.
    """
    has_dropout = any((sizes.embedding_dropout, *sizes.hidden_dropout, *sizes.attention_dropout))
    drop_differently = has_dropout and config.model.dropout_masks == "independent"
    differ = drop_differently or config.data.augmentation != "none"
    if differ or not config.needs("dropout"):
        return ""
    return (
        "the two views of a sentence are equal, because only dropout could make them differ. Set "
        "model.hidden_dropout=(0.1,), model.attention_dropout=(0.1,) and "
        "model.dropout_masks='independent'."
    )


def load_generator(
    config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast
) -> Pretrained | None:
    """Load the frozen masked LM that the configuration names, if a loss needs it."""
    if not config.needs("generator") or config.trains_generator_head:
        return None
    if config.generator_is_start:
        return encoder
    name = config.generator.name_or_path
    try:
        generator = _read("generator.name_or_path", name, needs_mlm_head=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{str(error).removesuffix('.')}. Or leave this key empty, as --config diffcse_minilm "
            "does. Then the run first trains a masked-LM head on its encoder."
        ) from error
    return _fitting(config, f"generator.name_or_path={name!r}", generator, encoder, tokenizer)


def load_discriminator(
    config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast
) -> Pretrained | None:
    """Load the ELECTRA discriminator that the configuration names, if it names one."""
    name, size = config.difference.discriminator, encoder.config.hidden_size
    if not name or "difference" not in config.losses:
        return None
    key = f"difference.discriminator={name!r}"
    discriminator = _read("difference.discriminator", name)
    if discriminator.discriminator_head is None or discriminator.config.hidden_size != size:
        head = "no" if discriminator.discriminator_head is None else "a"
        raise ConfigError(
            f"{key} has {head} head for replaced tokens and hidden states of "
            f"{discriminator.config.hidden_size}. It needs such a head, as "
            f"google/electra-base-discriminator has, and hidden states of {size}, the size of the "
            "encoder's embedding (ELECTRA small: 256, base: 768, large: 1024). Or leave the key "
            "empty."
        )
    return _fitting(config, key, discriminator, encoder, tokenizer)


def load_teachers(
    config: Config, tokenizer: PreTrainedTokenizerFast
) -> tuple[dict[str, Network], dict[str, str]]:
    """Load the sentence encoders that losses name.

    Returns:
        The networks by name, and digests of their weights by the configuration key that names them.
    """
    teachers: dict[str, Network] = {}
    digests: dict[str, str] = {}
    for loss_name, loss in config.losses.items():
        key = f"{loss_name}.teachers"
        fingerprints = []
        for name, explicit in loss.named_teachers.items():
            try:
                encoder = SentenceEncoder.from_pretrained(name, pooler=explicit or None)
            except CheckpointError as error:
                raise CheckpointError(f"{key}, {loss_name}.poolers: {error}") from error
            if encoder.queries is not None:
                raise CheckpointError(
                    f"{key}: {name!r} has a query encoder and a document encoder. Name "
                    "a model with one encoder"
                )
            sizes = encoder.config
            source = f"{key}: {name!r}"
            _check_fits(config, source, sizes, encoder.tokenizer, tokenizer)
            check_token_ids(tokenizer, sizes.vocab_size, sizes.type_vocab_size, source)
            modules = encoder.sentence_head.layers
            cut = encoder.truncate_dim
            pooler = encoder.recorded.pooler
            network = partial(SentenceNetwork, encoder.config, pooler, cut, layers=modules)
            teachers[name] = Network(network, jax.tree.map(np.asarray, encoder.params), frozen=True)
            fingerprints.append(encoder.fingerprint())
        if fingerprints:
            digests[key] = hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()
    return teachers, digests


def _read(key: str, name: str, *, needs_mlm_head: bool = False) -> Pretrained:
    """Read the checkpoint that a key of the configuration names. Errors begin with the key."""
    try:
        return read(name, needs_mlm_head=needs_mlm_head)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def _fitting(
    config: Config,
    key: str,
    checkpoint: Pretrained,
    encoder: Pretrained,
    tokenizer: PreTrainedTokenizerFast,
) -> Pretrained:
    """Return a checkpoint on the encoder's devices. It must read the encoder's token ids."""
    theirs = load_tokenizer(checkpoint.folder) if has_tokenizer(checkpoint.folder) else tokenizer
    embeddings = encoder.config.vocab_size
    _check_fits(config, key, checkpoint.config, theirs, tokenizer, embeddings=embeddings)
    return checkpoint.like(encoder)


def _check_fits(
    config: Config,
    key: str,
    sizes: TransformerConfig,
    theirs: PreTrainedTokenizerFast,
    ours: PreTrainedTokenizerFast,
    *,
    embeddings: int | None = None,
) -> None:
    """Check that another checkpoint reads our token ids and has enough positions.

    If `embeddings` is given, it must also have that many of them.
    """
    their_ids, our_ids = theirs.get_vocab(), ours.get_vocab()
    unlike = sum(their_ids.get(token) != index for token, index in our_ids.items())
    difference = f"{unlike} of {len(our_ids)} tokens have other ids" if unlike else ""
    if embeddings not in (None, sizes.vocab_size):
        difference = f"{sizes.vocab_size} and {embeddings} tokens"
    if difference:
        raise CheckpointError(
            f"{key} and model.name_or_path={config.model.name_or_path!r} differ in their "
            f"vocabulary ({difference}). Generators, discriminators and teachers read the "
            "encoder's token ids, so all need the same one. As a generator, use "
            "distilbert-base-uncased for BERT and distilroberta-base for RoBERTa."
        )
    _check_length(config, key, sizes)


def _check_length(config: Config, key: str, sizes: TransformerConfig) -> None:
    """Check that a checkpoint has as many positions as `data.max_length`."""
    if config.data.max_length > sizes.max_length:
        raise ConfigError(
            f"data.max_length={config.data.max_length}: {key} reads at most {sizes.max_length} "
            "tokens."
        )


def vocabulary_of(config: Config, tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    """Return the tokenizer's vocabulary."""
    if tokenizer.mask_token_id is None and config.needs("mask_token"):
        needing = ", ".join(config.settings_that_need("mask_token"))
        raise ConfigError(
            f"the tokenizer of {config.model.name_or_path} has no mask token, which {needing} needs"
        )
    special_ids = tuple(sorted(tokenizer.all_special_ids))
    return Vocabulary(len(tokenizer), tokenizer.mask_token_id, special_ids)
