import ast
import gc
import importlib
import importlib.metadata
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import diffcse_jax
from diffcse_jax import cli
from diffcse_jax.cli import COMMANDS, options_of, read_options
from diffcse_jax.errors import printable, printable_message
from diffcse_jax.hosts import log_line

ROOT = Path(__file__).parents[1]
COMMAND = "diffcse_jax/cli.py"
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
# Runs the commands of its input. JAX finds no device: a mistake must be named before one is looked
# for.
SCRIPT = """
import contextlib, io, json, sys
from diffcse_jax.cli import main
for arguments in json.load(sys.stdin):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    except RuntimeError as error:
        code = str(error)
    print(json.dumps([code, printed.getvalue()]))
"""
MISTAKES = [
    (
        ("--config.optim.lerning_rate=3e-6",),
        "unknown key optim.lerning_rate; did you mean optim.learning_rate?",
    ),
    (("--workdri=x",), "'--workdri=x' is not an option. Did you mean --workdir?"),
    (
        ("--config", "diffcse_minilm", "--config.generator.head_steps=0"),
        "difference.weight > 0 needs a generator. Name one in generator.name_or_path, or set generator.head_steps > 0",
    ),
]


def test_a_mistake_is_named_in_one_line_before_jax_starts(tmp_path):
    file = tmp_path / "mine.py"
    lines = ["config = default_config()", "config.optim.lerning_rate = 1.0", "return config"]
    body = "".join(f"    {line}\n" for line in lines)
    file.write_text(f"from diffcse_jax.config import default_config\ndef get_config():\n{body}")
    expected = [
        (("train", "--config", QUICKSTART, *arguments), message) for arguments, message in MISTAKES
    ]
    expected += [(("train", "--config", str(file)), MISTAKES[0][1])]
    tuning = (
        "finetune",
        "--config=finetune_multitask",
        "--config.init=minilm",
        "--config.optim.lerning_rate=3e-6",
    )
    expected += [(tuning, MISTAKES[0][1])]
    unknown = ("train", "--config", "adpat")
    valid = ("train", "--config=quickstart", "--config.optim.learning_rate=3e-6")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "none"}
    script = [sys.executable, "-c", SCRIPT]
    commands = json.dumps([*(arguments for arguments, _ in expected), unknown, valid])
    result = subprocess.run(
        script, env=environment, cwd=tmp_path, input=commands, capture_output=True, text=True
    )
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert found[: len(expected)] == [[2, f"error: {message}\n"] for _, message in expected]
    start = "error: --config: 'adpat' is neither a file nor the name of a configuration. Did you mean adapt? Known "
    code, message = found[-2]
    assert (code, message.startswith(start), "quickstart" in message) == (2, True, True)
    # the mistakes above would notice JAX
    assert "Unable to initialize backend 'none'" in found[-1][0]


@pytest.fixture
def diffcse(monkeypatch, capsys):
    """Calls the console script of the wheel in this process; returns exit code and what it printed."""
    (script,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
    command = importlib.metadata.EntryPoint(*script, group="console_scripts").load()

    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", [script[0], *arguments])
        with pytest.raises(SystemExit) as stopped:
            sys.exit(command())
        return stopped.value.code, capsys.readouterr()

    return call


def test_commands_describe_themselves_under_their_names(diffcse):
    for command in COMMANDS:
        code, printed = diffcse(command, "--help")
        assert (code, f"usage: diffcse {command} " in printed.out, "None" in printed.out) == (
            0,
            True,
            False,
        )
    code, printed = diffcse("--help")
    assert code == 0
    assert all(f"  {command} " in printed.out for command in COMMANDS)
    assert diffcse("--version") == (0, (f"diffcse_jax {diffcse_jax.__version__}\n", ""))
    code, printed = diffcse("report", "--model", "runs/a", "runs/my-b")
    assert (code, "unrecognized arguments: runs/my-b. See diffcse" in printed.err) == (2, True)
    code, printed = diffcse("search", "--input", "text.txt", "--top-k", "3", "words")
    assert (code, "'--top-k' is not an option. Did you mean --top_k?" in printed.err) == (2, True)
    code, printed = diffcse(
        "embed", "--model", "minilm", "--input", "text.txt", "--output", "gs://bucket/embeddings"
    )
    assert (code, "addresses with gs:// are not supported" in printed.err) == (2, True)


# Runs a script. The last line has its processor time and what it has imported.
START = """
import runpy, sys, time
before = set(sys.modules)
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    pass
print(time.process_time(), *sys.modules.keys() - before, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--help"],
        ["eval.py", "--help"],
        ["train.py", "--config", "quickstart", "--workdri=x"],
        [COMMAND, "--help"],
        *([COMMAND, name, "--help"] for name in COMMANDS),
        [COMMAND, "search", "--input", "text.txt", "--nonsense"],
        [COMMAND, "encode", "--model", "minilm", "--batch_size", "0"],
    ],
    ids=" ".join,
)
def test_help_and_mistakes_import_no_library(arguments):
    start = [sys.executable, "-c", START, *arguments]
    result = subprocess.run(start, cwd=ROOT, capture_output=True, text=True)
    seconds, *modules = result.stderr.splitlines()[-1].split()
    assert "diffcse_jax.commands" in modules
    packages = {module.partition(".")[0] for module in modules}
    libraries = packages & importlib.metadata.packages_distributions().keys()
    assert libraries - {"diffcse_jax"} <= {"filelock"}
    assert float(seconds) < 1.0  # about 0.1 s. With JAX and transformers it takes 2


def test_values_are_read_by_type_and_what_is_not_given_is_none():
    words = "search --input t --columns a --columns b c --threshold 1 --no-passages --output ~/i q"
    name, options = read_options(words.split())
    assert (name, options.columns, options.queries) == ("search", ("a", "b", "c"), ("q",))
    assert (options.threshold, type(options.threshold)) == (1.0, float)
    assert options.output == Path.home() / "i"
    fixed = ("model", "mode", "weight", "storage", "passages", "id_column")
    assert options.given(*fixed) == {"passages": False}
    assert shlex.split(options.command) == ["diffcse", *words.split()]
    run = read_options(["train", "--config", "adapt", "--config.train.steps", "9", "--strict"])[1]
    assert run.overrides == ("--config.train.steps", "9", "--config.data.on_bad_line=error")
    assert run.workdir is None


def test_each_command_works_with_its_own_options():
    for command, (options, function) in COMMANDS.items():
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        assert inspect.get_annotations(function)["options"] is options, command


def test_each_option_is_read():
    """Types of options are checked. Whether any code reads an option is not."""
    read = set()
    for file in (ROOT / "diffcse_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                is_read = getattr(node.value, "id", "") in ("options", "settings")
                read |= {node.attr} if is_read else set()
            if isinstance(node, ast.Tuple) or getattr(node, "func", None):
                names = node.elts if isinstance(node, ast.Tuple) else node.args
                read |= {each.value for each in names if isinstance(each, ast.Constant)}
    for command, (kind, _) in COMMANDS.items():
        assert {field.name for field in options_of(kind)} - read == set(), command


def test_the_collector_leaves_out_what_a_process_has_imported(monkeypatch):
    seen = []
    before = gc.get_freeze_count()  # not always 0 from Python 3.12 on

    def work(options):
        seen.append(gc.isenabled())
        return lambda: seen.append((gc.isenabled(), gc.get_freeze_count() > before))

    stub = cli.Command(COMMANDS["encode"].options, work)
    arguments = ["encode", "--model", "minilm", "--input", "text.txt"]
    monkeypatch.setitem(COMMANDS, "encode", stub)
    assert cli.main(arguments) == 0
    monkeypatch.setattr(sys, "argv", ["diffcse", *arguments])
    try:
        assert cli.main() == 0
    finally:
        gc.unfreeze()
    # In a process that goes on, nothing changes.
    assert seen == [True, (True, False), False, (True, True)]


# What is printed


def test_an_encoding_that_lacks_characters_loses_no_answer(tmp_path, monkeypatch):
    text = tmp_path / "\u0434\u0430\u043d\u043d\u044b\u0435.txt"
    line = "\u043a\u043e\u0448\u043a\u0430 \U0001f408"
    text.write_text(line, encoding="utf-8")

    def search(*options: str) -> tuple[bytes, bytes]:
        printed = io.BytesIO(), io.BytesIO()
        for name, stream in zip(("stdout", "stderr"), printed, strict=True):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding="cp1252"))
        arguments = ["search", "--input", str(text), "--mode", "lexical", *options, line[:5]]
        assert cli.main(arguments) == 0
        sys.stderr.flush()
        return printed[0].getvalue(), printed[1].getvalue()

    hits, account = search()
    assert rb"\u043a\u043e\u0448\u043a\u0430 \U0001f408" in hits
    assert rb"\u0434\u0430\u043d\u043d\u044b\u0435.txt: 1 document" in account
    (hit,) = json.loads(search("--json")[0].decode("utf-8"))["hits"]
    assert (hit["file"], hit["snippet"]) == (str(text), line)


FORGED = "a\x1b[2Jb\nerror: forged\u202ec"


def test_names_cannot_pass_for_messages(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["search", "--input", FORGED, "--mode", "lexical", "words"],
        ["search", "--input", "text.txt", f"--{FORGED.replace(' ', '')}"],
        ["train", "--config", FORGED],
        ["export", "--model", FORGED, "--output", "out"],
    ):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        printed = capsys.readouterr().err
        assert r"a\x1b[2Jb" in printed
        assert "\x1b" not in printed
        assert "\u202e" not in printed
        assert "\nerror: forged" not in printed
    log_line(FORGED)
    assert capsys.readouterr().err == "a\\x1b[2Jb\n  error: forged\\u202ec\n"
    assert printable(FORGED) == r"a\x1b[2Jb\nerror: forged\u202ec"
    assert printable("caf\u00e9 \u0434\u0430 \u05d0\u200c") == "caf\u00e9 \u0434\u0430 \u05d0\u200c"
    assert printable_message("one:\n  two\nthree\n") == "one:\n  two\n  three"


def test_ctrl_c_during_imports_ends_the_process_without_a_traceback():
    """Packages that start slowly can swallow the exception or turn it into another one."""
    code = (
        "import os, signal\nfrom diffcse_jax.errors import ctrl_c_ends_process\n"
        "with ctrl_c_ends_process():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException:\n        pass\n"
        "print('swallowed')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")
