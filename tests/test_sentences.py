"""Sentences, paragraphs and words of text in any script."""

import pytest
from growth import assert_linear
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.documents import sentences as rules
from diffcse_jax.documents.docstrings import spans_of
from diffcse_jax.documents.sentences import canonical, paragraphs, sentences_of, split_sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It reads a file. It writes one!  Does it work?", ["It reads a file.", "It writes one!", "Does it work?"]),
        ("See Smith et al. for more, e.g. Fig. 3 there.", ["See Smith et al. for more, e.g. Fig. 3 there."]),
        ("He said (at last.) Then he left the room.", ["He said (at last.)", "Then he left the room."]),
        ("Written by Foo Inc. in the year 1999 or so.", ["Written by Foo Inc. in the year 1999 or so."]),
        ("a first sentence . a second sentence .", ["a first sentence .", "a second sentence ."]),
        ("1. Install the package. 2. Run it now.", ["1. Install the package.", "2. Run it now."]),
        ("\u3053\u308c\u306f\u6700\u521d\u306e\u6587\u3067\u3059\u3088\u306d\u3002" * 2,
         ["\u3053\u308c\u306f\u6700\u521d\u306e\u6587\u3067\u3059\u3088\u306d\u3002"] * 2),
        ("Am 3. Mai kommt z. B. Dr. Maier, Nr. 5 von ca. 10. Danach ist Schluss.",
         ["Am 3. Mai kommt z. B. Dr. Maier, Nr. 5 von ca. 10.", "Danach ist Schluss."]),
        ("\u201eDas ist das Ende.\u201c Dann ging er heim.", ["\u201eDas ist das Ende.\u201c", "Dann ging er heim."]),
        ("Does it support postscript ? if so try it.", ["Does it support postscript ?", "if so try it."]),
        ("you need an Ubuntu disc. then you build it.", ["you need an Ubuntu disc.", "then you build it."]),
        ("malloc() gets memory. free() frees it. Both are fast.",
         ["malloc() gets memory. free() frees it.", "Both are fast."]),
        ("\u6587" * 9 + "\u3002\u306f\u3044\u3002", ["\u6587" * 9 + "\u3002\u306f\u3044\u3002"]),
        ("", []),
        *((sentence * 3, [sentence.strip()] * 3) for sentence in (
            # Arabic, with spaces
            "\u0645\u0627 \u0647\u0630\u0627 \u0627\u0644\u0634\u064a\u0621\u061f ",
            "\u092f\u0939 \u092a\u0939\u0932\u093e \u0935\u093e\u0915\u094d\u092f \u0964",  # Hindi
            "\u4ed6\u4eca\u5929\u4e0d\u6765\u4e86\uff01\uff1f",  # Chinese
            # Japanese
            "\u300c\u3053\u308c\u3067\u6c7a\u307e\u3063\u305f\u3002\u300d\u3068\u8a00\u3063\u305f\u3002",
        )),
    ],
)  # fmt: skip
def test_where_sentences_end(text, expected):
    assert split_sentences(text) == expected


@given(st.text("aB. ?\u3002)\n", max_size=80))
def test_splitting_loses_no_text(text):
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_wrapped_lines_are_joined():
    lines = [
        "The quick brown fox jumps over the lazy dog, and then it",
        "goes home to its den. There it sleeps until the sun has",
        "come up.",
    ]
    title, items = (
        "A title of its own",
        ["- the first item of a list", "- the second one, which is longer"],
    )
    assert list(paragraphs([title, "", *lines, "", *items])) == [title, " ".join(lines), *items]
    lines = [
        "This line is a sentence, and rather long it is.",
        "This one is, too, and about as long as that.",
        "12",
    ]
    assert sentences_of([*lines, "---"]) == lines


def test_text_without_spaces_has_words_and_joins_without_spaces():
    japanese, thai = (
        "\u3053\u308c\u306f\u6587\u3060\u3002",
        "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
    )
    pairs = [japanese[:2], japanese[2:4], japanese[4:]]
    assert rules.words(f"two words {japanese}{thai}") == [
        "two",
        "words",
        *pairs,
        thai[:4],
        thai[4:],
    ]
    assert rules.some_words(japanese * 2, 1, 4) == (japanese * 2)[2:8]
    assert (
        rules.join([japanese, japanese, "a", "b", thai, thai])
        == f"{japanese}{japanese} a b {thai} {thai}"
    )
    wrapped = [japanese * 4, japanese * 3 + japanese[:-1], japanese]
    assert list(paragraphs(wrapped)) == ["".join(wrapped)]
    assert rules.canonical("\n".join(wrapped)) == rules.canonical("".join(wrapped))
    assert rules.canonical("Ma\u0308rz  2") == rules.canonical("M\xe4rz \uff12") == "m\xe4rz 2"


@pytest.mark.parametrize(
    "part", ["A b. ", "e.g. ", "am 3. ", '." ', "\u3002)", "A" * 20 + " a. ", ":a:`b ", "``a"]
)
def test_time_grows_with_the_size_of_a_paragraph(part):
    assert_linear(split_sentences, part)
    assert_linear(spans_of, part)


def test_normalising_runs_of_marks_takes_linear_time():
    assert_linear(canonical, "\u0301\u0323")
    assert canonical("e\u0323\u0301") == canonical("e\u0301\u0323")
