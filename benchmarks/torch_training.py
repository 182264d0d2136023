"""Train SimCSE and DiffCSE in PyTorch as the authors' code does, to compare training with.

    python -m benchmarks.torch_training --config diffcse_base --config.model.name_or_path=START \
        --config.generator.name_or_path=GENERATOR --config.data.train_file=TEXT.txt \
        --seeds 1,2,3 --record FILE.jsonl

START is a local folder of a BERT, GENERATOR one of a masked LM with the same vocabulary, and
TEXT.txt has a sentence per line. The configuration is that of `diffcse train`. If it asks for
anything that the authors' training does not do, the command refuses it. As soon as a seed ends, its
record is appended to FILE. Seeds that FILE has already are skipped. A record is one line, a JSON
object:

    seed               the seed
    config, overrides  the name of the configuration, and what the command line changes, by key
    digest             identifies the text and all keys that change results, except for the seed
    text               "lines" and "sha256" of the text
    steps              the number of training steps
    dev                [[step, Spearman x 100 on STS-B dev], ...], a row every `eval.every` steps
    loss               [[step, mean training loss since the row before], ...], a row every
                       `train.log_every` steps
    best               "step", "dev" and "test" of the best evaluation. "test" has by task Spearman
                       or accuracy x 100 on the test split
    last               "step" and "test" of the last weights
    missing            the tasks without data, and why
    seconds            of the whole seed. training_seconds is without evaluations
    device, precision  what the networks computed on, and in what
    threads            the number of threads of PyTorch
    versions           of torch, transformers and other packages

The procedure is that of voidism/DiffCSE and princeton-nlp/SimCSE with the Trainer of transformers
4.2.1. Ours differs on purpose in these points, where this follows the originals:

- An epoch is a permutation by PyTorch's RandomSampler. Our batch depends only on the seed and its
  number.
- The last, incomplete batch of an epoch is trained on. Ours leaves it out.
- Empty lines are trained on, as sentences without words. Ours skips them.
- Blanks around a sentence and huge lines stay. Ours strips blanks and skips huge lines.
- Batches end where their longest sentence ends. Ours may be padded further or packed.
- Dev scores exist only every `eval.every` steps. Ours also has those of step 0 and the last step.
- The scale of the projector's BatchNorm has weight decay. Ours has none.
- The BatchNorm keeps running statistics, which nothing reads. Ours has none.
- A step with a NaN or infinite loss is taken. Ours skips it.

It differs from the originals where that only changes speed or rounding: fused attention and AdamW,
and bfloat16 by autocast on GPUs, where the authors' scripts use float16 with a scaled loss.
"""

import argparse
import copy
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler

from benchmarks import measure, torch_twin
from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config, configuration, flat, machine_keys, read_overrides
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, reported_to_user
from diffcse_jax.evaluation import CachedEncoder
from diffcse_jax.evaluation.metrics import CorrelationMetric
from diffcse_jax.evaluation.runner import NAMES, expand_groups, find_task
from diffcse_jax.evaluation.senteval_data import senteval_folder
from diffcse_jax.evaluation.sts import STSB
from diffcse_jax.hosts import log_line, quiet_transformers
from diffcse_jax.io import append_line, expand_path, json_digest, sha256
from diffcse_jax.models import files
from diffcse_jax.models.sentence_folder import Prompts
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.run_folder.finding import model_of
from diffcse_jax.training.networks import vocabulary_of

METRIC = "stsb_spearman"
TOKENISED_AT_ONCE = 1000  # lines

# Keys with any value, keys with some values, and groups that only DiffCSE reads. All other keys
# that change results must have their defaults, which are those of the authors' code.
FREE = frozenset(
    {
        "contrast.negative_ratio",
        "contrast.temperature",
        "data.max_length",
        "data.train_file",
        "dcl.temperature",
        "dcl.weight",
        "difference.mask_ratio",
        "difference.weight",
        "eval.every",
        "generator.head_batch_size",
        "generator.head_learning_rate",
        "generator.head_mask_ratio",
        "generator.head_steps",
        "generator.name_or_path",
        "model.attention_dropout",
        "model.hidden_dropout",
        "model.name_or_path",
        "optim.clip_norm",
        "optim.learning_rate",
        "optim.warmup_steps",
        "optim.weight_decay",
        "precision",
        "train.batch_size",
        "train.epochs",
        "train.seed",
        "train.steps",
    }
)
SOME = {
    "contrast.negatives": ("dropout", "off_dropout"),
    "difference.objective": ("rtd", "none"),
    "mesh.data": (0, 1),  # 0 stands for all devices; this trains on one
    "model.pooler": ("cls", "cls_before_pooler"),
    "model.projector": ("mlp", "batchnorm"),
}
ONE_DEVICE = frozenset({"mesh.model", "distributed"})  # change no result, but are not done here
OF_DIFFCSE = ("difference.", "generator.")


class Text(NamedTuple):
    """The training text as tokens."""

    rows: list[list[int]]  # of each line
    digest: str


class Networks(NamedTuple):
    """The folders of the start and the generator, and the start's tokenizer."""

    encoder: Path
    generator: Path | None
    tokenizer: transformers.PreTrainedTokenizerFast
    vocabulary: Vocabulary


@dataclasses.dataclass(frozen=True)
class Training:
    """Everything that the seeds share."""

    name: str
    overrides: Mapping[str, Any]
    config: Config
    networks: Networks
    text: Text
    dev: CorrelationMetric
    data: Path  # SentEval's
    tasks: Sequence[str]
    missing: Mapping[str, str]
    device: torch.device

    @property
    def steps(self) -> int:
        """The number of training steps. An epoch has its last, incomplete batch."""
        train = self.config.train
        return train.steps or train.epochs * math.ceil(len(self.text.rows) / train.batch_size)

    @property
    def digest(self) -> str:
        """What identifies the text and all keys that change results, except for the seed."""
        without = machine_keys() | {"train.seed"}
        settings = flat(self.config.to_dict())
        chosen = {key: value for key, value in settings.items() if key not in without}
        return json_digest(chosen | {"text": self.text.digest})


class TwinEncoder:
    """The encoder in training, for our evaluation.

    An embedding is position 0 of the last layer, without the projector.
    """

    pooler = "cls_before_pooler"
    truncate_dim = None
    prompts = Prompts()
    queries = None

    def __init__(self, model: nn.Module, tokenizer: transformers.PreTrainedTokenizerFast):
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def encode(
        self,
        sentences: Sequence[str],
        batch_size: int = 64,
        *,
        prompt: str | None = None,
    ) -> np.ndarray:
        """Return one embedding per sentence. Only what exceeds the model's positions is cut."""
        positions = self.model.config.max_position_embeddings
        texts = [(prompt or "") + sentence for sentence in sentences]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        embeddings = np.zeros((len(texts), self.model.config.hidden_size), np.float32)
        was_training = self.model.training
        self.model.eval()
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = self.tokenizer(
                [texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=positions,
                return_tensors="pt",
            ).to(self.model.device)
            states = self.model(batch["input_ids"], attention_mask=batch["attention_mask"])
            embeddings[chosen] = states.last_hidden_state[:, 0].float().cpu().numpy()
        self.model.train(was_training)
        return embeddings


# What the configuration asks for.


def check(config: Config) -> None:
    """Raise `ConfigError` if the configuration asks for what the authors' training does not do."""
    defaults = flat(Config().to_dict())
    indifferent = machine_keys() - ONE_DEVICE
    for key, value in flat(config.to_dict()).items():
        if key.startswith(OF_DIFFCSE) and "difference" not in config.losses:
            continue
        allowed = SOME.get(key, (defaults.get(key),))
        if value not in allowed and (key in SOME or key not in FREE | indifferent):
            asked = " or ".join(map(repr, allowed))
            raise ConfigError(f"{key}={value!r}: the PyTorch twin only trains with {key}={asked}.")
    if config.encoding_pooler != TwinEncoder.pooler:
        raise ConfigError(
            "model.pooler and model.projector_train_only keep the projector, but the PyTorch twin "
            "evaluates without it. Use model.pooler='cls' with model.projector_train_only=True."
        )
    for key in ("hidden_dropout", "attention_dropout"):
        if len(rates := getattr(config.model, key)) > 1:
            raise ConfigError(f"model.{key}={rates}: the PyTorch twin has one rate for all blocks.")
    if config.trains_generator_head or config.generator_is_start:
        raise ConfigError(
            f"generator.name_or_path={config.generator.name_or_path!r}: the PyTorch twin trains no "
            "masked-LM head. Name the folder of a masked LM."
        )


def open_networks(config: Config) -> Networks:
    """Find the start and the generator, and load the start's tokenizer."""
    encoder = _folder(config.model.name_or_path)
    generator = None
    if config.needs("generator"):
        generator = _folder(config.generator.name_or_path)
    kind, words = _kind_and_words(encoder)
    if kind != "bert":
        raise CheckpointError(f"{encoder} is a {kind} model. The PyTorch twin only trains BERT.")
    if generator and (theirs := _kind_and_words(generator)[1]) != words:
        raise CheckpointError(
            f"generator.name_or_path={config.generator.name_or_path!r} has {theirs} tokens, but "
            f"model.name_or_path={config.model.name_or_path!r} has {words}. Both need the same "
            "vocabulary."
        )
    tokenizer = load_tokenizer(encoder)
    return Networks(encoder, generator, tokenizer, vocabulary_of(config, tokenizer))


def _folder(name_or_path: str) -> Path:
    return files.transformer_folder(files.find_folder(model_of(name_or_path)))


def _kind_and_words(folder: Path) -> tuple[str, int]:
    """Return the family of a model and the size of its vocabulary."""
    config = files.read_model_config(folder)
    return config["model_type"], config["vocab_size"]


def read_text(config: Config, tokenizer: transformers.PreTrainedTokenizerFast) -> Text:
    """Return the tokens of each line, also of empty ones."""
    key = f"data.train_file={config.data.train_file!r}"
    path = expand_path(config.data.train_file)
    if path.suffix != ".txt" or not path.is_file():
        raise DataError(f"{key}: the PyTorch twin reads local .txt files of sentences, one a line.")
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: {error}") from error
    if not lines:
        raise DataError(f"{key} is empty.")
    rows: list[list[int]] = []
    for start in range(0, len(lines), TOKENISED_AT_ONCE):
        some = lines[start : start + TOKENISED_AT_ONCE]
        rows += tokenizer(some, truncation=True, max_length=config.data.max_length)["input_ids"]
    return Text(rows, sha256([path]))


def find_tasks(names: str, data: Path) -> tuple[list[str], dict[str, str]]:
    """Return the tasks that have data, and why others have none."""
    tasks = expand_groups(names.split(","), "test")
    if unknown := [name for name in tasks if name not in NAMES["full"]]:
        raise ConfigError(f"--tasks {','.join(unknown)}: only STS and transfer tasks are scored.")
    missing = {}
    for name in tasks:
        if paths := find_task(name).missing(data, "test"):
            missing[name] = f"not found: {paths[0].relative_to(data)}"
    return [name for name in tasks if name not in missing], missing


# Training.


def load_twin(training: Training) -> torch_twin.Twin:
    """Return the networks with the weights of their folders, and new heads."""
    config, networks = training.config, training.networks
    (hidden_dropout,) = config.model.hidden_dropout
    (attention_dropout,) = config.model.attention_dropout
    options = {"attn_implementation": "sdpa", "dtype": torch.float32, "local_files_only": True}
    generator = None
    with quiet_transformers():
        encoder = transformers.BertModel.from_pretrained(
            networks.encoder,
            add_pooling_layer=False,
            hidden_dropout_prob=hidden_dropout,
            attention_probs_dropout_prob=attention_dropout,
            **options,
        )
        if networks.generator:
            generator, found = transformers.AutoModelForMaskedLM.from_pretrained(
                networks.generator, output_loading_info=True, trust_remote_code=False, **options
            )
            if absent := sorted(found["missing_keys"]):
                raise CheckpointError(f"{networks.generator} lacks the weights {', '.join(absent)}")
    return torch_twin.Twin(config, encoder, generator, networks.vocabulary).to(training.device)


def endless_batches(
    rows: Sequence[Sequence[int]],
    batch_size: int,
    pad_id: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and attention masks, (batch, length), epoch after epoch.

    The order is drawn from PyTorch's global generator, as in the authors' trainer.
    """

    def collate(chosen: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        tokens = [torch.tensor(row) for row in chosen]
        input_ids = pad_sequence(tokens, batch_first=True, padding_value=pad_id)
        attention_mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        return input_ids, attention_mask

    loader = DataLoader(rows, batch_size, sampler=RandomSampler(rows), collate_fn=collate)
    while True:
        yield from loader


class Trained(NamedTuple):
    """What training gives, next to the trained networks."""

    dev: list[tuple[int, float]]
    loss: list[tuple[int, float]]
    best: dict[str, Tensor]  # the encoder's weights at the first of the best dev scores
    seconds: float  # without evaluations


def train(training: Training, twin: torch_twin.Twin, encoder: TwinEncoder) -> Trained:
    """Train the networks, and evaluate the encoder every `eval.every` steps."""
    config, steps = training.config, training.steps
    step = torch_twin.make_step(twin, config, steps, compiled=False)
    pad_id = training.networks.tokenizer.pad_token_id
    batches = endless_batches(training.text.rows, config.train.batch_size, pad_id)
    dev: list[tuple[int, float]] = []
    loss: list[tuple[int, float]] = []
    best: dict[str, Tensor] = {}
    recent: list[Tensor] = []
    evaluating = 0.0
    began = time.perf_counter()
    for number in range(1, steps + 1):
        input_ids, attention_mask = next(batches)
        recent.append(step(input_ids.to(training.device), attention_mask.to(training.device)))
        if number % config.train.log_every == 0 or number == steps:
            loss.append((number, torch.stack(recent).mean().item()))
            recent = []
        if number % config.eval.every == 0:
            paused = time.perf_counter()
            score = training.dev.measure(encoder).scores[METRIC]
            if not dev or score > max(earlier for _, earlier in dev):
                best = copy.deepcopy(encoder.model.state_dict())
            dev.append((number, score))
            log_line(f"seed {config.train.seed}, step {number} of {steps}: {METRIC} {score:.2f}")
            evaluating += time.perf_counter() - paused
    return Trained(dev, loss, best, time.perf_counter() - began - evaluating)


def test_scores(training: Training, encoder: TwinEncoder) -> dict[str, float]:
    """Return Spearman or accuracy x 100 on the test split of each task."""
    cached = CachedEncoder(encoder)
    scores = {name: find_task(name).run(cached, training.data) for name in training.tasks}
    return {name: found.get("spearman", found.get("acc")) for name, found in scores.items()}


def run_seed(training: Training) -> dict[str, Any]:
    """Train with the seed of the configuration, and return its record."""
    began = time.perf_counter()
    config = training.config
    transformers.set_seed(config.train.seed)
    twin = load_twin(training)
    encoder = TwinEncoder(twin.encoder, training.networks.tokenizer)
    trained = train(training, twin, encoder)
    best_step, best_dev = max(trained.dev, key=lambda row: row[1])  # the first of equals
    best = last = test_scores(training, encoder)
    if best_step != training.steps:
        encoder.model.load_state_dict(trained.best)
        best = test_scores(training, encoder)
    on_gpu = training.device.type == "cuda"
    return {
        "seed": config.train.seed,
        "config": training.name,
        "overrides": dict(training.overrides),
        "digest": training.digest,
        "text": {"lines": len(training.text.rows), "sha256": training.text.digest},
        "steps": training.steps,
        "dev": trained.dev,
        "loss": trained.loss,
        "best": {"step": best_step, "dev": best_dev, "test": best},
        "last": {"step": training.steps, "test": last},
        "missing": dict(training.missing),
        "seconds": time.perf_counter() - began,
        "training_seconds": trained.seconds,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "precision": config.precision,
        "threads": torch.get_num_threads(),
        "versions": measure.versions(),
    }


# The command.


def open_training(name: str, overrides: Mapping[str, Any], tasks: str) -> Training:
    """Read everything that the seeds share. Raise a `UserError` before anything is trained."""
    name, config = configuration(name, overrides)
    check(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
        config = dataclasses.replace(config, precision=precision)
    data = senteval_folder(config.eval.data_dir)
    dev = CorrelationMetric(METRIC, config.eval.batch_size, {METRIC: STSB.load(data, "dev")})
    chosen, missing = find_tasks(tasks, data)
    networks = open_networks(config)
    text = read_text(config, networks.tokenizer)
    training = Training(name, overrides, config, networks, text, dev, data, chosen, missing, device)
    if not 0 < config.eval.every <= training.steps:
        raise ConfigError(
            f"eval.every={config.eval.every}: the best of {training.steps} steps is chosen by dev "
            f"scores, so give a number from 1 to {training.steps}."
        )
    return training


def recorded_seeds(path: Path, digest: str) -> set[int]:
    """Return the seeds that a file has. Its lines must be of the same configuration and text."""
    seeds = set()
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the line was not written to its end
            continue
        if record.get("digest") != digest:
            problem = "has runs of another configuration or text. Name another file."
            raise ConfigError(f"--record {path} {problem}")
        seeds.add(record["seed"])
    return seeds


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read the command line: options, and overrides of the configuration by key."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.torch_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="a file as those in configs/, or its name")
    parser.add_argument("--seeds", help="seeds, separated by commas (default: that of train.seed)")
    parser.add_argument("--record", type=Path, required=True, help="the file of records")
    parser.add_argument("--tasks", default="sts", help="tasks and groups (default: %(default)s)")
    options, rest = parser.parse_known_args(argv)
    if options.seeds and not all(seed.isdecimal() for seed in options.seeds.split(",")):
        parser.error(f"--seeds {options.seeds}: write numbers with commas between, such as 1,2,3")
    return options, read_overrides(rest)


def main(argv: Sequence[str]) -> None:
    """Train each seed that the record lacks, and append its line."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX scores transfer tasks
    options, overrides = parse(argv)
    training = open_training(options.config, overrides, options.tasks)
    seeds = [training.config.train.seed]
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    done = recorded_seeds(options.record, training.digest)
    options.record.parent.mkdir(parents=True, exist_ok=True)
    for seed in dict.fromkeys(seeds):
        if seed in done:
            log_line(f"seed {seed}: {options.record} has it already")
            continue
        train_config = dataclasses.replace(training.config.train, seed=seed)
        config = dataclasses.replace(training.config, train=train_config)
        record = run_seed(dataclasses.replace(training, config=config))
        append_line(options.record, json.dumps(record))
        best = record["best"]
        log_line(f"seed {seed}: {METRIC} {best['dev']:.2f} at step {best['step']}; {best['test']}")


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
