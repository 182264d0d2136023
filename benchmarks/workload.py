"""Workloads: encoder sizes, random weights, and token stores of synthetic or real sentences."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import DataConfig
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import ROW, TokenStore, build_or_open
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.models import files, hf, layers
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.transformer import Transformer

PAD, UNK, CLS, SEP, MASK = 0, 100, 101, 102, 103  # of BERT's vocabulary
FIRST_WORD = 110
MAX_LENGTH = 512
BLOCK = 1_000_000  # sentences written at a time


def _bert(hidden: int, blocks: int, heads: int, vocabulary: int = 30522) -> dict[str, Any]:
    return {
        "model_type": "bert", "vocab_size": vocabulary, "hidden_size": hidden,
        "num_hidden_layers": blocks, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "hidden_act": "gelu",
        "max_position_embeddings": MAX_LENGTH, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": PAD,
    }  # fmt: skip


_DISTIL = {
    "model_type": "distilbert", "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12,
    "hidden_dim": 3072, "max_position_embeddings": MAX_LENGTH, "activation": "gelu",
    "dropout": 0.1, "attention_dropout": 0.1, "pad_token_id": PAD,
}  # fmt: skip

_MODERNBERT = {
    "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "num_hidden_layers": 22,
    "num_attention_heads": 12, "intermediate_size": 1152, "max_position_embeddings": 8192,
    "norm_eps": 1e-5, "hidden_activation": "gelu",
    "embedding_dropout": 0.0, "mlp_dropout": 0.0, "attention_dropout": 0.0,
    "local_attention": 128, "global_attn_every_n_layers": 3, "pad_token_id": 50283,
}  # fmt: skip

# Hugging Face's config.json of each size: the encoder (and the discriminator, which starts as its
# copy).
ENCODERS = {
    "tiny": _bert(16, 1, 2, vocabulary=200),
    "minilm": _bert(384, 6, 12),
    "base": _bert(768, 12, 12),
    "large": _bert(1024, 24, 16),
}
# The checkpoints that the configurations name, with the sizes of the hub's config.json.
_ROBERTA = _bert(768, 12, 12, vocabulary=50265) | {
    "model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1,
    "layer_norm_eps": 1e-5, "pad_token_id": 1,
}  # fmt: skip
BY_NAME = {
    "minilm": ENCODERS["minilm"],
    "bert-base-uncased": ENCODERS["base"],
    "bert-large-uncased": ENCODERS["large"],
    "voidism/diffcse-bert-base-uncased-sts": ENCODERS["base"],
    "princeton-nlp/unsup-simcse-bert-large-uncased": ENCODERS["large"],
    "distilbert-base-uncased": _DISTIL,
    "roberta-base": _ROBERTA,
    "roberta-large": _ROBERTA
    | {"hidden_size": 1024, "num_hidden_layers": 24}
    | {"num_attention_heads": 16, "intermediate_size": 4096},
    "answerdotai/ModernBERT-base": _MODERNBERT,
    "distilroberta-base": _ROBERTA | {"num_hidden_layers": 6},
}  # fmt: skip
# The frozen masked LM. For MiniLM, there is none with its own weights, so its encoder is used.
GENERATORS = {
    "tiny": ENCODERS["tiny"],
    "minilm": ENCODERS["minilm"],
    "base": _DISTIL,
    "large": _DISTIL,
}


def vocabulary(size: str) -> Vocabulary:
    """Return the vocabulary, as masking needs it."""
    return Vocabulary(
        ENCODERS[size]["vocab_size"], mask_id=MASK, special_ids=(PAD, UNK, CLS, SEP, MASK)
    )


def random_checkpoint(hf_config: dict[str, Any], seed: int) -> hf.Pretrained:
    """Return an encoder with a masked-LM head and random initial weights."""
    sizes = hf.transformer_config(hf_config, source="benchmark")
    transformer_key, head_key = jax.random.split(jax.random.key(seed))
    transformer = layers.initial(partial(Transformer, sizes), transformer_key)
    mlm_head = layers.initial(partial(MaskedLMHead, sizes), head_key)
    return hf.Pretrained(
        Path("random"), hf_config, sizes, transformer, pooler=None, mlm_head=mlm_head
    )


def abstract_checkpoint(hf_config: dict[str, Any], source: str) -> hf.Pretrained:
    """Return the shapes of an encoder with a masked-LM head, without weights."""
    sizes = hf.transformer_config(hf_config, source=source)
    transformer, head = (
        layers.shapes(partial(module, sizes)) for module in (Transformer, MaskedLMHead)
    )
    return hf.Pretrained(Path(source), hf_config, sizes, transformer, pooler=None, mlm_head=head)


def sizes_of(name: str) -> dict[str, Any]:
    """Return the config.json of a checkpoint: a local folder, or a name in `BY_NAME`.

    Raises:
        ConfigError: The name is neither.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    if not Path(name).is_dir():
        raise ConfigError(
            f"the sizes of {name} are not known: name a local folder, or one of "
            f"{', '.join(BY_NAME)}"
        )
    return dict(hf.read_hf_config(Path(name)))


def synthetic_lengths(
    rng: np.random.Generator, count: int, longest: int
) -> Int[np.ndarray, " count"]:
    """Return the numbers of tokens of sentences, including [CLS] and [SEP].

    They are log-normal with median 25.3 and sigma 0.5, cut at 32, like Wikipedia sentences in word
    pieces: on average 24.2 tokens, with a third of the sentences cut. For another longest length
    they are scaled, so that the share of padding stays the same: on average 48.4 tokens at 64, and
    96.8 at 128.
    """
    lengths = rng.lognormal(3.23, 0.5, count) * (longest / 32)
    return np.clip(np.rint(lengths), 3, longest).astype(np.int64)


def synthetic_store(
    size: str, folder: Path, sentences: int, length: int, seed: int = 0
) -> TokenStore:
    """Write a token store of random words with `synthetic_lengths`, block by block."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(synthetic_lengths(rng, sentences, length))])
    folder.mkdir(parents=True)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "rows.npy", np.zeros(len(offsets) - 1, ROW))
    token_ids = np.memmap(folder / "token_ids", np.uint16, "w+", shape=(int(offsets[-1]),))
    for first in range(0, sentences, BLOCK):
        start, end = offsets[first], offsets[min(first + BLOCK, sentences)]
        token_ids[start:end] = rng.integers(
            FIRST_WORD, ENCODERS[size]["vocab_size"], end - start, dtype=np.uint16
        )
    token_ids[offsets[:-1]] = CLS
    token_ids[offsets[1:] - 1] = SEP
    token_ids.flush()
    (folder / "meta.json").write_text(
        json.dumps(
            {
                "columns": ["text"],
                "max_length": length,
                "account": [],
                "unknown": 0,
                "beyond_limits": [],
                "dtype": "uint16",
            }
        )
    )
    return TokenStore(folder)


def text_store(path: Path, folder: Path, sentences: int, length: int) -> TokenStore:
    """Write a token store of the first sentences of a file, with MiniLM's tokenizer (BERT's).

    Raises:
        DataError: The file has too few lines.
    """
    from diffcse_jax.models.tokenizer import load_tokenizer

    folder.mkdir(parents=True)
    lines = folder / "lines.txt"
    lines.write_text(
        "".join(f"{sentence}\n" for sentence in read_sentences(path, sentences)), encoding="utf-8"
    )
    tokenizer = load_tokenizer(files.find_folder("minilm"))
    return build_or_open(open_corpus(DataConfig(train_file=str(lines))), tokenizer, length, folder)


def read_sentences(path: Path, count: int) -> list[str]:
    """Return the first `count` lines of a text file.

    Raises:
        DataError: It cannot be read, or has fewer lines.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            sentences = [line.rstrip("\n") for line in itertools.islice(lines, count)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {path}: {error}") from error
    if len(sentences) < count:
        raise DataError(f"--text {path} has {len(sentences)} lines, but {count} are needed")
    return sentences
