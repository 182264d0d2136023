import importlib.metadata
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import diffcse_jax
from diffcse_jax.cli import COMMANDS, build_parser, run_configuration

ROOT = Path(__file__).parents[1]
NO_DEVICE = "Unable to initialize backend 'none'"
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
DIFFCSE = str(ROOT / "configs" / "diffcse_minilm.py")


def train(folder: Path, *arguments: str, script: tuple[str, ...] = (str(ROOT / "train.py"),)):
    """Runs the command where JAX finds no device: a mistake must be named before one is looked for."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "none"}
    command = [sys.executable, *script, *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--config", QUICKSTART, "--config.optim.lerning_rate=3e-6"),
            "unknown key optim.lerning_rate; did you mean optim.learning_rate?",
        ),
        (
            ("--config", QUICKSTART, "--config.optim.learning_rate=fast"),
            "optim.learning_rate: expected a number such as 3e-5, got 'fast'",
        ),
        (
            ("--config", DIFFCSE, "--config.generator.head_steps=0"),
            "difference.weight > 0 needs a generator. Name a masked LM in generator.name_or_path, train a masked-LM "
            "head with generator.head_steps > 0, or set the weight to 0.",
        ),
        (("--config", "adapt", "--train.steps=3"), "'--train.steps=3' is not an option. Write --config.train.steps=3."),
        (("--config", "adapt", "--config.train.steps=a"), "train.steps: expected a whole number such as 60, got 'a'"),
        (("--config", QUICKSTART, "extra"), "'extra' is not an option. Overrides are written --config.KEY=VALUE."),
        (("--config", QUICKSTART, "--workdri=x"), "'--workdri=x' is not an option. Did you mean --workdir?"),
    ],
)
def test_a_mistake_is_named_in_one_line_before_jax_starts(tmp_path, arguments, message):
    result = train(tmp_path, *arguments)
    assert result.stderr == f"error: {message}\n"
    assert result.returncode == 2
    assert result.stdout == ""


def test_a_mistake_in_the_config_file_is_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from diffcse_jax.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.optim.lerning_rate = 1.0\n"
        "    return config\n"
    )
    result = train(tmp_path, "--config", str(file))
    assert result.stderr == "error: unknown key optim.lerning_rate; did you mean optim.learning_rate?\n"
    assert result.returncode == 2


@pytest.mark.slow
def test_jax_starts_once_the_configuration_is_valid(tmp_path):
    """The tests above would notice JAX."""
    result = train(tmp_path, "--config", QUICKSTART, "--config.optim.learning_rate=3e-6")
    assert NO_DEVICE in result.stderr
    assert result.returncode == 1


@pytest.mark.parametrize("name", ["adpat", "adpat.py"])
def test_an_unknown_configuration_is_answered_with_the_names(tmp_path, name):
    result = train(tmp_path, "--config", name)
    assert result.stderr.startswith(
        f"error: --config: {name!r} is neither a file nor the name of a configuration. Did you mean adapt? Known "
    )
    assert "quickstart" in result.stderr


DIFFCSE_TRAIN = ("-m", "diffcse_jax.cli", "train")


@pytest.mark.parametrize("config", [("--config", "quickstart"), ("--config=quickstart",)])
def test_the_installed_command_knows_the_configurations_by_name(tmp_path, config):
    result = train(tmp_path, *config, "--config.train.batch_size=1", script=DIFFCSE_TRAIN)
    assert result.stderr == "error: train.batch_size: 1 is below 2\n"


def test_fine_tuning_names_mistakes_likewise(tmp_path):
    config = ("--config", "finetune_multitask", "--config.init=minilm", "--config.finetune.tasks.sst.fil=a.csv")
    result = train(tmp_path, *config, script=("-m", "diffcse_jax.cli", "finetune"))
    expected = "unknown key finetune.tasks.sst.fil; did you mean finetune.tasks.sst.file?"
    assert result.stderr == f"error: {expected}\n"


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


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_each_command_describes_itself_under_its_name(diffcse, command):
    code, printed = diffcse(command, "--help")
    assert code == 0
    assert f"usage: diffcse {command} " in printed.out
    assert "None" not in printed.out
    assert diffcse("help", command)[1].out == printed.out


def test_the_command_lists_the_others(diffcse):
    code, printed = diffcse("--help")
    assert code == 0
    assert all(f"  {command.__name__} " in printed.out for command in COMMANDS)
    assert diffcse("--version") == (0, (f"diffcse_jax {diffcse_jax.__version__}\n", ""))
    code, printed = diffcse("trian")
    assert code == 2
    assert "invalid choice: 'trian'" in printed.err


def test_unknown_options_and_a_missing_configuration_are_named(diffcse):
    code, printed = diffcse("train")
    assert (code, "--config" in printed.err) == (2, True)
    code, printed = diffcse("report", "--model", "runs/a", "--corpus", "x")
    assert (code, "unrecognized arguments: --corpus x" in printed.err) == (2, True)


def test_a_command_line_becomes_a_configuration():
    arguments = ["train", "--config=adapt", "--workdir", "runs/x", "--config.train.steps", "3", "--quiet"]
    arguments += ["--config.model.hidden_dropout=(0.1,)", "--config.distributed=True", "--config.data.train_file=7"]
    options, rest = build_parser()[0].parse_known_args(arguments)
    name, config = run_configuration(options, rest)
    assert (name, options.workdir, options.quiet, config.train.steps, config.distributed) == (
        "adapt",
        "runs/x",
        True,
        3,
        True,
    )
    assert config.model.hidden_dropout == (0.1,)
    assert config.data.train_file == "7"


def test_ctrl_c_during_imports_ends_the_process_without_a_traceback():
    """Packages that start slowly can swallow the exception or turn it into another one."""
    code = (
        "import os, signal\nfrom diffcse_jax.errors import ctrl_c_ends_process\n"
        "with ctrl_c_ends_process():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException:\n        pass\n"
        "print('swallowed')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")
