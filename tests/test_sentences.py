import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.data.sentences import paragraphs, sentences_of, split_sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It reads a file. It writes one!  Does it work?", ["It reads a file.", "It writes one!", "Does it work?"]),
        ("See Smith et al. for more, e.g. Fig. 3 there.", ["See Smith et al. for more, e.g. Fig. 3 there."]),
        ("He said (at last.) Then he left the room.", ["He said (at last.)", "Then he left the room."]),
        ("Written by Foo Inc. in the year 1999 or so.", ["Written by Foo Inc. in the year 1999 or so."]),
        ("a first sentence . a second sentence .", ["a first sentence .", "a second sentence ."]),
        ("1. Install the package. 2. Run it now.", ["1. Install the package.", "2. Run it now."]),
        ("Everything is done. Yes.", ["Everything is done. Yes."]),
        (
            "\u3053\u308c\u306f\u6700\u521d\u306e\u6587\u3067\u3059\u3088\u306d\u3002" * 2,
            ["\u3053\u308c\u306f\u6700\u521d\u306e\u6587\u3067\u3059\u3088\u306d\u3002"] * 2,
        ),
        ("no end", ["no end"]),
        ("", []),
    ],
)
def test_where_sentences_end(text, expected):
    assert split_sentences(text) == expected


@given(st.text("aB. ?\u3002)\n", max_size=80))
def test_splitting_loses_no_text(text):
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_lines_broken_to_fit_a_width_are_joined():
    lines = [
        "The quick brown fox jumps over the lazy dog, and then it",
        "goes home to its den. There it sleeps until the sun has",
        "come up.",
    ]
    title, items = "A title of its own", ["- the first item of a list", "- the second one, which is longer"]
    assert list(paragraphs([title, "", *lines, "", *items])) == [title, " ".join(lines), *items]


def test_a_sentence_a_line_stays_that():
    lines = ["This line is a sentence, and rather long it is.", "This one is, too, and about as long as that.", "12"]
    assert sentences_of([*lines, "---"]) == lines
