"""The groups of keys that every run has.

Each key is here once, with its type, default, range and description. The defaults are the published
DiffCSE run of BERT-base for STS (Chuang et al. 2022, Table 12), in the form of the authors' code
where it differs from the paper. The groups of losses are the losses themselves (`losses/`).
"""

import dataclasses

from diffcse_jax.models.poolers import OTHER_NAMES, POOLERS, is_pooler
from diffcse_jax.options import option

SWITCH = ("auto", "on", "off")
AUTOMATIC_CHUNK = 64  # sentences, if `train.chunking` cuts a batch
DEFAULT_SEED = 42
SEEDED = ("heads", "order", "dropout")  # what a seed determines
OWN_POOLER = "own"  # as a pooler: the one that the checkpoint records
# Metrics that need held-out documents.
OF_DOCUMENTS = ("mixed_retrieval", "lead_retrieval", "neighbours_retrieval")
HELD_OUT_METRICS = (*OF_DOCUMENTS, "halves_retrieval")  # without labels
MASKED_ACCURACY = "masked_accuracy"
DEV_METRICS = (
    *("stsb_spearman", "average_spearman", "pairs_spearman", "pairs_retrieval"),
    *HELD_OUT_METRICS,
    MASKED_ACCURACY,
)
SECOND_TEXTS = {  # what the second view is, by data.pairs
    "lead": "the rest of the document",
    "neighbours": "the next sentence",
    "passages": "the next passage",
    "crops": "another span",
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The encoder, its sentence embedding and its dropout."""

    name_or_path: str = option(
        "bert-base-uncased", "encoder checkpoint: a folder, a hub id, or `minilm`"
    )
    pooler: str = option(
        "cls",
        "how hidden states become the sentence embedding: position 0 of the last layer (`cls`, "
        "`cls_before_pooler`); the mean over tokens of the last layer (`avg`), of the last two "
        "(`avg_top2`), of the embedding output and the last (`avg_first_last`), or of the first "
        "block and the last (`avg_first_block_last`); `max`, `mean_sqrt_len_tokens`, "
        "`weightedmean`, `lasttoken` as in sentence-transformers; several joined by `+`; `own`: "
        "the one that the checkpoint records, or else `avg`",
        choices=(*POOLERS, OWN_POOLER),
        also=is_pooler,
        aliases=OTHER_NAMES,
    )
    projector: str = option(
        "batchnorm",
        "head between embedding and losses: `mlp` (dense + tanh, SimCSE) or `batchnorm` (DiffCSE "
        "appendix A)",
        choices=("none", "mlp", "batchnorm"),
    )
    projector_train_only: bool = option(
        True, "drop the projector when encoding (SimCSE's mlp_only_train)"
    )
    hidden_dropout: tuple[float, ...] = option(
        (0.1,),
        "dropout rate of hidden states: one for embeddings and all blocks, or one per block, with "
        "which the embedding layer keeps the checkpoint's rate",
        low=0.0,
        high=0.99,
    )
    attention_dropout: tuple[float, ...] = option(
        (0.1,),
        "dropout rate of attention probabilities: one rate for all blocks, or one per block",
        low=0.0,
        high=0.99,
    )
    dropout_masks: str = option(
        "independent",
        "dropout masks of views: `shared` makes views of the same text equal (SimCSE Table 3, "
        "`Fixed 0.1`)",
        choices=("independent", "shared"),
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, how pairs are made of it, and what is held out."""

    train_file: str = option(
        "wiki1m",
        "training text: a txt, csv, tsv, jsonl, json (or compressed), Parquet or Arrow file; a "
        "folder, or a pattern such as `shards/*.txt.gz`, of files of one kind; a folder of "
        "`datasets.save_to_disk` or of ArrayRecord shards; for documents also markdown, html, rst, "
        "pdf and office files, of several kinds; `wiki1m` (Wikipedia sentences of the hub) or "
        "`docstrings` (of installed Python packages); with `query_distillation` also an index or "
        "the output of `embed`",
    )
    columns: tuple[str, ...] = option(
        (),
        "columns or keys to read: sentence [, positive [, hard negatives]]; empty: the only one, "
        "or those named sentence, positive, hard_negative, hard_negative_2, ... or sent0, sent1, "
        "hard_neg, ...",
    )
    pairs: str = option(
        "columns",
        "sentence and positive: the `columns` of the text (a single one is its own positive); or, "
        "of documents (text between blank lines, a line, a row with title and text, a file of a "
        "folder, or a docstring): `dropout`, a sentence twice (SimCSE); `lead`, the title or first "
        "sentence and the rest; `neighbours`, a sentence and the next one; `passages`, about "
        "data.max_length tokens of whole sentences and the next ones; `crops`, two random spans, "
        "new in each epoch (Contriever)",
        choices=("columns", "dropout", *SECOND_TEXTS),
    )
    min_columns: int = option(
        1,
        "with `columns`: the fewest columns of text; 2 refuses text without positives, 3 pairs "
        "without hard negatives",
        low=1,
    )
    held_out: float = option(
        0.0,
        "share of the documents, chosen by a hash of their text, that is kept out of training for "
        "dev metrics; their text is also removed from other documents. If that is fewer than 25 "
        "documents, 25 that share no text with others are kept out as well, unless all of these "
        "are more than half of the documents",
        low=0.0,
        high=0.5,
    )
    cloze: float = option(
        0.0,
        "with `lead`: share of the passages without a title or first sentence that an epoch uses, "
        "each paired with a window of 5 to 25 words that is taken out of it (inverse cloze, Lee et "
        "al. 2019); 0: such text is left out",
        low=0.0,
        high=1.0,
    )
    next_within: int = option(
        1, "the next sentence or passage is one of this many that follow (SimCSE Table 2)", low=1
    )
    augmentation: str = option(
        "none",
        "change of the second view of single sentences (SimCSE Table 1): `crop`, `word_deletion` "
        "and `mlm` (the generator fills masked tokens), by data.augmentation_ratio; "
        "`delete_one_word`; `synonyms` replaces one word, by data.synonyms_file; `none`: only "
        "dropout",
        choices=("none", "crop", "word_deletion", "delete_one_word", "synonyms", "mlm"),
    )
    augmentation_ratio: float = option(
        0.1,
        "share of words that `crop` and `word_deletion` remove, or of tokens that `mlm` masks",
        low=0.0,
        high=1.0,
    )
    synonyms_file: str = option(
        "", "for `synonyms`: a word and its synonyms on each line, separated by tabs"
    )
    prompts: tuple[str, ...] = option(
        (),
        "text in front of each sentence, for all columns or one for each: the name of a prompt "
        "that the starting checkpoint records, a prompt itself such as 'query: ', or `none`; "
        "empty: its prompt of queries for the first column and that of documents for the others, "
        "and one prompt where both views are of one kind",
    )
    max_length: int = option(
        32, "tokens per sentence, with [CLS], [SEP] and the prompt; longer ones are cut", low=3
    )
    follow_links: bool = option(
        False, "also read links in a folder that lead to other folders, or to files outside it"
    )
    on_bad_line: str = option(
        "skip",
        "files that cannot be read, and lines that are empty, contain NUL bytes or have a wrong "
        "number of fields: `skip` them and say how many, or `error`",
        choices=("skip", "error"),
    )
    language: tuple[str, ...] = option(
        (),
        "languages of the text for the model card, as codes such as 'de'; empty: the card of a "
        "trained model names none, unless the text is `wiki1m` or `docstrings`",
        changes="selection",
    )
    cache_dir: str = option(
        "", "folder of token stores; empty: ~/.cache/diffcse_jax/tokens", changes="nothing"
    )

    @property
    def reads_documents(self) -> bool:
        """True if rows are made of documents."""
        return self.pairs != "columns"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Batches, steps and the seed."""

    batch_size: int = option(64, "sentences per step, over all devices and hosts", low=2)
    chunk_size: int = option(
        0,
        "largest number of sentences (over all devices) that the networks see at once. A batch is "
        "cut into as few equal chunks as possible: less memory, a second forward pass, the same "
        "loss and gradients; 0: as `train.chunking` says",
        low=0,
    )
    chunking: str = option(
        "off",
        "without a `train.chunk_size`: `off`, or `auto` for chunks of at most "
        f"{AUTOMATIC_CHUNK} sentences if a whole batch might need more memory than is free",
        choices=("off", "auto"),
        changes="nothing",
    )
    packing: str = option(
        "auto", "skip padding; `auto`: on for CPUs and TPUs", choices=SWITCH, changes="nothing"
    )
    recompute: str = option(
        "auto", "recompute activations; `auto`: on for CPUs", choices=SWITCH, changes="nothing"
    )
    epochs: int = option(
        2, "passes over the data; the last, incomplete batch of an epoch is left out", low=1
    )
    steps: int = option(0, "training steps; 0: as many as `epochs` gives", low=0)
    seed: int = option(
        DEFAULT_SEED, "seed of new heads, data order, masks and dropout", low=0, high=2**32 - 1
    )
    seed_changes: tuple[str, ...] = option(
        SEEDED,
        "what the seed changes: new `heads`, the `order` of the data, `dropout` with masks and "
        f"samples of the generator; the rest is drawn with seed {DEFAULT_SEED}",
        choices=SEEDED,
    )
    log_every: int = option(
        10, "steps between rows of metrics.jsonl; 1 for up to 100 steps", low=1, changes="nothing"
    )
    max_bad_steps: int = option(
        5, "skipped steps (NaN or infinite loss) that a run survives", low=0, changes="nothing"
    )

    def seed_of(self, what: str) -> int:
        """Return the seed of one of `SEEDED`."""
        return self.seed if what in self.seed_changes else DEFAULT_SEED

    @property
    def chunks(self) -> int:
        """The number of chunks of a batch: as few equal ones as `chunk_size` allows."""
        counts = (n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0)
        return next(
            n for n in counts if self.batch_size // n <= (self.chunk_size or self.batch_size)
        )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate."""

    learning_rate: float = option(7e-6, "peak learning rate", low=0.0)
    weight_decay: float = option(
        0.0, "decoupled weight decay of matrices (not of biases and norms)", low=0.0
    )
    clip_norm: float = option(
        1.0, "largest global norm of the gradient; larger ones are scaled; 0: off", low=0.0
    )
    warmup_steps: int = option(0, "steps of linear warm-up", low=0)
    schedule: str = option(
        "linear", "after warm-up: `linear` decay to 0 or `constant`", choices=("linear", "constant")
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Dev metrics, and which checkpoint is exported."""

    every: int = option(
        125,
        "steps between dev evaluations and checkpoints; 0: at the end",
        low=0,
        changes="selection",
    )
    metric: str = option(
        "stsb_spearman",
        "dev metric that selects the checkpoint to export: `stsb_spearman`; `average_spearman` of "
        "eval.tasks; `pairs_spearman` of eval.pairs_file (rows of score, sentence, sentence); "
        "`pairs_retrieval` of eval.pairs_file (rows of two texts; mean reciprocal rank of the "
        "second, given the first); the same for up to 1,000 pairs of held-out documents: "
        "`mixed_retrieval` (titles; sentences, windows and the longest words of passages), "
        "`lead_retrieval` (title or first sentence, and the rest), `neighbours_retrieval` (a "
        "sentence and the next one), `halves_retrieval` (of a sentence); `retrieval:FOLDER`, "
        "nDCG@10 of a search collection; `masked_accuracy`, share of the masked tokens of held-out "
        "documents that a masked LM recovers",
    )
    beside: tuple[str, ...] = option(
        (), "metrics that are only logged: as eval.metric, or `pairs_retrieval:FILE`"
    )
    tasks: tuple[str, ...] = option(
        ("STSBenchmark",), "STS dev sets", choices=("STSBenchmark", "SICKRelatedness")
    )
    data_dir: str = option(
        "",
        "SentEval's `downstream` folder; empty: $DIFFCSE_DATA_DIR/senteval, or the hub's",
        changes="nothing",
    )
    pairs_file: str = option(
        "",
        "pairs for the `pairs_*` metrics, separated by tabs, or csv, json or Parquet; for "
        "`pairs_retrieval` also `docstrings`",
    )
    batch_size: int = option(64, "sentences per batch when encoding", low=1, changes="nothing")
    keep_start: bool = option(
        False,
        "export the starting checkpoint, with its own pooler, unless a trained model is "
        "significantly better in eval.metric (95 % interval of the gain above 0, over at least 20 "
        "documents; without documents, over at least 20 queries or pairs). Of "
        "`query_distillation`, it also depends on BM25",
        changes="selection",
    )
    hold: tuple[str, ...] = option(
        (),
        "document metrics in which the selected model must not be significantly worse than the "
        "starting checkpoint (95 % interval below 0). With eval.keep_start such a model is not "
        "exported, otherwise it is reported",
        choices=HELD_OUT_METRICS,
        changes="selection",
    )
    interpolate: tuple[float, ...] = option(
        (),
        "after training, score models with the weights (1 - a) start + a trained for each a given, "
        "and export the best of them in place of the best checkpoint; trained weights alone are a "
        "= 1",
        low=0.01,
        high=1.0,
        changes="selection",
    )
    patience: int = option(
        0, "stop after this many evaluations in a row without a better eval.metric; 0: off", low=0
    )
    guard: bool = option(
        False,
        "also score general quality at each evaluation: Spearman on STS-B dev or, without it, "
        "agreement with the starting checkpoint about the similarities of general sentences",
    )
    max_drop: float = option(
        0.0,
        "largest allowed drop of general quality, in points (turns eval.guard on). Beyond it, "
        "training stops and the checkpoint is not selected; with eval.interpolate, a model within "
        "the limit is selected; 0: any drop",
        low=0.0,
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How batches and weights are split over devices."""

    data: int = option(
        0, "devices over which batches are split; 0: all devices", low=0, changes="nothing"
    )
    model: int = option(
        1, "devices over which weights are split (tensor parallelism)", low=1, changes="nothing"
    )
    fully_sharded: bool = option(
        False, "also split parameters and optimizer state over mesh.data", changes="nothing"
    )
