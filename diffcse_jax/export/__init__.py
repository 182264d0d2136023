"""Write an encoder as a Hugging Face folder, and check it.

sentence-transformers reads the folder as well. The folder is read back, also by PyTorch if
installed, and compared with the encoder before it gets its name.
"""

import contextlib
import functools
import importlib.util
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffcse_jax import io
from diffcse_jax.commands import FORMS
from diffcse_jax.encoder import SentenceEncoder, require_finite
from diffcse_jax.errors import (
    CheckpointError,
    ConfigError,
    UserError,
    printable,
    require_extra,
    warn_user,
)
from diffcse_jax.export.card import model_card, recorded_results
from diffcse_jax.export.graph import Closeness, convert_graph, own_texts, write_graph
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.models import files, hf, routes, sentence_folder
from diffcse_jax.models.graph import GRAPH
from diffcse_jax.models.text_settings import max_length_of, text_settings
from diffcse_jax.models.tokenizer import load_tokenizer, unlimited_tokenizer
from diffcse_jax.models.unread import unreported
from diffcse_jax.run_folder.checkpoints import SavedEncoder, read_encoder
from diffcse_jax.run_folder.finding import SEARCH, find_run
from diffcse_jax.run_folder.records import origin
from diffcse_jax.run_folder.start import is_hub_id, read_base_model

TOLERANCE = 1e-4  # relative to the largest absolute value in the embeddings
CARD = "README.md"
NEEDED_BY_ONNX = {
    "torch": "torch",
    "sentence_transformers": "torch",
    "onnx": "onnx",
    "onnxruntime": "onnx",
}

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


class Source(NamedTuple):
    """What is exported."""

    checkpoints: hf.Encoders
    encoder: SentenceEncoder  # of the checkpoints, with its pooler and the size of its embeddings
    saved: SavedEncoder | None = None  # of a run

    def folders(self, root: Path) -> dict[Path, tuple[hf.Pretrained, SentenceEncoder]]:
        """Return the encoders by their folders: the root, or one for each of two encoders."""
        documents, queries = self.checkpoints
        if queries is None or self.encoder.queries is None:
            return {root: (documents, self.encoder)}
        return {
            root / routes.QUERY: (queries, self.encoder.queries),
            root / routes.DOCUMENT: (documents, self.encoder),
        }


def export(
    model: str | Path,
    output: Path,
    truncate_dim: int | None = None,
    *,
    onnx: str = "",
    text: str = "",
    pooler: str | None = None,
    hub_id: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] = (),
) -> dict[str, Any]:
    """Write an encoder as a Hugging Face folder.

    Args:
        model: A run's folder, for the encoder that it has selected, a checkpoint in it, or any
            model that `SentenceEncoder.from_pretrained` loads.
        output: The folder to write. An earlier export there is replaced.
        truncate_dim: The size that readers of the folder cut embeddings to. None: they are not cut.
        onnx: Add an ONNX file in this form, `float32`, `float16` or `int8`. Empty: none.
        text: A file or folder of the user's own text, to compare the ONNX file with the model.
        pooler: For a model that records none.
        hub_id: The model's id on the hub, `USER/NAME`, for the model card of a run.
        license: The license for that card, if it differs from the base model's.
        language: The code of a language for that card, or several, if they differ from those of
            the training text.

    Returns:
        The content of `export_check.json` without checksums: for each reader of the folder, the
        largest difference between its embeddings of sample sentences and those of the encoder in
        memory, and how close the ONNX file is.

    Raises:
        UserError: There is nothing to export, an option is invalid, `output` has other content or
            cannot be written, or the embeddings differ. A failed export leaves no files, and an
            earlier one stays.
    """
    output = io.expand_path(output).resolve()
    languages = (language,) if isinstance(language, str) else tuple(language)
    _check_onnx(onnx, text)
    source = _read(model, pooler, truncate_dim)
    texts = own_texts(text) if text else ()
    of_card = {"hub_id": hub_id, "license": license, "language": languages}
    if source.saved is None and (given := [name for name, value in of_card.items() if value]):
        raise ConfigError(
            f"--{given[0]} is for the model card of a run. {model} keeps its own README.md"
        )
    safe = "The checkpoints and any earlier export are complete."
    with io.disk_errors(output, safe=safe, instead="name another folder"):
        is_empty = output.is_dir() and not any(output.iterdir())
        if output.exists() and not is_empty and not (output / files.EXPORT_CHECK).is_file():
            raise CheckpointError(
                f"{output} is not empty and not an earlier export. Name another folder"
            )
        with io.replace_dir(output) as folder:
            write_folder(source, folder)
            folders = source.folders(folder)
            for each in folders if onnx else ():
                write_graph(each, source.encoder.truncate_dim)
            check = check_folder(source.encoder, folder)
            if onnx:
                converted = (
                    convert_graph(each, onnx, encoder, texts)
                    for each, (_, encoder) in folders.items()
                )
                check["onnx"] = min(converted, key=lambda close: close.cosine)._asdict()
            # People edit the card, on which no embedding depends.
            sealed = (path for path in folder.rglob("*") if path != folder / "README.md")
            io.write_sealed(folder / files.EXPORT_CHECK, check, sealed)
            if source.saved:
                _write_card(
                    source.saved,
                    folder,
                    io.expand_path(model),
                    check,
                    truncate_dim=truncate_dim,
                    **of_card,
                )
    print(f"exported to {printable(str(output))}: {_origin(source)}")
    print(_describe(check))
    # A masked LM has no pooler in transformers.
    documents = source.checkpoints.documents
    has_pooler = documents.pooler or documents.mlm_head
    if hf.FAMILIES[documents.config.family].pooler and not has_pooler:
        print(
            "note: transformers warns that pooler.dense is missing. This is expected: the pooler "
            f"{source.encoder.recorded.pooler} does not use it. Do not use `pooler_output`"
        )
    return check


def _check_onnx(form: str, text: str) -> None:
    """Raise a `UserError` if an ONNX file cannot be written in this form, or none is asked for."""
    if form not in ("", *FORMS):
        raise ConfigError(f"onnx={form!r}: use one of {', '.join(FORMS)}")
    if text and not form:
        raise ConfigError(
            f"--input {text} is what an ONNX file is compared on. Add --onnx, or leave it out"
        )
    for package, extra in NEEDED_BY_ONNX.items() if form else ():
        require_extra(package, extra)


def _read(model: str | Path, pooler: str | None, truncate_dim: int | None) -> Source:
    """Read the encoder of a run or checkpoint, or any other."""
    path = io.expand_path(model)
    if find_run(path) is None:
        checkpoints = hf.read_encoders(str(model))
        options: dict[str, Any] = {"pooler": pooler, "truncate_dim": truncate_dim}
        return Source(
            checkpoints, SentenceEncoder.of_pretrained(checkpoints, str(model), **options)
        )
    if pooler:
        raise ConfigError(f"--pooler {pooler}: {path} is of a run, which has its own. Leave it out")
    saved = read_encoder(path)
    encoder = SentenceEncoder.from_saved(saved, truncate_dim=truncate_dim)
    return Source(saved.checkpoints, encoder, saved)


def _origin(source: Source) -> str:
    """Describe where the weights are from."""
    if source.saved is None:
        return f"{printable(source.encoder.name)}, unchanged"
    return origin(source.saved.selection.interpolation, source.saved.step)


def write_folder(source: Source, root: Path) -> None:
    """Write all but ONNX and the card of a run into an existing folder.

    This is configuration, weights, tokenizer, modules, how to search and, of a model that is not a
    run's, its README.md. Two encoders have folders inside.
    """
    for folder, (checkpoint, encoder) in source.folders(root).items():
        folder.mkdir(exist_ok=True)
        _write_encoder(checkpoint, encoder, folder)
    if source.checkpoints.queries is not None:
        routes.write_router(root)
        settings = sentence_folder.SETTINGS
        shutil.copyfile(root / routes.DOCUMENT / settings, root / settings)
    if source.saved is None:
        of_model = routes.card_folder(source.checkpoints.documents.root)
        for name in (SEARCH, CARD):
            if (of_model / name).is_file():
                shutil.copyfile(of_model / name, root / name)
    elif source.saved.selection.search:
        io.write_json(root / SEARCH, dict(source.saved.selection.search))


def _write_encoder(checkpoint: hf.Pretrained, encoder: SentenceEncoder, folder: Path) -> None:
    """Write configuration, weights, tokenizer and modules of an encoder."""
    sizes = checkpoint.config
    pooler = encoder.recorded.pooler
    write_checkpoint(
        checkpoint, folder, output_hidden_states=pooler in sentence_folder.TWO_LAYER_POOLERS
    )
    record = encoder.recorded._replace(truncate_dim=encoder.truncate_dim)
    sentence_folder.write(folder, record, sizes.num_blocks, sizes.hidden_size)
    length = max_length_of(checkpoint.folder, sizes.max_length)
    text_settings(checkpoint.folder)._replace(max_length=length).write(folder)


def _write_card(
    saved: SavedEncoder,
    folder: Path,
    path: Path,
    check: Mapping[str, Any],
    *,
    truncate_dim: int | None,
    **options: Any,
) -> None:
    """Write the model card of a run."""
    card = model_card(
        saved,
        read_base_model(saved.checkpoint.folder),
        name=(find_run(path) or path).resolve().name,
        truncate_dim=truncate_dim,
        results=recorded_results(path, saved, truncate_dim),
        check=_describe(check),
        graph=GRAPH if "onnx" in check else "",
        **options,
    )
    io.write_text(folder / CARD, card)


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


def check_folder(encoder: SentenceEncoder, folder: Path) -> dict[str, Any]:
    """Compare the embeddings of each available reader of the folder with those of the encoder.

    One of the texts is longer than the model reads, and one is empty.

    Raises:
        CheckpointError: They differ by more than the tolerance, or they are NaN or infinite.
    """
    prompts = dict.fromkeys(["", encoder.prompts.query, encoder.prompts.document])
    words = itertools.cycle(" ".join(SAMPLES).split())
    too_long = " ".join(itertools.islice(words, 2 * encoder.max_length))
    texts = [*SAMPLES, too_long, ""]

    tasks: list[dict[str, str]] = [{}]
    if encoder.queries is not None:
        tasks = [{"task": task} for task in routes.ROUTES]

    def embeddings(encode: Callable[..., np.ndarray]) -> np.ndarray:
        with unreported():
            each = itertools.product(tasks, prompts)
            return np.concatenate([encode(texts, prompt=prompt, **task) for task, prompt in each])

    expected = require_finite(embeddings(encoder.encode))
    differences = {}
    for name, encode in _readers(folder).items():
        with _errors_of(name):
            actual = embeddings(encode)
        same_shape = actual.shape == expected.shape  # false if a reader ignores `truncate_dim`
        differences[name] = float(np.abs(actual - expected).max()) if same_shape else np.inf
        scale = float(np.abs(expected).max())
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

    A warning says if sentence-transformers is installed, but cannot be imported.
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
    if any(folder.rglob(GRAPH)):
        readers[GRAPH] = SentenceEncoder.from_pretrained(folder, backend="onnx").encode
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
    """Return what `export_check.json` records as sentences."""
    readers = ", ".join(
        f"{name} {value:.1e}" for name, value in check["maximal_absolute_difference"].items()
    )
    exact = (
        f"Largest difference from the model's embeddings on {check['sentences']} sentences: "
        f"{readers}."
    )
    if "onnx" not in check:
        return exact
    close = Closeness(**check["onnx"])
    return (
        f"{exact} {GRAPH} in {close.form}: mean cosine {close.cosine:.4f}, lowest "
        f"{close.lowest_cosine:.4f}, with the model's embeddings of {close.texts} texts."
    )


def _without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove local paths that libraries have recorded; hub ids stay."""

    def is_public(key: str, value: Any) -> bool:
        return key not in _PATHS or (key.endswith("name_or_path") and is_hub_id(value))

    return {key: value for key, value in settings.items() if is_public(key, value)}


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
