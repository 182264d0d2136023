"""The command `diffcse`: the options of each command, and the function of the package that it calls.

What a command needs is imported when it runs, so that `--help` and mistakes are answered soon.
"""

import argparse
import contextlib
import dataclasses
import inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffcse_jax import __version__
from diffcse_jax.errors import ConfigError, ctrl_c_ends_process, reported_to_user

with ctrl_c_ends_process():
    from diffcse_jax.config import SHIPPED, Config, configuration, read_overrides
    from diffcse_jax.models.pooling import POOLERS

if TYPE_CHECKING:
    from diffcse_jax.encoder import SentenceEncoder
    from diffcse_jax.search.vector_store import EncoderRecord

MODEL = "run folder, checkpoint, Hugging Face or sentence-transformers folder, hub id (NAME@REVISION), or `minilm`"
KEYS = """
Any key of the configuration is an option: --config.train.steps=100, --config.optim.learning_rate=3e-5.
docs/reference.md lists all keys with their meaning, default and range.
"""


Run = Callable[[argparse.Namespace, Sequence[str]], int | None]  # options, and arguments that are not options
Command = Callable[[argparse.ArgumentParser], Run]  # adds the options of a command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: The command line after the name of the program; by default that of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    parser, runs = build_parser()
    options, rest = parser.parse_known_args(arguments, argparse.Namespace(arguments=arguments))
    if rest and options.command not in ("train", "finetune", "study"):  # these take keys of the configuration
        parser.error(f"unrecognized arguments: {' '.join(rest)}. See diffcse {options.command} --help")
    with reported_to_user(), _quiet_if_pipe_closed():
        with ctrl_c_ends_process():
            from diffcse_jax.hosts import set_verbosity
        set_verbosity("quiet" if options.quiet else "verbose" if options.verbose else "normal")
        if not options.verbose:  # Orbax logs each step of each save, and its errors several times
            logging.getLogger("absl").setLevel(logging.CRITICAL)
        return runs[options.command](options, rest) or 0
    raise AssertionError  # errors exit


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, Run]]:
    """Return the parser of all commands, and what runs each of them."""
    parser = argparse.ArgumentParser(prog="diffcse", description="Train, evaluate and use sentence embeddings.")
    parser.add_argument("--version", action="version", version=f"diffcse_jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    runs: dict[str, Run] = {}
    for command in COMMANDS:
        description = inspect.getdoc(command) or ""
        sub = commands.add_parser(
            command.__name__,
            help=description.splitlines()[0].rstrip("."),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        runs[command.__name__] = command(sub)
        sub.add_argument("--quiet", action="store_true", help="print warnings and errors only")
        sub.add_argument("--verbose", action="store_true", help="also print the log messages of libraries")
    return parser, runs


# Training


def train(parser: argparse.ArgumentParser) -> Run:
    """Train an encoder and export it.

    The same command again resumes where an earlier run stopped. When training ends, the selected model is exported to
    WORKDIR/export, a folder that transformers and sentence-transformers load. If the environment variable
    WANDB_PROJECT is set, metrics are also logged to that project of Weights & Biases.

      diffcse train --config diffcse_base
      diffcse train --config adapt --workdir runs/mine --config.data.train_file=documents.txt
    """
    _add_run_options(parser, "configs", SHIPPED.glob("*.py"))

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        name, config = run_configuration(options, rest)
        with ctrl_c_ends_process():
            from diffcse_jax.api import named_workdir, run
            from diffcse_jax.training.callbacks import WandB
        callbacks = [WandB(os.environ["WANDB_PROJECT"])] if os.environ.get("WANDB_PROJECT") else []
        run(config, named_workdir(options.workdir, name, config), callbacks)

    return run


def finetune(parser: argparse.ArgumentParser) -> Run:
    """Fine-tune an encoder on labelled tasks.

    At the end WORKDIR holds `export` (the encoder), `tasks` (the heads), `predictions` and `report`. The same command
    resumes a run that was stopped. --config.init=MODEL is short for --config.model.name_or_path=MODEL.

      diffcse finetune --config finetune_multitask --config.init=runs/mine
    """
    _add_run_options(parser, "configs", SHIPPED.glob("finetune*.py"))

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        rest = [
            f"--config.model.name_or_path{argument.removeprefix('--config.init')}"
            if argument.partition("=")[0] == "--config.init"
            else argument
            for argument in rest
        ]
        name, config = run_configuration(options, rest)
        with ctrl_c_ends_process():
            from diffcse_jax.api import named_workdir
            from diffcse_jax.apps.finetune.train import run_finetune
        run_finetune(config, named_workdir(options.workdir, name, config))

    return run


def study(parser: argparse.ArgumentParser) -> Run:
    """Train variants with several seeds and compare them in a table.

    The same command continues a study that was stopped, also from several hosts at the same time. --config.KEY=VALUE
    overrides a key of all variants, and --finetune.KEY=VALUE a key of all fine-tunings.

      diffcse study --config minilm --workdir runs/minilm --config.data.train_file=sentences.txt
      diffcse study --config minilm --workdir runs/minilm --report
    """
    _add_run_options(parser, "configs/studies", (SHIPPED / "studies").glob("*.py"))
    add = parser.add_argument
    add("--encoders", metavar="DIR", help="take trained encoders from the folder of an earlier study")
    add("--workers", type=int, default=1, metavar="N", help="runs at a time; workers share the GPUs (default: 1)")
    add("--variants", nargs="+", action="extend", metavar="NAME", help="only these variants, named as in the table")
    add("--seeds", nargs="+", action="extend", type=int, metavar="SEED", help="only these seeds")
    add("--tasks", help="score these tasks, separated by commas, instead of the study's")
    add("--start", action="store_true", help="also score the starting checkpoint, with its own pooler")
    add("--report", action="store_true", help="run nothing; write and print the table of what is done")
    add("--format", choices=("text", "markdown", "latex"), default="text", help="format of the printed table")

    def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
        with ctrl_c_ends_process():
            from diffcse_jax.apps.study.command import run_study
        return run_study(**_options(options), overrides=rest)

    return run


# Models


def evaluate(parser: argparse.ArgumentParser) -> Run:
    """Score encoders on STS, SentEval and retrieval tasks.

    Exits with 3 if data of a task is missing.

      diffcse evaluate --model runs/diffcse_base --tasks sts,transfer --data_dir DIR
      diffcse evaluate --model runs/seed1 runs/seed2 --tasks sts --published --format markdown
    """
    add = parser.add_argument
    add("--model", required=True, nargs="+", action="extend", help=MODEL)
    tasks = (
        "comma-separated: sts, transfer, full, geometry, retrieval, STS12, MR, ...; for your own tab-separated files "
        "pairs_retrieval:FILE (two texts) and duplicates:FILE (two texts and 0 or 1)"
    )
    add("--tasks", default="sts", help=tasks)
    data = "SentEval's `downstream` folder (default: $DIFFCSE_DATA_DIR/senteval, or the hub's copy if it is not set)"
    add("--data_dir", default="", help=data)
    modes = "dev: score dev splits; fasttest: train cheaper classifiers for transfer tasks (default: test)"
    add("--mode", choices=("test", "fasttest", "dev"), default="test", help=modes)
    aggregation = "how a task's subsets become one score (default: all)"
    add("--aggregation", choices=("all", "mean", "wmean"), default="all", help=aggregation)
    similarity = "similarity of STS pairs (default: cosine)"
    add("--similarity", choices=("cosine", "dot", "euclidean", "manhattan"), default="cosine", help=similarity)
    regression = "also run STSBenchmark-senteval and SICKRelatedness-senteval, supervised as in the original SentEval"
    add("--regression", action="store_true", help=regression)
    add("--pooler", choices=POOLERS, help="replaces the recorded pooler")
    add("--truncate_dim", type=int, help="cut embeddings to this size (default: as recorded)")
    add("--post", metavar="METHOD:FILE", help="transform embeddings by `whitening` or `dcl`, fitted on the file's text")
    add("--post_dimension", type=int, help="target size of whitening (default: the embedding size)")
    add("--queries", type=Path, metavar="FILE", help="lines whose nearest STS-B sentences `retrieval` lists")
    add("--top_k", type=int, default=3, help="sentences that it lists for each query (default: 3)")
    backend = "jax, or torch to compute embeddings with transformers (default: jax)"
    add("--backend", choices=("jax", "torch"), default="jax", help=backend)
    add("--published", action="store_true", help="print published scores above the models' own")
    add("--format", choices=("text", "markdown", "latex"), default="text", help="format of the tables (default: text)")
    add("--allow_missing", action="store_true", help="exit with 0 even if data of a task is missing")
    output = "results file; pictures go to report/ next to it (default: results.json)"
    add("--output", type=Path, default=Path("results.json"), help=output)

    def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
        with ctrl_c_ends_process():
            from diffcse_jax.evaluation import runner
            from diffcse_jax.hosts import keep_compiled
        keep_compiled()
        settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(runner.Settings)}
        return runner.run(
            options.model,
            runner.Settings(**settings),
            output=options.output,
            with_published=options.published,
            style=options.format,
            allow_missing=options.allow_missing,
        )

    return run


def export(parser: argparse.ArgumentParser) -> Run:
    """Write a trained model as a Hugging Face and sentence-transformers folder.

    diffcse export --model runs/mine --output DIR
    diffcse export --model runs/mine --push_to_hub USER/NAME
    """
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="the folder of a run, or one checkpoint in it")
    add("--output", help="the folder to write (default with --push_to_hub: RUN/export)")
    add("--truncate_dim", type=int, help="the size that readers cut embeddings to")
    add("--onnx", action="store_true", help="add onnx/model.onnx and its int8 form, checked against the model")
    results = "results.json files of `diffcse evaluate`, for the card (default: those in RUN)"
    add("--results", nargs="+", default=[], metavar="FILE", help=results)
    add("--license", help="the model's license, for the card, such as apache-2.0 (default: the base model's)")
    languages = "codes of the model's languages, for the card, such as en (default: the base model's)"
    add("--language", nargs="+", default=[], metavar="CODE", help=languages)
    upload = "upload the folder to the Hugging Face hub, with the token of HF_TOKEN or of `hf auth login`"
    add("--push_to_hub", metavar="USER/NAME", help=upload)
    add("--private", action="store_true", help="with --push_to_hub: make a new repository private")

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        if not options.output and not options.push_to_hub:
            parser.error("give --output DIR or --push_to_hub USER/NAME")
        if options.private and not options.push_to_hub:
            parser.error("--private needs --push_to_hub")
        with ctrl_c_ends_process():
            from diffcse_jax.export.card import About
            from diffcse_jax.export.folder import export_and_upload
            from diffcse_jax.io import expand_path
        export_and_upload(
            expand_path(options.model),
            expand_path(options.output) if options.output else None,
            options.truncate_dim,
            with_onnx=options.onnx,
            about=About(
                options.push_to_hub, options.license, tuple(options.language), tuple(map(expand_path, options.results))
            ),
            private=options.private,
        )

    return run


# Text


def encode(parser: argparse.ArgumentParser) -> Run:
    """Encode texts into one file.

    The suffix of --output chooses the format. `.jsonl` and `.parquet` hold each text with its line and its embedding.
    `.npy` holds embeddings alone, one row for each line, so a line without text is an error. For a text that takes
    hours use `diffcse embed`, which can resume.

      echo 'A man plays the guitar.' | diffcse encode --model minilm
      diffcse encode --model runs/mine --input text.txt.gz --output embeddings.npy
    """
    _add_encoder_options(parser)
    _add_text_options(parser, nargs="+", default=["-"], help="what training reads; `-` is standard input (default)")
    parser.add_argument("--normalize", action="store_true", help="scale embeddings to length 1")
    output = ".npy, .parquet or .jsonl; `-`: JSONL to standard output (default)"
    parser.add_argument("--output", default="-", metavar="FILE", help=output)

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        _check_positive(options, "batch_size")
        with ctrl_c_ends_process():
            from diffcse_jax.apps.embed import encode
        encode(
            options.input,
            options.output,
            lambda: _load_encoder(options),
            batch_size=options.batch_size,
            normalize=options.normalize,
            columns=options.columns,
            id_column=options.id_column,
        )

    return run


def embed(parser: argparse.ArgumentParser) -> Run:
    """Embed any amount of text into a folder of Parquet files, and resume after a crash.

    Each Parquet file holds a run of texts of one input: `line`, `id` (with --id_column), `column` (with several
    --columns), `sentence` and `embedding`. pyarrow, polars, datasets and `diffcse search` read the folder. Its state is
    in OUTPUT.state.

    Several processes share the inputs: process i of n (JAX_PROCESS_ID and JAX_NUM_PROCESSES) takes every n-th one.

      diffcse embed --model runs/mine --input 'shards/*.txt.gz' --output embeddings
    """
    _add_encoder_options(parser)
    _add_text_options(parser, nargs="+", action="extend", required=True, help="what training reads; quote patterns")
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="DIR", help="folder of Parquet files")
    add("--normalize", action="store_true", help="scale embeddings to length 1")
    add("--dtype", choices=("float32", "float16"), default="float32", help="of stored embeddings (default: float32)")
    add("--rows_per_file", type=int, help="texts in a Parquet file (default: as in the existing files, or 5,000)")
    add("--distributed", action="store_true", help="let JAX find the processes (TPU pods, GKE, Slurm)")

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        _check_positive(options, "batch_size", "rows_per_file")
        with ctrl_c_ends_process():
            from diffcse_jax.apps.embed import embed, process_of
        embed(
            options.input,
            options.output,
            lambda: _load_encoder(options),
            rows_per_file=options.rows_per_file or 0,
            batch_size=options.batch_size,
            dtype=options.dtype,
            normalize=options.normalize,
            columns=options.columns,
            id_column=options.id_column,
            process=process_of(options.distributed),
            command=shlex.join(["diffcse", *options.arguments]),
        )

    return run


def search(parser: argparse.ArgumentParser) -> Run:
    """Find the texts that are most similar to queries.

    --input is text, which is encoded now; embeddings of `diffcse embed` or `diffcse encode`; or an index. The last two
    name their encoder, so --model may be left out. Similarities are cosines.

      diffcse search --model runs/mine --input documents/ 'how do I stop a thread?'
      diffcse search --input embeddings --queries questions.txt --top_k 10 --json > hits.jsonl
      diffcse search --model runs/mine --input documents/ --output index 'first query'
    """
    add = parser.add_argument
    add("query", nargs="*", metavar="QUERY", help="text; without any, --queries or the lines of standard input")
    add("--queries", default="-", metavar="FILE", help="a text of queries; `-` is standard input (default)")
    add("--top_k", type=int, default=5, help="the largest number of hits for a query (default: 5)")
    add("--threshold", type=float, help="the least cosine similarity of a hit (default: any)")
    add("--json", action="store_true", help="print an object for each query, one a line")
    _add_encoder_options(parser, recorded="that of the embeddings")
    _add_text_options(parser, required=True, help="what training reads, embeddings or an index")
    add("--output", type=Path, metavar="DIR", help="keep the index in this folder, to search it again")
    faiss = "search with faiss: `Flat` is exact, `IVF1024,Flat` and `HNSW32` are not (extra `search`)"
    add("--faiss", default="", metavar="FACTORY", help=faiss)

    def load(options: argparse.Namespace, record: "EncoderRecord | None") -> "SentenceEncoder":
        recorded = dataclasses.asdict(record) if record else {}
        return _load_encoder(options, **recorded, truncate_dim=recorded.get("dimension"))

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        _check_positive(options, "batch_size", "top_k")
        with ctrl_c_ends_process():
            from diffcse_jax.apps.search import search
        search(
            options.input,
            options.query,
            lambda record: load(options, record),
            model=options.model or "",
            queries_file=options.queries,
            top_k=options.top_k,
            threshold=options.threshold,
            as_json=options.json,
            batch_size=options.batch_size,
            columns=options.columns,
            id_column=options.id_column,
            output=options.output,
            faiss=options.faiss,
        )

    return run


# Pages


def report(parser: argparse.ArgumentParser) -> Run:
    """Write what was trained and what came of it as one HTML page.

    A run in progress has a report, too. The page needs no network.

      diffcse report --model runs/quickstart
      diffcse report --model runs/seed-1 runs/seed-2 --output seeds.html
    """
    add = parser.add_argument
    add("--model", required=True, nargs="+", action="extend", metavar="RUN", help="folders of runs")
    output = "the page (default: RUN/report/index.html, of several runs report.html)"
    add("--output", default="", metavar="FILE.html", help=output)
    results = "results.json of `diffcse evaluate` for other models, to compare the runs with"
    add("--results", nargs="+", default=[], metavar="FILE", help=results)
    add("--skip_models", action="store_true", help="load no model: no similarities, singular values and searches")

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        with ctrl_c_ends_process():
            from diffcse_jax.apps.report.page import write_report
        print(write_report(options.model, options.output, options.results, skip_models=options.skip_models))

    return run


def demo(parser: argparse.ArgumentParser) -> Run:
    """Search a text in the browser, with one model or two.

    Only this machine can open the page, unless --host says otherwise.

      diffcse demo --model runs/quickstart --input documents/
      diffcse demo --model runs/quickstart --against minilm --input docstrings
    """
    add = parser.add_argument
    add("--model", required=True, help=MODEL)
    add("--against", default="", metavar="MODEL", help="a second model, shown next to the first")
    _add_text_options(parser, required=True, help="what training reads")
    add("--top_k", type=int, default=10, help="hits of a search (default: 10)")
    add("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, help="the port; 0: any free one (default: 8000)")

    def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
        with ctrl_c_ends_process():
            from diffcse_jax.apps.demo import serve
        serve(
            options.model,
            options.input,
            against=options.against,
            columns=options.columns,
            top_k=options.top_k,
            host=options.host,
            port=options.port,
        )

    return run


COMMANDS: tuple[Command, ...] = (train, evaluate, encode, embed, search, export, finetune, study, report, demo)


# Shared options


def _add_run_options(parser: argparse.ArgumentParser, folder: str, files: Any) -> None:
    names = ", ".join(sorted(file.stem for file in files))
    parser.epilog = KEYS
    add = parser.add_argument
    add("--config", metavar="NAME_OR_FILE", required=True, help=f"a file, or the name of one in {folder}: {names}")
    workdir = (
        "where results go; {name}, {seed} and keys such as {optim.learning_rate} stand for values (default: "
        f"runs/{'studies/' * ('studies' in folder)}NAME of the configuration)"
    )
    add("--workdir", metavar="DIR", help=workdir)


def run_configuration(options: argparse.Namespace, rest: Sequence[str]) -> tuple[str, Config]:
    """Return the name of the configuration that the options name, and the configuration with its overrides."""
    return configuration(options.config, read_overrides(rest, others=("config", "workdir", "quiet", "verbose")))


def _options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the command's own options by name."""
    return {
        name: value for name, value in vars(options).items() if name not in ("arguments", "command", "quiet", "verbose")
    }


def _add_encoder_options(parser: argparse.ArgumentParser, recorded: str = "") -> None:
    """Add `--model` and the options of encoding; `recorded` says where defaults come from if --model is optional."""
    add = parser.add_argument
    default = recorded or "the model's"
    add("--model", required=not recorded, help=MODEL + (f" (default: {recorded})" if recorded else ""))
    add("--pooler", choices=POOLERS, help=f"replaces the recorded pooler (default: {default})")
    add("--truncate_dim", type=int, help=f"keep only the first dimensions of each embedding (default: {default})")
    precision = f"of the computation (default: {recorded or 'float32'})"
    add("--precision", choices=("float32", "bfloat16"), default=None if recorded else "float32", help=precision)
    add("--batch_size", type=int, default=64, help="texts per step on this host (default: 64)")


def _add_text_options(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Add `--input` with these settings, `--columns` and `--id_column`."""
    parser.add_argument("--input", metavar="TEXT", **settings)
    columns = "columns of text (default: the only one, or the first with a known name)"
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME", help=columns)
    parser.add_argument("--id_column", default="", metavar="NAME", help="a column whose values are kept as `id`")


def _check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(options, name)}")


def _load_encoder(options: argparse.Namespace, **recorded: Any) -> "SentenceEncoder":
    """Load the encoder that the options name; what they leave out is as recorded."""
    from diffcse_jax.encoder import SentenceEncoder
    from diffcse_jax.hosts import keep_compiled

    keep_compiled()
    names = ("model", "pooler", "precision", "truncate_dim")
    chosen = {name: recorded.get(name) if getattr(options, name) is None else getattr(options, name) for name in names}
    return SentenceEncoder.from_pretrained(
        str(chosen["model"]),
        pooler=chosen["pooler"],
        dtype=chosen["precision"] or "float32",
        truncate_dim=chosen["truncate_dim"],
    )


@contextlib.contextmanager
def _quiet_if_pipe_closed() -> Iterator[None]:
    """End the command quietly if the reader of its output, such as `head`, has gone."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        sys.exit(141)


if __name__ == "__main__":
    sys.exit(main())
