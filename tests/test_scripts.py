"""The launch scripts pass on their arguments; the cluster's commands are stand-ins."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
OVERRIDE = "--config.model.hidden_dropout=(0.1, 0.2)"


def stand_in(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def launch(tmp_path):
    """Runs a script with stand-ins on the PATH; gives what the stand-in `python` was started with, line by line."""
    calls = tmp_path / "calls"
    stand_ins = {
        "python": f'printf "%s\\n" "${{JAX_PROCESS_ID-}}/${{JAX_NUM_PROCESSES-}}" "$@" >> {calls}',
        "srun": 'while [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=1 SLURM_NTASKS=4 "$@"',
        "gcloud": 'for last; do :; done\n[[ $last == --command=*train.py* ]] || exit 0\neval "${last#--command=}"',
    }
    stand_ins["diffcse"] = stand_ins["python"]
    for name, body in stand_ins.items():
        stand_in(tmp_path / name, body)
    (tmp_path / "diffcse_jax").mkdir()

    def launch(script, *arguments, **environment):
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run(
            [SCRIPTS / script, *arguments],
            env=os.environ | {"PATH": path} | environment,
            cwd=tmp_path,
            check=True,
        )
        return calls.read_text().splitlines()

    return launch


def test_slurm(launch):
    expected = [
        "/",
        "train.py",
        "--config",
        "configs/simcse_base.py",
        "--config.distributed=True",
        OVERRIDE,
    ]
    assert launch("slurm.sh", "configs/simcse_base.py", OVERRIDE) == expected


def test_slurm_queues_the_job_again_when_its_time_is_up(launch, tmp_path):
    """Training is told to end, and the job goes back to the queue only when it has saved."""
    calls = tmp_path / "calls"
    saving = f"trap 'sleep 0.5; echo saved >> {calls}; exit 130' TERM"
    stand_in(tmp_path / "srun", f'{saving}\nkill -USR1 "$PPID"\nwhile true; do sleep 0.1; done')
    stand_in(tmp_path / "scontrol", f'echo "$@" >> {calls}')
    assert launch("slurm.sh", "configs/simcse_base.py", SLURM_JOB_ID="17") == [
        "saved",
        "requeue 17",
    ]


def test_tpu_vm(launch):
    called = launch(
        "tpu_vm.sh", "configs/simcse_base.py", OVERRIDE, TPU="slice", ZONE="zone", RUNS="/mnt/runs"
    )
    expected = [
        "/",
        "train.py",
        "--config",
        "configs/simcse_base.py",
        "--workdir",
        "/mnt/runs/simcse_base",
    ]
    assert called[-8:] == [*expected, "--config.distributed=True", OVERRIDE]
