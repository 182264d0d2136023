"""An encoder as one ONNX file: from token ids to embeddings, without JAX and without PyTorch."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from diffcse_jax.errors import CheckpointError, require_extra

# Where sentence-transformers and text-embeddings-inference look for it.
GRAPH = "onnx/model.onnx"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
STATES, EMBEDDING = "last_hidden_state", "sentence_embedding"  # the outputs


class Graph:
    """The graph of a folder, which ONNX Runtime computes on the processor.

    Its inputs are those of `INPUTS` that the family has, of shape (batch, length). Its output
    `sentence_embedding`, (batch, dim), is what `SentenceEncoder.encode` returns.
    """

    def __init__(self, folder: Path, name: str):
        self._arguments = folder, name
        self.path = folder / GRAPH
        runtime = require_extra("onnxruntime", "onnx")
        if not os.path.isfile(self.path):
            raise CheckpointError(
                f"{name} has no {GRAPH}. Write a folder that has it with `diffcse export --model "
                f"{name} --onnx float32 --output DIR`, and name DIR"
            )
        options = runtime.SessionOptions()
        # A thread that waits for others sleeps. By default it keeps its processor busy.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = runtime.InferenceSession(
                self.path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # one type for each status of the runtime
            raise CheckpointError(f"{self.path}: ONNX Runtime cannot read it: {error}") from error
        self._names = [each.name for each in self._session.get_inputs()]
        if unknown := sorted({*self._names} - {*INPUTS}):
            raise CheckpointError(f"{self.path} has the input {unknown[0]}, which is not known")
        sizes = {each.name: each.shape[-1] for each in self._session.get_outputs()}
        if EMBEDDING not in sizes:
            raise CheckpointError(
                f"{self.path} has no output {EMBEDDING}: the pooling is missing. "
                "`diffcse export --onnx` writes files that have it"
            )
        # Files of other programs may name the size instead.
        size = sizes[EMBEDDING]
        self.dimension: int | None = size if isinstance(size, int) else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle and copy read the file again."""
        return Graph, self._arguments

    def digest(self) -> str:
        """Return the SHA-256 of the file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def __call__(
        self,
        input_ids: Int32[np.ndarray, "rows length"],
        attention_mask: Int32[np.ndarray, "rows length"],
    ) -> Float32[np.ndarray, "texts dim"]:
        """Return the embeddings of padded rows of token ids, up to the last row that has tokens.

        ONNX Runtime takes any shape, so that padding which gives few shapes is left out.
        """
        rows, columns = (np.max(np.nonzero(attention_mask)[axis]) + 1 for axis in (0, 1))
        arrays = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": np.zeros_like(input_ids),
        }
        inputs = {name: arrays[name][:rows, :columns].astype(np.int64) for name in self._names}
        (embeddings,) = self._session.run([EMBEDDING], inputs)
        return embeddings
