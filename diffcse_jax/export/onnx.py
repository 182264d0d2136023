"""The ONNX file of an export: transformer, pooling and normalisation as one graph.

`onnx/model.onnx` takes `input_ids`, `attention_mask` and, if the family has them, `token_type_ids`, each of shape
(batch, length). It returns `sentence_embedding`, (batch, dim), of length 1, and `last_hidden_state`, (batch, length,
hidden). The names are those of sentence-transformers' `backend="onnx"`.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.io import read_json_object
from diffcse_jax.models.pooling_modules import TEXT_SETTINGS

GRAPH = "onnx/model.onnx"
PACKAGES = ("torch", "sentence_transformers", "onnx", "onnxruntime")  # to write and to check the file

_OPSET = 17  # the first one with layer normalisation; ONNX Runtime reads it since 1.12
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_TRACED = ("a cat", "a cat that sleeps on the warm stones beside the door")  # of two lengths, to trace padding


def write(folder: Path, truncate_dim: int | None = None) -> None:
    """Add the file to an exported folder, for embeddings that are cut to `truncate_dim`."""
    import torch

    tokenizer = load_tokenizer(folder)
    names = [name for name in _INPUTS if name in tokenizer.model_input_names]
    tokens = tokenizer(list(_TRACED), padding=True, return_tensors="pt")
    (folder / GRAPH).parent.mkdir()
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    with warnings.catch_warnings(action="ignore"):  # of the tracer
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


def encode(folder: Path, sentences: Sequence[str], prompt: str = "") -> Float32[np.ndarray, "sentences dim"]:
    """Return embeddings of length 1 by ONNX Runtime on CPU. Sentences longer than the model's positions are cut."""
    from onnxruntime import InferenceSession

    session = InferenceSession(folder / GRAPH, providers=["CPUExecutionProvider"])
    limit = read_json_object(folder / TEXT_SETTINGS)["max_seq_length"]
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "np"}
    tokens = load_tokenizer(folder)([prompt + sentence for sentence in sentences], **options)
    inputs = {each.name: tokens[each.name].astype(np.int64) for each in session.get_inputs()}
    (embeddings,) = session.run(["sentence_embedding"], inputs)
    return embeddings
