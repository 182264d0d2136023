"""Write a checkpoint to pre-train.

It has random weights and a new vocabulary, or the first blocks of another checkpoint.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
import transformers

from diffcse_jax import io
from diffcse_jax.commands import HEADS, HIDDEN_SIZE, VOCABULARY_SIZE, InitOptions
from diffcse_jax.documents.find import STDIN
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, counted
from diffcse_jax.export import write_checkpoint
from diffcse_jax.hosts import Progress, log_line, report
from diffcse_jax.models import hf, layers
from diffcse_jax.models.forward import fold_in_name
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.run_folder.finding import model_of
from diffcse_jax.search.reading import read_source

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_CHARACTERS = 1000  # different ones in a vocabulary. A word with another one becomes [UNK]
POSITIONS = 512


def init(options: InitOptions) -> Path:
    """Write the checkpoint as a Hugging Face folder, and return the folder.

    Raises:
        UserError: Options contradict each other, a text or checkpoint cannot be read, or `output`
            is not empty.
    """
    if bool(options.inputs) == (options.model is not None):
        raise ConfigError(
            "give --input for a new model of random weights, or --model to keep blocks of a "
            "checkpoint"
        )
    if STDIN in options.inputs:
        raise ConfigError(
            "--input: the text is read twice, which standard input cannot be. Name a file"
        )
    output = io.expand_path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is not an empty folder. Remove it or name another one")
    with tempfile.TemporaryDirectory() as temporary:
        if options.model is not None:
            checkpoint = first_blocks(options.model, options)
        else:
            checkpoint = random_weights(options, Path(temporary))
        with io.disk_errors(output, safe="Nothing was changed."), io.replace_dir(output) as folder:
            write_checkpoint(checkpoint, folder)
    sizes = checkpoint.config
    arrays = [*checkpoint.transformer.values(), *(checkpoint.mlm_head or {}).values()]
    numbers = sum(array.size for array in arrays)
    blocks = counted(sizes.num_blocks, "block{s}")
    head = "with" if checkpoint.mlm_head else "without"
    log_line(
        f"{blocks} of {sizes.hidden_size}, {sizes.vocab_size:,} tokens, {head} a "
        f"masked-LM head: {numbers:,} parameters, SHA-256 {checkpoint.digest()[:16]}"
    )
    return output


# The first blocks of a checkpoint


def first_blocks(model: str, options: InitOptions) -> hf.Pretrained:
    """Return a checkpoint with its first blocks only.

    It keeps its embeddings and, if it has one, its masked-LM head.
    """
    for name in options.given("hidden_size", "heads", "vocabulary_size"):
        raise ConfigError(
            f"--{name} is that of --model. Leave it out, or give --input for a new model"
        )
    checkpoint = hf.read(model_of(model))
    blocks = checkpoint.config.num_blocks
    kept = options.blocks
    if not 1 <= kept <= blocks:
        raise ConfigError(
            f"--blocks={kept}: {model} has {blocks} blocks. Give a number from 1 to {blocks}"
        )
    dropped = tuple(f"blocks.{number}." for number in range(kept, blocks))
    transformer = {
        name: array
        for name, array in checkpoint.transformer.items()
        if not name.startswith(dropped)
    }
    hf_config = {name: _cut(name, value, kept) for name, value in checkpoint.hf_config.items()}
    sizes = hf.transformer_config(hf_config, source=model)
    return dataclasses.replace(
        checkpoint,
        hf_config=hf_config,
        config=sizes,
        transformer=layers.Params(transformer),
        pooler=None,
    )


def _cut(name: str, value: Any, blocks: int) -> Any:
    """Return an entry of `config.json` for fewer blocks."""
    if name in ("num_hidden_layers", "n_layers"):
        return blocks
    return value[:blocks] if name == "layer_types" else value


# Random weights


def random_weights(options: InitOptions, folder: Path) -> hf.Pretrained:
    """Return a BERT of these sizes, with a vocabulary learnt from text.

    It is initialised as BERT's authors do. The tokenizer is written to the folder.
    """
    hidden_size = options.hidden_size or HIDDEN_SIZE
    size = options.vocabulary_size or VOCABULARY_SIZE
    hf_config = {
        "model_type": "bert",
        "vocab_size": size,
        "hidden_size": hidden_size,
        "num_hidden_layers": options.blocks,
        "num_attention_heads": options.heads or HEADS,
        "intermediate_size": 4 * hidden_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    source = "diffcse init"
    hf.transformer_config(hf_config, source=source)  # checks the sizes before the text is read
    vocabulary = learn_vocabulary(options.inputs, size)
    transformers.BertTokenizer(vocab=vocabulary, model_max_length=POSITIONS).save_pretrained(folder)
    hf_config["vocab_size"] = len(vocabulary)
    sizes = hf.transformer_config(hf_config, source=source)

    def initial(module: Callable[..., Any], name: str) -> layers.Params:
        params = layers.initial(
            partial(module, sizes), fold_in_name(jax.random.key(options.seed), name)
        )
        return layers.Params({name: np.asarray(array) for name, array in params.items()})

    transformer, head = initial(Transformer, "encoder"), initial(MaskedLMHead, "mlm_head")
    return hf.Pretrained(folder, hf_config, sizes, transformer, mlm_head=head)


def learn_vocabulary(inputs: tuple[str, ...], size: int) -> dict[str, int]:
    """Learn a WordPiece vocabulary, and return the tokens' numbers.

    It is lower-cased (Schuster and Nakajima 2012).
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    characters = collections.Counter[str]()
    for text in texts_of(inputs, "counting characters", says_what_was_read=True):
        characters.update(tokenizer.normalizer.normalize_str(text))
    common = sorted(characters, key=lambda each: (-characters[each], each))
    alphabet = sorted([each for each in common if not each.isspace()][:MOST_CHARACTERS])
    if size < (least := len(SPECIAL) + 2 * len(alphabet)):
        raise ConfigError(
            f"--vocabulary_size={size}: the text has {len(alphabet)} characters. Give {least} or "
            "more"
        )
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size,
        # The trainer numbers the other tokens by the order of a hash table, which differs in each
        # process. Among equally frequent pairs of tokens that number decides, so all tokens of one
        # character get theirs here.
        special_tokens=[*SPECIAL, *alphabet, *(f"##{each}" for each in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(inputs, "learning a vocabulary"), trainer)
    return tokenizer.get_vocab()


def texts_of(
    inputs: tuple[str, ...], what: str, *, says_what_was_read: bool = False
) -> Iterator[str]:
    """Yield the text of each document of the inputs."""
    is_empty = True
    for name in inputs:
        source = open_documents_to_search(name)
        ledger = Ledger(source.name)
        with Progress(f"{what} of {name}", "texts") as progress:
            for document in read_source(source, ledger):
                is_empty = False
                yield document.text()
                progress.update(1)
        if says_what_was_read:
            report(ledger)
    if is_empty:
        raise DataError(f"--input: no text in {', '.join(inputs)}")
