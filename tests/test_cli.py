import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


@pytest.fixture(scope="module")
def without_jax(tmp_path_factory) -> Path:
    """A folder for PYTHONPATH in which importing JAX fails."""
    folder = tmp_path_factory.mktemp("without_jax")
    (folder / "jax.py").write_text("raise RuntimeError('JAX was imported')")
    return folder


def train(without_jax: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(without_jax), str(ROOT)))}
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, env=environment, cwd=without_jax, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--config", QUICKSTART, "--config.optim.lerning_rate=3e-6"),
            "unknown key optim.lerning_rate; did you mean optim.learning_rate?",
        ),
        (
            ("--config", QUICKSTART, "--config.learning_rate", "3e-6"),
            "unknown key learning_rate; did you mean optim.learning_rate?",
        ),
        (
            ("--config", QUICKSTART, "--config.optim.learning_rate=fast"),
            "flag --config.optim.learning_rate=fast: could not convert string to float: 'fast'",
        ),
        (("--config", QUICKSTART, "--config.train.batch_size=1"), "train.batch_size: 1 is below 2"),
        (("--config", QUICKSTART, "--config.precision=fp8"), "precision: 'fp8' is not one of auto, float32, bfloat16"),
        (
            ("--config", QUICKSTART, "--config.generator.head_steps=0"),
            "difference.weight > 0 needs a generator: name a masked LM in generator.name_or_path, or train an own head "
            "with generator.head_steps > 0, or set difference.weight=0",
        ),
        ((), "--config is missing; for example --config configs/quickstart.py"),
        (("--config", "nowhere.py"), "--config: [Errno 2] No such file or directory: 'nowhere.py'"),
        (
            ("--config", "nowhere.py", "--config.train.steps=1"),
            "--config: [Errno 2] No such file or directory: 'nowhere.py'",
        ),
        (("--config", QUICKSTART, "extra"), "unexpected argument 'extra'; overrides are written --config.KEY=VALUE"),
        (("--config", QUICKSTART, "--workdri=x"), "Unknown command line flag 'workdri'. Did you mean: workdir ?"),
    ],
)
def test_a_mistake_is_named_in_one_line_before_jax_starts(without_jax, arguments, message):
    result = train(without_jax, *arguments)
    assert result.stderr == f"error: {message}\n"
    assert result.returncode == 2
    assert result.stdout == ""


def test_a_mistake_in_the_config_file_is_named(without_jax, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from diffcse_jax.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.optim.lerning_rate = 1.0\n"
        "    return config\n"
    )
    result = train(without_jax, "--config", str(file))
    assert result.stderr == "error: unknown key optim.lerning_rate; did you mean optim.learning_rate?\n"
    assert result.returncode == 2


def test_jax_starts_once_the_configuration_is_valid(without_jax):
    """What shows that the tests above would notice JAX."""
    result = train(without_jax, "--config", QUICKSTART, "--config.optim.learning_rate=3e-6")
    assert "RuntimeError: JAX was imported" in result.stderr
    assert result.returncode == 1


def test_help_describes_the_command(without_jax):
    result = train(without_jax, "--help")
    assert "--config configs/" in result.stdout
    assert "--workdir" in result.stdout
