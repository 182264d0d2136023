"""Reading compiled programs, and the train step as the TPU's own compiler sees it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_model import hf_config_of
from tiny_run import overrides

from benchmarks.hlo import Array, Program
from diffcse_jax.io import write_json

# A loop of three turns, a conditional, a fused matrix product, a collective: XLA's text, shortened.
TEXT = """\
HloModule jit_step
%fused (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %conv = bf16[8,4]{1,0} convolution(%p, %p), metadata={op_name="jit(step)/attention/dot_general"}
}

%body (state: f32[4]) -> f32[4] {
  %state = f32[4]{0} parameter(0)
  ROOT %noise = f32[4]{0} fusion(%state), calls=%bits, metadata={op_name="jit(step)/dropout/mul"}, backend_config={"window_config":{"estimated_cycles":"10"}}
}

%bits (p: f32[4]) -> f32[4] {
  ROOT %mixed = u32[4]{0} xor(%p, %p)
}

%dear (p: f32[4]) -> f32[4] {
  ROOT %copy = f32[4]{0} copy(%p), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %product = bf16[8,4]{1,0:T(8,128)(2,1)} fusion(%x), calls=%fused, metadata={op_name="jit(step)/attention/add"}, backend_config={"estimated_cycles":"100"}
  %loop = f32[4]{0} while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %choice = f32[4]{0} conditional(%x, %x, %x), branch_computations={%bits, %dear}
  ROOT %sum = (f32[12,64]{1,0}, bf16[]) all-reduce(%x), channel_id=7, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
}
"""


def test_cycles_and_collectives_are_read_from_the_program():
    assert Program(TEXT).cycles() == {
        "matrix products": 100,
        "random bits": 30,
        "copies and casts": 7,
    }
    (dearest,) = Program(TEXT).dearest(1)
    assert (dearest["cycles"], dearest["times"], dearest["result"]) == (100, 1, "bf16[8,4]")
    found = [(one.kind, one.bytes, one.arrays) for one in Program(TEXT).collectives()]
    assert found == [("all-reduce", 12 * 64 * 4 + 2, (Array("f32", (12, 64)), Array("bf16", ())))]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("libtpu") is None,
    reason="the TPU's compiler, libtpu (the extra `compile`), is missing",
)
@pytest.mark.parametrize("fully_sharded", [False, True])
def test_the_step_of_several_chips_moves_gradients_parameters_and_sentence_vectors(
    fully_sharded, tmp_path
):
    """Many objectives for four chips, as small as MiniLM's blocks allow: no token or activation leaves its chip."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
    }
    write_json(tmp_path / "config.json", hf_config_of("bert", blocks=1) | sizes)
    output = tmp_path / "record.json"
    options = {
        "model.name_or_path": tmp_path,
        "generator.name_or_path": tmp_path,
        "consistency.weight": 1.0,
    }
    options |= {
        "distillation.weight": 1.0,
        "distillation.teachers": ("start",),
        "mesh.fully_sharded": fully_sharded,
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.compile_for",
        "--target",
        "v5e:2x2",
        "--output",
        str(output),
    ]
    command += ["--config", "diffcse_simcsepp_base", *overrides(options)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[1])

    record = json.loads(output.read_text())
    assert record["fits"]
    assert record["estimated_cycles"]["total"] > 100_000
    moved = record["collectives"]
    assert {entry["kind"] for entry in moved} <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert {entry["carries"] for entry in moved}.isdisjoint({"tokens", "activations"})
    gathered = {entry["carries"] for entry in moved if entry["kind"] == "all-gather"}
    assert gathered <= {"parameters", "sentence vectors", "counts"}
    trained = 4 * record["trained_parameters"]
    of_gradients = sum(entry["bytes"] for entry in moved if "gradients" in entry["carries"])
    assert trained * 0.9 <= of_gradients <= 1.2 * trained
