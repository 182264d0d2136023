"""Adaptation to one's own text: this package's preset beside sentence-transformers' own recipes.

    python -m benchmarks.adaptation_recipes --text docstrings --tasks pairs_retrieval:docstrings,STSBenchmark \
        --output benchmarks/results/NAME.json

All start from one model and take as many steps of as many examples, cut to as many tokens, of the same documents. The
library's recipes have the learning rates and schedules of its examples; what they end with is scored, for they choose
nothing. They keep the start's pooling (the TSDAE example takes position 0), and words are deleted between blanks. The
preset is `configs/adapt.py`, whose settings were chosen on docstrings and manual pages: compare on other text. What it
selects is scored. Each is trained in a process of its own, on the CPU. Its time is that from the text to the trained
model, dev evaluations left out. Needs the extra `recipes`.
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
from diffcse_jax.errors import reported_to_user

KEPT = 0.4  # share of the words that TSDAE keeps (Wang et al. 2021, Section 3.1)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One of the library's.

    Attributes:
        pairs: the kind of text that it reads, as `data.pairs` has it.
        learning_rate: of the library's example, as the following.
        schedule: of the learning rate, by its name in transformers.
        warmup: a share of the steps.
    """

    pairs: str
    learning_rate: float
    schedule: str = "linear"
    warmup: float = 0.1


RECIPES = {
    "pairs": Recipe("lead", 2e-5),  # MultipleNegativesRankingLoss
    "simcse": Recipe("dropout", 5e-5),  # the same, of a sentence twice
    "tsdae": Recipe("dropout", 3e-5, "constant", 0.0),  # DenoisingAutoEncoderLoss
}
OURS = "ours"


class Stopwatch:
    """Time, and time of processors, in seconds, since it was made, pauses left out."""

    def __init__(self) -> None:
        self._start = self._now()
        self._paused = [0.0, 0.0]

    def without(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, during whose calls the watch stands still."""

        def call(*arguments: Any) -> Any:
            before = self._now()
            result = function(*arguments)
            self._paused = [
                sum(each) for each in zip(self._paused, self._now(), [-time for time in before], strict=True)
            ]
            return result

        return call

    def read(self) -> dict[str, float]:
        """The time."""
        times = [
            now - start - paused for now, start, paused in zip(self._now(), self._start, self._paused, strict=True)
        ]
        return dict(zip(("seconds", "processor_seconds"), times, strict=True))

    @staticmethod
    def _now() -> list[float]:
        return [time.perf_counter(), time.process_time()]


def train_ours(config: Config, folder: Path) -> dict[str, Any]:
    """Trains by the configuration."""
    from diffcse_jax.evaluation.dev import build_dev_evaluation
    from diffcse_jax.training import train

    watch = Stopwatch()

    def build_evaluation(*arguments: Any) -> Any:
        evaluation = dataclasses.replace(watch.without(build_dev_evaluation)(*arguments), drift_check=None)
        object.__setattr__(evaluation, "measure", watch.without(evaluation.measure))  # the dataclass is frozen
        return evaluation

    train.build_dev_evaluation = build_evaluation
    try:
        verdict = train.train(config, folder)
    finally:
        train.build_dev_evaluation = build_dev_evaluation
    return watch.read() | {"verdict": verdict, "learning_rate": config.optim.learning_rate}


def train_theirs(name: str, config: Config, folder: Path) -> dict[str, Any]:
    """Trains a recipe of the library, with its trainer, on the text of a configuration."""
    import sentence_transformers as library
    import transformers
    from datasets import Dataset

    from diffcse_jax.data.sources import open_corpus
    from diffcse_jax.models import hf

    start = str(hf.read(config.model.name_or_path).folder)
    recipe, watch = RECIPES[name], Stopwatch()
    transformers.set_seed(config.train.seed)
    model = library.SentenceTransformer(start, device="cpu", trust_remote_code=False)
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
        use_cpu=True,
    )
    trainer = library.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns(name, texts, config.train.seed)),
        loss=_loss(name, model),
    )
    trainer.train()
    times = watch.read()
    model.max_seq_length = longest
    model.save_pretrained(str(folder), create_model_card=False)
    return times | dataclasses.asdict(recipe)


def columns(name: str, texts: Iterable[tuple[str, ...]], seed: int) -> dict[str, list[str]]:
    """The examples of a recipe of the library.

    Args:
        name: the recipe.
        texts: pairs, or sentences alone.
        seed: of the words that TSDAE deletes.
    """
    if name == "pairs":
        leads, rests = zip(*texts, strict=True)
        return {"anchor": list(leads), "positive": list(rests)}
    sentences = [sentence for (sentence,) in texts]
    if name == "simcse":
        return {"anchor": sentences, "positive": sentences}
    generator = random.Random(seed)
    return {"damaged": [_damaged(sentence, generator) for sentence in sentences], "original": sentences}


def _damaged(sentence: str, generator: random.Random) -> str:
    """The sentence with words deleted, at least one kept."""
    words = sentence.split()
    return " ".join([word for word in words if generator.random() < KEPT] or [generator.choice(words)])


def _loss(name: str, model: Any) -> Any:
    from sentence_transformers.sentence_transformer import losses

    if name == "tsdae":
        return losses.DenoisingAutoEncoderLoss(model, tie_encoder_decoder=True)
    return losses.MultipleNegativesRankingLoss(model)


def scores(model: str, tasks: list[str]) -> dict[str, float]:
    """The scores of a folder on test splits, by this package's evaluation."""
    from diffcse_jax import SentenceEncoder
    from diffcse_jax.evaluation.results import scores_by_column
    from diffcse_jax.evaluation.retrieval import own_task
    from diffcse_jax.evaluation.tasks import expand_groups, find_task, senteval_folder

    encoder, names = SentenceEncoder.from_pretrained(model), expand_groups(tasks, "test")
    folder = Path() if all(map(own_task, names)) else senteval_folder("")
    found = {name: find_task(name).run(encoder, folder, "test") for name in names}
    return scores_by_column({"tasks": found, "averages": {}})


def compare(recipes: Iterable[str], config: Config, tasks: list[str], folder: Path) -> dict[str, Any]:
    """Trains by each recipe, and scores what comes of it, the start first."""
    sides = {"start": {"scores": _alone(scores, config.model.name_or_path, tasks)}}
    for name in recipes:
        place = folder / name
        facts = _alone(train_ours, config, place) if name == OURS else _alone(train_theirs, name, config, place)
        sides[name] = facts | {"scores": _alone(scores, str(place), tasks)}
        print(f"{name}: {sides[name]}", file=sys.stderr)
    return sides


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """The command line; returns the record."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", default="docstrings", help="documents, as data.train_file has them (default: docstrings)")
    add("--model", default="minilm", help="the start: a folder or `minilm` (default: minilm)")
    add("--recipes", nargs="+", choices=(OURS, *RECIPES), default=[OURS, *RECIPES], help="default: all")
    add("--tasks", default="pairs_retrieval:docstrings", help="as `diffcse evaluate` has them, separated by commas")
    add("--steps", type=int, help="default, as of the following: the preset's")
    add("--batch_size", type=int)
    add("--max_length", type=int, help="tokens of a text")
    add("--held_out", type=float, help="share of the documents that no recipe reads; by them the preset chooses")
    add("--seed", type=int, default=1)
    add("--cores", type=int, default=0, help="use so many (default: all)")
    add("--output", type=Path, help="the record (default: the screen)")
    options = parser.parse_args(argv)
    with reported_to_user(), tempfile.TemporaryDirectory() as folder:
        measure.use_cores(options.cores)
        os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes, which import JAX: it reads this but once
        config = _config(options, Path(folder))
        values = config.to_dict()
        record = {
            "config": values | {"data": values["data"] | {"cache_dir": ""}},  # which lives as long as this
            "sides": compare(options.recipes, config, options.tasks.split(","), Path(folder)),
        }
        return measure.write_record(options.output, "benchmarks.adaptation_recipes", argv, record)


def _config(options: argparse.Namespace, folder: Path) -> Config:
    """The preset, with what the command line changes."""
    values = shipped_config("adapt")
    values.data.train_file, values.model.name_or_path, values.train.seed = options.text, options.model, options.seed
    values.eval.guard = False
    values.data.cache_dir = str(folder / "tokens")  # both sides read the text
    for group, key in (("train", "steps"), ("train", "batch_size"), ("data", "max_length"), ("data", "held_out")):
        given = getattr(options, key)
        if given is not None:
            values[group][key] = given
    return Config.from_dict(values.to_dict())


if __name__ == "__main__":
    main()
