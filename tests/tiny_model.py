"""A small encoder with random weights as a Hugging Face folder, with the tokenizer of MiniLM."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers
from flax import nnx

from diffcse_jax.io import write_tensors
from diffcse_jax.models import hf, layers
from diffcse_jax.models.heads import MlpProjector
from diffcse_jax.models.transformer import Transformer

MAX_LENGTH = 40
HIDDEN = 16
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_tiny_model(
    folder: Path, tokenizer_from: Path, family: str = "bert", pooler: bool = True, blocks: int = 3
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = hf_config_of(family, blocks)
    (folder / "config.json").write_text(json.dumps(hf_config))
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(tokenizer_from / name, folder / name)
    config = hf.transformer_config(hf_config, source="test")
    tensors = hf.to_hf(random_params(Transformer, config), "transformer", config)
    if pooler:
        tensors |= hf.to_hf(random_params(MlpProjector, config), "pooler", config)
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def write_smallest_model(folder: Path, words: Sequence[str]) -> Path:
    """Write an encoder of one block without a pooler, whose tokenizer knows only these words."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    transformers.BertTokenizer(vocab=vocabulary, model_max_length=MAX_LENGTH).save_pretrained(
        folder
    )
    hf_config = hf_config_of("bert", blocks=1) | {"vocab_size": len(vocabulary)}
    (folder / "config.json").write_text(json.dumps(hf_config))
    config = hf.transformer_config(hf_config, source="test")
    write_tensors(
        folder / "model.safetensors",
        hf.to_hf(random_params(Transformer, config), "transformer", config),
    )
    return folder


def write_bpe_tokenizer(folder: Path, text: str) -> int:
    """Write a tokenizer of ModernBERT's kind, byte-level BPE with BERT's special tokens, and return its size."""
    backend = tokenizers.ByteLevelBPETokenizer(unicode_normalizer="nfc")
    backend.train_from_iterator([text], vocab_size=400, special_tokens=[*SPECIAL])
    ends = ((token, backend.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
    backend.post_processor = tokenizers.processors.BertProcessing(*ends)
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        model_input_names=["input_ids", "attention_mask"],
        **names,
    ).save_pretrained(folder)
    return backend.get_vocab_size()


def random_params(
    module: type[nnx.Module], config: hf.TransformerConfig, seed: int = 0
) -> layers.Params:
    """Weights far larger than at initialisation, biases and norms included, so that every one of them matters."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(name.endswith("scale"), 0.3, shape.shape).astype(np.float32)
        for name, shape in layers.shapes(partial(module, config)).items()
    }


def random_torch_model(family: str, head: str = "Model", **sizes) -> transformers.PreTrainedModel:
    """A model of transformers whose every weight is random: initial biases and norms would hide swapped ones."""
    import torch

    config = transformers.CONFIG_MAPPING[family](**sizes)
    model = getattr(transformers, type(config).__name__.replace("Config", head))(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def bound(
    module: type[nnx.Module], config: hf.TransformerConfig, params: layers.Params
) -> nnx.Module:
    """The module with these parameters."""
    return layers.bind(
        layers.definition(partial(module, config)), jax.tree.map(jnp.asarray, params)
    )


def hf_config_of(family: str, blocks: int = 3) -> dict:
    if family == "distilbert":
        return {
            "model_type": family, "architectures": ["DistilBertForMaskedLM"], "vocab_size": 30522, "dim": HIDDEN,
            "n_layers": blocks, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": MAX_LENGTH,
            "activation": "gelu", "dropout": 0.1, "attention_dropout": 0.1, "pad_token_id": 0,
        }  # fmt: skip
    if family == "modernbert":
        return {
            "model_type": family, "architectures": ["ModernBertForMaskedLM"], "vocab_size": 30522,
            "hidden_size": HIDDEN, "num_hidden_layers": blocks, "num_attention_heads": 2, "intermediate_size": 32,
            "max_position_embeddings": MAX_LENGTH, "hidden_activation": "gelu", "norm_eps": 1e-5, "pad_token_id": 0,
            "embedding_dropout": 0.0, "mlp_dropout": 0.0, "attention_dropout": 0.0, "local_attention": 4,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        }  # fmt: skip
    like_bert = family in ("bert", "electra", "nomic_bert", "gte")
    # the other families number positions from the padding id + 1
    pad_token_id = 0 if like_bert else 1
    return {
        "model_type": family, "architectures": ["BertForMaskedLM"], "vocab_size": 30522, "hidden_size": HIDDEN,
        "num_hidden_layers": blocks, "num_attention_heads": 2, "intermediate_size": 32, "hidden_act": "gelu",
        "max_position_embeddings": MAX_LENGTH + (0 if like_bert else pad_token_id + 1), "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "pad_token_id": pad_token_id, **({"embedding_size": 8} if family == "electra" else {}),
        **({"rope_theta": 160000.0} if family == "gte" else {}),
    }  # fmt: skip
