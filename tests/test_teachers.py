"""Teachers from checkpoints: what they are pooled by, and those that are refused."""

import shutil
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import write_tiny_model
from tiny_networks import ENCODER, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.batch import TokenRows
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models import sentence_folder
from diffcse_jax.models.heads import HeadLayer, RecordedHead
from diffcse_jax.models.hf import read
from diffcse_jax.models.layers import bind, definition
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.run_folder.start import open_run
from diffcse_jax.training import networks

SENTENCES = ["A dog runs.", "Cats sleep all day long, and at night they do not."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, minilm_dir) -> Path:
    """A folder that records its pooler, with a head and a cut, one that does not, and one with a chain of modules."""
    folder = tmp_path_factory.mktemp("teachers")
    model = read(str(write_tiny_model(folder / "recorded", minilm_dir)))
    sizes = model.config.num_blocks, model.config.hidden_size
    sentence_folder.write(
        folder / "recorded", RecordedPooler("cls", model.pooler, truncate_dim=7), *sizes
    )
    write_tiny_model(folder / "bare", minilm_dir, family="distilbert", pooler=False)
    write_tiny_model(folder / "chain", minilm_dir)
    gelu = "torch.nn.modules.activation.GELU"
    layers = HeadLayer("Dense", 32, 8, bias=False, activation_function=gelu), HeadLayer("Normalize")
    kernel = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    head = RecordedHead("avg+max", layers, {"layers.0.linear.kernel": kernel})
    sentence_folder.write(folder / "chain", RecordedPooler("avg+max", sentence_head=head), *sizes)
    return folder


def loaded(minilm_dir: Path, *names: Path, max_length: int = 32, **options) -> tuple[dict, dict]:
    distillation = {"weight": 1.0, "teachers": tuple(map(str, names))} | options
    config = config_of({"distillation": distillation, "data": {"max_length": max_length}})
    return networks.load_teachers(config, load_tokenizer(minilm_dir))


def test_a_teacher_gives_the_vectors_of_its_sentence_encoder(folders, minilm_dir):
    names = [folders / name for name in ("recorded", "bare", "chain")]
    teachers, _ = loaded(minilm_dir, *names, poolers=("", "avg_first_last", ""))
    encoded = load_tokenizer(minilm_dir)(SENTENCES, padding=True)
    rows = TokenRows(
        *(jnp.array(encoded[name], jnp.int32) for name in ("input_ids", "attention_mask"))
    )
    for name, pooler in zip(names, (None, "avg_first_last", None), strict=True):
        teacher = teachers[str(name)]
        vectors = bind(definition(teacher.build), teacher.params)(rows)
        expected = SentenceEncoder.from_pretrained(name, pooler=pooler).encode(SENTENCES)
        np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_does_not_fit_is_refused(folders, minilm_dir):
    with pytest.raises(
        CheckpointError,
        match=r"distillation\.poolers: .*bare does not record its pooler. Choose one",
    ):
        loaded(minilm_dir, folders / "bare")
    with pytest.raises(ConfigError, match=r"data\.max_length=64: "):
        loaded(minilm_dir, folders / "recorded", max_length=64)
    other = shutil.copytree(folders / "recorded", folders / "other")
    text = (other / "tokenizer.json").read_text().replace('"dog":', '"dig":', 1)
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(
        CheckpointError, match="differ in their vocabulary \\(1 of 30522 tokens have other ids\\)"
    ):
        loaded(minilm_dir, other)


def test_a_run_does_not_go_on_with_other_teachers(folders, minilm_dir, tmp_path):
    name = str(folders / "recorded")
    config = config_of({"distillation": {"weight": 1.0, "teachers": (name, "start")}})

    def start(**poolers) -> None:
        _, digests = loaded(minilm_dir, name, **poolers)
        open_run(
            tmp_path, config, ENCODER, mock.Mock(spec=PreTrainedTokenizerFast), None, others=digests
        )

    start()
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    start()
    with (
        pytest.warns(UserWarning, match="trained with the pooler"),
        pytest.raises(ConfigError) as refused,
    ):
        start(poolers=("avg",))  # the digest is of all that determines the vectors
    assert "distillation.teachers=(" in str(refused.value)
    assert "have changed since the run" in str(refused.value)
