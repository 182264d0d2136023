"""The authors' networks with the reference's weights, under the reference's PyTorch names."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from reference_weights import extra_weights
from safetensors.numpy import load_file
from tiny_networks import views_of

from diffcse_jax.batch import Batch, TokenRows, Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.losses.diffcse import Masked
from diffcse_jax.models import hf, layers
from diffcse_jax.models.layers import Params
from diffcse_jax.training import networks

# Folders of reference values, the largest last. The repository carries one, which authors_code.py
# has recorded.
REFERENCES = [Path(__file__).parent / "reference"]
if "DIFFCSE_REFERENCE_DIR" in os.environ:
    REFERENCES.append(Path(os.environ["DIFFCSE_REFERENCE_DIR"]))
NO_DROPOUT = {"hidden_dropout": (0.0,), "attention_dropout": (0.0,)}
VOCABULARY = Vocabulary(size=30522, mask_id=103, special_ids=(0, 100, 101, 102, 103))
HEADS = {
    "mlp.dense.weight": "projector.dense.kernel",
    "mlp.dense.bias": "projector.dense.bias",
    "mlp.net.0.weight": "projector.expand.kernel",
    "mlp.net.1.weight": "projector.expand_norm.scale",
    "mlp.net.1.bias": "projector.expand_norm.bias",
    "mlp.net.3.weight": "projector.contract.kernel",
    "electra_head.weight": "token_classifier.kernel",
    "electra_head.bias": "token_classifier.bias",
    "lm_head.transform.dense.weight": "mlm_head.transform.kernel",
    "lm_head.transform.dense.bias": "mlm_head.transform.bias",
    "lm_head.transform.LayerNorm.weight": "mlm_head.norm.scale",
    "lm_head.transform.LayerNorm.bias": "mlm_head.norm.bias",
    "lm_head.decoder.weight": "mlm_head.decoder",
    "lm_head.bias": "mlm_head.bias",
}


def reference_config(**groups: Mapping) -> Config:
    """A configuration with every dropout off, as in the reference; `groups` are laid over it."""
    model = NO_DROPOUT | groups.pop("model", {})
    generator = {"dropout": False} | groups.pop("generator", {})
    return Config.from_dict(
        {"precision": "float32", "model": model, "generator": generator, **groups}
    )


def reference_networks(config: Config, folder: Path, head: str = "fitted") -> tuple:
    """What `networks.build` gives for MiniLM, with the reference's projectors and heads.

    Args:
        head: which of the reference's masked-LM heads the generator (and the auxiliary masked LM)
            has.
    """
    stored = folder / "weights_extra.safetensors"
    extra = load_file(stored) if stored.exists() else extra_weights()
    mlm_head = {
        ours.removeprefix("mlm_head."): array.T if ours.endswith("kernel") else array
        for name, ours in HEADS.items()
        if "mlm_head" in ours
        and (array := extra.get(name.replace("lm_head", f"generator_{head}"))) is not None
    }
    encoder = dataclasses.replace(minilm(), mlm_head=mlm_head)
    definitions, params, frozen = networks.build(config, encoder, encoder, VOCABULARY)
    extra |= {name.replace("projection_mlp", "mlp"): array for name, array in extra.items()}
    for name, ours in HEADS.items():
        if ours in params and name in extra:
            params[ours] = extra[name].T if ours.endswith("kernel") else extra[name]
    return definitions, params, frozen


@functools.cache
def minilm() -> hf.Pretrained:
    return hf.read("minilm")


def by_reference_name(params: Params) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, under the reference's names and in its layout."""
    named = {}
    for network, prefix in (("encoder", "bert"), ("discriminator", "discriminator")):
        if own := layers.subset(params, network):
            tensors = hf.to_hf(own, "transformer", minilm().config)
            named |= {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    for name, ours in HEADS.items():
        if ours in params:
            named[name] = (
                np.asarray(params[ours]).T if ours.endswith("kernel") else np.asarray(params[ours])
            )
    return named


def reference_views(folder: Path, name: str) -> Batch:
    """The batch `unsup`, `pair` or `sup`, laid out as in training: without most of the padding."""
    inputs = np.load(folder / "inputs.npz")
    batch = {
        key: inputs[f"{name}.{key}"].astype(np.int32) for key in ("input_ids", "attention_mask")
    }
    return jax.tree.map(jnp.asarray, views_of(batch, packed=True))


def reference_masked(folder: Path, name: str, rows: TokenRows) -> Masked:
    """The masked rows of a batch."""
    inputs = np.load(folder / "inputs.npz")
    masked_ids = inputs[f"{name}.mlm_input_ids"].reshape(-1, 32).astype(np.int32)
    selected = inputs[f"{name}.mlm_labels"].reshape(-1, 32) != -100
    return Masked(rows._replace(input_ids=jnp.asarray(masked_ids)), jnp.asarray(selected))
