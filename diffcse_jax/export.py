"""From a training checkpoint to a Hugging Face folder that sentence-transformers loads too.

python -m diffcse_jax.export --workdir runs/diffcse_base --output DIR

The export is read back and compared with the encoder in memory before it gets its name; PyTorch takes part in the
comparison where it is installed and is not needed otherwise.
"""

import argparse
import contextlib
import functools
import glob
import importlib.metadata
import importlib.util
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import diffcse_jax
from diffcse_jax.data.tokenizer import load_tokenizer, unlimited_tokenizer
from diffcse_jax.encoder import SentenceEncoder, checked_truncation
from diffcse_jax.errors import CheckpointError, reported_to_user
from diffcse_jax.models import families, pretrained
from diffcse_jax.storage import sentence_transformers_folder
from diffcse_jax.storage.checkpoint import SavedEncoder, read_encoder
from diffcse_jax.storage.files import give_name, partial_folder, write_json, write_tensors, writing
from diffcse_jax.storage.manifest import EXPORT_CHECK, described
from diffcse_jax.storage.selection import origin

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
_PACKAGES = ("jax", "flax", "transformers", "tokenizers", "safetensors", "numpy")


def export(source: Path, output: Path, truncate_dim: int | None = None) -> dict[str, Any]:
    """Writes the encoder that a run has selected, or that of one checkpoint, as a Hugging Face folder.

    Args:
        source: a workdir (`diffcse_jax.storage.checkpoint.read_encoder` says what is taken), or a checkpoint in it.
        output: the folder to write. An earlier export there is replaced.
        truncate_dim: the length that readers of the folder cut vectors to; None: whole vectors.

    Returns:
        The content of `export_check.json` in the folder: the largest absolute differences between the embeddings of
        sample sentences by the encoder in memory and by each reader of the folder, and the SHA-256 of its files.

    Raises:
        CheckpointError: nothing to export, a folder in the way that is no export, an output that cannot be written, or
            an export whose embeddings differ by more than 1e-4 of their largest number, of which nothing is left.
        ConfigError: vectors do not have `truncate_dim` numbers.
    """
    output = output.resolve()
    saved = read_encoder(source)
    checked_truncation(truncate_dim, saved.transformer_config.hidden_size)
    safe = "The checkpoints and an earlier export are whole."
    with writing(output, safe=safe, instead="name another folder"), _replaced(output) as folder:
        write_folder(saved, folder, truncate_dim)
        files = described(folder, (path for path in folder.rglob("*") if path.is_file()))
        check = check_folder(saved, folder, truncate_dim) | {"files": files}
        write_json(folder / EXPORT_CHECK, check)
        (folder / "README.md").write_text(model_card(saved, check, truncate_dim), encoding="utf-8")
    weights = origin(saved.share, saved.step)
    print(f"exported to {output}: {weights}; maximal absolute difference of embeddings: {_differences(check)}")
    return check


@contextlib.contextmanager
def _replaced(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, which takes its name and its place if the block ends without an exception.

    A process killed in here leaves the earlier export under its name or, for an instant, as `NAME.*.old`.
    """
    if output.exists() and not (output.is_dir() and (not any(output.iterdir()) or (output / EXPORT_CHECK).is_file())):
        raise CheckpointError(f"{output} is not empty and no earlier export; choose another folder")
    old = output.with_name(f"{output.name}.{uuid.uuid4().hex}.old")
    with partial_folder(output) as new:
        yield new
        if output.exists():
            output.rename(old)
        give_name(new, output)
        for left in output.parent.glob(f"{glob.escape(output.name)}.{'[0-9a-f]' * 32}.old"):
            shutil.rmtree(left)


def write_folder(saved: SavedEncoder, folder: Path, truncate_dim: int | None = None) -> None:
    """Writes configuration, weights, tokenizer and modules into an existing folder."""
    sizes = saved.transformer_config
    hf_config = dict(saved.hf_config) | {
        "architectures": [families.find(sizes.family).architecture],
        "dtype": "float32",
    }
    for key in ("torch_dtype", "auto_map", "configuration_files"):  # the last two name files that are not exported
        hf_config.pop(key, None)
    if saved.pooler in sentence_transformers_folder.TWO_LAYER_POOLERS:
        hf_config["output_hidden_states"] = True
    write_json(folder / "config.json", hf_config)

    tensors = pretrained.to_hf(saved.transformer, "transformer", sizes)
    if saved.pooler_head:
        tensors |= pretrained.to_hf(saved.pooler_head, "pooler", sizes)
    write_tensors(folder / "model.safetensors", tensors)

    for name in _TOKENIZER_FILES:
        if (saved.folder / name).is_file():
            shutil.copyfile(saved.folder / name, folder / name)
    unlimited_tokenizer(load_tokenizer(saved.folder)).save(str(folder / "tokenizer.json"))

    sentence_transformers_folder.write(
        folder,
        saved.pooler,
        num_blocks=sizes.num_blocks,
        hidden_size=sizes.hidden_size,
        head=saved.pooler_head,
        truncate_dim=truncate_dim,
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": sizes.max_length, "do_lower_case": False})


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
        from transformers.utils import logging

        logging.disable_progress_bar()  # of loading weights
        model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False)
        readers["sentence_transformers"] = functools.partial(model.encode, show_progress_bar=False)
    return readers


def model_card(saved: SavedEncoder, check: dict[str, Any], truncate_dim: int | None = None) -> str:
    """The folder's README.md."""
    config, whole = saved.config, saved.transformer_config.hidden_size
    settings = {
        "base model": config.model.name_or_path,
        "training text": config.data.train_file,
        "objective": " + ".join(f"{each.weight:g} {name}" for name, each in config.objectives.items()),
        "pooler": saved.pooler,
        "projector": config.model.projector + (" (training only)" if config.model.projector_train_only else ""),
        "batch size, maximal length": f"{config.train.batch_size}, {config.data.max_length} tokens",
        "learning rate, seed": f"{config.optim.learning_rate:g}, {config.train.seed}",
        "weights": origin(saved.share, saved.step),
        "dev scores (x 100, uniformity as it is)": _shown(saved.dev) or "none",
        "chosen by": saved.dev_metric,
        **_comparison(saved),
        "dimension": f"{truncate_dim}, cut from {whole}" if truncate_dim else str(whole),
    }
    return _CARD.format(
        settings="\n".join(f"| {name} | {value} |" for name, value in settings.items()),
        differences=_differences(check),
        sentences=check["sentences"],
        versions=", ".join(
            [f"diffcse_jax {diffcse_jax.__version__}"]
            + [f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES]
        ),
        configuration=json.dumps(config.to_dict(), indent=2),
    )


def _comparison(saved: SavedEncoder) -> dict[str, str]:
    """The lines of the card about the start."""
    if saved.start is None:  # a run of an earlier version
        return {}
    lines = {f"dev scores of the start ({saved.start.pooler})": _shown(saved.start.dev)}
    return lines | {"compared with the start": saved.verdict} if saved.verdict else lines


def _shown(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


_CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, diffcse, jax]
---

# Sentence embeddings trained with diffcse_jax

| | |
|---|---|
{settings}

With sentence-transformers:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A man plays the guitar.", "Someone makes music."])
```

With diffcse_jax, without PyTorch:

```python
from diffcse_jax import SentenceEncoder

encoder = SentenceEncoder.from_pretrained("path/to/this/folder")
vectors = encoder.encode(["A man plays the guitar.", "Someone makes music."])
```

Maximal absolute difference from the trained model's embeddings on {sentences} sentences, by reader: {differences}.

Written with {versions}.

<details><summary>Resolved configuration</summary>

```json
{configuration}
```

</details>
"""


def _differences(check: dict[str, Any]) -> str:
    return ", ".join(f"{reader} {value:.1e}" for reader, value in check["maximal_absolute_difference"].items())


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True, help="a training workdir, or one checkpoint in it")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--truncate_dim", type=int, help="readers cut vectors to their first so many numbers")
    options = parser.parse_args()
    with reported_to_user():
        export(options.workdir, options.output, options.truncate_dim)


if __name__ == "__main__":
    main()
