import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import expand_groups, missing_files, needs_folder, own_pairs
from diffcse_jax.evaluation.own_pairs import average_precision, own_task


class Angles:
    """Words on a circle: one letter, one direction."""

    pooler, truncate_dim = "avg", None

    def encode(self, sentences, batch_size=64):
        angles = np.array([ord(sentence[0]) - ord("a") for sentence in sentences], np.float32) / 20
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1).filter(lambda pairs: any(p[1] for p in pairs)))
def test_average_precision_is_the_mean_over_positives(pairs):
    similarities, labels = (np.array(column) for column in zip(*pairs, strict=True))
    expected = [labels[similarities >= similarity].mean() for similarity in similarities[labels]]
    assert average_precision(similarities.astype(np.float32), labels.astype(int)) == pytest.approx(np.mean(expected))


def test_retrieval_and_duplicates_of_files(tmp_path):
    pairs, labelled = tmp_path / "a/test.tsv", tmp_path / "quora.tsv"
    pairs.parent.mkdir()
    pairs.write_text("a\tb\nd\tc\nk\tk\n")
    labelled.write_text("a\tb\t1\na\tz\t0\nc\th\t1\nc\te\t0.0\n")
    names = [f"pairs_retrieval:{pairs}", f"duplicates:{labelled}"]
    assert expand_groups([*names, names[0]], "test") == names
    assert not needs_folder(names)
    assert needs_folder([*names, "STS12"])
    assert [own_pairs.title(name) for name in names] == ["pairs_retrieval a/test", f"duplicates {tmp_path.name}/quora"]
    assert own_pairs.title("STS12") == "STS12"
    retrieval, duplicates = (own_task(name).run(Angles(), "test") for name in names)
    assert retrieval == pytest.approx({"mrr": 100, "recall@1": 100, "recall@5": 100, "recall@10": 100, "n": 3})
    assert duplicates == pytest.approx({"average_precision": 100 * (1 + 2 / 3) / 2, "n": 4})  # a-b, c-e, c-h, a-z
    gone = own_task(f"duplicates:{tmp_path}/gone.tsv")
    assert missing_files(gone, "test") == [tmp_path / "gone.tsv"]
    assert not missing_files(own_task("pairs_retrieval:docstrings"), "test")


@pytest.mark.parametrize("content", ["a\tb\t1\n", "a\tb\t0.5\na\tb\t1\n"])
def test_labels_are_checked(content, tmp_path):
    (tmp_path / "pairs.tsv").write_text(content)
    with pytest.raises(DataError, match=r"pairs\.tsv: duplicates needs labels of 1"):
        own_task(f"duplicates:{tmp_path}/pairs.tsv").run(Angles(), "test")


@pytest.mark.parametrize("name", ["pairs:file", "pairs_retrieval:", "duplicates"])
def test_other_names_are_no_files(name):
    with pytest.raises(ConfigError, match=r"unknown task .* duplicates:FILE"):
        expand_groups([name], "test")
