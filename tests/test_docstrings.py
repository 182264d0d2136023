"""Docstrings of installed packages: their prose, and which functions are held out."""

import pytest

from diffcse_jax.config import DataConfig
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.documents import docstrings

NUMPY_STYLE = """
    Compute the ``median`` along the specified *axis*.  The result of `numpy.median` is exact.

    Returns the median of the array elements, see :func:`mean <numpy.mean>`. It is robust, e.g. against outliers.

    Parameters
    ----------
    a : array_like
        Input array or object that can be converted to an array.

    Notes
    -----
    Given a vector of values, the median is its middle value [1]_. The method is described in [2]_.
    It is the value :math:`m` for which half of the values are larger.

    .. versionadded:: 1.0
       This paragraph is part of a directive and does not count.

    - This is an item of a list.
"""

GOOGLE_STYLE = """Opens the file at the path.

    Files are opened for reading in binary mode
    unless told otherwise by the caller.

    Args:
      path: The path of the file to open.

    set_mode(path) is called when x_y = 3 for now.
    """


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (NUMPY_STYLE, ["Compute the median along the specified axis.",
                       "Returns the median of the array elements, see mean.", "It is robust, e.g. against outliers.",
                       "Given a vector of values, the median is its middle value."]),
        (GOOGLE_STYLE, ["Opens the file at the path.",
                        "Files are opened for reading in binary mode unless told otherwise by the caller."]),
        ("Too short a one.", []),
        ("This has no end of a sentence", []),
        (" ".join(["Word"] * 60) + ".", [" ".join(["Word"] * 60) + "."]),
        (" ".join(["Word"] * 61) + ".", []),
        ("Is this a short question? Yes, it is one, indeed!", ["Is this a short question?", "Yes, it is one, indeed!"]),
    ],
)  # fmt: skip
def test_sentences_are_prose_without_markup(docstring, expected):
    assert [*filter(docstrings.is_english, docstrings.spans_of(docstring))] == expected


FUNCTION = '''
def function_{0}():
    """Compute the value of function {0}.

    The value of number {0} is large for most of the arguments. This sentence occurs in all docstrings here.
    """
    raise RuntimeError("this must not run")
'''


def test_functions_are_either_in_the_corpus_or_held_out(tmp_path, monkeypatch):
    """200 functions stand for the installed packages."""
    (tmp_path / "module.py").write_text("".join(map(FUNCTION.format, range(200))) + "\n1 / 0\n")
    (tmp_path / "broken.py").write_text("def (")
    files = [("package.broken", tmp_path / "broken.py"), ("package.module", tmp_path / "module.py")]
    monkeypatch.setattr(docstrings, "_source_files", lambda: iter(files))
    docstrings._docstrings.cache_clear()
    pairs = docstrings.docstring_pairs()
    corpus = [*open_corpus(DataConfig(train_file="docstrings")).first_texts()]
    pairs_of_documents = open_corpus(DataConfig(train_file="docstrings", pairs="lead"))
    leads = [row.texts for row in pairs_of_documents.rows()]
    assert docstrings.docstring_pairs(3) == pairs[:3]
    docstrings._docstrings.cache_clear()
    assert 5 <= len(pairs) <= 40  # 20 expected, standard deviation 4
    summaries = [f"Compute the value of function {number}." for number in range(200)]
    values = [
        f"The value of number {number} is large for most of the arguments." for number in range(200)
    ]
    repeated = "This sentence occurs in all docstrings here."
    held_out = {summaries.index(summary) for summary, _ in pairs}
    assert dict(pairs) == {summaries[number]: f"{values[number]} {repeated}" for number in held_out}
    trained = [number for number in range(200) if number not in held_out]
    assert {*corpus} == {text for number in trained for text in (summaries[number], values[number])}
    assert sorted(leads) == sorted((summaries[number], values[number]) for number in trained)
