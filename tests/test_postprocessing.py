import jax.numpy as jnp
import numpy as np
import pytest
from test_sts import TableEncoder

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import backends as postprocessing
from diffcse_jax.losses.decorrelation import dimension_contrast


@pytest.fixture
def vectors():
    """Correlated dimensions of different scale, off centre."""
    generator = np.random.default_rng(0)
    mixing = generator.normal(size=(6, 6)) * np.array([5, 3, 2, 1, 0.5, 0.2])
    return (generator.normal(size=(400, 6)) @ mixing.T + 3).astype(np.float32)


@pytest.mark.parametrize(
    ("method", "rows", "message"),
    [
        ("whitening", 3, "3 different sentences span 2 dimensions, not 6"),
        ("dcl", 1, "1 different sentences leave"),
    ],
)
def test_too_few_sentences_are_refused(method, rows, message, vectors, tmp_path):
    (tmp_path / "few.txt").write_text("".join(f"{row}\n" for row in range(rows)))
    encoder = TableEncoder({str(row): vectors[row] for row in range(rows)})
    with pytest.raises(DataError, match=f"--post {method}:{tmp_path}/few.txt: {message}"):
        postprocessing.post_process(encoder, f"{method}:{tmp_path}/few.txt")


@pytest.mark.parametrize("method", ["whitening", "dcl"])
def test_an_encoder_is_fitted_on_a_file(method, vectors, tmp_path):
    text = [f"sentence {row}" for row in range(len(vectors))]
    encoder = TableEncoder(dict(zip(text, vectors, strict=True)))
    (tmp_path / "text.txt").write_text("\n".join([*text, text[0]]) + "\n")
    fitted = postprocessing.post_process(encoder, f"{method}:{tmp_path}/text.txt")
    assert encoder.asked == text
    assert fitted.pooler == "avg"
    mapped = fitted.encode(text)
    assert mapped.dtype == np.float32
    np.testing.assert_allclose(mapped.std(axis=0), 1, rtol=1e-3)
    np.testing.assert_allclose(mapped.mean(axis=0), 0, atol=1e-3)
    if method == "whitening":
        np.testing.assert_allclose(np.cov(mapped.T, bias=True), np.eye(6), atol=1e-3)
        return
    before, after = ((np.corrcoef(part.T) - np.eye(6)).max() for part in (vectors, mapped))
    assert before > 0.9
    assert after < 0.7
    parts = (jnp.asarray(part) for part in (vectors, mapped))
    losses = [
        dimension_contrast(part, part, temperature=0.05, form="code").mean() for part in parts
    ]
    assert losses[0] > 100 * losses[1]
