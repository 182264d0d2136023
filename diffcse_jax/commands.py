"""What each command accepts: a frozen dataclass, whose docstring is the help of the command.

The command line makes these objects, and the function that does the work takes them. A value that
was not given is None or an empty tuple.
"""

import dataclasses
from pathlib import Path
from typing import Any

from diffcse_jax.io import SHIPPED
from diffcse_jax.models.poolers import check_pooler
from diffcse_jax.options import REQUIRED, option
from diffcse_jax.search.modes import DEFAULT_WEIGHT, MODES, STORAGES

MODEL = (
    "run folder, checkpoint, Hugging Face or sentence-transformers folder, hub id (NAME@REVISION), "
    "or `minilm`"
)
INPUT = "text: a file, a folder, a pattern in quotes such as 'pages/*.md', or `docstrings`"
POOLER = "apply this pooler alone, such as cls or avg, without the modules after the recorded one"
OR_STDIN = "`-`: standard input"
PASSAGES = (
    "split texts that are longer than the model reads into overlapping passages, instead of "
    "truncating them"
)
BACKENDS = ("jax", "onnx")
FORMS = ("float32", "float16", "int8")  # of ONNX files
# The sizes of a model of random weights.
HIDDEN_SIZE = 256
HEADS = 4
VOCABULARY_SIZE = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What every command accepts."""

    quiet: bool = option(False, "print warnings and errors only")
    verbose: bool = option(False, "also print the log messages of libraries")

    # Not an option.
    command: str = "the same command"  # the whole command line, for messages

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of the named options that were given."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value not in (None, ())}


# Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What the commands that train accept."""

    workdir: str | None = option(
        None,
        "the folder of the run; {name}, {seed} and {KEY} stand for its values (default: runs/NAME)",
        metavar="DIR",
    )
    strict: bool = option(
        False, "a file or text that cannot be used is an error (--config.data.on_bad_line=error)"
    )

    # Not an option of its own.
    overrides: tuple[str, ...] = ()  # the arguments --config.KEY=VALUE and --finetune.KEY=VALUE


def _config(folder: str, pattern: str) -> Any:
    """Return the option `--config`. Its help names the configurations of a folder."""
    names = sorted(file.stem for file in SHIPPED.glob(pattern))
    doc = f"a file, or the name of one in {folder}: {', '.join(names)}"
    return option(REQUIRED, doc, metavar="NAME_OR_FILE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train an encoder and export it.

    If a run was stopped, the same command resumes it. When training ends, the selected model is
    exported to WORKDIR/export, a folder that transformers and sentence-transformers load. If the
    environment variable WANDB_PROJECT is set, metrics are also logged to that project of Weights &
    Biases.

      diffcse train --config diffcse_base
      diffcse train --config adapt --workdir runs/mine --config.data.train_file=documents.txt
    """

    config: str = _config("configs", "*.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """Fine-tune an encoder on labelled tasks.

    At the end, WORKDIR contains `export` (the encoder), `tasks` (the heads), `predictions` and
    `report`. If a run was stopped, the same command resumes it. --config.init=MODEL is short for
    --config.model.name_or_path=MODEL.

      diffcse finetune --config finetune_multitask --config.init=runs/mine
    """

    config: str = _config("configs", "finetune*.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions(RunOptions):
    """Train variants with several seeds and compare them in a table.

    If a study was stopped, the same command continues it. Several processes may run it at the same
    time, each with its own devices. --config.KEY=VALUE changes a key for all variants, and
    --finetune.KEY=VALUE a key for all fine-tunings.

      diffcse study --config minilm --workdir runs/minilm --config.data.train_file=sentences.txt
      diffcse study --config minilm --workdir runs/minilm --report
    """

    config: str = _config("configs/studies", "studies/*.py")
    workdir: str | None = option(
        None, "the folder of the study (default: runs/studies/NAME)", metavar="DIR"
    )
    variants: tuple[str, ...] = option(
        (), "only these variants, named as in the table", metavar="NAME"
    )
    seeds: int | None = option(
        None, "train each variant with the seeds 1 to COUNT (default: the study's)", metavar="COUNT"
    )
    record: Path | None = option(
        None,
        "add the scores of each run to this file, and skip runs that it has (JSON lines)",
        metavar="FILE",
    )
    tasks: str | None = option(
        None, "score these tasks, separated by commas, instead of the study's"
    )
    report: bool = option(False, "train nothing; write and print the table of the finished runs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitOptions(Options):
    """Write a checkpoint to pre-train with the configuration `masked_lm`.

    With --input it is a BERT of random weights with a lower-cased WordPiece vocabulary, which is
    learnt from the text. With --model it is the beginning of a checkpoint: its embeddings, its
    first blocks, and its masked-LM head, if it has one. The same text, sizes and seed give the same
    files.

      diffcse init --input text.txt --vocabulary_size 8192 --blocks 4 --output start
      diffcse init --model minilm --blocks 3 --output start
      diffcse train --config masked_lm --config.model.name_or_path=start
    """

    inputs: tuple[str, ...] = option(
        (), f"{INPUT}, of which the vocabulary is learnt", flag="--input", metavar="TEXT"
    )
    model: str | None = option(
        None, "Hugging Face folder, hub id (NAME@REVISION), or `minilm`, whose blocks are kept"
    )
    blocks: int = option(REQUIRED, "transformer blocks", metavar="N", low=1)
    hidden_size: int | None = option(
        None, f"size of hidden states (default: {HIDDEN_SIZE})", metavar="N", low=1
    )
    heads: int | None = option(None, f"attention heads (default: {HEADS})", metavar="N", low=1)
    vocabulary_size: int | None = option(
        None, f"tokens of the new vocabulary (default: {VOCABULARY_SIZE})", metavar="N", low=1
    )
    seed: int = option(42, "seed of the random weights", low=0, high=2**32 - 1)
    output: Path = option(REQUIRED, "the folder to write", metavar="DIR")


# Models


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Settings that all models of a comparison share: options of `diffcse evaluate`."""

    tasks: str = option(
        "sts",
        "such as sts,transfer,geometry,MR, or pairs_retrieval:FILE, documents:FILE, "
        "retrieval:FOLDER",
    )
    data_dir: str | None = option(
        None, "SentEval's `downstream` folder (default: $DIFFCSE_DATA_DIR/senteval)"
    )
    mode: str = option(
        "test",
        "test or dev splits; fasttest: test splits with simpler classifiers",
        choices=("test", "fasttest", "dev"),
    )
    aggregation: str = option(
        "all", "how a task's subsets become one score", choices=("all", "mean", "wmean")
    )
    pooler: str | None = option(None, POOLER, read=check_pooler)
    truncate_dim: int | None = option(
        None, "cut embeddings to this size (default: the recorded size)", metavar="SIZE"
    )
    post: str | None = option(
        None,
        "transform embeddings by `whitening` or `dcl`, fitted on the file's text",
        metavar="METHOD:FILE",
    )
    queries_file: Path | None = option(
        None,
        "task `retrieval`: list the sentences nearest to each line",
        flag="--queries",
        metavar="FILE",
    )
    top_k: int = option(3, "sentences to list for each query", low=1)
    runs: Path | None = option(
        None, "write the rankings of retrieval:FOLDER there, in TREC's form", metavar="DIR"
    )
    against: Path | None = option(
        None, "compare nDCG@10 with that of a run in TREC's form", metavar="FILE"
    )
    backend: str = option(
        "jax",
        "what computes embeddings: torch is sentence-transformers, onnx is ONNX Runtime, which "
        "reads what `diffcse export --onnx` has written",
        choices=("jax", "torch", "onnx"),
    )
    strict: bool = option(False, "stop at the first text of your own files that is left out")

    # Not options: the program sets them for each model.
    model: str = ""  # that is evaluated
    compared: tuple[str, ...] = ()  # all models, whose rankings get different names


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvaluationSettings, Options):
    """Score encoders on STS, SentEval and retrieval tasks.

    Exits with 3 if data of a task is missing.

      diffcse evaluate --model runs/diffcse_base --tasks sts,transfer --data_dir DIR
      diffcse evaluate --model minilm runs/diffcse_base --tasks sts --published --format markdown
    """

    models: tuple[str, ...] = option(REQUIRED, MODEL, flag="--model", metavar="MODEL")
    with_published: bool = option(
        False, "print published scores above the models' own", flag="--published"
    )
    style: str = option(
        "text", "format of the tables", flag="--format", choices=("text", "markdown", "latex")
    )
    allow_missing: bool = option(False, "exit with 0 even if data of a task is missing")
    output: Path = option(
        Path("results.json"), "results file; pictures go to report/ next to it", metavar="FILE"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Write a model as a Hugging Face and sentence-transformers folder, also with an ONNX file.

    `diffcse train` has already written RUN/export. This command writes another folder, with other
    settings or in another form, of a run or of any other model.

      diffcse export --model runs/mine --output mine_128 --truncate_dim 128
      diffcse export --model minilm --output minilm_int8 --onnx int8
    """

    model: str = option(REQUIRED, MODEL)
    output: Path = option(REQUIRED, "the folder to write", metavar="DIR")
    truncate_dim: int | None = option(
        None, "record that embeddings are cut to this size", metavar="SIZE"
    )
    onnx: str | None = option(
        None,
        "add onnx/model.onnx in this form: int8 for CPUs, float16 for GPUs",
        choices=FORMS,
    )
    text: str | None = option(
        None,
        f"compare the ONNX file with the model on this {INPUT} (default: general sentences)",
        flag="--input",
        metavar="TEXT",
    )
    pooler: str | None = option(None, "the pooler of a model that records none", read=check_pooler)
    hub_id: str | None = option(
        None, "the model's id on the hub, for the card", metavar="USER/NAME"
    )
    license: str | None = option(
        None, "license for the card, such as apache-2.0 (default: the base model's)"
    )
    language: tuple[str, ...] = option(
        (), "languages for the card (default: data.language)", metavar="CODE"
    )


# Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOptions(Options):
    """How an encoder is applied. What is not given is as the model or stored embeddings record."""

    pooler: str | None = option(None, f"{POOLER} (default: the recorded one)", read=check_pooler)
    truncate_dim: int | None = option(
        None, "cut embeddings to this size (default: the recorded size)", metavar="SIZE"
    )
    precision: str | None = option(
        None,
        "precision of the computation (default: float32, or that of stored embeddings)",
        choices=("float32", "bfloat16"),
    )
    backend: str | None = option(
        None,
        "what computes embeddings (default: jax, or that of stored embeddings); onnx reads what "
        "`diffcse export --onnx` has written",
        choices=BACKENDS,
    )
    batch_size: int = option(64, "texts encoded at a time", metavar="N", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """How text is read."""

    columns: tuple[str, ...] = option(
        (),
        "columns of text, each a text of its own (default: those with known names, or all of text)",
    )
    id_column: str | None = option(
        None, "the column that identifies rows (default: `_id` or `id`)", metavar="NAME"
    )
    follow_links: bool = option(
        False, "also read links in a folder that lead to other folders, or to files outside it"
    )
    strict: bool = option(
        False, "stop at the first file that is not read and at the first text that is left out"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeOptions(EncoderOptions, TextOptions):
    """Encode texts into one file.

    The suffix of --output chooses the format. `.jsonl` contains each text with its line and its
    embedding. `.npy` contains only the embeddings: one for each line, row of a table or document,
    in their order. With --columns, there is one for each of these columns. What has no text is an
    error. Texts that are longer than the model reads are truncated. If a text takes hours, use
    `diffcse embed`, which can resume.

      echo 'A man plays the guitar.' | diffcse encode --model minilm
      diffcse encode --model runs/mine --input text.txt.gz --output embeddings.npy
    """

    model: str = option(REQUIRED, MODEL)
    inputs: tuple[str, ...] = option(("-",), f"{INPUT}; {OR_STDIN}", flag="--input", metavar="TEXT")
    normalize: bool = option(False, "scale embeddings to length 1")
    prompt_name: str | None = option(
        None,
        "the model's prompt of the texts (default: its default prompt, if any)",
        metavar="NAME",
    )
    output: str = option("-", "`.npy` or `.jsonl`; `-`: JSONL to standard output", metavar="FILE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions(EncoderOptions, TextOptions):
    """Embed any amount of text into a folder of Parquet files, and resume after a crash.

    pyarrow, polars, datasets and `diffcse search` read the folder. OUTPUT.state records what is
    done. Several processes can divide the inputs: process i of n (JAX_PROCESS_ID and
    JAX_NUM_PROCESSES) takes every n-th one.

      diffcse embed --model runs/mine --input 'shards/*.txt.gz' --output embeddings
    """

    model: str = option(REQUIRED, MODEL)
    inputs: tuple[str, ...] = option(REQUIRED, INPUT, flag="--input", metavar="TEXT")
    output: Path = option(REQUIRED, "folder of Parquet files", metavar="DIR")
    normalize: bool = option(False, "scale embeddings to length 1")
    prompt_name: str | None = option(
        None, "the model's prompt of the texts (default: that of documents, if any)", metavar="NAME"
    )
    dtype: str = option("float32", "stored numbers", choices=("float32", "float16"))
    passages: bool | None = option(None, f"{PASSAGES} (default: False)")
    # A minute or two of work on a slow machine, which is what a crash can cost.
    rows_per_file: int = option(5000, "texts in a Parquet file", low=1)
    distributed: bool = option(False, "let JAX find the processes (TPU pods, GKE, Slurm)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModeOptions(Options):
    """How a text is searched."""

    mode: str | None = option(
        None,
        "dense: compare embeddings; lexical: words, by BM25; hybrid: both (default: what the run "
        "recommends)",
        choices=MODES,
    )
    language: str | None = option(
        None, "language of BM25's stop words and stemmer: german, none, ... (default: detected)"
    )
    weight: float | None = option(
        None,
        "weight of BM25 in hybrid scores, from 0 to 1 (default: the one that a run "
        f"recommends for hybrid search, or {DEFAULT_WEIGHT})",
    )
    passages: bool | None = option(None, f"{PASSAGES} (default: True)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions(EncoderOptions, TextOptions, ModeOptions):
    """Find the texts that are most similar to queries, or that share words with them.

    --input is text, the output of `diffcse embed`, or an index. The last two record their encoder,
    so that --model can be left out. Scores are cosine similarities, BM25 scores (--mode lexical),
    or the weighted mean of both, each standardised over the texts (--mode hybrid).

    --output saves an index. The same --input and --output again bring it up to date: only new and
    changed documents are encoded.

      diffcse search --model runs/mine --input documents/ 'how do I stop a thread?'
      diffcse search --model runs/mine --input documents/ --mode hybrid --output index 'first query'
      diffcse search --input index --queries questions.txt --top_k 10 --json > hits.jsonl
    """

    queries: tuple[str, ...] = option(
        (), "queries; without them, those of --queries", flag="queries", metavar="QUERY"
    )
    queries_file: str = option(
        "-",
        f"one per line, or the column `query` or `question` of a table; {OR_STDIN}",
        flag="--queries",
        metavar="FILE",
    )
    top_k: int = option(5, "the largest number of hits for a query", low=1)
    threshold: float | None = option(None, "the lowest score of a hit (default: any)")
    prompt_name: str | None = option(
        None, "the model's prompt of the queries (default: that of queries, if any)", metavar="NAME"
    )
    as_json: bool = option(False, "print a JSON object for each query, one per line", flag="--json")
    model: str | None = option(None, f"{MODEL} (default: that of the embeddings)")
    input: str = option(REQUIRED, f"{INPUT}; or the output of `embed`, or an index", metavar="TEXT")
    output: Path | None = option(
        None, "save the index there, or bring the index there up to date", metavar="DIR"
    )
    add: bool = option(False, "put another --input into the index in --output")
    replace: bool = option(False, "build the index in --output again, whatever it holds")
    mode: str | None = option(
        None,
        "dense: compare embeddings; lexical: words, by BM25; hybrid: both (default: that of the "
        "index, or what the run recommends)",
        choices=MODES,
    )
    storage: str | None = option(
        None,
        "stored embeddings: int8 takes a quarter of the memory, bits a 32nd (default: float32)",
        choices=STORAGES,
    )


# Pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Write an HTML page about a run.

    The page shows the result, the training curves, searches before and after training, and the
    configuration. It works offline. A run in progress has a report, too.

      diffcse report --model runs/quickstart
    """

    model: str = option(REQUIRED, "the folder of a run", metavar="RUN")
    output: Path | None = option(
        None, "the page (default: RUN/report/index.html)", metavar="FILE.html"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions(TextOptions, ModeOptions):
    """Search a text in the browser, with one model or two.

    Only this machine can open the page, unless --host says otherwise.

      diffcse demo --model runs/quickstart --input documents/
      diffcse demo --model runs/quickstart --against minilm --input docstrings
    """

    model: str = option(REQUIRED, MODEL)
    backend: str = option(
        "jax",
        "what computes embeddings of --model, not of --against; onnx reads what `diffcse export "
        "--onnx` has written",
        choices=BACKENDS,
    )
    against: str | None = option(None, "a second model, shown next to the first", metavar="MODEL")
    input: str = option(REQUIRED, INPUT, metavar="TEXT")
    top_k: int = option(10, "the number of hits", low=1)
    host: str = option("127.0.0.1", "the address to listen on")
    port: int = option(8000, "the port; 0: any free one", low=0, high=65535)
