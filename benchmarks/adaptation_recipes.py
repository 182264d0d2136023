r"""Compare the preset `adapt` with the recipes of sentence-transformers, on the same documents.

    python -m benchmarks.adaptation_recipes --text docstrings \
        --tasks pairs_retrieval:docstrings,STSBenchmark --output benchmarks/results/NAME.json

All recipes start from the same model, with the same number of steps, batch size and sentence
length. The library's recipes have the learning rates and schedules of its examples. They select no
checkpoint, so the last one is scored. They keep the pooling of the starting checkpoint (the TSDAE
example takes position 0), and words are deleted between blanks. The preset is `configs/adapt.py`,
and the checkpoint that it selects is scored. Its settings were chosen on docstrings and manual
pages, so compare on other text. Each recipe trains in its own process, on the CPU. Its time is that
from the text to the trained model, without dev evaluations. Needs the extra `recipes`.
"""

import argparse
import dataclasses
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import measure
from diffcse_jax.config import Config, shipped_config
from diffcse_jax.data.token_store import Kind, Row
from diffcse_jax.errors import reported_to_user

KEPT = 0.4  # share of the words that TSDAE keeps (Wang et al. 2021, Section 3.1)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe of the library.

    Attributes:
        pairs: The kind of text that it reads, a value of `data.pairs`.
        learning_rate: The learning rate of the library's example. The other attributes are from
            there, too.
        schedule: The learning-rate schedule, by its name in transformers.
        warmup: The share of steps with warm-up.
    """

    pairs: str
    learning_rate: float
    schedule: str = "linear"
    warmup: float = 0.1


RECIPES = {
    "pairs": Recipe("lead", 2e-5),  # MultipleNegativesRankingLoss
    "simcse": Recipe("dropout", 5e-5),  # the same, with each sentence twice
    "tsdae": Recipe("dropout", 3e-5, "constant", 0.0),  # DenoisingAutoEncoderLoss
}
OURS = "ours"


class Stopwatch:
    """A stopwatch: seconds and processor seconds since it was created, without pauses."""

    def __init__(self) -> None:
        self._start = self._now()
        self._paused = [0.0, 0.0]

    def without(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the watch paused during its calls."""

        def call(*arguments: Any) -> Any:
            before = self._now()
            result = function(*arguments)
            self._paused = [
                sum(each)
                for each in zip(self._paused, self._now(), [-time for time in before], strict=True)
            ]
            return result

        return call

    def read(self) -> dict[str, float]:
        """The time."""
        times = [
            now - start - paused
            for now, start, paused in zip(self._now(), self._start, self._paused, strict=True)
        ]
        return dict(zip(("seconds", "processor_seconds"), times, strict=True))

    @staticmethod
    def _now() -> list[float]:
        return [time.perf_counter(), time.process_time()]


def train_ours(config: Config, folder: Path) -> dict[str, Any]:
    """Train as the configuration says."""
    from diffcse_jax.evaluation.dev import build_dev_evaluation
    from diffcse_jax.training import train

    watch = Stopwatch()

    def build_evaluation(*arguments: Any) -> Any:
        evaluation = dataclasses.replace(
            watch.without(build_dev_evaluation)(*arguments), drift_check=None
        )
        # The dataclass is frozen.
        object.__setattr__(evaluation, "measure", watch.without(evaluation.measure))
        return evaluation

    train.build_dev_evaluation = build_evaluation
    try:
        verdict = train.train_in_folder(config, folder)
    finally:
        train.build_dev_evaluation = build_dev_evaluation
    return watch.read() | {"verdict": verdict, "learning_rate": config.optim.learning_rate}


def train_theirs(name: str, config: Config, folder: Path) -> dict[str, Any]:
    """Train a recipe of the library, with its trainer, on the text of a configuration."""
    import jax
    import sentence_transformers as library
    import transformers
    from datasets import Dataset

    from diffcse_jax.data.sources import open_corpus
    from diffcse_jax.models import hf

    start = str(hf.read(config.model.name_or_path).folder)
    recipe, watch = RECIPES[name], Stopwatch()
    transformers.set_seed(config.train.seed)
    on_cpu = jax.default_backend() == "cpu"
    model = library.SentenceTransformer(
        start, device="cpu" if on_cpu else "cuda", trust_remote_code=False
    )
    longest, model.max_seq_length = model.max_seq_length, config.data.max_length
    texts = open_corpus(dataclasses.replace(config.data, pairs=recipe.pairs))
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=config.train.batch_size,
        max_steps=config.train.steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=recipe.warmup,
        weight_decay=0.0,
        seed=config.train.seed,
        dataloader_drop_last=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
    )
    trainer = library.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns(name, texts.rows(), config.train.seed)),
        loss=_loss(name, model),
    )
    trainer.train()
    times = watch.read()
    model.max_seq_length = longest
    model.save_pretrained(str(folder), create_model_card=False)
    return times | dataclasses.asdict(recipe)


def columns(name: str, rows: Iterable[Row], seed: int) -> dict[str, list[str]]:
    """Return the examples of a recipe of the library.

    Args:
        name: The recipe.
        rows: Pairs or single sentences.
        seed: Decides which words TSDAE deletes, and which are taken out of a passage without a
            title.
    """
    generator = random.Random(seed)
    if name == "pairs":
        pairs = [
            row.texts if row.kind == Kind.TEXTS else _cloze(row.texts[0], generator) for row in rows
        ]
        leads, rests = zip(*pairs, strict=True)
        return {"anchor": list(leads), "positive": list(rests)}
    sentences = [row.texts[0] for row in rows]
    if name == "simcse":
        return {"anchor": sentences, "positive": sentences}
    return {
        "damaged": [_damaged(sentence, generator) for sentence in sentences],
        "original": sentences,
    }


def _cloze(passage: str, generator: random.Random) -> tuple[str, str]:
    """Take a window of 5 to 25 words out of a passage."""
    words = passage.split()
    size = generator.randint(5, max(5, min(25, len(words) - 5)))
    start = generator.randint(0, max(0, len(words) - size))
    return " ".join(words[start : start + size]), " ".join(
        words[:start] + words[start + size :]
    ) or passage


def _damaged(sentence: str, generator: random.Random) -> str:
    """Delete words of a sentence, and keep at least one."""
    words = sentence.split()
    return " ".join(
        [word for word in words if generator.random() < KEPT] or [generator.choice(words)]
    )


def _loss(name: str, model: Any) -> Any:
    from sentence_transformers.sentence_transformer import losses

    if name == "tsdae":
        return losses.DenoisingAutoEncoderLoss(model, tie_encoder_decoder=True)
    return losses.MultipleNegativesRankingLoss(model)


def scores(model: str, tasks: list[str]) -> dict[str, float]:
    """Score a model folder on test splits, by this package's evaluation."""
    from diffcse_jax import SentenceEncoder
    from diffcse_jax.evaluation.results import scores_by_column
    from diffcse_jax.evaluation.runner import expand_groups, find_task, own_kind
    from diffcse_jax.evaluation.senteval_data import senteval_folder

    encoder, names = SentenceEncoder.from_pretrained(model), expand_groups(tasks, "test")
    folder = Path() if all(map(own_kind, names)) else senteval_folder("")
    found = {name: find_task(name).run(encoder, folder) for name in names}
    return scores_by_column({"tasks": found, "averages": {}})


def compare(
    recipes: Iterable[str], config: Config, tasks: list[str], folder: Path
) -> dict[str, Any]:
    """Score the starting checkpoint, then train and score each recipe."""
    sides = {"start": {"scores": _alone(scores, config.model.name_or_path, tasks)}}
    for name in recipes:
        place = folder / name
        facts = (
            _alone(train_ours, config, place)
            if name == OURS
            else _alone(train_theirs, name, config, place)
        )
        sides[name] = facts | {"scores": _alone(scores, str(place), tasks)}
        print(f"{name}: {sides[name]}", file=sys.stderr)
    return sides


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command line and return the record."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--text",
        default="docstrings",
        help="documents, a value of data.train_file (default: docstrings)",
    )
    add(
        "--model",
        default="minilm",
        help="the starting checkpoint: a folder or `minilm` (default: minilm)",
    )
    add(
        "--recipes",
        nargs="+",
        choices=(OURS, *RECIPES),
        default=[OURS, *RECIPES],
        help="default: all",
    )
    add(
        "--tasks",
        default="pairs_retrieval:docstrings",
        help="tasks of `diffcse evaluate`, separated by commas",
    )
    add("--steps", type=int, help="default, as of the following: the preset's")
    add("--batch_size", type=int)
    add("--max_length", type=int, help="tokens of a text")
    add(
        "--held_out",
        type=float,
        help="share of the documents that is not trained on; the preset selects by them",
    )
    add("--seed", type=int, default=1)
    add("--cores", type=int, default=0, help="number of cores (default: all)")
    add("--output", type=Path, help="file for the record (default: print it)")
    options = parser.parse_args(argv)
    with reported_to_user(), tempfile.TemporaryDirectory() as folder:
        measure.use_cores(options.cores)
        # For the processes that import JAX, which reads this only once.
        os.environ["JAX_PLATFORMS"] = "cpu"
        config = _config(options, Path(folder))
        record = {
            "config": measure.changed_keys(config.to_dict()),
            "sides": compare(options.recipes, config, options.tasks.split(","), Path(folder)),
        }
        return measure.write_record(options.output, "benchmarks.adaptation_recipes", argv, record)


def _config(options: argparse.Namespace, folder: Path) -> Config:
    """Return the preset with the changes of the command line."""
    values = shipped_config("adapt")
    values.data.train_file, values.model.name_or_path, values.train.seed = (
        options.text,
        options.model,
        options.seed,
    )
    values.eval.guard = False
    values.data.cache_dir = str(folder / "tokens")  # both sides read the text
    for group, key in (
        ("train", "steps"),
        ("train", "batch_size"),
        ("data", "max_length"),
        ("data", "held_out"),
    ):
        given = getattr(options, key)
        if given is not None:
            values[group][key] = given
    return Config.from_dict(values.to_dict())


if __name__ == "__main__":
    main()
