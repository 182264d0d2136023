"""The run's own generator: its head is trained, stored, and read again."""

import itertools
import json
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import write_smallest_model
from tiny_networks import ENCODER, config_of

from diffcse_jax.batch import Batch, Vocabulary
from diffcse_jax.config import DataConfig
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import build_or_open
from diffcse_jax.errors import CheckpointError, ConfigError, Interrupted
from diffcse_jax.hosts import StopRequest
from diffcse_jax.models import layers
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.training import generator
from diffcse_jax.training.generator import (
    make_masked_lm_training,
    own_generator,
    with_fitting_head,
)
from diffcse_jax.training.sharding import make_mesh

WORDS = Vocabulary(size=60, mask_id=4, special_ids=(0, 1, 2, 3, 4))  # of `write_smallest_model`


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Sentences that repeat one word, which a head can learn to read off the neighbours. All have one length."""
    folder = tmp_path_factory.mktemp("corpus")
    words = [f"w{index}" for index in range(10)]
    tokenizer = load_tokenizer(write_smallest_model(folder, words))
    chosen = np.random.default_rng(0).choice(words, 400)
    (folder / "text.txt").write_text("\n".join(" ".join([word] * 6) for word in chosen))
    return build_or_open(
        open_corpus(DataConfig(train_file=str(folder / "text.txt"))),
        tokenizer,
        10,
        folder / "cache",
    )


def config_with(steps: int):
    options = {"head_steps": steps, "head_batch_size": 16, "head_learning_rate": 0.02}
    return config_of({"generator": options, "mesh": {"data": 1}})


@pytest.mark.slow
def test_training_the_head_makes_it_guess_better_and_keeps_it(store, tmp_path, monkeypatch, capfd):
    config = config_with(60)
    first = own_generator(
        config, ENCODER, store, WORDS, mesh=make_mesh(config), workdir=tmp_path, text=store.name
    )
    scores = json.loads((tmp_path / "generator" / "report.json").read_text())
    assert scores["perplexity"] < 0.5 * WORDS.size  # of a head that knows nothing
    assert scores["accuracy"] > 20.0  # one of ten words by chance
    assert f"perplexity {scores['perplexity']:.0f}, 60 steps" in capfd.readouterr().err
    monkeypatch.setattr(generator, "train_masked_lm_head", None)  # not called again
    second = own_generator(
        config, ENCODER, store, WORDS, mesh=make_mesh(config), workdir=tmp_path, text=store.name
    )
    jax.tree.map(np.testing.assert_array_equal, first.mlm_head, second.mlm_head)
    assert first.transformer is ENCODER.transformer
    assert "using the masked-LM head" in capfd.readouterr().err


@pytest.mark.slow
def test_an_interrupted_head_is_the_same_as_an_uninterrupted_one(
    store, tmp_path, monkeypatch, capfd
):
    config = config_with(9)
    monkeypatch.setattr(generator, "SAVED_EVERY", 4)
    monkeypatch.setattr(generator, "WORTH_TIMING", 9)

    def own(folder: str):
        return own_generator(
            config,
            ENCODER,
            store,
            WORDS,
            mesh=make_mesh(config),
            workdir=tmp_path / folder,
            text=store.name,
        )

    def after_steps(count: int, stop):
        agreed, steps = StopRequest.is_agreed, itertools.count(1)

        def is_agreed(self, *, may_ask: bool) -> bool:
            if next(steps) == count:
                stop()
            return agreed(self, may_ask=may_ask)

        return is_agreed

    whole = own("whole")
    assert not [*(tmp_path / "whole/generator").glob("training*")]
    assert "training the masked-LM head takes about 1 s" in capfd.readouterr().err
    # A signal after step 3 loses nothing; a kill three steps later loses what follows step 4.
    ask = after_steps(3, lambda: signal.raise_signal(signal.SIGTERM))
    for is_agreed, error in ((ask, Interrupted), (after_steps(3, sys.exit), SystemExit)):
        with monkeypatch.context() as patched:
            patched.setattr(StopRequest, "is_agreed", is_agreed)
            with pytest.raises(error):
                own("stopped")
    assert "resuming the masked-LM head after step 3" in capfd.readouterr().err
    resumed = own("stopped")
    assert "resuming the masked-LM head after step 4" in capfd.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, whole.mlm_head, resumed.mlm_head)
    reports = [
        json.loads((tmp_path / name / "generator/report.json").read_text())
        for name in ("whole", "stopped")
    ]
    for score in ("accuracy", "perplexity", "steps"):
        assert reports[0][score] == reports[1][score]
    assert reports[0]["step_seconds"] > 0 == reports[1]["step_seconds"]
    assert not [*(tmp_path / "stopped/generator").glob("training*")]


def test_a_head_reads_all_that_is_edited():
    config = config_with(1)
    initial, loss, _ = make_masked_lm_training(config, ENCODER.config, WORDS, make_mesh(config))
    head, _ = initial()
    frozen = jax.tree.map(jnp.asarray, layers.prefixed(ENCODER.transformer, "transformer"))
    ids = np.random.default_rng(0).integers(5, 50, size=(2, 16, 2, 10), dtype=np.int32)
    ids[1, :, 0] = ids[0, :, 0]  # other second views
    first, second = (
        loss(head, frozen, Batch(jnp.array(each), jnp.ones_like(each)), jax.random.key(1))[0]
        for each in ids
    )
    assert first != second


def test_a_short_run_trains_the_head_for_fewer_steps():
    config = config_with(2000)
    assert with_fitting_head(config, 20).generator.head_steps == 100
    assert with_fitting_head(config, 400).generator == config.generator
    assert with_fitting_head(config_with(3), 1).generator.head_steps == 3


@pytest.fixture
def own(store, tmp_path, monkeypatch):
    """`own_generator` of a run whose head "trains" at once: it counts how often, and gives this bias."""
    config, trained = config_with(2), []

    def own(bias: float = 1.0, text: str = store.name) -> list:
        def train_masked_lm_head(*_, **__):
            trained.append(bias)
            return {"bias": np.array([1.0, bias], np.float32)}, {
                "accuracy": 1.0,
                "perplexity": 2.0,
                "steps": 2,
            }

        monkeypatch.setattr(generator, "train_masked_lm_head", train_masked_lm_head)
        own_generator(
            config, ENCODER, store, WORDS, mesh=make_mesh(config), workdir=tmp_path, text=text
        )
        return trained

    return own


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("report.json", b'{"accuracy": 1'),
        ("mlm_head.safetensors", b"12345"),
        ("mlm_head.safetensors", None),
    ],
)
def test_a_damaged_head_is_named(own, tmp_path, name, content):
    own()
    path = tmp_path / "generator" / name
    path.write_bytes(content or path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(
        CheckpointError, match=r"generator.*\. Remove .*generator to train the head again"
    ):
        own()


def test_a_head_of_another_text_is_trained_again(own, tmp_path, capfd):
    """A fault: a text that was corrected before the first checkpoint kept the old head."""
    own()
    assert len(own()) == 1
    assert len(own(text="corrected")) == 2
    assert "the text has changed" in capfd.readouterr().err
    (tmp_path / "checkpoints/3").mkdir(parents=True)  # which the checkpoint will refuse
    assert len(own(text="another")) == 2


def test_a_head_that_is_not_finite_is_not_used(own, tmp_path):
    with pytest.raises(
        ConfigError, match=r"diverged \(bias is NaN.*Lower generator\.head_learning_rate=0\.02"
    ):
        own(np.nan)
    assert not (tmp_path / "generator/report.json").exists()


def test_a_head_killed_before_its_report_is_trained_again(own, tmp_path, monkeypatch):
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.name == "report.json":
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            own()
    assert not (tmp_path / "generator/report.json").exists()
    own()
    assert len(own()) == 2
