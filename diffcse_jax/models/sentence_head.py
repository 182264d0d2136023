"""The modules that follow the pooling in a sentence-transformers folder: Dense, LayerNorm, Normalize and Dropout."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffcse_jax.models import parameters
from diffcse_jax.models.layers import ACTIVATIONS, Dense, LayerNorm
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import normalize

SENTENCE_HEAD = "sentence_head"  # among the networks of a run
# Activations of torch.nn with their default arguments, by the names of the classes.
TORCH_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Identity": jax.nn.identity, "Tanh": jnp.tanh, "ReLU": jax.nn.relu, "GELU": ACTIVATIONS["gelu"],
    "SiLU": jax.nn.silu, "Sigmoid": jax.nn.sigmoid, "LeakyReLU": jax.nn.leaky_relu, "ELU": jax.nn.elu,
    "CELU": jax.nn.celu, "SELU": jax.nn.selu, "Mish": jax.nn.mish, "ReLU6": jax.nn.relu6,
    "Softplus": jax.nn.softplus, "Softsign": jax.nn.soft_sign, "Hardtanh": jax.nn.hard_tanh,
    "Hardswish": jax.nn.hard_swish, "Hardsigmoid": jax.nn.hard_sigmoid, "LogSigmoid": jax.nn.log_sigmoid,
}  # fmt: skip


class HeadLayer(NamedTuple):
    """A module after the pooling, with the settings that sentence-transformers has for its kind (`HEAD_SETTINGS`)."""

    kind: str  # the name of the class
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    activation_function: str = ""  # such as `torch.nn.modules.activation.Tanh`
    dimension: int = 0
    dropout: float = 0.0  # is not applied


HEAD_SETTINGS = {
    "Dense": ("in_features", "out_features", "bias", "activation_function"),
    "LayerNorm": ("dimension",),
    "Normalize": (),
    "Dropout": ("dropout",),
}


class RecordedHead(NamedTuple):
    """The modules after the pooling that a checkpoint records, without the dense + tanh head of the pooler `cls`."""

    pooler: str = ""  # of the embeddings that the modules read
    layers: tuple[HeadLayer, ...] = ()
    params: Params = Params()  # of `SentenceHead`
    similarity: str = "cosine"  # how embeddings are compared (`similarity_fn_name`), a name in `pooling.SIMILARITIES`

    def of(self, pooler: str, trained: Params | None = None) -> "RecordedHead":
        """Return the head, empty for another pooler than the recorded one; with its trained parameters, if given."""
        if pooler != self.pooler:
            return NO_HEAD
        return self if trained is None else self._replace(params=parameters.subset(trained, SENTENCE_HEAD))

    def embedding_size(self, pooler: str, hidden_size: int) -> int:
        """Return the size of the embeddings by a pooler, after the modules if it is the recorded one."""
        sizes = [layer.out_features for layer in self.of(pooler).layers if layer.out_features]
        return sizes[-1] if sizes else hidden_size * len(pooler.split("+"))

    @property
    def ranks_by_cosine(self) -> bool:
        """Whether the recorded similarity ranks embeddings as the cosine similarity does."""
        has_length_1 = bool(self.layers) and self.layers[-1].kind == "Normalize"
        return self.similarity == "cosine" or (has_length_1 and self.similarity in ("dot", "euclidean"))


NO_HEAD = RecordedHead()


class SentenceHead(nnx.Module):
    """Applies modules to pooled embeddings, one after the other."""

    def __init__(self, layers: tuple[HeadLayer, ...], *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.layers = nnx.List(_Module(layer, dtype=dtype, rngs=rngs) for layer in layers)

    def __call__(self, pooled: Float[Array, "rows size"]) -> Float[Array, "rows dimension"]:
        """Return embeddings."""
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


class _Module(nnx.Module):
    def __init__(self, layer: HeadLayer, *, dtype: DTypeLike, rngs: nnx.Rngs):
        sizes = layer.in_features, layer.out_features
        self.layer = layer
        self.linear = Dense(*sizes, bias=layer.bias, dtype=dtype, rngs=rngs) if layer.kind == "Dense" else None
        self.norm = LayerNorm(layer.dimension, 1e-5, dtype=dtype) if layer.kind == "LayerNorm" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.linear is not None:
            return TORCH_ACTIVATIONS[self.layer.activation_function.rpartition(".")[2]](self.linear(x))
        if self.norm is not None:
            return self.norm(x)
        return normalize(x) if self.layer.kind == "Normalize" else x
