"""Make the start of the study `does_difference_help`: two masked LMs from MiniLM.

    python -m benchmarks.make_raw_start --text wiki_1m.txt --work FOLDER

MiniLM is a sentence encoder. Trained on as a masked LM, it forgets much of that. The encoder has
its six blocks and a constant learning rate, because it remembers again as the rate decays. The
generator has the first three blocks. If the command is interrupted, the same command resumes.

The command then writes both to `--output`, as Hugging Face folders with weights in half precision,
and a record to `--record`: the commands, digests of text and weights, and the masked accuracy over
the steps beside that of a unigram and a bigram.
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

BLOCKS = {"encoder": 6, "generator": 3}
SETTINGS: dict[str, dict[str, object]] = {
    "encoder": {"train.steps": 400, "optim.schedule": "constant"},
    "generator": {"train.steps": 1100},
}
OF_BOTH = {"train.batch_size": 64, "optim.learning_rate": 5e-4, "eval.every": 200}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")  # besides the weights
SCORES = ("masked_accuracy", "masked_accuracy_unigram", "masked_accuracy_bigram")


def commands_of(name: str, text: str, work: Path) -> list[list[str]]:
    """Return the commands that make a model in `work/NAME`."""
    start = str(work / f"{name}_start")
    init = ["diffcse", "init", "--model", "minilm", "--blocks", str(BLOCKS[name])]
    train = ["diffcse", "train", "--config", "masked_lm", "--workdir", str(work / name)]
    settings = {"model.name_or_path": start, "data.train_file": text, **OF_BOTH, **SETTINGS[name]}
    train += [f"--config.{key}={value}" for key, value in settings.items()]
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
    parser.add_argument("--record", type=Path, help="JSON file (default: print it)")
    options = parser.parse_args()
    record: dict[str, object] = {"text": sha256([Path(options.text)])}
    for name in BLOCKS:
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
    measure.write_record(options.record, "benchmarks.make_raw_start", sys.argv[1:], record)


if __name__ == "__main__":
    main()
