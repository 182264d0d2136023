"""The networks of a run: which there are, what is trained, what is frozen, where each starts from."""

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerFast

from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.losses.base import Checkpoints, Network
from diffcse_jax.models import parameters
from diffcse_jax.models.forward import Networks, fold_in_name
from diffcse_jax.models.heads import PROJECTORS, MaskedLMHead
from diffcse_jax.models.hf import Pretrained, read
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.teachers import Teacher
from diffcse_jax.models.transformer import Transformer, TransformerConfig, scheduled_rates
from diffcse_jax.search.vector_store import VectorStore, find_store


class Built(NamedTuple):
    """The networks of a run and their initial arrays."""

    networks: Networks
    params: Params  # trained
    frozen: Params


def build(
    config: Config,
    encoder: Pretrained,
    generator: Pretrained | None,
    vocabulary: Vocabulary,
    teachers: Mapping[str, Teacher] = MappingProxyType({}),
    projector: Params | None = None,
) -> Built:
    """Assembles the networks and their initial arrays.

    Args:
        config: decides which networks exist.
        encoder: the checkpoint that the encoder starts from.
        generator: the frozen masked LM with its head; None where no objective needs one.
        vocabulary: the tokenizer's.
        teachers: the sentence encoders that losses name.
        projector: the weights that a projector which is kept starts from; None: its initial ones.

    Raises:
        ConfigError: dropout rates that do not fit the number of blocks.
    """
    checkpoints = _checkpoints(config, encoder, generator)._replace(teachers=teachers)
    dtype, key = jnp.dtype(config.precision), fold_in_name(jax.random.key(config.train.seed), "initial weights")
    definitions: dict[str, nnx.GraphDef] = {}
    params, frozen = Params(), Params()
    for name, network in _asked_for(config, checkpoints, projector).items():
        module = partial(network.build, dtype=dtype)
        definitions[name] = parameters.definition(module)
        start = parameters.initial(module, fold_in_name(key, name)) if network.params is None else network.params
        (frozen if network.frozen else params).update(parameters.prefixed(start, name))
    return Built(Networks(vocabulary, definitions), params, frozen)


def _checkpoints(config: Config, encoder: Pretrained, generator: Pretrained | None) -> Checkpoints:
    encoder = dataclasses.replace(encoder, config=for_run(encoder.config, config))
    if generator is None or not config.needs("generator"):
        return Checkpoints(encoder, None)
    sizes = generator.config if config.generator.dropout else generator.config.without_dropout()
    return Checkpoints(encoder, dataclasses.replace(generator, config=sizes))


def _asked_for(config: Config, checkpoints: Checkpoints, projector: Params | None) -> dict[str, Network]:
    """The networks by name: the encoder, its projector, the generator, and those of the losses."""
    sizes = checkpoints.encoder.config
    networks = {"encoder": Network(partial(Transformer, sizes), checkpoints.encoder.transformer)}
    if config.model.projector != "none":
        build = partial(PROJECTORS[config.model.projector], sizes)
        networks["projector"] = Network(build, projector if config.keeps_projector else None)
    if checkpoints.generator:
        transformer, head = (partial(module, checkpoints.generator.config) for module in (Transformer, MaskedLMHead))
        networks["generator"] = Network(transformer, checkpoints.generator.transformer, frozen=True)
        networks["generator_head"] = Network(head, checkpoints.generator.mlm_head, frozen=True)
    for loss in config.losses.values():
        networks |= loss.networks(checkpoints, config.run_info)
    return networks


def for_run(sizes: TransformerConfig, config: Config) -> TransformerConfig:
    """The encoder's sizes with the configured dropout schedule, and recomputation in the backward pass or not.

    Raises:
        ConfigError: dropout rates that do not fit the number of blocks, or prefixes that are no shorter than vectors.
    """
    model = config.model
    if max(config.matryoshka.sizes, default=0) >= sizes.hidden_size:
        raise ConfigError(
            f"matryoshka.sizes={config.matryoshka.sizes}: the vectors of {model.name_or_path} have {sizes.hidden_size} "
            "numbers, and whole vectors count anyway"
        )
    sizes = dataclasses.replace(sizes, recompute=config.train.recompute == "on")
    hidden, attention = model.hidden_dropout, model.attention_dropout
    try:
        if model.dropout_schedule != "none":
            hidden, attention = (
                scheduled_rates(model.dropout_schedule, rates, sizes.num_blocks) for rates in (hidden, attention)
            )
        return sizes.with_dropout(hidden, attention)
    except ValueError as error:
        keys = "model.hidden_dropout / model.attention_dropout"
        schedule = "" if model.dropout_schedule == "none" else f", model.dropout_schedule={model.dropout_schedule!r}"
        raise ConfigError(f"{keys}{schedule}: {error}") from error


def about_equal_views(sizes: TransformerConfig, config: Config) -> str:
    """A warning where both views of a single sentence are the same vector, by which nothing is learned; or nothing.

    It is no error: SimCSE's Table 3 has rows of both kinds.

    Args:
        sizes: the encoder's, with the dropout of the run.
        config: the run.
    """
    if config.data.augmentation != "none" or not config.needs("dropout"):
        return ""
    if not any((sizes.embedding_dropout, *sizes.hidden_dropout, *sizes.attention_dropout)):
        told = "dropout tells the two views of a sentence apart, and there is none; set "
        return told + "model.hidden_dropout=(0.1,) and model.attention_dropout=(0.1,)"
    if config.model.dropout_masks == "shared":
        told = "dropout tells the two views of a sentence apart, and model.dropout_masks='shared' makes it the same; "
        return told + "use 'independent'"
    return ""


def load_generator(config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> Pretrained:
    """The named frozen masked LM, which must read and write the encoder's token ids.

    Args:
        config: names it.
        encoder: the checkpoint that the encoder starts from, with its masked-LM head if that is the generator.
        tokenizer: the encoder's.

    Raises:
        CheckpointError: no masked-LM head, or another vocabulary than the encoder's. A generator's folder without a
            tokenizer is compared by the number of tokens.
        ConfigError: it has fewer positions than the text's sentences.
    """
    if config.generator_is_start:
        return encoder
    generator = read(config.generator.name_or_path, needs_mlm_head=True)
    difference = ""
    if generator.config.vocab_size != encoder.config.vocab_size:
        difference = f"{generator.config.vocab_size} tokens against {encoder.config.vocab_size}"
    elif (generator.folder / "tokenizer.json").is_file():
        difference = _difference(load_tokenizer(generator.folder), tokenizer)
    if difference:
        raise CheckpointError(
            f"generator.name_or_path={config.generator.name_or_path!r} and "
            f"model.name_or_path={config.model.name_or_path!r} differ in their vocabulary ({difference}): the "
            "discriminator reads the generator's token ids, so both need the same one (BERT: distilbert-base-uncased; "
            "RoBERTa: distilroberta-base)"
        )
    check_max_length(config, generator.config, config.generator.name_or_path)
    return generator


class Teachers(NamedTuple):
    """The sentence encoders that losses name."""

    by_name: Mapping[str, Teacher]
    stores: Mapping[str, VectorStore]  # of those whose vectors are stored, by name
    digests: Mapping[str, str]  # of their weights or vectors, by the key of the configuration that names them


def load_teachers(config: Config, tokenizer: PreTrainedTokenizerFast) -> Teachers:
    """Loads the sentence encoders that losses name, or finds their stored vectors.

    Raises:
        CheckpointError: an encoder that cannot be read, does not record its pooler where none is given, or has another
            vocabulary than the run's, whose token ids it must read.
        ConfigError: an encoder that has fewer positions than the text's sentences; stored vectors with a pooler, or of
            sentences that an augmentation changes or crops cut.
        DataError: stored vectors that cannot be read.
    """
    by_name: dict[str, Teacher] = {}
    stores: dict[str, VectorStore] = {}
    digests = {}
    for objective_name, objective in config.losses.items():
        fingerprints = []
        for name, pooler in objective.named_teachers.items():
            if store := find_store(name):
                _check_store(objective_name, name, pooler, config)
                stores[name], fingerprint = store, store.digest
            else:
                by_name[name], fingerprint = _load_teacher(objective_name, name, pooler, config, tokenizer)
            fingerprints.append(fingerprint)
        if fingerprints:
            digests[f"{objective_name}.teachers"] = hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()
    return Teachers(by_name, stores, digests)


def _load_teacher(
    objective_name: str, name: str, pooler: str, config: Config, tokenizer: PreTrainedTokenizerFast
) -> tuple[Teacher, str]:
    """A sentence encoder and the hash of all that determines its vectors."""
    key = f"{objective_name}.teachers"
    try:
        teacher = SentenceEncoder.from_pretrained(name, pooler=pooler or None)
    except CheckpointError as error:
        raise CheckpointError(f"{key}, {objective_name}.poolers: {error}") from error
    _check_teacher(key, name, teacher, config, tokenizer)
    params = {name: np.asarray(array) for name, array in teacher.params.items()}
    return Teacher(teacher.config, teacher.pooler, params, teacher.truncate_dim), teacher.fingerprint()


def _check_store(objective_name: str, name: str, pooler: str, config: Config) -> None:
    if pooler:
        raise ConfigError(f"{objective_name}.poolers: {name} holds vectors, which need none; give '' for it")
    if config.data.augmentation != "none":
        raise ConfigError(
            f"{objective_name}.teachers: {name} holds vectors of the text as it is, and data.augmentation="
            f"{config.data.augmentation!r} changes second views; name the encoder itself, or use "
            "data.augmentation='none'"
        )
    if config.data.pairs == "crops":
        raise ConfigError(
            f"{objective_name}.teachers: {name} holds vectors of sentences, and data.pairs='crops' trains on parts of "
            "them; name the encoder itself"
        )


def _check_teacher(
    key: str, name: str, teacher: SentenceEncoder, config: Config, tokenizer: PreTrainedTokenizerFast
) -> None:
    difference = _difference(teacher.tokenizer, tokenizer)
    if difference:
        raise CheckpointError(
            f"{key}: {name!r} and model.name_or_path={config.model.name_or_path!r} differ in their vocabulary "
            f"({difference}): teachers read the encoder's token ids, so all need the same one"
        )
    check_max_length(config, teacher.config, f"{name} in {key}")


def check_max_length(config: Config, sizes: TransformerConfig, name: str) -> None:
    """Refuses a checkpoint that has no positions for the longest sentences.

    Raises:
        ConfigError: with the number that it has.
    """
    if config.data.max_length > sizes.max_length:
        raise ConfigError(
            f"data.max_length={config.data.max_length} is more than the {sizes.max_length} positions of {name}"
        )


def _difference(theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast) -> str:
    """How their vocabulary differs from ours; empty: all our tokens have the same ids there."""
    theirs_by_token, ours_by_token = theirs.get_vocab(), ours.get_vocab()
    unlike = sum(theirs_by_token.get(token) != index for token, index in ours_by_token.items())
    return f"{unlike} of {len(ours_by_token)} tokens have other ids" if unlike else ""


def vocabulary_of(config: Config, tokenizer: PreTrainedTokenizerFast, embeddings: int) -> Vocabulary:
    """The tokenizer's vocabulary, for a model with so many word embeddings.

    Raises:
        ConfigError: more tokens than embeddings, or no mask token where an objective needs one.
    """
    if len(tokenizer) > embeddings:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, the model only {embeddings} word embeddings")
    if tokenizer.mask_token_id is None and config.needs("mask_token"):
        those = ", ".join(config.settings_that_need("mask_token"))
        raise ConfigError(f"the tokenizer of {config.model.name_or_path} has no mask token, needed for: {those}")
    return Vocabulary(len(tokenizer), tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)))
