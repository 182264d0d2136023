"""The networks of a run: which there are, what is trained, what is frozen, where each starts from."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerFast

from diffcse_jax.config import Config
from diffcse_jax.edits import Vocabulary
from diffcse_jax.encoder import load_tokenizer
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models import parameters
from diffcse_jax.models.heads import BatchNormProjector, MaskedLMHead, MlpProjector, token_classifier
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pretrained import Pretrained, load
from diffcse_jax.models.transformer import Transformer, TransformerConfig

PROJECTORS = {"mlp": MlpProjector, "batchnorm": BatchNormProjector}


@dataclasses.dataclass(frozen=True)
class Networks:
    """Graph definitions, static under `jax.jit`. A network that no objective needs is None.

    Arrays live in flat dicts whose names begin with the field names here: trained ones (`encoder`, `projector`,
    `discriminator`, `token_classifier`, `mlm_head`) in `params`, frozen ones (`generator`, `generator_head`) apart.
    """

    vocabulary: Vocabulary
    encoder: nnx.GraphDef
    projector: nnx.GraphDef | None = None
    discriminator: nnx.GraphDef | None = None
    token_classifier: nnx.GraphDef | None = None
    mlm_head: nnx.GraphDef | None = None
    generator: nnx.GraphDef | None = None
    generator_head: nnx.GraphDef | None = None

    def bind(self, name: str, params: Params, batch_stats: Params | None = None) -> nnx.Module:
        """The network `name` over its entries of `params`."""
        stats = parameters.subset(batch_stats or {}, name)
        return parameters.bind(getattr(self, name), parameters.subset(params, name), stats)


def compute_dtype(precision: str) -> DTypeLike:
    """The computation type that `precision` names on this backend."""
    if precision == "auto":
        precision = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(precision)


def build(
    config: Config, encoder: Pretrained, generator: Pretrained | None, vocabulary: Vocabulary
) -> tuple[Networks, Params, Params, Params]:
    """Assembles the networks and their initial arrays.

    Args:
        config: decides which networks exist.
        encoder: where the encoder and the discriminator start from.
        generator: the frozen masked LM with its head; None where nothing needs one.
        vocabulary: what masking needs of the encoder's tokenizer.

    Returns:
        The networks, the trained parameters, the batch statistics and the frozen parameters.

    Raises:
        ConfigError: dropout rates that do not fit the number of blocks.
    """
    sizes = with_dropout(encoder.config, config)
    modules = {"encoder": partial(Transformer, sizes)}
    start = {"encoder": encoder.transformer}
    frozen = {}
    if config.model.projector != "none":
        modules["projector"] = partial(PROJECTORS[config.model.projector], sizes)
    if "mlm" in config.weights:
        modules["mlm_head"] = partial(MaskedLMHead, sizes, tied=False)
        start["mlm_head"] = _own_mlm_head(encoder, config.train.seed)
    if config.uses_difference:
        modules["discriminator"] = partial(Transformer, sizes)
        start["discriminator"] = encoder.transformer
        modules["token_classifier"] = partial(token_classifier, sizes)
        generator_sizes = generator.config if config.generator.dropout else generator.config.without_dropout()
        modules["generator"] = partial(Transformer, generator_sizes)
        modules["generator_head"] = partial(MaskedLMHead, generator_sizes)
        frozen = parameters.prefixed(generator.transformer, "generator")
        frozen |= parameters.prefixed(generator.mlm_head, "generator_head")

    dtype = compute_dtype(config.precision)
    key = jax.random.key(config.train.seed)
    definitions, params, batch_stats = {}, {}, {}
    for index, (name, module) in enumerate(modules.items()):
        build_module = partial(module, dtype=dtype)
        definitions[name] = parameters.definition(build_module)
        if name in start:
            params |= parameters.prefixed(start[name], name)
        elif name not in ("generator", "generator_head"):
            initial, stats = parameters.initial(build_module, jax.random.fold_in(key, index))
            params |= parameters.prefixed(initial, name)
            batch_stats |= parameters.prefixed(stats, name)
    return Networks(vocabulary, **definitions), params, batch_stats, frozen


def _own_mlm_head(encoder: Pretrained, seed: int) -> Params:
    """The auxiliary head's start: the checkpoint's own head where it has one, an untied copy of the embeddings."""
    head = encoder.mlm_head or parameters.initial(partial(MaskedLMHead, encoder.config), jax.random.key(seed))[0]
    return head | {"decoder": encoder.transformer["embeddings.word.embedding"]}


def with_dropout(sizes: TransformerConfig, config: Config) -> TransformerConfig:
    """The encoder's sizes with the configured dropout schedule."""
    try:
        return sizes.with_dropout(config.model.hidden_dropout, config.model.attention_dropout)
    except ValueError as error:
        raise ConfigError(f"model.hidden_dropout / model.attention_dropout: {error}") from error


def load_generator(config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> Pretrained:
    """The named frozen masked LM, which must read and write the encoder's token ids.

    Raises:
        CheckpointError: no masked-LM head, or another vocabulary than the encoder's. A generator's folder without a
            tokenizer is compared by the number of tokens.
    """
    generator = load(config.generator.name_or_path, needs_mlm_head=True)
    difference = ""
    if generator.config.vocab_size != encoder.config.vocab_size:
        difference = f"{generator.config.vocab_size} tokens against {encoder.config.vocab_size}"
    elif (generator.folder / "tokenizer.json").is_file():
        theirs, ours = load_tokenizer(generator.folder).get_vocab(), tokenizer.get_vocab()
        unlike = sum(theirs.get(token) != index for token, index in ours.items())
        difference = f"{unlike} of {len(ours)} tokens have other ids" if unlike else ""
    if difference:
        raise CheckpointError(
            f"generator.name_or_path={config.generator.name_or_path!r} and "
            f"model.name_or_path={config.model.name_or_path!r} differ in their vocabulary ({difference}): the "
            "discriminator reads the generator's token ids, so both need the same one (BERT: distilbert-base-uncased; "
            "RoBERTa: distilroberta-base)"
        )
    return generator


def vocabulary_of(config: Config, tokenizer: PreTrainedTokenizerFast, size: int) -> Vocabulary:
    """What masking needs of a tokenizer whose model has `size` rows of word embeddings.

    Raises:
        ConfigError: more tokens than embeddings, or no mask token where an objective needs one.
    """
    if len(tokenizer) > size:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, the model only {size} word embeddings")
    if tokenizer.mask_token_id is None and {"difference", "mlm"} & config.weights.keys():
        raise ConfigError(
            f"the tokenizer of {config.model.name_or_path} has no mask token, which the objectives difference and mlm "
            "need"
        )
    return Vocabulary(size, tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)))
