"""Compare the GPU's kernel for attention with our attention in parts.

Prints distances to float32, for states and gradients.

    python -m benchmarks.attention_kernel

The encoder is a ModernBERT of three blocks with random weights. Its second block has a window,
where the kernel is not used. Both sides compute in bfloat16. Without a GPU that has the kernel,
both sides are attention in parts.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from transformers import ModernBertConfig

from diffcse_jax.batch import TokenRows
from diffcse_jax.models import hf, layers
from diffcse_jax.models.transformer import Transformer, TransformerConfig, has_fused_attention

SIZE, WORDS, LENGTHS = 256, 1000, (1000, 333, 700)


def distance(found: jax.Array, expected: jax.Array) -> float:
    """Return the norm of the difference, divided by the norm of what is expected."""
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def main() -> None:
    """Print the device and the distances."""
    hf_config = ModernBertConfig(
        vocab_size=WORDS, hidden_size=SIZE, num_attention_heads=4, num_hidden_layers=3,
        intermediate_size=2 * SIZE, local_attention=128, global_attn_every_n_layers=2,
        attention_dropout=0.0, mlp_dropout=0.0, embedding_dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    config = hf.transformer_config(hf_config.to_dict(), source="benchmark")
    rng = np.random.default_rng(0)
    shapes = layers.shapes(partial(Transformer, config))
    params = {
        name: jnp.asarray(rng.normal(0, 0.08, shape.shape), shape.dtype)
        for name, shape in shapes.items()
    }
    mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int32)
    ids = np.where(mask == 1, rng.integers(5, WORDS, mask.shape), 0).astype(np.int32)
    rows = TokenRows(jnp.asarray(ids), jnp.asarray(mask))

    @partial(jax.jit, static_argnums=(0, 1))
    def outputs(
        config: TransformerConfig, dtype: type, params: layers.Params
    ) -> tuple[jax.Array, jax.Array]:
        def loss(params: layers.Params) -> tuple[jax.Array, jax.Array]:
            definition = layers.definition(partial(Transformer, config, dtype=dtype))
            states = layers.bind(definition, params)(rows)[-1].astype(jnp.float32)
            real = jnp.where(mask[..., None] == 1, states, 0.0)
            return (real * jnp.sin(jnp.arange(float(SIZE)))).sum() / mask.sum(), real

        gradients, states = jax.grad(loss, has_aux=True)(params)
        return states.ravel(), jnp.concatenate(
            [each.ravel() for each in jax.tree.leaves(gradients)]
        )

    device = jax.devices()[0]
    print(f"{device.device_kind}, kernel: {has_fused_attention(device)}")
    with jax.default_matmul_precision("highest"):
        exact = outputs(config, jnp.float32, params)
        for name, fused in ("in parts", False), ("kernel", has_fused_attention(device)):
            states, gradients = outputs(
                dataclasses.replace(config, fused=fused), jnp.bfloat16, params
            )
            print(
                f"{name}: states {distance(states, exact[0]):.4f}, gradients "
                f"{distance(gradients, exact[1]):.4f}"
            )


if __name__ == "__main__":
    main()
