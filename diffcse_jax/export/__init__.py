"""Write a trained model as a Hugging Face folder, and check it.

sentence-transformers reads the folder as well. The folder is read back, also by PyTorch if
installed, and compared with the encoder before it gets its name.
"""

import contextlib
import functools
import importlib.util
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from diffcse_jax import io
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, UserError, printable, require_extra, warn_user
from diffcse_jax.export.card import model_card, recorded_results
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.models import files, hf, sentence_folder
from diffcse_jax.models.pooling import normalize
from diffcse_jax.models.text_settings import max_length_of, text_settings
from diffcse_jax.models.tokenizer import load_tokenizer, unlimited_tokenizer
from diffcse_jax.models.unread import unreported
from diffcse_jax.run_folder.checkpoints import SavedEncoder, read_encoder
from diffcse_jax.run_folder.finding import SEARCH, find_run
from diffcse_jax.run_folder.records import origin
from diffcse_jax.run_folder.start import is_hub_id, read_base_model

TOLERANCE = 1e-4  # relative to the largest absolute value in the embeddings
GRAPH = "onnx/model.onnx"

SAMPLES = (
    "A man is playing a guitar on stage.",
    "Someone performs music for an audience.",
    "The stock market fell sharply on Monday.",
    "Is it possible to learn a language in three months?",
    "no",
    'Café prices rose by 12.5 % in 2023, according to the "Daily News".',
    "The committee, which had met twice before without reaching any agreement, finally decided "
    "that the bridge should be rebuilt with stone from the old quarry rather than with steel.",
    "Numbers: 1, 22, 333; symbols: @ # & * ( )",
)

_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
_PATHS = {"_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file", "cache_dir"}


def export(
    model: Path,
    output: Path,
    truncate_dim: int | None = None,
    *,
    with_onnx: bool = False,
    hub_id: str | None = None,
    license: str | None = None,
    language: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the encoder of a run or checkpoint as a Hugging Face folder.

    Args:
        model: A run's folder, for the encoder that it has selected, or a checkpoint in it.
        output: The folder to write. An earlier export there is replaced.
        truncate_dim: The size that readers of the folder cut embeddings to. None: they are not cut.
        with_onnx: Add an ONNX file.
        hub_id: The model's id on the hub, `USER/NAME`, for the model card.
        license: The license for the model card, if it differs from the base model's.
        language: The codes of languages for the model card, if they differ from those of the
            training text.

    Returns:
        The content of `export_check.json` without checksums: for each reader of the folder, the
        largest difference between its embeddings of sample sentences and those of the encoder in
        memory.

    Raises:
        UserError: There is nothing to export, an option is invalid, `output` has other content or
            cannot be written, or the embeddings differ. A failed export leaves no files, and an
            earlier one stays.
    """
    source = io.expand_path(model)
    output = io.expand_path(output).resolve()
    for package in ("torch", "sentence_transformers", "onnx", "onnxruntime") if with_onnx else ():
        require_extra(package, "onnx")
    saved = read_encoder(source)
    sentence_folder.checked_truncation(truncate_dim, saved.checkpoint.embedding_size(saved.pooler))
    results = recorded_results(source, saved, truncate_dim)
    safe = "The checkpoints and any earlier export are complete."
    with io.disk_errors(output, safe=safe, instead="name another folder"):
        is_empty = output.is_dir() and not any(output.iterdir())
        if output.exists() and not is_empty and not (output / files.EXPORT_CHECK).is_file():
            raise CheckpointError(
                f"{output} is not empty and not an earlier export. Name another folder"
            )
        with io.replace_dir(output) as folder:
            write_folder(saved, folder, truncate_dim)
            if saved.selection.search:
                io.write_json(folder / SEARCH, dict(saved.selection.search))
            if with_onnx:
                write_onnx(folder, truncate_dim)
            check = check_folder(saved, folder, truncate_dim)
            io.write_sealed(folder / files.EXPORT_CHECK, check, folder.rglob("*"))
            card = model_card(
                saved,
                read_base_model(saved.checkpoint.folder),
                name=(find_run(source) or source).resolve().name,
                truncate_dim=truncate_dim,
                hub_id=hub_id,
                license=license,
                language=language,
                results=results,
                check=_describe(check),
                graph=GRAPH if with_onnx else "",
            )
            io.write_text(folder / "README.md", card)
    print(
        f"exported to {printable(str(output))}: {origin(saved.selection.interpolation, saved.step)}"
    )
    print(_describe(check))
    # A masked LM has no pooler in transformers.
    has_pooler = saved.checkpoint.pooler or saved.checkpoint.mlm_head
    if hf.FAMILIES[saved.checkpoint.config.family].pooler and not has_pooler:
        print(
            "note: transformers warns that pooler.dense is missing. This is expected: the pooler "
            f"{saved.pooler} does not use it. Do not use `pooler_output`"
        )
    return check


def write_folder(saved: SavedEncoder, folder: Path, truncate_dim: int | None = None) -> None:
    """Write configuration, weights, tokenizer and modules into an existing folder."""
    trained = saved.checkpoint
    sizes = trained.config
    write_checkpoint(
        trained, folder, output_hidden_states=saved.pooler in sentence_folder.TWO_LAYER_POOLERS
    )
    record = saved.recorded._replace(truncate_dim=truncate_dim)
    sentence_folder.write(folder, record, sizes.num_blocks, sizes.hidden_size)
    length = max_length_of(trained.folder, sizes.max_length)
    text_settings(trained.folder)._replace(max_length=length).write(folder)


def write_checkpoint(
    checkpoint: hf.Pretrained, folder: Path, *, output_hidden_states: bool = False
) -> None:
    """Write configuration, weights and tokenizer of a checkpoint into an existing folder.

    With a masked-LM head, it is a folder of a class such as `BertForMaskedLM`, whose decoder is the
    word embeddings.
    """
    family = checkpoint.config.family
    architecture = hf.architecture(checkpoint.config, has_mlm_head=bool(checkpoint.mlm_head))
    hf_config = dict(checkpoint.hf_config) | {"architectures": [architecture], "dtype": "float32"}
    # The last two name files that are not exported.
    for key in ("torch_dtype", "auto_map", "configuration_files"):
        hf_config.pop(key, None)
    if checkpoint.mlm_head:
        hf_config["tie_word_embeddings"] = True
    if output_hidden_states:
        hf_config["output_hidden_states"] = True
    io.write_json(folder / "config.json", _without_paths(hf_config))

    tensors = hf.to_hf(checkpoint.transformer, "transformer", checkpoint.config)
    if checkpoint.pooler:
        tensors |= hf.to_hf(checkpoint.pooler, "pooler", checkpoint.config)
    if checkpoint.mlm_head:
        tensors = {f"{hf.FAMILIES[family].prefix}{name}": array for name, array in tensors.items()}
        tensors |= hf.to_hf(checkpoint.mlm_head, "mlm_head", checkpoint.config)
    io.write_tensors(folder / "model.safetensors", tensors)

    for name in _TOKENIZER_FILES:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    tokenizer = load_tokenizer(checkpoint.folder)
    settings = folder / _TOKENIZER_FILES[0]
    recorded = io.read_json_object(settings) if settings.is_file() else {}
    # tokenizer.json is written without truncation, which may have named the side.
    side = {} if tokenizer.truncation_side == "right" else {"truncation_side": "left"}
    if recorded or side:
        io.write_json(settings, _without_paths(recorded) | side)
    unlimited_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))


def check_folder(
    saved: SavedEncoder, folder: Path, truncate_dim: int | None = None
) -> dict[str, Any]:
    """Compare the embeddings of each available reader of the folder with those of the encoder.

    One of the texts is longer than the model reads, and one is empty.

    Raises:
        CheckpointError: They differ by more than the tolerance, or they are NaN or infinite.
    """
    encoder = SentenceEncoder.from_saved(saved, truncate_dim=truncate_dim)
    prompts = dict.fromkeys(["", saved.prompts.query, saved.prompts.document])
    words = itertools.cycle(" ".join(SAMPLES).split())
    too_long = " ".join(itertools.islice(words, 2 * encoder.max_length))
    texts = [*SAMPLES, too_long, ""]

    def embeddings(encode: Callable[..., np.ndarray]) -> np.ndarray:
        with unreported():
            return np.concatenate([encode(texts, prompt=prompt) for prompt in prompts])

    expected = embeddings(encoder.encode)
    if not np.isfinite(expected).all():
        raise CheckpointError(
            f"the embeddings of the checkpoint of step {saved.step} are NaN or infinite"
        )
    differences = {}
    for name, encode in _readers(folder).items():
        with _errors_of(name):
            actual = embeddings(encode)
        wanted = normalize(expected) if name == GRAPH else expected
        same_shape = actual.shape == wanted.shape  # false if a reader ignores `truncate_dim`
        differences[name] = float(np.abs(actual - wanted).max()) if same_shape else np.inf
        scale = float(np.abs(wanted).max())
        if not differences[name] <= TOLERANCE * scale:
            raise CheckpointError(
                f"the export does not match the model: read by {name}, its embeddings differ by "
                f"{differences[name]:.2e}, which is more than {TOLERANCE:.0e} of their scale of "
                f"{scale:.2g}"
            )
    return {
        "maximal_absolute_difference": differences,
        "tolerance": TOLERANCE,
        "sentences": len(texts),
    }


def _readers(folder: Path) -> dict[str, Callable[..., np.ndarray]]:
    """Return the readers of the folder that are installed, by name.

    A warning says if sentence-transformers is installed, but cannot be imported. The ONNX graph
    normalises embeddings.
    """
    readers: dict[str, Callable] = {"diffcse_jax": SentenceEncoder.from_pretrained(folder).encode}
    if _installed("sentence_transformers"):
        try:
            library = require_extra("sentence_transformers", "torch")
        except UserError as error:
            warn_user(f"The export is not checked with sentence-transformers: {error}")
        else:
            with quiet_transformers(), _errors_of("sentence_transformers"):
                model = library.SentenceTransformer(
                    str(folder), device="cpu", trust_remote_code=False
                )
            readers["sentence_transformers"] = functools.partial(
                model.encode, show_progress_bar=False
            )
    if (folder / GRAPH).is_file():
        readers[GRAPH] = functools.partial(encode_onnx, folder)
    return readers


@contextlib.contextmanager
def _errors_of(reader: str) -> Iterator[None]:
    """Turn any error of a reader of the folder into a `CheckpointError` that names the reader."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # other libraries raise a dozen types
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{reader} cannot read the export: {reason}") from error


def _describe(check: Mapping[str, Any]) -> str:
    """Return the differences in `export_check.json` as a sentence."""
    readers = ", ".join(
        f"{name} {value:.1e}" for name, value in check["maximal_absolute_difference"].items()
    )
    return (
        f"Largest difference from the trained model's embeddings on {check['sentences']} "
        f"sentences: {readers}."
    )


def _without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove local paths that libraries have recorded; hub ids stay."""

    def is_public(key: str, value: Any) -> bool:
        return key not in _PATHS or (key.endswith("name_or_path") and is_hub_id(value))

    return {key: value for key, value in settings.items() if is_public(key, value)}


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def write_onnx(folder: Path, truncate_dim: int | None = None) -> None:
    """Add the whole encoder as one ONNX graph to an exported folder.

    It has the transformer, pooling, truncation to `truncate_dim` and normalisation. Its inputs are
    `input_ids`, `attention_mask` and, if the family has them, `token_type_ids`, each of shape
    (batch, length). It returns `sentence_embedding`, (batch, dim), of length 1, and
    `last_hidden_state`, (batch, length, hidden). The names are those of sentence-transformers'
    `backend="onnx"`.
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
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    names = [name for name in inputs if name in tokenizer.model_input_names]
    # Two lengths, to trace padding.
    tokens = tokenizer(
        ["a cat", "a cat that sleeps on the warm stones"], padding=True, return_tensors="pt"
    )

    class Graph(torch.nn.Module):
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

    (folder / GRAPH).parent.mkdir()
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    with warnings.catch_warnings(action="ignore"):  # of the tracer
        # The older exporter: the newer one needs one more package, onnxscript.
        torch.onnx.export(
            Graph().eval(),
            tuple(tokens[name] for name in names),
            str(folder / GRAPH),
            input_names=names,
            output_names=["last_hidden_state", "sentence_embedding"],
            dynamic_axes=axes | {"sentence_embedding": {0: "batch"}},
            # The first version with layer normalisation. ONNX Runtime reads it since 1.12.
            opset_version=17,
            dynamo=False,
        )


def encode_onnx(
    folder: Path, sentences: Sequence[str], prompt: str = ""
) -> Float32[np.ndarray, "sentences dim"]:
    """Return embeddings of length 1 by ONNX Runtime on CPU.

    Sentences longer than the model's positions are cut.
    """
    from onnxruntime import InferenceSession

    session = InferenceSession(folder / GRAPH, providers=["CPUExecutionProvider"])
    limit = text_settings(folder).max_length
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "np"}
    tokens = load_tokenizer(folder)([prompt + sentence for sentence in sentences], **options)
    inputs = {each.name: tokens[each.name].astype(np.int64) for each in session.get_inputs()}
    (embeddings,) = session.run(["sentence_embedding"], inputs)
    return embeddings
