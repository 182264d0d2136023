"""Several processes on this machine train like one, through the public command."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from test_sts import write_stsb
from tiny_run import environment, overrides, run_settings

from diffcse_jax import api, hosts
from diffcse_jax.config import configuration
from diffcse_jax.documents.ledger import EMPTY, Ledger
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.run_folder.checkpoints import read_encoder
from diffcse_jax.run_folder.records import read_metrics
from diffcse_jax.training.tokens import require_same_text

REPOSITORY = Path(__file__).parents[1]
STEPS = 9  # enough for a process to be killed in the middle
CONFIG = "diffcse_minilm"
NULL = (os.devnull, os.devnull)
# `python train.py`, where the loss of a process is noticed sooner, and without curves.
TRAIN = """
import sys
from diffcse_jax import api, hosts
from diffcse_jax.cli import main
hosts.SIGN_SECONDS, hosts.SILENCE_SECONDS, hosts.SHUTDOWN_SECONDS = 1, 8, 5
api.draw_curves = str
main(["train", *sys.argv[1:]])
"""
# The same, but the second process is killed when it is about to save for the second time.
DIE = """
import os
import signal
import orbax.checkpoint as ocp

class CheckpointManager(ocp.CheckpointManager):
    def save(self, step, **arguments):
        if step == 6 and os.environ["JAX_PROCESS_ID"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().save(step, **arguments)

ocp.CheckpointManager = CheckpointManager
"""
# A process that meets the others, and decides with them until one is lost. It writes two files: one
# is a decision.
MEET = """
import sys
from pathlib import Path
from diffcse_jax.errors import reported_to_user
from diffcse_jax import hosts
from diffcse_jax.io import disk_errors
hosts.INITIALIZATION_SECONDS = int(sys.argv[1])
hosts.SIGN_SECONDS, hosts.SILENCE_SECONDS, hosts.SHUTDOWN_SECONDS = 1, 8, 5

def write(file):
    with disk_errors(Path(file), safe="Nothing is lost."):
        Path(file).write_text("text")

with reported_to_user():
    hosts.join()
    for number in range(10**9):
        hosts.decided_by_first(lambda: write(sys.argv[2]) if number == 5 else None)
        if number == 5:
            print("working", flush=True)
            write(sys.argv[3])
"""
TASKS = """
from dataclasses import asdict
from diffcse_jax.config import default_config
from diffcse_jax.losses.finetune import LabelledTask

def get_config():
    config = default_config()
    config.model.name_or_path = {model!r}
    config.model.pooler, config.model.projector = "avg", "none"
    config.contrast.weight = config.difference.weight = 0.0
    config.finetune.weight = 1.0
    config.finetune.tasks = {{"mine": asdict(LabelledTask(file="rows.csv", texts=("text",), label="class"))}}
    config.train.steps, config.train.batch_size, config.data.max_length = 1, 4, 8
    return config
"""
BOUND = 60  # seconds in which the loss of a process must be noticed


@pytest.fixture(scope="module", autouse=True)
def stsb_dev(tmp_path_factory) -> Iterator[None]:
    """Dev pairs where the commands of these tests look for them."""
    folder = tmp_path_factory.mktemp("data")
    pairs = [
        f"-\t-\t-\t-\t{score}\tthe number {score}\tthe words {score * score}\n"
        for score in range(6)
    ]
    write_stsb(folder / "senteval", "dev", pairs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DIFFCSE_DATA_DIR", str(folder))
        # PyTorch's check of exports
        patched.setattr("diffcse_jax.export._installed", lambda module: False)
        patched.setattr(api, "draw_curves", str)
        yield


@pytest.fixture
def settings(tmp_path, minilm_dir) -> dict[str, Any]:
    """A run on a small model and a small text."""
    return run_settings(
        tmp_path, minilm_dir, train={"steps": STEPS}, eval={"every": 3, "metric": "stsb_spearman"}
    )


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path, settings):
    """Weights are split over them. The second has no dev data; it gets them from the first."""
    no_data = {"DIFFCSE_DATA_DIR": str(tmp_path / "nowhere")}
    processes = start_hosts(
        tmp_path / "together", settings | {"mesh.fully_sharded": True}, of_last=no_data
    )
    train_alone(tmp_path / "alone", settings)
    outputs = communicate(processes, 300)
    assert [process.returncode for process in processes] == [0, 0], outputs
    check_same(tmp_path / "together", tmp_path / "alone")
    assert (tmp_path / "together" / "export" / "model.safetensors").is_file()
    assert "exported to" in outputs[0]
    for line in (" rows (", "masked-LM head", f"step {STEPS}"):  # one host speaks
        assert line in outputs[0]
        assert line not in outputs[1]
    assert "is replaced by" not in "".join(outputs)  # the metric, for want of data


@pytest.mark.slow
def test_two_processes_fine_tune(tmp_path, minilm_dir):
    """A fault: the first one scored the start with the second, which waited for the result."""
    (tmp_path / "rows.csv").write_text(
        "text,class\n" + "".join(f"number {n},{n % 2}\n" for n in range(40))
    )
    (tmp_path / "tasks.py").write_text(TASKS.format(model=str(minilm_dir)))
    settings = {"distributed": True, "finetune.data_dir": str(tmp_path)}
    arguments = ["--config", f"{tmp_path}/tasks.py", "--workdir", f"{tmp_path}/run"]
    script = TRAIN.replace('"train"', '"finetune"')
    outputs = communicate(
        [python(script, [*arguments, *overrides(settings)], each) for each in addresses("01")], 300
    )
    assert "step 1: mine_accuracy " in outputs[0], outputs
    assert (tmp_path / "run/export/model.safetensors").is_file()


@pytest.mark.parametrize("text", ["first", "other"])
def test_processes_that_read_other_texts_are_named(text, monkeypatch):
    """A fault: they drew the rows of a batch from different texts, and said nothing."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(hosts, "decided_by_first", lambda decide: "first")
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda same: np.array([1, 1, same]))
    with (
        contextlib.nullcontext()
        if text == "first"
        else pytest.raises(DataError, match="notes: process 2 of 3 has read another text")
    ):
        require_same_text(text, "notes")


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other_and_a_third_goes_on(tmp_path, settings, capsys):
    """The model axis spans the two processes, which feed the same rows.

    A fault: a process that was lost while the others saved was reported as an error of the disk.
    """
    workdir = tmp_path / "run"
    settings |= {"difference.weight": 0.0}  # which would take long to compile
    processes = start_hosts(workdir, settings | {"mesh.model": 2}, DIE + TRAIN)
    train_alone(tmp_path / "alone", settings)
    (output, _) = communicate(processes, 300)
    assert processes[0].returncode == 1, output
    assert "2 processes take part, with 2 devices in all\n" in output
    lost = (
        f"error: process 1 of 2, on host {socket.gethostname()}, is lost: it has been silent for "
    )
    assert output.splitlines()[-1].startswith(lost), output
    assert "Traceback" not in output
    assert read_encoder(workdir / "checkpoints/3").step == 3  # without the processes that wrote it
    train_alone(workdir, settings)
    assert re.search(rf"resumed at step 3 of {STEPS} from", capsys.readouterr().err)
    check_same(workdir, tmp_path / "alone")


@pytest.fixture(scope="module")
def meetings() -> Iterator[dict[str, list[subprocess.Popen]]]:
    """Processes that meet, all at the same time because most of their time is waiting."""
    started = {
        "first hangs": meet(),
        "second hangs": meet(),
        "first is killed": meet(),
        "one fails": meet(own=(os.devnull, "/dev/full")),
    }
    started |= {
        "first decides": meet(decided=str(REPOSITORY)),
        "missing": meet(patience=1, indices="1"),
    }
    yield started
    for processes in started.values():
        end(processes)


@pytest.mark.slow
def test_a_process_that_hangs_is_named_and_ends_the_other(meetings):
    pairs = {lost: meetings[name] for lost, name in enumerate(("first hangs", "second hangs"))}
    for process in (*pairs[0], *pairs[1]):
        assert any(line == "working\n" for line in process.stdout)
    time.sleep(3)  # until each has heard the other's host
    for lost, processes in pairs.items():
        processes[lost].send_signal(signal.SIGSTOP)
    for lost, processes in pairs.items():
        output = processes[1 - lost].communicate(timeout=BOUND)[0]
        assert processes[1 - lost].returncode == 1
        named = f"error: process {lost} of 2, on host {socket.gethostname()}, is lost: it has been "
        assert output.splitlines()[-1].startswith(named), output


@pytest.mark.slow
def test_a_kill_of_the_first_process_ends_the_other_with_a_sentence(meetings):
    first, second = meetings["first is killed"]
    assert any(line == "working\n" for line in second.stdout)
    first.kill()
    output = second.communicate(timeout=BOUND)[0]
    assert second.returncode
    assert output.splitlines()[-1].startswith("error: process 1 of 2 was ended. It was killed, or")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_of_one_process_ends_the_other(meetings):
    outputs = communicate(meetings["one fails"], BOUND)
    assert all(process.returncode for process in meetings["one fails"])
    assert "error: cannot write /dev/full: No space left on device. Nothing is lost." in outputs[1]


@pytest.mark.slow
def test_what_the_first_process_refuses_ends_all(meetings):
    outputs = communicate(meetings["first decides"], BOUND)
    assert [process.returncode for process in meetings["first decides"]] == [2, 2], outputs
    assert all(
        f"error: cannot write {REPOSITORY}: Is a directory" in output for output in outputs
    ), outputs


@pytest.mark.slow
def test_a_port_that_stays_closed_is_named(meetings):
    (output,) = communicate(meetings["missing"], BOUND)
    assert meetings["missing"][0].returncode == 2
    assert output.count("\n") == 1
    assert re.match(
        r"error: after 1 s process 1 of 2 has not reached the others at 127\.0\.0\.1:\d+\. Check",
        output,
    )


def test_private_state_of_jax_is_read_in_one_place():
    assert (
        sum(
            file.read_text().count("jax._src")
            for file in (REPOSITORY / "diffcse_jax").rglob("*.py")
        )
        == 1
    )


def test_quiet_leaves_warnings(capsys, monkeypatch):
    monkeypatch.setattr(hosts, "_verbosity", "normal")
    for verbosity, printed in (("normal", ["notice", "warning: low"]), ("quiet", ["warning: low"])):
        hosts.set_verbosity(verbosity)
        hosts.log_line("notice")
        hosts.log_line("warning: low")
        assert capsys.readouterr().err.splitlines() == printed


def test_what_was_lost_is_a_warning(capsys, monkeypatch):
    monkeypatch.setattr(hosts, "_verbosity", "quiet")
    ledger = Ledger("a.csv")
    ledger.keep(2)
    ledger.make("row{s}", 2)
    ledger.leave_out(EMPTY)
    hosts.report(ledger)
    assert capsys.readouterr().err == ""
    ledger.skip_file("b.csv", "damaged")
    hosts.report(ledger)
    assert "warning: skipped 1 file: 1 damaged (b.csv)\n" in capsys.readouterr().err


def test_the_environment_numbers_the_processes(monkeypatch):
    monkeypatch.delenv("JAX_PROCESS_ID", raising=False)
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    assert hosts.process_from_environment() is None
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    for count in ("", "2", "two"):
        monkeypatch.setenv("JAX_NUM_PROCESSES", count)
        with pytest.raises(
            ConfigError, match=f"JAX_PROCESS_ID=2 and JAX_NUM_PROCESSES={count}: expected an index"
        ):
            hosts.process_from_environment()


def train_alone(workdir: Path, settings: Mapping[str, Any]) -> None:
    """Train in this process, on one device, and resume if the run has begun."""
    api.run(configuration(CONFIG, dict(settings) | {"mesh.data": 1})[1], workdir)


def check_same(workdir: Path, expected: Path) -> None:
    """Both runs have the same losses and dev scores, step by step."""
    rows, rows_expected = read_metrics(workdir), read_metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in rows_expected]
    for row, row_expected in zip(rows, rows_expected, strict=True):
        name = "loss" if "loss" in row_expected else "dev/stsb_spearman"
        assert row[name] == pytest.approx(row_expected[name], rel=1e-5)


def start_hosts(
    workdir: Path,
    settings: Mapping[str, Any],
    script: str = TRAIN,
    of_last: Mapping[str, str] | None = None,
) -> list[subprocess.Popen]:
    """Start the two processes of a run, the second with further environment variables."""
    first, second = addresses("01")
    arguments = [
        "--config",
        CONFIG,
        "--workdir",
        str(workdir),
        *overrides({**settings, "distributed": True}),
    ]
    return [python(script, arguments, variables) for variables in (first, second | (of_last or {}))]


def meet(
    *,
    patience: int = BOUND,
    decided: str = os.devnull,
    own: Sequence[str] = NULL,
    indices: str = "01",
):
    """Start processes that meet in so many seconds. The first writes `decided`, and each one a file of its `own`."""
    environments = zip(own, addresses(indices), strict=False)
    return [
        python(MEET, [str(patience), decided, file], variables) for file, variables in environments
    ]


def python(script: str, arguments: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=REPOSITORY, env=environment("", **variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def addresses(indices: str) -> list[dict[str, str]]:
    """Return the environment of each of two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    return [common | {"JAX_PROCESS_ID": index} for index in indices]


def communicate(processes: list[subprocess.Popen], seconds: float) -> list[str]:
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        end(processes)


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.communicate()
