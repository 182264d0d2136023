"""Write an encoder as one ONNX file, in a form for serving, and measure what the form loses.

float32 is exact. float16 is for GPUs. int8 is for CPUs: products of matrices have 8-bit weights,
scaled for each output, and 8-bit inputs, scaled for each call; tables of embeddings have 8-bit rows
with a scale each. docs/serving.md has what each form takes and loses.
"""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.documents.sentences import join
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import warn_user
from diffcse_jax.evaluation.metrics import general_sentences
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.models.graph import EMBEDDING, GRAPH, INPUTS, STATES
from diffcse_jax.models.pooling import normalize
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.search.reading import read_documents

MOST_TEXTS = 500  # of the user's own, evenly spaced
# On average. In int8, MiniLM has 0.992 and loses 0.2 to 0.7 % of nDCG@10 in its own language
# (docs/serving.md).
LEAST_COSINE = 0.98
LARGEST_INT8 = 127


class Closeness(NamedTuple):
    """How close the embeddings of an ONNX file are to those of the model."""

    form: str
    cosine: float  # mean
    lowest_cosine: float
    texts: int


def write_graph(folder: Path, truncate_dim: int | None = None) -> None:
    """Add the whole encoder as one ONNX graph to an exported folder, in float32.

    It has the transformer, the modules after it and truncation to `truncate_dim`. Its inputs are
    `input_ids`, `attention_mask` and, if the family has them, `token_type_ids`, each of shape
    (batch, length). It returns `sentence_embedding`, (batch, dim), as text-embeddings-inference
    reads it, and `last_hidden_state`, (batch, length, hidden), as sentence-transformers does.
    """
    import torch
    from sentence_transformers import SentenceTransformer

    # Attention in plain operations: not every operator set has the fused one.
    options = {"attn_implementation": "eager"}
    with quiet_transformers():
        model = SentenceTransformer(
            str(folder), device="cpu", trust_remote_code=False, model_kwargs=options
        )
    tokenizer = load_tokenizer(folder)
    names = [name for name in INPUTS if name in tokenizer.model_input_names]
    # Two lengths, to trace padding.
    tokens = tokenizer(
        ["a cat", "a cat that sleeps on the warm stones"], padding=True, return_tensors="pt"
    )

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> tuple[Any, Any]:
            transformer, *poolers = self.model
            outputs = transformer(dict(zip(names, inputs, strict=True)))
            last = outputs["token_embeddings"]  # a pooler over two layers replaces it
            for pooler in poolers:
                outputs = pooler(outputs)
            return last, outputs["sentence_embedding"][:, :truncate_dim]

    (folder / GRAPH).parent.mkdir()
    axes = {name: {0: "batch", 1: "length"} for name in [*names, STATES]}
    with warnings.catch_warnings(action="ignore"):  # of the tracer
        # The older exporter: the newer one needs one more package, onnxscript.
        torch.onnx.export(
            Encoder().eval(),
            tuple(tokens[name] for name in names),
            str(folder / GRAPH),
            input_names=names,
            output_names=[STATES, EMBEDDING],
            dynamic_axes=axes | {EMBEDDING: {0: "batch"}},
            # The first version with layer normalisation. ONNX Runtime reads it since 1.12.
            opset_version=17,
            dynamo=False,
        )


def convert_graph(
    folder: Path, form: str, encoder: SentenceEncoder, texts: Sequence[str] = ()
) -> Closeness:
    """Convert the ONNX file of a folder from float32, and compare it with the encoder.

    Args:
        folder: An exported folder with an ONNX file, whose embeddings equal the encoder's.
        form: `float32`, `float16` or `int8`.
        encoder: The encoder that was exported.
        texts: The texts to compare on, at most `MOST_TEXTS`. By default they are general English
            sentences.

    Returns:
        How close the embeddings are. If they are far, a warning says so.
    """
    path = folder / GRAPH
    if form == "float16":
        _to_float16(path)
    elif form == "int8":
        _to_int8(path)
    texts = texts[:: -(-len(texts) // MOST_TEXTS)] if texts else general_sentences()
    expected, actual = (
        normalize(each.encode(texts, prompt=encoder.prompts.document))
        for each in (encoder, SentenceEncoder.from_pretrained(folder, backend="onnx"))
    )
    cosines = (expected * actual).sum(axis=1)
    closeness = Closeness(form, float(cosines.mean()), float(cosines.min()), len(texts))
    if not closeness.cosine >= LEAST_COSINE:  # also NaN
        warn_user(
            f"In {form}, the embeddings have a mean cosine of {closeness.cosine:.3f} with the "
            f"model's (lowest {closeness.lowest_cosine:.3f}), so that searches may find other "
            "texts. Compare both with `diffcse evaluate --backend`, or export float32"
        )
    return closeness


def own_texts(name: str) -> list[str]:
    """Return the distinct texts of a file or folder."""
    documents = read_documents(open_documents_to_search(name, "--input"))
    texts = [join(section.lines) for document in documents for section in document.sections]
    return list(dict.fromkeys(filter(None, map(str.strip, texts))))


def _to_float16(path: Path) -> None:
    """Store weights and compute in float16. Inputs and outputs keep their types."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings(action="ignore"):  # of numbers that become 0 or the largest
        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)


def _to_int8(path: Path) -> None:
    """Compute products with weights in 8-bit integers, and store tables of embeddings in them."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model = onnx.load(path)
    _store_rows_as_int8(model)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # advice to fuse operations first, which changes nothing here
    try:
        # Without the 8th bit of weights, no processor's 16-bit sums of two products overflow.
        quantize_dynamic(
            model, path, op_types_to_quantize=["MatMul"], per_channel=True, reduce_range=True
        )
    finally:
        logging.disable(disabled)


def _store_rows_as_int8(model: Any) -> None:
    """Replace each table that rows are taken from by rows of 8-bit integers and their scales.

    onnxruntime's own quantisation of such a table has one scale for all of it.
    """
    from onnx import TensorProto, helper, numpy_helper

    tables = {each.name: each for each in model.graph.initializer if len(each.dims) == 2}
    replaced = set()
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Gather" or node.input[0] not in tables:
            nodes.append(node)
            continue
        name, ids = node.input
        table = tables[name]
        if name not in replaced:
            replaced.add(name)
            values = numpy_helper.to_array(table)
            scales = np.abs(values).max(axis=1, keepdims=True) / LARGEST_INT8
            scales[scales == 0] = 1
            rows = np.round(values / scales).astype(np.int8)
            model.graph.initializer.remove(table)
            model.graph.initializer.extend(
                [
                    numpy_helper.from_array(rows, f"{name}_rows"),
                    numpy_helper.from_array(scales.astype(np.float32), f"{name}_scales"),
                ]
            )
        parts = [f"{node.output[0]}_{part}" for part in ("rows", "scales", "floats")]
        nodes += [
            helper.make_node("Gather", [f"{name}_rows", ids], [parts[0]]),
            helper.make_node("Gather", [f"{name}_scales", ids], [parts[1]]),
            helper.make_node("Cast", [parts[0]], [parts[2]], to=TensorProto.FLOAT),
            helper.make_node("Mul", [parts[2], parts[1]], [*node.output]),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
