"""The networks of a run: the starting checkpoint, the generator, the teachers, and what is trained or frozen."""

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
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.losses.base import Checkpoints, Network
from diffcse_jax.models import parameters, pooling_modules
from diffcse_jax.models.forward import Networks, Teacher, fold_in_name
from diffcse_jax.models.heads import PROJECTORS, MaskedLMHead
from diffcse_jax.models.hf import Pretrained, read
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling_modules import RecordedPooler
from diffcse_jax.models.prompts import NO_PROMPTS, Prompts
from diffcse_jax.models.sentence_head import NO_HEAD, SENTENCE_HEAD, SentenceHead
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.run_folder.saved_encoder import read_encoder
from diffcse_jax.search.vector_store import VectorStore, find_store

DEFAULT_POOLER = "avg"  # for model.pooler="own" if the checkpoint records none, as in sentence-transformers


@dataclasses.dataclass(frozen=True)
class StartingCheckpoint:
    """The starting checkpoint. With the pooler that it records, it is the baseline of the run.

    Attributes:
        name: The checkpoint as the configuration names it.
        recorded: The pooler that it records; None if it records none, as a raw masked LM does.
        prompts: Its prompts, and those of `data.prompts`.
    """

    name: str
    checkpoint: Pretrained
    tokenizer: PreTrainedTokenizerFast
    recorded: RecordedPooler | None
    prompts: Prompts = NO_PROMPTS

    @property
    def head(self) -> Params | None:
        """The dense + tanh head of the recorded pooler `cls`, from which a kept projector starts."""
        return self.recorded.head if self.recorded else None

    @property
    def pooler_head(self) -> Params | None:
        """The dense + tanh head that is recorded or in the checkpoint, if there is one."""
        return self.head or self.checkpoint.pooler

    def pooler(self, config: Config) -> str:
        """Return the pooler that the checkpoint records, or else the run's."""
        pooler = self.recorded.pooler if self.recorded else config.encoding_pooler
        return "cls_before_pooler" if pooler == "cls" and self.pooler_head is None else pooler

    def encoder(self, config: Config) -> SentenceEncoder:
        """Return the starting checkpoint as its users use it."""
        model, pooler, head = self.checkpoint, self.pooler(config), self.pooler_head
        length = pooling_modules.max_length_of(model.folder, model.config.max_length)
        options: dict[str, Any] = {"pooler_head": head, "sentence_head": model.sentence_head}
        options |= {"prompts": self.prompts, "max_length": length}
        return SentenceEncoder(
            model.config, model.transformer, self.tokenizer, pooler=pooler, name=self.name, **options
        )

    def is_trained_embedding(self, config: Config) -> bool:
        """Return whether the run trains the embedding that the checkpoint has before the first step."""
        has_its_weights = config.encoding_pooler != "cls" or self.head is not None
        return has_its_weights and self.pooler(config) == config.encoding_pooler

    def describe_pooler(self, asked: str, config: Config) -> str:
        """Say how the run pools the checkpoint, if the user asked for `own` or the two differ."""
        if asked == OWN_POOLER:
            if self.recorded:
                return f"Starting from {self.name}, with its own pooler ({self.recorded.pooler})."
            return (
                f"{self.name} records no pooler. It is trained as a raw masked LM, with the mean over tokens "
                f"({DEFAULT_POOLER}). configs/base/masked_lm.py has the settings for such checkpoints."
            )
        if self.recorded is None or self.is_trained_embedding(config):
            return ""
        return (
            f"notice: {self.name} is a sentence encoder with the pooler {self.recorded.pooler}, but this run trains "
            f"{config.encoding_pooler}, because of model.pooler={asked!r} and the projector. configs/base/"
            "sentence_encoder.py has the settings for such checkpoints."
        )


def recorded_pooler(checkpoint: Pretrained, asked: str) -> RecordedPooler | None:
    """Return the pooler that a checkpoint records, or None if it records none.

    If the pooler cannot be read, this is an error only if `model.pooler`, the argument `asked`, is `own`.
    """
    try:
        return pooling_modules.recorded(checkpoint)
    except CheckpointError as error:
        if asked == OWN_POOLER:
            raise
        log_line(f"notice: {error}. As the baseline, it is read with the run's own pooler.")
        return None


def open_start(config: Config, mesh: Mesh) -> tuple[Config, StartingCheckpoint, Vocabulary]:
    """Load the starting checkpoint, and check that it fits the configuration.

    Fine-tuning also reads a run, or one of its checkpoints.

    Returns:
        The configuration with the pooler resolved, the checkpoint, and the vocabulary of its tokenizer.
    """
    name, asked = config.model.name_or_path, config.model.pooler
    if config.needs("labels") and find_run(expand_path(name)):
        saved = read_encoder(expand_path(name))
        head = saved.pooler_head
        encoder = Pretrained(saved.folder, saved.hf_config, saved.transformer_config, saved.transformer, head, None)
        recorded: RecordedPooler | None = RecordedPooler(saved.pooler, head if saved.pooler == "cls" else None)
        encoder = dataclasses.replace(encoder, sentence_head=saved.sentence_head)
        prompts = saved.prompts
    else:
        encoder = read(name, needs_mlm_head=config.generator_is_start)
        recorded = recorded_pooler(encoder, asked)
        prompts = pooling_modules.prompts_of(encoder.folder, recorded)
        encoder = dataclasses.replace(encoder, sentence_head=recorded.sentence_head if recorded else NO_HEAD)
    encoder = encoder.on(mesh.devices.flat[0].platform, mesh.shape["data"])
    base = StartingCheckpoint(name, encoder, load_tokenizer(encoder.folder), recorded, prompts)
    config = with_own_pooler(config, recorded)
    if description := base.describe_pooler(asked, config):
        log_line(description)
    _check_size(encoder, config)
    sizes_for_run(encoder.config, config)
    check_max_length(config, encoder.config, name)
    return config, base, vocabulary_of(config, base.tokenizer, encoder.config.vocab_size)


def with_own_pooler(config: Config, recorded: RecordedPooler | None) -> Config:
    """Return the configuration with `model.pooler="own"` replaced by the pooler that the checkpoint records.

    The pooler `cls` has a dense + tanh head, which is trained as a projector that is kept.
    """
    if config.model.pooler != OWN_POOLER:
        return config
    model = dataclasses.replace(config.model, pooler=recorded.pooler if recorded else DEFAULT_POOLER)
    if model.pooler == "cls":
        if model.projector == "batchnorm":
            raise ConfigError(
                f"model.projector={model.projector!r} with model.pooler={OWN_POOLER!r}: {model.name_or_path} records "
                "a dense + tanh head, which would be trained. Use model.projector='none'."
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
    teachers: Mapping[str, Teacher] = MappingProxyType({}),
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
    networks = {"encoder": Network(partial(Transformer, sizes), encoder.transformer)}
    if layers := (head := encoder.sentence_head.of(config.encoding_pooler)).layers:
        networks[SENTENCE_HEAD] = Network(partial(SentenceHead, layers), head.params)
    if config.model.projector != "none":
        size = encoder.embedding_size(config.encoding_pooler)
        build = partial(PROJECTORS[config.model.projector], dataclasses.replace(sizes, hidden_size=size))
        networks["projector"] = Network(build, projector if config.keeps_projector else None)
    if generator is not None and config.needs("generator"):
        own = generator.config if config.generator.dropout else generator.config.without_dropout()
        generator = dataclasses.replace(generator, config=own)
        networks["generator"] = Network(partial(Transformer, own), generator.transformer, frozen=True)
        networks["generator_head"] = Network(partial(MaskedLMHead, own), generator.mlm_head, frozen=True)
    else:
        generator = None
    if discriminator is not None:
        discriminator = dataclasses.replace(discriminator, config=sizes_for_run(discriminator.config, config))
    checkpoints = Checkpoints(dataclasses.replace(encoder, config=sizes), generator, teachers, discriminator)
    for loss in config.losses.values():
        networks |= loss.networks(checkpoints, config.run_info)

    dtype, key = jnp.dtype(config.precision), fold_in_name(jax.random.key(config.train.seed), "initial weights")
    definitions: dict[str, nnx.GraphDef] = {}
    params, frozen = Params(), Params()
    for name, network in networks.items():
        module = partial(network.build, dtype=dtype)
        definitions[name] = parameters.definition(module)
        start = parameters.initial(module, fold_in_name(key, name)) if network.params is None else network.params
        (frozen if network.frozen else params).update(parameters.prefixed(start, name))
    return Built(Networks(vocabulary, definitions), params, frozen)


def sizes_for_run(sizes: TransformerConfig, config: Config) -> TransformerConfig:
    """Return the encoder's sizes with the run's dropout rates and recomputation."""
    model = config.model
    sizes = dataclasses.replace(sizes, recompute=config.train.recompute == "on")
    try:
        return sizes.with_dropout(model.hidden_dropout, model.attention_dropout, model.dropout_schedule)
    except ValueError as error:
        keys = "model.hidden_dropout, model.attention_dropout, model.dropout_schedule"
        raise ConfigError(f"{keys}: {error}") from error


def _check_size(encoder: Pretrained, config: Config) -> None:
    """Raise ConfigError if the run needs another embedding size than that of the pooler and its head."""
    name, pooler, hidden = config.model.name_or_path, config.encoding_pooler, encoder.config.hidden_size
    size = encoder.embedding_size(pooler)
    if max(config.matryoshka.sizes, default=0) >= size:
        raise ConfigError(
            f"matryoshka.sizes={config.matryoshka.sizes}: the embedding size of {name} is {size}, which is always "
            "trained. Give smaller sizes only."
        )
    if size != hidden and (needing := config.settings_that_need("hidden_size")):
        raise ConfigError(
            f"{' and '.join(needing)} puts embeddings among hidden states, which have {hidden} features, but those of "
            f"{name} with the pooler {pooler} have {size}. Set the weight to 0, or choose another model.pooler."
        )


def describe_equal_views(sizes: TransformerConfig, config: Config) -> str:
    """Return a warning if both views of a single sentence have the same embedding, so that nothing is learned.

    It is not an error: SimCSE's Table 3 has such rows.
    """
    if config.data.augmentation != "none" or not config.needs("dropout"):
        return ""
    differ = "only dropout makes the two views of a sentence differ"
    if not any((sizes.embedding_dropout, *sizes.hidden_dropout, *sizes.attention_dropout)):
        return f"{differ}, and it is off. Set model.hidden_dropout=(0.1,) and model.attention_dropout=(0.1,)."
    if config.model.dropout_masks == "shared":
        return f"{differ}, and model.dropout_masks='shared' makes it the same for both. Use 'independent'."
    return ""


def load_generator(config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> Pretrained:
    """Load the frozen masked LM that the configuration names. It must use the encoder's token ids.

    If its folder has no tokenizer, only the numbers of tokens are compared.
    """
    if config.generator_is_start:
        return encoder
    name = config.generator.name_or_path
    generator = read(name, needs_mlm_head=True)
    difference = _vocabulary_difference(generator, encoder, tokenizer)
    _require_same_vocabulary(config, f"generator.name_or_path={name!r}", difference)
    check_max_length(config, generator.config, name)
    return generator


def load_discriminator(config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> Pretrained | None:
    """Load the ELECTRA discriminator that the configuration names, if it names one.

    Raises:
        CheckpointError: It has no head for replaced tokens, or another vocabulary than the encoder.
        ConfigError: It has another hidden size than the encoder, or fewer positions than data.max_length.
    """
    name = config.difference.discriminator
    if not name or "difference" not in config.losses:
        return None
    key, discriminator = f"difference.discriminator={name!r}", read(name)
    if discriminator.discriminator_head is None:
        raise CheckpointError(
            f"{key} has no head for replaced tokens. Name an ELECTRA discriminator with its head, such as "
            "google/electra-base-discriminator, or leave the key empty."
        )
    ours, theirs = encoder.config.hidden_size, discriminator.config.hidden_size
    if ours != theirs:
        raise ConfigError(
            f"{key} has hidden states of {theirs}, but it reads the encoder's embedding, which has {ours}. Choose an "
            "ELECTRA of that size (small: 256, base: 768, large: 1024), or leave the key empty."
        )
    _require_same_vocabulary(config, key, _vocabulary_difference(discriminator, encoder, tokenizer))
    check_max_length(config, discriminator.config, name)
    return discriminator.like(encoder)


class Teachers(NamedTuple):
    """The sentence encoders that losses name.

    Attributes:
        by_name: Encoders that run during training.
        stores: Stored embeddings of the others.
        digests: Digests of weights or embeddings, by the configuration key that names the teachers.
    """

    by_name: dict[str, Teacher]
    stores: dict[str, VectorStore]
    digests: dict[str, str]


def load_teachers(config: Config, tokenizer: PreTrainedTokenizerFast) -> Teachers:
    """Load the sentence encoders that losses name, or find their stored embeddings."""
    teachers = Teachers({}, {}, {})
    for loss_name, loss in config.losses.items():
        key, fingerprints = f"{loss_name}.teachers", []
        for name, pooler in loss.named_teachers.items():
            if store := find_store(name):
                if pooler:
                    raise ConfigError(f"{loss_name}.poolers: {name} holds embeddings, which have no pooler. Give ''.")
                change = "data.pairs='crops' trains on parts of sentences" if config.data.pairs == "crops" else ""
                if config.data.pairs == "lead" and config.data.cloze:
                    change = "data.cloze trains on parts of texts (0 turns it off)"
                if config.data.augmentation != "none":
                    change = f"data.augmentation={config.data.augmentation!r} changes second views"
                if change:
                    raise ConfigError(f"{key}: {name} holds embeddings of the text, but {change}. Name the encoder.")
                teachers.stores[name] = store
                fingerprints.append(store.digest)
                continue
            try:
                encoder = SentenceEncoder.from_pretrained(name, pooler=pooler or None)
            except CheckpointError as error:
                raise CheckpointError(f"{key}, {loss_name}.poolers: {error}") from error
            difference = _difference(encoder.tokenizer, tokenizer)
            _require_same_vocabulary(config, f"{key}: {name!r}", difference)
            check_max_length(config, encoder.config, f"{name} in {key}")
            params = {name: np.asarray(array) for name, array in encoder.params.items()}
            teachers.by_name[name] = Teacher(
                encoder.config, encoder.pooler, params, encoder.truncate_dim, encoder.sentence_head.layers
            )
            fingerprints.append(encoder.fingerprint())
        if fingerprints:
            teachers.digests[key] = hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()
    return teachers


def check_max_length(config: Config, sizes: TransformerConfig, name: str) -> None:
    """Raise ConfigError if a checkpoint has fewer positions than data.max_length."""
    if config.data.max_length > sizes.max_length:
        raise ConfigError(
            f"data.max_length={config.data.max_length} is more than {name} can read. Use at most {sizes.max_length}."
        )


def _require_same_vocabulary(config: Config, name: str, difference: str) -> None:
    if difference:
        raise CheckpointError(
            f"{name} and model.name_or_path={config.model.name_or_path!r} differ in their vocabulary ({difference}). "
            "Generators, discriminators and teachers read the encoder's token ids, so all need the same one. As a "
            "generator, use distilbert-base-uncased for BERT and distilroberta-base for RoBERTa."
        )


def _vocabulary_difference(checkpoint: Pretrained, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return how a checkpoint's vocabulary differs from the encoder's. Without a tokenizer, only sizes are compared."""
    if checkpoint.config.vocab_size != encoder.config.vocab_size:
        return f"{checkpoint.config.vocab_size} and {encoder.config.vocab_size} tokens"
    if (checkpoint.folder / "tokenizer.json").is_file():
        return _difference(load_tokenizer(checkpoint.folder), tokenizer)
    return ""


def _difference(theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast) -> str:
    """Return how their vocabulary differs from ours, or an empty string if all our tokens have the same ids in both."""
    theirs_by_token, ours_by_token = theirs.get_vocab(), ours.get_vocab()
    unlike = sum(theirs_by_token.get(token) != index for token, index in ours_by_token.items())
    return f"{unlike} of {len(ours_by_token)} tokens have other ids" if unlike else ""


def vocabulary_of(config: Config, tokenizer: PreTrainedTokenizerFast, embeddings: int) -> Vocabulary:
    """Return the tokenizer's vocabulary, for a model with this number of word embeddings."""
    if len(tokenizer) > embeddings:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, but the model only {embeddings} word embeddings")
    if tokenizer.mask_token_id is None and config.needs("mask_token"):
        needing = ", ".join(config.settings_that_need("mask_token"))
        raise ConfigError(f"the tokenizer of {config.model.name_or_path} has no mask token, which {needing} needs")
    return Vocabulary(len(tokenizer), tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)))
