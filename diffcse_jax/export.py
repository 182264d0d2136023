"""Writes a trained model as a folder of Hugging Face and sentence-transformers.

python -m diffcse_jax.export --workdir runs/mine --output DIR
python -m diffcse_jax.export --workdir runs/mine --push_to_hub USER/NAME

The export is read back and compared with the encoder in memory before it gets
its name; PyTorch takes part in the comparison where it is installed and is not
needed otherwise.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import diffcse_jax
from diffcse_jax import hub, onnx_graph
from diffcse_jax.card.scores import recorded_results
from diffcse_jax.card.text import Exported, model_card
from diffcse_jax.data.tokenizer import load_tokenizer, unlimited_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, reported_to_user
from diffcse_jax.evaluation.dev import DRIFT_AGREEMENT, DRIFT_STSB, build_drift_check, general_sentences
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.io import (
    EXPORT_CHECK,
    disk_errors,
    file_digests,
    find_run,
    read_json_object,
    replace_dir,
    write_json,
    write_tensors,
    write_text,
)
from diffcse_jax.models import families, hf, pooling_modules
from diffcse_jax.models.pooling import normalize
from diffcse_jax.run_folder.folder import is_hub_id, read_base_model
from diffcse_jax.run_folder.records import origin
from diffcse_jax.run_folder.saved_encoder import SavedEncoder, read_encoder

TOLERANCE = 1e-4

SAMPLES = (
    "A man is playing a guitar on stage.",
    "Someone performs music for an audience.",
    "The stock market fell sharply on Monday.",
    "Is it possible to learn a language in three months?",
    "no",
    'Café prices rose by 12.5 % in 2023, according to the "Daily News".',
    "The committee, which had met twice before without reaching any agreement, finally decided that the bridge should "
    "be rebuilt with stone from the old quarry rather than with steel.",
    "Numbers: 1, 22, 333; symbols: @ # & * ( )",
)

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt")
_PATHS = {"_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file", "cache_dir"}
_GUARDS = {DRIFT_STSB: "Spearman on STS-B dev", DRIFT_AGREEMENT: "agreement of similarities (Spearman x 100)"}
_PACKAGES = ("jax", "flax", "transformers", "tokenizers", "safetensors", "numpy")


@dataclasses.dataclass(frozen=True)
class About:
    """Facts for the card that the run does not know.

    Attributes:
        hub_id: `USER/NAME`, under which the folder will be on the hub.
        license: of the model, where it is not the base model's.
        language: codes, where they are not the base model's.
        results: files of eval.py; none: those that are in the workdir.
    """

    hub_id: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    results: tuple[Path, ...] = ()


def export(
    source: Path, output: Path, truncate_dim: int | None = None, *, onnx: bool = False, about: About | None = None
) -> dict[str, Any]:
    """Writes the encoder that a run has selected, or that of one checkpoint, as a Hugging Face folder.

    Args:
        source: a workdir (`diffcse_jax.storage.saved_encoder.read_encoder` says what is taken), or a checkpoint in it.
        output: the folder to write. An earlier export there is replaced.
        truncate_dim: the length that readers of the folder cut vectors to; None: whole vectors.
        onnx: add ONNX files.
        about: for the card.

    Returns:
        The content of `export_check.json` in the folder: the largest absolute differences between the embeddings of
        sample sentences by the encoder in memory and by each reader of the folder, and the SHA-256 of its files.

    Raises:
        CheckpointError: nothing to export, a folder in the way that is no export, an output that cannot be written, or
            an export whose embeddings differ by more than 1e-4 of their largest number, of which nothing is left.
        ConfigError: vectors do not have `truncate_dim` numbers; packages for ONNX are missing; a file of results that
            has none of this model.
    """
    output = output.resolve()
    about = about or About()
    if onnx:
        onnx_graph.require_packages()
    saved = read_encoder(source)
    pooling_modules.checked_truncation(truncate_dim, saved.transformer_config.hidden_size)
    recorded = recorded_results(source, saved, truncate_dim, about.results)
    safe = "The checkpoints and an earlier export are whole."
    with disk_errors(output, safe=safe, instead="name another folder"), _replaced(output) as folder:
        write_folder(saved, folder, truncate_dim)
        check = check_folder(saved, folder, truncate_dim)
        if onnx:
            onnx_graph.write(saved, folder, truncate_dim)
            check["onnx"] = _measured(saved, folder, truncate_dim)
        check["files"] = file_digests(folder, (path for path in folder.rglob("*") if path.is_file()))
        write_json(folder / EXPORT_CHECK, check)
        exported = Exported(
            name=about.hub_id or (find_run(source) or source).resolve().name,
            on_hub=about.hub_id is not None,
            truncate_dim=truncate_dim,
            recorded=recorded,
            checks=_about_checks(check),
            versions={"diffcse_jax": diffcse_jax.__version__}
            | {package: importlib.metadata.version(package) for package in _PACKAGES},
            license=about.license,
            language=about.language,
            onnx=onnx,
        )
        base = read_base_model(saved.folder)
        write_text(folder / "README.md", model_card(saved, base, exported))
    weights = origin(saved.interpolation, saved.step)
    print(f"exported to {output}: {weights}; maximal absolute difference of embeddings: {_differences(check)}")
    if families.find(saved.transformer_config.family).pooler and not saved.pooler_head:
        print(
            "(transformers will report pooler.dense as missing there: the start has none, and the pooler "
            f"{saved.pooler} needs none. Only its `pooler_output` is of no use.)"
        )
    for told in _about_checks(check)[1:]:
        print(told.replace("`", ""))
    return check


@contextlib.contextmanager
def _replaced(output: Path) -> Iterator[Path]:
    """A partial folder that takes the place of an earlier export, if the block ends without an exception."""
    if output.exists() and not (output.is_dir() and (not any(output.iterdir()) or (output / EXPORT_CHECK).is_file())):
        raise CheckpointError(f"{output} is not empty and no earlier export; choose another folder")
    with replace_dir(output) as new:
        yield new


def write_folder(saved: SavedEncoder, folder: Path, truncate_dim: int | None = None) -> None:
    """Writes configuration, weights, tokenizer and modules into an existing folder."""
    sizes = saved.transformer_config
    hf_config = dict(saved.hf_config) | {
        "architectures": [families.find(sizes.family).architecture],
        "dtype": "float32",
    }
    for key in ("torch_dtype", "auto_map", "configuration_files"):  # the last two name files that are not exported
        hf_config.pop(key, None)
    _drop_paths(hf_config)
    if saved.pooler in pooling_modules.TWO_LAYER_POOLERS:
        hf_config["output_hidden_states"] = True
    write_json(folder / "config.json", hf_config)

    tensors = hf.to_hf(saved.transformer, "transformer", sizes)
    if saved.pooler_head:
        tensors |= hf.to_hf(saved.pooler_head, "pooler", sizes)
    write_tensors(folder / "model.safetensors", tensors)

    for name in _TOKENIZER_FILES:
        if (saved.folder / name).is_file():
            shutil.copyfile(saved.folder / name, folder / name)
    if (folder / _TOKENIZER_FILES[0]).is_file():
        write_json(folder / _TOKENIZER_FILES[0], _drop_paths(read_json_object(folder / _TOKENIZER_FILES[0])))
    unlimited_tokenizer(load_tokenizer(saved.folder)).save(str(folder / "tokenizer.json"))

    pooling_modules.write(
        folder,
        saved.pooler,
        num_blocks=sizes.num_blocks,
        hidden_size=sizes.hidden_size,
        head=saved.pooler_head,
        truncate_dim=truncate_dim,
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": sizes.max_length, "do_lower_case": False})


def _drop_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Removes what libraries have noted of where files were, names on the hub excepted, and returns the settings."""
    for key in _PATHS & settings.keys():
        name = settings[key]
        if not isinstance(name, str) or not key.endswith("name_or_path") or not is_hub_id(name):
            del settings[key]
    return settings


def check_folder(saved: SavedEncoder, folder: Path, truncate_dim: int | None = None) -> dict[str, Any]:
    """Compares the embeddings that each available reader of the folder gives with those of the encoder in memory.

    Raises:
        CheckpointError: a difference above the tolerance, which is relative to the largest number in the embeddings;
            embeddings that are no numbers.
    """
    expected = SentenceEncoder.from_saved(saved, truncate_dim=truncate_dim).encode(SAMPLES)
    scale = float(np.abs(expected).max())
    if not np.isfinite(scale):
        raise CheckpointError(f"the embeddings of the checkpoint of step {saved.step} are no finite numbers")
    differences = {}
    for name, encode in _readers(saved, folder).items():
        found = encode(SAMPLES)
        alike = found.shape == expected.shape
        differences[name] = float(np.abs(found - expected).max()) if alike else np.inf  # a reader that does not cut
        if not differences[name] <= TOLERANCE * scale:
            raise CheckpointError(
                f"the export does not give the model's embeddings: read by {name}, they differ by "
                f"{differences[name]:.2e}, more than {TOLERANCE:.0e} of their scale of {scale:.2g}"
            )
    return {
        "maximal_absolute_difference": differences,
        "tolerance": TOLERANCE,
        "sentences": len(SAMPLES),
        "scale": scale,
    }


def _readers(saved: SavedEncoder, folder: Path) -> dict[str, Callable[[Sequence[str]], np.ndarray]]:
    """Whatever can read the folder here, each independently of the others."""
    readers: dict[str, Callable] = {"diffcse_jax": SentenceEncoder.from_pretrained(folder).encode}
    has_hf_pooler = bool(families.find(saved.transformer_config.family).pooler)
    if _installed("torch") and (has_hf_pooler or saved.pooler != "cls"):
        from diffcse_jax.evaluation.backends import TorchEncoder

        readers["transformers"] = TorchEncoder(str(folder)).encode
    if _installed("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        with quiet_transformers():
            model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False)
        readers["sentence_transformers"] = functools.partial(model.encode, show_progress_bar=False)
    return readers


def _measured(saved: SavedEncoder, folder: Path, truncate_dim: int | None) -> dict[str, Any]:
    """How the ONNX files of a folder agree with the encoder in memory: the one exactly, int8 by its score.

    Raises:
        CheckpointError: vectors of unit length by the graph differ from the encoder's by more than the tolerance.
    """
    encoder = SentenceEncoder.from_saved(saved, truncate_dim=truncate_dim)
    graph, int8 = (
        onnx_graph.OnnxEncoder(folder, file, saved.pooler, truncate_dim) for file in (onnx_graph.GRAPH, onnx_graph.INT8)
    )
    sentences = [*SAMPLES, *general_sentences()]
    expected, found, small = normalize(encoder.encode(sentences)), graph.encode(sentences), int8.encode(sentences)
    difference, scale = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    if not difference <= TOLERANCE * scale:
        raise CheckpointError(
            f"the ONNX graph does not give the model's embeddings: of unit length, they differ by {difference:.2e}, "
            f"more than {TOLERANCE:.0e} of their scale of {scale:.2g}"
        )
    check = build_drift_check(saved.config.eval, lambda: encoder)
    return {
        "sentences": len(sentences),
        "maximal_absolute_difference": difference,
        "scale": scale,
        "tolerance": TOLERANCE,
        "score": check.name,
        "float32": check.score(encoder),
        "int8": check.score(int8),
        "mean_cosine_of_int8": float((small * expected).sum(axis=1).mean()),
    }


def _about_checks(check: Mapping[str, Any]) -> list[str]:
    """The content of `export_check.json` in sentences, for the card."""
    told = [
        f"Maximal absolute difference from the trained model's embeddings on {check['sentences']} sentences, by "
        f"reader: {_differences(check)}."
    ]
    if onnx := check.get("onnx"):
        told += [
            f"`{onnx_graph.GRAPH}`: maximal absolute difference from the trained model's embeddings of unit length on "
            f"{onnx['sentences']} sentences: {onnx['maximal_absolute_difference']:.1e}.",
            f"`{onnx_graph.INT8}`: {_GUARDS[onnx['score']]} {onnx['int8']:.2f}, where that of the trained model is "
            f"{onnx['float32']:.2f}; mean cosine with its embeddings {onnx['mean_cosine_of_int8']:.4f}.",
        ]
    return told


def _differences(check: Mapping[str, Any]) -> str:
    return ", ".join(f"{reader} {value:.1e}" for reader, value in check["maximal_absolute_difference"].items())


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="a training workdir, or one checkpoint in it")
    add("--output", type=Path, help="the folder to write (with --push_to_hub: WORKDIR/export if not given)")
    add("--truncate_dim", type=int, help="readers cut vectors to their first so many numbers")
    add("--onnx", action="store_true", help="add onnx/model.onnx and its int8 form, checked against the model")
    results = "results.json of eval.py, for the card (default: that in WORKDIR, if it is of this model)"
    add("--results", type=Path, nargs="+", default=[], metavar="FILE", help=results)
    add("--license", help="of the model, for the card, such as `apache-2.0` (default: what the base model's card says)")
    languages = "codes of the model's languages, for the card, such as `en` (default: what the base model's card says)"
    add("--language", nargs="+", default=[], metavar="CODE", help=languages)
    upload = "then upload the folder to the Hugging Face hub (the token is that of HF_TOKEN or of `hf auth login`)"
    add("--push_to_hub", metavar="USER/NAME", help=upload)
    add("--private", action="store_true", help="with --push_to_hub: a repository that is new is private")
    options = parser.parse_args()
    if options.output is None and not options.push_to_hub:
        parser.error("--output DIR is missing")
    if options.private and not options.push_to_hub:
        parser.error("--private is for --push_to_hub")
    with reported_to_user():
        if options.push_to_hub:
            hub.check(options.push_to_hub)
        output = options.output or (find_run(options.workdir) or options.workdir) / "export"
        about = About(options.push_to_hub, options.license, tuple(options.language), tuple(options.results))
        export(options.workdir, output, options.truncate_dim, onnx=options.onnx, about=about)
        if options.push_to_hub:
            print(f"uploaded: {hub.push(output, options.push_to_hub, private=options.private)}")


if __name__ == "__main__":
    main()
