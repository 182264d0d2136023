import numpy as np
import pytest
from test_sts import TableEncoder, write_stsb

from diffcse_jax.evaluation import suite
from diffcse_jax.evaluation.guard import AGREEMENT, STSB, build_guard, general_sentences
from diffcse_jax.groups import EvalConfig


def encoder_of(vectors) -> TableEncoder:
    return TableEncoder(dict(zip(general_sentences(), vectors, strict=True)))


def test_general_sentences_are_few_and_different():
    sentences = general_sentences()
    assert 100 <= len(set(sentences)) == len(sentences) <= 400
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


def test_agreement_is_that_of_similarities(monkeypatch):
    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)
    monkeypatch.setattr(suite, "hub_folder", lambda: pytest.fail("a guard fetches nothing"))
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(len(general_sentences()), 8))
    rotation, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    guard = build_guard(EvalConfig(), lambda: encoder_of(vectors))
    assert guard.name == AGREEMENT
    assert guard(encoder_of(vectors @ rotation * 3)) == pytest.approx(100, abs=0.01)
    near, far = (guard(encoder_of(vectors + rng.normal(0, noise, vectors.shape))) for noise in (0.1, 1.0))
    assert 99 > near > far > 20
    assert abs(guard(encoder_of(rng.normal(size=vectors.shape)))) < 5


def test_stsb_takes_its_place_where_it_is_found(tmp_path):
    rows = [f"-\t-\t-\t-\t{score}\ta\t{other}\n" for score, other in ((5, "b"), (1, "c"), (3, "d"))]
    write_stsb(tmp_path, "dev", rows)
    encoder = TableEncoder(
        {name: [np.cos(x), np.sin(x)] for name, x in {"a": 0.0, "b": 0.1, "c": 1.0, "d": 0.5}.items()}
    )
    guard = build_guard(EvalConfig(data_dir=str(tmp_path)), lambda: pytest.fail("the start is not needed"))
    assert guard.name == STSB
    assert guard(encoder) == pytest.approx(100)
