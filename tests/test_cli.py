import ast
import importlib.metadata
import inspect
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import diffcse_jax
from diffcse_jax import cli
from diffcse_jax.cli import COMMANDS, ENCODER, WITH_KEYS, build_parser

ROOT = Path(__file__).parents[1]
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
    assert (code, "--top-k. Options have underscores, such as --top_k" in printed.err) == (2, True)
    code, printed = diffcse(
        "embed", "--model", "minilm", "--input", "text.txt", "--output", "gs://bucket/embeddings"
    )
    assert (code, "addresses with gs:// are not supported" in printed.err) == (2, True)


def test_each_option_is_read_and_no_other():
    """Options are attributes of a namespace, which type checkers do not know. They know all that the values go to."""
    functions = {
        node.name: node
        for node in ast.parse(inspect.getsource(cli)).body
        if isinstance(node, ast.FunctionDef)
    }

    def read(function: str) -> set[str]:
        """Return the options that a function reads, also by functions that it hands all of them to."""
        found = set()
        for node in ast.walk(functions[function]):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "options"
            ):
                found.add(node.attr)
            if isinstance(node, ast.Call) and any(
                getattr(each, "id", "") == "options" for each in node.args
            ):
                named = [node.func, *node.args]
                called = {getattr(each, "id", "") for each in named} & functions.keys()
                found |= set().union(*map(read, called))
        return found

    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    of_main = {"help", "quiet", "verbose", "overrides", "command"}
    for name, parser in commands.items():
        options = {action.dest for action in parser._actions}
        found = read(COMMANDS[name].prepare.__name__) | (
            ENCODER if name in ("encode", "embed", "search") else set()
        )
        # it stands for a key of the configuration
        found |= {"strict"} if name in WITH_KEYS else set()
        assert options - of_main == found - of_main, name


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
