"""ONNX files of an exported folder: the network, pooling and scaling to unit length as one graph, and its int8 form.

`onnx/model.onnx` takes `input_ids`, `attention_mask` and, where the family has them, `token_type_ids`, each
(batch, length); it gives `sentence_embedding`, (batch, dimension), of unit length, and `last_hidden_state`,
(batch, length, hidden). `onnx/model_qint8.onnx` has weights in 8 bits, scaled by channel, and quantises activations as
they come. File names and `last_hidden_state` are those of sentence-transformers' `backend="onnx"`.
"""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation.backends import pooled, torch_model
from diffcse_jax.io import read_json_object
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.saved_encoder import SavedEncoder

GRAPH = "onnx/model.onnx"
INT8 = "onnx/model_qint8.onnx"

_OPSET = 17  # the first with layer normalisation; runtimes from 1.12 read it
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_TRACED = ("a cat", "a cat that sleeps on the warm stones beside the door")  # of two lengths, so that padding is traced


def require_packages() -> None:
    """Refuses to begin without what writing and checking needs.

    Raises:
        ConfigError: naming what is missing.
    """
    missing = [name for name in ("torch", "onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--onnx needs {' and '.join(missing)}: pip install '.[onnx]' in the repository")


def write(saved: SavedEncoder, folder: Path, truncate_dim: int | None = None) -> None:
    """Adds both files to an exported folder.

    Args:
        saved: the encoder that was exported.
        folder: the export.
        truncate_dim: the length that vectors are cut to; None: whole vectors.
    """
    import torch
    from onnxruntime.quantization import quantize_dynamic

    tokenizer = load_tokenizer(folder)
    names = [name for name in _INPUTS if name in tokenizer.model_input_names]
    tokens = tokenizer(list(_TRACED), padding=True, return_tensors="pt")
    graph = _module(saved, folder, names, truncate_dim)
    (folder / GRAPH).parent.mkdir()
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    with _quiet():
        # The exporter by tracing: the one by torch.export needs onnxscript, a package more.
        torch.onnx.export(
            graph,
            tuple(tokens[name] for name in names),
            str(folder / GRAPH),
            input_names=names,
            output_names=["last_hidden_state", "sentence_embedding"],
            dynamic_axes=axes | {"sentence_embedding": {0: "batch"}},
            opset_version=_OPSET,
            dynamo=False,
        )
        # Weights of 7 bits: sums of 8 bits overflow on x86 CPUs without the instructions of VNNI.
        quantize_dynamic(folder / GRAPH, folder / INT8, per_channel=True, reduce_range=True)


def _module(saved: SavedEncoder, folder: Path, names: Sequence[str], truncate_dim: int | None) -> Any:
    """The whole computation as a torch module in evaluation mode."""
    import torch

    # Attention in plain operations: the fused one is not in every set of operators.
    model, _ = torch_model(folder, read_json_object(folder / "config.json"), attn_implementation="eager")
    head = _dense(saved.pooler_head) if saved.pooler == "cls" and saved.pooler_head else None

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = model, head

        def forward(self, *inputs: Any) -> tuple[Any, Any]:
            named = dict(zip(names, inputs, strict=True))
            outputs = self.model(**named, output_hidden_states=True)  # what is not used is no part of the graph
            if self.head is not None:  # not every family has a pooler in transformers
                vectors = torch.tanh(self.head(outputs.last_hidden_state[:, 0]))
            else:
                vectors = pooled(outputs, named["attention_mask"], saved.pooler)
            vectors = vectors[:, :truncate_dim]
            return outputs.last_hidden_state, torch.nn.functional.normalize(vectors, dim=-1)

    return Encoder().eval()


def _dense(params: Params) -> Any:
    """The dense layer of the pooler `cls`."""
    import torch

    kernel, bias = (torch.from_numpy(np.array(params[f"dense.{name}"])) for name in ("kernel", "bias"))
    dense = torch.nn.Linear(*kernel.shape)
    dense.weight.data, dense.bias.data = kernel.T.contiguous(), bias
    return dense


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without advice to developers: that of tracing, and of the quantiser, which sets up logging to give it."""
    root, handler = logging.getLogger(), logging.NullHandler()
    before = root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)


class OnnxEncoder:
    """Vectors of unit length by ONNX Runtime, on CPU.

    Args:
        folder: an export with ONNX files.
        file: one of them.
        pooler: that is in the graph, as others may ask for it.
        truncate_dim: likewise.
    """

    def __init__(self, folder: Path, file: str, pooler: str, truncate_dim: int | None):
        from onnxruntime import InferenceSession

        self.pooler, self.truncate_dim = pooler, truncate_dim
        self._tokenizer = load_tokenizer(folder)
        self._max_length = read_json_object(folder / "sentence_bert_config.json")["max_seq_length"]
        self._session = InferenceSession(folder / file, providers=["CPUExecutionProvider"])
        self._inputs = [each.name for each in self._session.get_inputs()]

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences dimension"]:
        """Vectors of sentences, (sentences, dimension); longer ones than the model has positions are cut."""
        distinct = sorted(set(sentences), key=len)
        batches = [distinct[start : start + batch_size] for start in range(0, len(distinct), batch_size)]
        vectors = np.concatenate([self._encode_batch(batch) for batch in batches])
        rows = {sentence: row for row, sentence in enumerate(distinct)}
        return vectors[[rows[sentence] for sentence in sentences]]

    def _encode_batch(self, sentences: list[str]) -> np.ndarray:
        tokens = self._tokenizer(
            sentences, padding=True, truncation=True, max_length=self._max_length, return_tensors="np"
        )
        inputs = {name: tokens[name].astype(np.int64) for name in self._inputs}
        return self._session.run(["sentence_embedding"], inputs)[0]
