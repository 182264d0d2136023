"""Make the start of the study `does_difference_help`: two masked LMs from random weights.

    python -m benchmarks.make_raw_start --text wiki_1m.txt --work FOLDER

It runs `diffcse init` and `diffcse train --config masked_lm` for the encoder (4 blocks of 256) and
the generator (2 blocks of 128), with the vocabulary of the text. If it is interrupted, the same
command resumes. Then `--output` gets both as Hugging Face folders with weights in half precision,
and `record.json`: the commands, the digest of the text, and the masked accuracy over the steps
beside that of a unigram and a bigram.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks import measure
from diffcse_jax.io import sha256
from diffcse_jax.run_folder.records import read_metrics

SIZES = {"encoder": (4, 256, 4), "generator": (2, 128, 4)}  # blocks, hidden size, heads
STEPS = 10_000
VOCABULARY = 5000
BATCH = 64
LEARNING_RATE = 1e-3
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")  # besides the weights
SCORES = ("masked_accuracy", "masked_accuracy_unigram", "masked_accuracy_bigram")


def commands_of(name: str, text: str, work: Path) -> list[list[str]]:
    """Return the commands that make a model in `work/NAME`, from its random weights on."""
    blocks, hidden_size, heads = SIZES[name]
    start = str(work / f"{name}_start")
    init = ["diffcse", "init", "--input", text, "--vocabulary_size", str(VOCABULARY)]
    init += ["--blocks", str(blocks), "--hidden_size", str(hidden_size), "--heads", str(heads)]
    train = ["diffcse", "train", "--config", "masked_lm", "--workdir", str(work / name)]
    train += [
        f"--config.{key}={value}"
        for key, value in {
            "model.name_or_path": start,
            "data.train_file": text,
            "train.batch_size": BATCH,
            "train.steps": STEPS,
            "optim.learning_rate": LEARNING_RATE,
        }.items()
    ]
    return [[*init, "--output", start], train]


def write_half(run: Path, output: Path) -> None:
    """Write the model of a run in half precision."""
    output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(run / "export" / name, output / name)
    arrays = load_file(run / "export" / "model.safetensors")
    half = {name: array.astype(np.float16) for name, array in arrays.items()}
    save_file(half, output / "model.safetensors", metadata={"format": "pt"})


def curve_of(run: Path) -> list[list[float]]:
    """Return rows of a step and its masked accuracies."""
    rows = read_metrics(run)
    names = [f"dev/{score}" for score in SCORES]
    return [[row["step"], *(row[name] for name in names)] for row in rows if names[0] in row]


def main() -> None:
    """Run the commands that are not done, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True, help="a sentence per line, such as Wikipedia's")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("raw_start"))
    options = parser.parse_args()
    record: dict[str, object] = {}
    for name in SIZES:
        init, train = commands_of(name, options.text, options.work)
        for command in (train,) if Path(init[-1]).is_dir() else (init, train):
            done = subprocess.run([sys.executable, "-m", "diffcse_jax.cli", *command[1:]])
            if done.returncode:  # the command has said why
                sys.exit(done.returncode)
        write_half(options.work / name, options.output / name)
        record[name] = {
            "commands": [" ".join(init), " ".join(train)],
            "digest": sha256([options.output / name / "model.safetensors"]),
            "columns": ["step", *SCORES],
            "curve": curve_of(options.work / name),
        }
    record["text"] = sha256([Path(options.text)])
    path = options.output / "record.json"
    measure.write_record(path, "benchmarks.make_raw_start", sys.argv[1:], record)


if __name__ == "__main__":
    main()
