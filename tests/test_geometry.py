import numpy as np
import pytest
from test_sts import TableEncoder, write_stsb

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import Settings
from diffcse_jax.evaluation.retrieval import STSB_RETRIEVAL
from diffcse_jax.evaluation.sts import BINS, GEOMETRY


def stsb_row(score, first, second):
    return f"-\t-\t-\t-\t{score}\t{first}\t{second}\n"


ROWS = [
    stsb_row(5.0, "a", "b"),
    stsb_row(4.2, "c", "d"),
    stsb_row(5.0, "e", "f"),
    stsb_row(4.0, "a", "f"),
    stsb_row(0.0, "b", "e"),
    stsb_row(0.5, "d", "e"),
]


@pytest.fixture
def vectors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=5).astype(np.float32) for name in "abcdef"}


def test_measures_follow_their_definitions(tmp_path, vectors):
    write_stsb(tmp_path, "test", ROWS)
    results = GEOMETRY.run(TableEncoder(vectors), tmp_path)
    units = {name: vector / np.linalg.norm(vector) for name, vector in vectors.items()}
    positives = [("a", "b"), ("c", "d"), ("e", "f")]  # rated above 4
    alignment = np.mean([np.sum((units[u] - units[v]) ** 2) for u, v in positives])
    kernel = [np.exp(-2 * np.sum((units[u] - units[v]) ** 2)) for u in units for v in units if u != v]
    assert results["alignment"] == pytest.approx(alignment, rel=1e-5)
    assert results["uniformity"] == pytest.approx(np.log(np.mean(kernel)), rel=1e-4)
    values = np.linalg.svd(np.stack([*vectors.values()]), compute_uv=False)
    np.testing.assert_allclose(results["singular_values"], values / values[0], rtol=1e-5)
    groups = results["similarity_by_rating"]
    assert [group["n"] for group in groups] == [2, 0, 0, 1, 3]
    assert (groups[3]["mean"], groups[3]["std"]) == pytest.approx((units["a"] @ units["f"], 0))
    assert groups[1]["mean"] is None
    width = BINS[1] - BINS[0]
    assert [sum(group["density"]) * width for group in groups] == pytest.approx([1, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (stsb_row(4.0, "a", "b"), r"sts-test\.csv: geometry needs pairs of STS-B rated above 4"),
        (stsb_row(5.0, "a", "a"), "geometry needs .* and different sentences"),
    ],
)
def test_data_without_a_geometry_is_refused(tmp_path, vectors, row, message):
    write_stsb(tmp_path, "test", [row])
    with pytest.raises(DataError, match=message):
        GEOMETRY.run(TableEncoder(vectors), tmp_path)


def test_retrieval_ranks_the_other_sentence_among_all_but_the_query(tmp_path, vectors):
    vectors["b"] = vectors["a"] * 3  # found at once
    vectors["f"] = -vectors["e"]  # found last
    write_stsb(tmp_path, "test", ROWS)
    (tmp_path / "queries.txt").write_text("a\n")
    settings = Settings(queries=tmp_path / "queries.txt", top_k=2)
    results = STSB_RETRIEVAL.run(TableEncoder(vectors), tmp_path, settings)
    assert (results["n"], results["recall@1"], results["recall@5"], results["recall@10"]) == (2, 0, 50, 50)
    # "a" stands in the split twice, so its copy is as near as its pair: their mean rank is above 1.
    ((hit, cosine), (other, _)) = results["examples"][0]["hits"]
    assert ({hit, other}, cosine) == ({"a", "b"}, pytest.approx(1))
