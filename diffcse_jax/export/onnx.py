"""ONNX files of an export: transformer, pooling and normalisation as one graph, and its int8 form.

`onnx/model.onnx` takes `input_ids`, `attention_mask` and, if the family has them, `token_type_ids`, each of shape
(batch, length). It returns `sentence_embedding`, (batch, dim), of length 1, and `last_hidden_state`, (batch, length,
hidden). `onnx/model_qint8.onnx` has 8-bit weights with one scale per channel and quantises activations on the fly. The
names are those of sentence-transformers' `backend="onnx"`.
"""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.errors import ConfigError
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.io import read_json_object
from diffcse_jax.models.pooling_modules import TEXT_SETTINGS
from diffcse_jax.models.prompts import read_prompts

GRAPH = "onnx/model.onnx"
INT8 = "onnx/model_qint8.onnx"

_OPSET = 17  # the first one with layer normalisation; ONNX Runtime reads it since 1.12
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_TRACED = ("a cat", "a cat that sleeps on the warm stones beside the door")  # of two lengths, to trace padding


def require_packages() -> None:
    """Raise a `ConfigError` that names the missing packages that writing or checking needs, if there are any."""
    needed = ("torch", "sentence_transformers", "onnx", "onnxruntime")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"--onnx needs {' and '.join(missing)}. Install the extra 'onnx': pip install 'diffcse_jax[onnx]'"
        )


def write(folder: Path, truncate_dim: int | None = None) -> None:
    """Add both files to an exported folder, for embeddings that are cut to `truncate_dim`."""
    import torch
    from onnxruntime.quantization import quantize_dynamic

    tokenizer = load_tokenizer(folder)
    names = [name for name in _INPUTS if name in tokenizer.model_input_names]
    tokens = tokenizer(list(_TRACED), padding=True, return_tensors="pt")
    (folder / GRAPH).parent.mkdir()
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # advice of the quantiser; warnings are those of the tracer
    with warnings.catch_warnings(action="ignore"), contextlib.ExitStack() as cleaning:
        cleaning.callback(logging.disable, disabled)
        # The older exporter: the newer one needs one more package, onnxscript.
        torch.onnx.export(
            _network(folder, names, truncate_dim),
            tuple(tokens[name] for name in names),
            str(folder / GRAPH),
            input_names=names,
            output_names=["last_hidden_state", "sentence_embedding"],
            dynamic_axes=axes | {"sentence_embedding": {0: "batch"}},
            opset_version=_OPSET,
            dynamo=False,
        )
        # 7-bit weights: sums of 8-bit ones overflow on x86 CPUs without VNNI instructions.
        quantize_dynamic(folder / GRAPH, folder / INT8, per_channel=True, reduce_range=True)


def _network(folder: Path, names: Sequence[str], truncate_dim: int | None) -> Any:
    """Return the whole computation as a torch module."""
    import torch
    from sentence_transformers import SentenceTransformer

    # Attention in plain operations: not every operator set has the fused one.
    options = {"attn_implementation": "eager"}
    with quiet_transformers():
        model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False, model_kwargs=options)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> tuple[Any, Any]:
            transformer, *poolers = self.model
            outputs = transformer(dict(zip(names, inputs, strict=True)))
            last = outputs["token_embeddings"]  # a pooler over two layers replaces it
            for pooler in poolers:
                outputs = pooler(outputs)
            embeddings = outputs["sentence_embedding"][:, :truncate_dim]
            return last, torch.nn.functional.normalize(embeddings, dim=-1)

    return Network().eval()


class OnnxEncoder:
    """Normalised embeddings by `GRAPH` or `INT8` of an export, by ONNX Runtime on CPU."""

    def __init__(self, folder: Path, file: str, pooler: str, truncate_dim: int | None):
        from onnxruntime import InferenceSession

        self.pooler, self.truncate_dim, self.prompts = pooler, truncate_dim, read_prompts(folder)
        self._tokenizer = load_tokenizer(folder)
        self._max_length = read_json_object(folder / TEXT_SETTINGS)["max_seq_length"]
        self._session = InferenceSession(folder / file, providers=["CPUExecutionProvider"])
        self._inputs = [each.name for each in self._session.get_inputs()]

    def encode(
        self, sentences: Sequence[str], batch_size: int = 64, *, prompt: str | None = None
    ) -> Float32[np.ndarray, "sentences dimension"]:
        """Return embeddings, shape (sentences, dim). Sentences longer than the model's positions are cut."""
        prompt = self.prompts.choose(prompt)
        sentences = [prompt + sentence for sentence in sentences]
        options = {"padding": True, "truncation": True, "max_length": self._max_length, "return_tensors": "np"}
        embeddings = []
        for start in range(0, len(sentences), batch_size):
            tokens = self._tokenizer(sentences[start : start + batch_size], **options)
            inputs = {name: tokens[name].astype(np.int64) for name in self._inputs}
            embeddings += self._session.run(["sentence_embedding"], inputs)
        return np.concatenate(embeddings)
