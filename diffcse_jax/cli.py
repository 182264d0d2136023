"""The command `diffcse`: the options of each command, and the call that they lead to.

Each command is two functions. `add_NAME` adds the options, and its docstring is the help.
`_prepare_NAME` imports the function of the package that does the work, so that `--help` is quick,
and binds the options to its parameters.
"""

import argparse
import dataclasses
import inspect
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.errors import ConfigError, ctrl_c_ends_process, reported_to_user
from diffcse_jax.version import __version__

with ctrl_c_ends_process():
    from diffcse_jax.config import SHIPPED, Config, configuration, read_overrides
    from diffcse_jax.io import expand_path
    from diffcse_jax.models.pooling import check_pooler

MODEL = (
    "run folder, checkpoint, Hugging Face or sentence-transformers folder, hub id (NAME@REVISION), "
    "or `minilm`"
)
RUN_FOLDER = (
    "the folder of the run; {name}, {seed} and {KEY} stand for its values (default: runs/NAME)"
)
INPUT = "text: a file, a folder, a pattern in quotes such as 'pages/*.md', or `docstrings`"
POOLER = "apply this pooler alone, such as cls or avg, without the modules after the recorded one"
KEYS = """
Any key of the configuration is an option, such as --config.train.steps=100.
docs/keys.md lists all keys with their meaning, default and range.
"""
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
ENCODER = {"model", "pooler", "truncate_dim", "precision"}  # read by `_load_encoder`

Add = Callable[..., Any]  # a parser's `add_argument`
Options = argparse.Namespace


class Command(NamedTuple):
    """A command."""

    add: Callable[[Add], None]  # adds the options; its docstring is the help
    # Returns what does the work. If that returns a path, it is printed; a number is the exit code.
    prepare: Callable[[Options], Callable[[], Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, without the name of the program, and return the exit code.

    By default it is the command line of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    with reported_to_user():
        options, rest = parser.parse_known_args(arguments)
        if rest and options.name not in WITH_KEYS:
            has_hyphen = any(re.match("--(?!no-)[a-z]+-", argument) for argument in rest)
            spelling = "Options have underscores, such as --top_k. " if has_hyphen else ""
            parser.error(
                f"unrecognized arguments: {' '.join(rest)}. {spelling}See diffcse {options.name} "
                "--help"
            )
        for name in ("batch_size", "rows_per_file", "top_k"):
            if (count := getattr(options, name, None)) is not None and count < 1:
                raise ConfigError(f"--{name}: expected at least 1, got {count}")
        if options.name in WITH_KEYS and options.strict:
            rest.append("--config.data.on_bad_line=error")
        options.overrides = rest
        options.command = shlex.join(["diffcse", *arguments])
        with ctrl_c_ends_process():
            from diffcse_jax.hosts import keep_compiled, set_verbosity

            keep_compiled()
            set_verbosity("quiet" if options.quiet else "verbose" if options.verbose else "normal")
            # Orbax logs each step of each save, and its errors several times.
            if not options.verbose:
                logging.getLogger("absl").setLevel(logging.CRITICAL)
            call = COMMANDS[options.name].prepare(options)
        try:
            result = call()
            if isinstance(result, Path):
                print(result)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of the output, such as `head`, has ended
            # Python flushes once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            result = 141
        return result if isinstance(result, int) else 0
    raise AssertionError("`reported_to_user` exits on errors")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. It gives the name of the command as `name`."""
    about = (
        "Train, evaluate and use sentence embeddings. To begin: diffcse train --config quickstart"
    )
    parser = argparse.ArgumentParser(prog="diffcse", description=about)
    parser.add_argument("--version", action="version", version=f"diffcse_jax {__version__}")
    parsers = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description = inspect.getdoc(command.add) or ""
        sub = parsers.add_parser(
            name,
            help=description.splitlines()[0].rstrip("."),
            description=description,
            epilog=KEYS if name in WITH_KEYS else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add(sub.add_argument)
        sub.add_argument("--quiet", action="store_true", help="print warnings and errors only")
        sub.add_argument(
            "--verbose", action="store_true", help="also print the log messages of libraries"
        )
    return parser


# Training


def add_train(add: Add) -> None:
    """Train an encoder and export it.

    If a run was stopped, the same command resumes it. When training ends, the selected model is
    exported to WORKDIR/export, a folder that transformers and sentence-transformers load. If the
    environment variable WANDB_PROJECT is set, metrics are also logged to that project of Weights &
    Biases.

      diffcse train --config diffcse_base
      diffcse train --config adapt --workdir runs/mine --config.data.train_file=documents.txt
    """
    _add_run_options(add, "configs", SHIPPED.glob("*.py"), RUN_FOLDER)


def _prepare_train(options: Options) -> Callable[[], str]:
    config, workdir = _read_run_options(options)
    from diffcse_jax.api import run

    callbacks = []
    if project := os.environ.get("WANDB_PROJECT"):
        from diffcse_jax.training.callbacks import WandB

        callbacks.append(WandB(project))
    return partial(run, config, workdir, callbacks)


def add_init(add: Add) -> None:
    """Write a checkpoint to pre-train with the configuration `masked_lm`.

    With --input it is a BERT of random weights with a lower-cased WordPiece vocabulary, which is
    learnt from the text. With --model it is the beginning of a checkpoint: its embeddings, its
    first blocks, and its masked-LM head, if it has one. The same text, sizes and seed give the same
    files.

      diffcse init --input text.txt --vocabulary_size 8192 --blocks 4 --output start
      diffcse init --model minilm --blocks 3 --output start
      diffcse train --config masked_lm --config.model.name_or_path=start
    """
    add(
        "--input",
        dest="inputs",
        metavar="TEXT",
        help=f"{INPUT}, of which the vocabulary is learnt",
        **SEVERAL,
    )
    add(
        "--model",
        default="",
        help="Hugging Face folder, hub id (NAME@REVISION), or `minilm`, whose blocks are kept",
    )
    add("--blocks", type=int, required=True, metavar="N", help="transformer blocks")
    add(
        "--hidden_size",
        type=int,
        default=0,
        metavar="N",
        help="size of hidden states (default: 256)",
    )
    add("--heads", type=int, default=0, metavar="N", help="attention heads (default: 4)")
    add(
        "--vocabulary_size",
        type=int,
        default=0,
        metavar="N",
        help="tokens of the new vocabulary (default: 8192)",
    )
    add("--seed", type=int, default=42, help="seed of the random weights (default: %(default)s)")
    add("--output", type=expand_path, required=True, metavar="DIR", help="the folder to write")


def _prepare_init(options: Options) -> Callable[[], Path]:
    from diffcse_jax.apps.init import InitOptions, init

    chosen = InitOptions(
        output=options.output,
        inputs=tuple(options.inputs),
        model=options.model,
        blocks=options.blocks,
        hidden_size=options.hidden_size,
        heads=options.heads,
        vocabulary_size=options.vocabulary_size,
        seed=options.seed,
    )
    return partial(init, chosen)


def add_finetune(add: Add) -> None:
    """Fine-tune an encoder on labelled tasks.

    At the end, WORKDIR contains `export` (the encoder), `tasks` (the heads), `predictions` and
    `report`. If a run was stopped, the same command resumes it. --config.init=MODEL is short for
    --config.model.name_or_path=MODEL.

      diffcse finetune --config finetune_multitask --config.init=runs/mine
    """
    _add_run_options(add, "configs", SHIPPED.glob("finetune*.py"), RUN_FOLDER)


def _prepare_finetune(options: Options) -> Callable[[], str]:
    config, workdir = _read_run_options(options)
    from diffcse_jax.apps.finetune import run_finetune

    return partial(run_finetune, config, workdir)


def add_study(add: Add) -> None:
    """Train variants with several seeds and compare them in a table.

    If a study was stopped, the same command continues it. Several processes may run it at the same
    time, each with its own devices. --config.KEY=VALUE changes a key for all variants, and
    --finetune.KEY=VALUE a key for all fine-tunings.

      diffcse study --config minilm --workdir runs/minilm --config.data.train_file=sentences.txt
      diffcse study --config minilm --workdir runs/minilm --report
    """
    workdir = "the folder of the study (default: runs/studies/NAME)"
    _add_run_options(add, "configs/studies", (SHIPPED / "studies").glob("*.py"), workdir)
    add("--variants", metavar="NAME", help="only these variants, named as in the table", **SEVERAL)
    add(
        "--seeds",
        type=int,
        metavar="COUNT",
        help="train each variant with the seeds 1 to COUNT (default: the study's)",
    )
    record = "add the scores of each run to this file, and skip runs that it has (JSON lines)"
    add("--record", type=expand_path, metavar="FILE", help=record)
    add("--tasks", help="score these tasks, separated by commas, instead of the study's")
    add(
        "--report",
        action="store_true",
        help="train nothing; write and print the table of the finished runs",
    )


def _prepare_study(options: Options) -> Callable[[], int]:
    from diffcse_jax.apps.study import run_study

    return partial(
        run_study,
        options.config,
        options.workdir,
        variants=options.variants,
        seeds=options.seeds,
        tasks=options.tasks,
        record=options.record,
        report=options.report,
        overrides=options.overrides,
    )


# Models


def add_evaluate(add: Add) -> None:
    """Score encoders on STS, SentEval and retrieval tasks.

    Exits with 3 if data of a task is missing.

      diffcse evaluate --model runs/diffcse_base --tasks sts,transfer --data_dir DIR
      diffcse evaluate --model minilm runs/diffcse_base --tasks sts --published --format markdown
    """
    add("--model", dest="models", required=True, metavar="MODEL", help=MODEL, **SEVERAL)
    tasks = (
        "such as sts,transfer,geometry,MR, or pairs_retrieval:FILE, documents:FILE, "
        "retrieval:FOLDER (default: sts)"
    )
    add("--tasks", default="sts", help=tasks)
    add(
        "--data_dir",
        default="",
        help="SentEval's `downstream` folder (default: $DIFFCSE_DATA_DIR/senteval)",
    )
    mode = (
        "test or dev splits; fasttest: test splits with simpler classifiers (default: %(default)s)"
    )
    add("--mode", choices=("test", "fasttest", "dev"), default="test", help=mode)
    aggregation = "how a task's subsets become one score (default: %(default)s)"
    add("--aggregation", choices=("all", "mean", "wmean"), default="all", help=aggregation)
    add("--pooler", type=check_pooler, help=POOLER)
    add(
        "--truncate_dim",
        type=int,
        metavar="SIZE",
        help="cut embeddings to this size (default: the recorded size)",
    )
    add(
        "--post",
        metavar="METHOD:FILE",
        help="transform embeddings by `whitening` or `dcl`, fitted on the file's text",
    )
    add(
        "--queries",
        type=expand_path,
        metavar="FILE",
        help="task `retrieval`: list the sentences nearest to each line",
    )
    add(
        "--top_k",
        type=int,
        default=3,
        help="sentences to list for each query (default: %(default)s)",
    )
    add(
        "--runs",
        type=expand_path,
        metavar="DIR",
        help="write the rankings of retrieval:FOLDER there, in TREC's form",
    )
    add(
        "--against",
        type=expand_path,
        metavar="FILE",
        help="compare nDCG@10 with that of a run in TREC's form",
    )
    backend = "torch: compute embeddings with sentence-transformers (default: %(default)s)"
    add("--backend", choices=("jax", "torch"), default="jax", help=backend)
    add(
        "--published",
        dest="with_published",
        action="store_true",
        help="print published scores above the models' own",
    )
    formats = ("text", "markdown", "latex")
    add(
        "--format",
        dest="style",
        choices=formats,
        default="text",
        help="format of the tables (default: %(default)s)",
    )
    add(
        "--strict",
        action="store_true",
        help="stop at the first text of your own files that is left out",
    )
    add(
        "--allow_missing", action="store_true", help="exit with 0 even if data of a task is missing"
    )
    output = "results file; pictures go to report/ next to it (default: %(default)s)"
    add("--output", type=expand_path, default=Path("results.json"), metavar="FILE", help=output)


def _prepare_evaluate(options: Options) -> Callable[[], int]:
    from diffcse_jax.evaluation import EvaluationSettings
    from diffcse_jax.evaluation.runner import run

    settings = EvaluationSettings(
        tasks=options.tasks,
        data_dir=options.data_dir,
        mode=options.mode,
        aggregation=options.aggregation,
        pooler=options.pooler,
        truncate_dim=options.truncate_dim,
        backend=options.backend,
        post=options.post,
        queries=options.queries,
        top_k=options.top_k,
        runs=options.runs,
        against=options.against,
        strict=options.strict,
    )
    return partial(
        run,
        options.models,
        settings,
        output=options.output,
        with_published=options.with_published,
        style=options.style,
        allow_missing=options.allow_missing,
    )


def add_export(add: Add) -> None:
    """Write a trained model as a Hugging Face and sentence-transformers folder.

    `diffcse train` has already written RUN/export. This command writes another folder, with other
    settings.

      diffcse export --model runs/mine --output mine_128 --truncate_dim 128
    """
    add(
        "--model",
        type=expand_path,
        required=True,
        metavar="RUN",
        help="the folder of a run, or one checkpoint in it",
    )
    add("--output", type=expand_path, required=True, metavar="DIR", help="the folder to write")
    add(
        "--truncate_dim",
        type=int,
        metavar="SIZE",
        help="record that embeddings are cut to this size",
    )
    add(
        "--onnx",
        dest="with_onnx",
        action="store_true",
        help="add onnx/model.onnx, checked against the model",
    )
    add("--hub_id", metavar="USER/NAME", help="the model's id on the hub, for the card")
    add("--license", help="license for the card, such as apache-2.0 (default: the base model's)")
    add(
        "--language",
        nargs="+",
        default=[],
        metavar="CODE",
        help="languages for the card (default: data.language)",
    )


def _prepare_export(options: Options) -> Callable[[], object]:
    from diffcse_jax.export import export

    return partial(
        export,
        options.model,
        options.output,
        options.truncate_dim,
        with_onnx=options.with_onnx,
        hub_id=options.hub_id,
        license=options.license,
        language=options.language,
    )


# Text


def add_encode(add: Add) -> None:
    """Encode texts into one file.

    The suffix of --output chooses the format. `.jsonl` contains each text with its line and its
    embedding. `.npy` contains only the embeddings: one for each line, row of a table or document,
    in their order. With --columns, there is one for each of these columns. What has no text is an
    error. Texts that are longer than the model reads are truncated. If a text takes hours, use
    `diffcse embed`, which can resume.

      echo 'A man plays the guitar.' | diffcse encode --model minilm
      diffcse encode --model runs/mine --input text.txt.gz --output embeddings.npy
    """
    _add_encoder_options(add)
    _add_text_options(add, "inputs", f"{INPUT} (default: standard input)", nargs="+", default=["-"])
    add("--normalize", action="store_true", help="scale embeddings to length 1")
    add(
        "--prompt_name",
        metavar="NAME",
        help="the model's prompt of the texts (default: its default prompt, if any)",
    )
    add(
        "--output",
        default="-",
        metavar="FILE",
        help="`.npy` or `.jsonl`; `-`: JSONL to standard output",
    )


def _prepare_encode(options: Options) -> Callable[[], None]:
    from diffcse_jax.apps.embed import encode

    return partial(
        encode,
        options.inputs,
        options.output,
        partial(_load_encoder, options),
        batch_size=options.batch_size,
        normalize=options.normalize,
        prompt_name=options.prompt_name,
        columns=options.columns,
        id_column=options.id_column,
        strict=options.strict,
    )


def add_embed(add: Add) -> None:
    """Embed any amount of text into a folder of Parquet files, and resume after a crash.

    pyarrow, polars, datasets and `diffcse search` read the folder. OUTPUT.state records what is
    done. Several processes can divide the inputs: process i of n (JAX_PROCESS_ID and
    JAX_NUM_PROCESSES) takes every n-th one.

      diffcse embed --model runs/mine --input 'shards/*.txt.gz' --output embeddings
    """
    _add_encoder_options(add)
    _add_text_options(add, "inputs", INPUT, required=True, **SEVERAL)
    add("--output", required=True, type=expand_path, metavar="DIR", help="folder of Parquet files")
    add("--normalize", action="store_true", help="scale embeddings to length 1")
    add(
        "--prompt_name",
        metavar="NAME",
        help="the model's prompt of the texts (default: that of documents, if any)",
    )
    add(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="stored numbers (default: %(default)s)",
    )
    _add_passages(add, default=False)
    add(
        "--rows_per_file",
        type=int,
        default=5000,
        help="texts in a Parquet file (default: %(default)s)",
    )
    add(
        "--distributed",
        action="store_true",
        help="let JAX find the processes (TPU pods, GKE, Slurm)",
    )


def _prepare_embed(options: Options) -> Callable[[], None]:
    from diffcse_jax.apps.embed import embed

    return partial(
        embed,
        options.inputs,
        options.output,
        partial(_load_encoder, options),
        rows_per_file=options.rows_per_file,
        batch_size=options.batch_size,
        dtype=options.dtype,
        normalize=options.normalize,
        prompt_name=options.prompt_name,
        columns=options.columns,
        id_column=options.id_column,
        distributed=options.distributed,
        passages=options.passages,
        strict=options.strict,
        command=options.command,
    )


def add_search(add: Add) -> None:
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
    add("queries", nargs="*", metavar="QUERY", help="queries; without them, those of --queries")
    add(
        "--queries",
        dest="queries_file",
        default="-",
        metavar="FILE",
        help="one per line, or the column `query` or `question` of a table (default: standard "
        "input)",
    )
    add(
        "--top_k",
        type=int,
        default=5,
        help="the largest number of hits for a query (default: %(default)s)",
    )
    add("--threshold", type=float, help="the lowest score of a hit (default: any)")
    add(
        "--prompt_name",
        metavar="NAME",
        help="the model's prompt of the queries (default: that of queries, if any)",
    )
    add(
        "--json",
        dest="as_json",
        action="store_true",
        help="print a JSON object for each query, one per line",
    )
    _add_encoder_options(add, recorded="that of the embeddings")
    _add_text_options(
        add, "source", f"{INPUT}; or the output of `embed`, or an index", required=True
    )
    output = "save the index there, or bring the index there up to date"
    add("--output", type=expand_path, metavar="DIR", help=output)
    add("--add", action="store_true", help="put another --input into the index in --output")
    add(
        "--replace",
        action="store_true",
        help="build the index in --output again, whatever it holds",
    )
    _add_mode_options(add, "that of the index, or what the run recommends")
    _add_passages(add, default=None)
    storage = (
        "stored embeddings: int8 takes a quarter of the memory, bits a 32nd (default: float32)"
    )
    add("--storage", choices=("float32", "float16", "int8", "bits"), default="", help=storage)


def _prepare_search(options: Options) -> Callable[[], None]:
    from diffcse_jax.apps.search import SearchOptions, search

    chosen = SearchOptions(
        source=options.source,
        queries=tuple(options.queries),
        queries_file=options.queries_file,
        model=options.model,
        top_k=options.top_k,
        threshold=options.threshold,
        as_json=options.as_json,
        batch_size=options.batch_size,
        columns=tuple(options.columns),
        id_column=options.id_column,
        output=options.output,
        add=options.add,
        replace=options.replace,
        prompt_name=options.prompt_name,
        mode=options.mode,
        language=options.language,
        weight=options.weight,
        storage=options.storage,
        passages=options.passages,
        strict=options.strict,
    )
    return partial(search, chosen, partial(_load_encoder, options))


# Pages


def add_report(add: Add) -> None:
    """Write an HTML page about a run.

    The page shows the result, the training curves, searches before and after training, and the
    configuration. It works offline. A run in progress has a report, too.

      diffcse report --model runs/quickstart
    """
    add("--model", required=True, metavar="RUN", help="the folder of a run")
    add(
        "--output",
        default="",
        metavar="FILE.html",
        help="the page (default: RUN/report/index.html)",
    )


def _prepare_report(options: Options) -> Callable[[], Path]:
    from diffcse_jax.apps.report import write_report

    return partial(write_report, options.model, options.output)


def add_demo(add: Add) -> None:
    """Search a text in the browser, with one model or two.

    Only this machine can open the page, unless --host says otherwise.

      diffcse demo --model runs/quickstart --input documents/
      diffcse demo --model runs/quickstart --against minilm --input docstrings
    """
    add("--model", required=True, help=MODEL)
    add("--against", default="", metavar="MODEL", help="a second model, shown next to the first")
    _add_text_options(add, "source", INPUT, required=True)
    add("--top_k", type=int, default=10, help="the number of hits (default: %(default)s)")
    _add_mode_options(add, "what the run recommends")
    _add_passages(add, default=None)
    add("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="the port; 0: any free one (default: %(default)s)")


def _prepare_demo(options: Options) -> Callable[[], None]:
    from diffcse_jax.apps.demo import DemoOptions, serve

    chosen = DemoOptions(
        model=options.model,
        source=options.source,
        against=options.against,
        columns=tuple(options.columns),
        id_column=options.id_column,
        top_k=options.top_k,
        host=options.host,
        port=options.port,
        mode=options.mode,
        language=options.language,
        weight=options.weight,
        passages=options.passages,
        strict=options.strict,
    )
    return partial(serve, chosen)


COMMANDS: dict[str, Command] = {
    "train": Command(add_train, _prepare_train),
    "evaluate": Command(add_evaluate, _prepare_evaluate),
    "encode": Command(add_encode, _prepare_encode),
    "embed": Command(add_embed, _prepare_embed),
    "search": Command(add_search, _prepare_search),
    "export": Command(add_export, _prepare_export),
    "init": Command(add_init, _prepare_init),
    "finetune": Command(add_finetune, _prepare_finetune),
    "study": Command(add_study, _prepare_study),
    "report": Command(add_report, _prepare_report),
    "demo": Command(add_demo, _prepare_demo),
}
WITH_KEYS = ("train", "finetune", "study")  # commands that also accept keys of the configuration


# Shared options


def _add_run_options(add: Add, folder: str, files: Iterable[Path], workdir: str) -> None:
    names = ", ".join(sorted(file.stem for file in files))
    add(
        "--config",
        metavar="NAME_OR_FILE",
        required=True,
        help=f"a file, or the name of one in {folder}: {names}",
    )
    add("--workdir", metavar="DIR", help=workdir)
    strict = "a file or text that cannot be used is an error (--config.data.on_bad_line=error)"
    add("--strict", action="store_true", help=strict)


def _read_run_options(options: Options) -> tuple[Config, Path]:
    """Return the chosen configuration with its overrides, and the run folder."""
    rest = [
        re.sub(r"^--config\.init(?=$|=)", "--config.model.name_or_path", each)
        for each in options.overrides
    ]
    overrides = read_overrides(rest, others=("config", "workdir", "strict", "quiet", "verbose"))
    name, config = configuration(options.config, overrides)
    from diffcse_jax.api import named_workdir

    return config, named_workdir(options.workdir, name, config)


def _add_encoder_options(add: Add, recorded: str = "") -> None:
    """Add the options of an encoder.

    `recorded` says where defaults come from if --model is optional.
    """
    default = recorded or "the model's"
    add(
        "--model",
        required=not recorded,
        help=MODEL + (f" (default: {recorded})" if recorded else ""),
    )
    add("--pooler", type=check_pooler, help=f"{POOLER} (default: {default})")
    add(
        "--truncate_dim",
        type=int,
        metavar="SIZE",
        help=f"cut embeddings to this size (default: {default})",
    )
    precision = f"precision of the computation (default: {recorded or 'float32'})"
    add("--precision", choices=("float32", "bfloat16"), help=precision)
    add(
        "--batch_size",
        type=int,
        default=64,
        metavar="N",
        help="texts encoded at a time (default: %(default)s)",
    )


def _add_text_options(add: Add, dest: str, about: str, **settings: Any) -> None:
    """Add `--input`, whose value gets the name `dest`, and how it is read."""
    add("--input", dest=dest, metavar="TEXT", help=about, **settings)
    columns = (
        "columns of text, each a text of its own (default: those with known names, or all of text)"
    )
    add("--columns", nargs="+", default=[], help=columns)
    add(
        "--id_column",
        default="",
        metavar="NAME",
        help="the column that identifies rows (default: `_id` or `id`)",
    )
    strict = "stop at the first file that is not read and at the first text that is left out"
    add("--strict", action="store_true", help=strict)


def _add_mode_options(add: Add, default: str) -> None:
    mode = f"dense: compare embeddings; lexical: words, by BM25; hybrid: both (default: {default})"
    add("--mode", choices=("dense", "lexical", "hybrid"), default="", help=mode)
    add(
        "--language",
        default="",
        help="language of BM25's stop words and stemmer, such as german (default: detected)",
    )
    add(
        "--weight",
        type=float,
        help="weight of BM25 in hybrid scores, from 0 to 1 (default: 0.1; without --mode, the one "
        "that the run recommends)",
    )


def _add_passages(add: Add, default: bool | None) -> None:
    """Add `--passages`; without a default, texts are split unless an index says otherwise."""
    split = (
        "split texts that are longer than the model reads into overlapping passages, instead of "
        "truncating them"
    )
    shown = "True" if default is None else "%(default)s"
    add(
        "--passages",
        action=argparse.BooleanOptionalAction,
        default=default,
        help=f"{split} (default: {shown})",
    )


def _load_encoder(options: Options, record: Any = None) -> Any:
    """Load the encoder that the options name.

    Options that are left out have their recorded values.
    """
    from diffcse_jax.encoder import SentenceEncoder

    recorded = dataclasses.asdict(record) | {"truncate_dim": record.dimension} if record else {}
    own = {name: getattr(options, name) for name in ENCODER}
    chosen = {name: recorded.get(name) if value is None else value for name, value in own.items()}
    model = str(chosen.pop("model"))
    precision = chosen.pop("precision") or "float32"
    return SentenceEncoder.from_pretrained(model, dtype=precision, **chosen)


if __name__ == "__main__":
    sys.exit(main())
