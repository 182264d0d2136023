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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import diffcse_jax
from diffcse_jax.data.tokenizer import load_tokenizer, unlimited_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, reported_to_user
from diffcse_jax.models import families, pretrained
from diffcse_jax.storage import sentence_transformers_folder
from diffcse_jax.storage.checkpoint import SavedEncoder, read_encoder
from diffcse_jax.storage.files import give_name, partial_folder, write_json, write_tensors, writing

TOLERANCE = 1e-4
CHECK_FILE = "export_check.json"

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


def export(source: Path, output: Path) -> dict[str, Any]:
    """Writes the encoder of a workdir's best checkpoint, or of one checkpoint, as a Hugging Face folder.

    Args:
        source: a workdir, or one checkpoint in it.
        output: the folder to write. An earlier export there is replaced.

    Returns:
        The content of `export_check.json` in the folder: the largest absolute differences between the embeddings of
        sample sentences by the encoder in memory and by each reader of the folder.

    Raises:
        CheckpointError: nothing to export, a folder in the way that is no export, an output that cannot be written, or
            an export whose embeddings differ by more than 1e-4 of their largest number, of which nothing is left.
    """
    output = output.resolve()
    saved = read_encoder(source)
    safe = "The checkpoints and an earlier export are whole."
    with writing(output, safe=safe, instead="name another folder"), _replaced(output) as folder:
        write_folder(saved, folder)
        check = check_folder(saved, folder)
        write_json(folder / CHECK_FILE, check)
        (folder / "README.md").write_text(model_card(saved, check), encoding="utf-8")
    print(f"exported to {output}; maximal absolute difference of embeddings: {_differences(check)}")
    return check


@contextlib.contextmanager
def _replaced(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, which takes its name and its place if the block ends without an exception.

    A process killed in here leaves the earlier export under its name or, for an instant, as `NAME.*.old`.
    """
    if output.exists() and not (output.is_dir() and (not any(output.iterdir()) or (output / CHECK_FILE).is_file())):
        raise CheckpointError(f"{output} is not empty and no earlier export; choose another folder")
    old = output.with_name(f"{output.name}.{uuid.uuid4().hex}.old")
    with partial_folder(output) as new:
        yield new
        if output.exists():
            output.rename(old)
        give_name(new, output)
        for left in output.parent.glob(f"{glob.escape(output.name)}.{'[0-9a-f]' * 32}.old"):
            shutil.rmtree(left)


def write_folder(saved: SavedEncoder, folder: Path) -> None:
    """Writes configuration, weights, tokenizer and modules into an existing folder."""
    sizes = saved.transformer_config
    hf_config = dict(saved.hf_config) | {
        "architectures": [families.find(sizes.family).architecture],
        "dtype": "float32",
    }
    hf_config.pop("torch_dtype", None)
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
        folder, saved.pooler, num_blocks=sizes.num_blocks, hidden_size=sizes.hidden_size, head=saved.pooler_head
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": sizes.max_length, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})


def check_folder(saved: SavedEncoder, folder: Path) -> dict[str, Any]:
    """Compares the embeddings that each available reader of the folder gives with those of the encoder in memory.

    Raises:
        CheckpointError: a difference above the tolerance, which is relative to the largest number in the embeddings;
            embeddings that are no numbers.
    """
    expected = SentenceEncoder.from_saved(saved).encode(SAMPLES)
    scale = float(np.abs(expected).max())
    if not np.isfinite(scale):
        raise CheckpointError(f"the embeddings of the checkpoint of step {saved.step} are no finite numbers")
    differences = {}
    for name, encode in _readers(saved, folder).items():
        differences[name] = float(np.abs(encode(SAMPLES) - expected).max())
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
        model = SentenceTransformer(str(folder), device="cpu")
        readers["sentence_transformers"] = functools.partial(model.encode, show_progress_bar=False)
    return readers


def model_card(saved: SavedEncoder, check: dict[str, Any]) -> str:
    """The folder's README.md."""
    config = saved.config
    settings = {
        "base model": config.model.name_or_path,
        "training text": config.data.train_file,
        "objective": " + ".join(f"{each.weight:g} {name}" for name, each in config.objectives.items()),
        "pooler": saved.pooler,
        "projector": config.model.projector + (" (training only)" if config.model.projector_train_only else ""),
        "batch size, maximal length": f"{config.train.batch_size}, {config.data.max_length} tokens",
        "learning rate, seed": f"{config.optim.learning_rate:g}, {config.train.seed}",
        "checkpoint": f"step {saved.step}",
        "dev scores (x 100)": ", ".join(f"{name} {score:.2f}" for name, score in saved.dev.items()) or "none",
        "chosen by": saved.dev_metric,
        "dimension": str(saved.transformer_config.hidden_size),
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
    options = parser.parse_args()
    with reported_to_user():
        export(options.workdir, options.output)


if __name__ == "__main__":
    main()
