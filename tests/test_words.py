"""What BM25 takes for a word, BM25 against its formula, and how the time grows."""

import copy
import pickle
import time

import numpy as np
import pytest
import Stemmer
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.documents.language import NAMES, detector, languages_of
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.search.lexical import LexicalIndex, best_rows, found_by_words
from diffcse_jax.search.words import Words, choose_language, parts_of, stemmer_of, tokens_of

SHORT_WORDS = [
    "Vitamin C is found in oranges and in peppers.",
    "Vitamin D is made in the skin in summer.",
    "Vitamin A is found in carrots, and a pepper has it.",
    "Windows 7 no longer receives updates from the vendor.",
    "Windows 8 no longer receives updates from the vendor.",
    "Functions in C are compiled ahead of time.",
    "Functions in R are called from the console.",
    "Functions in C++ may be overloaded in the library.",
    "Functions in C# may be overloaded in the library.",
    "The library .NET may be called by functions.",
    "The net may be mended.",
    "Call parse_config before the server starts.",
    "The setting is stored in userProfileImage.",
    "Start an HTTPServer before the client.",
    "Version 3.14 of the tool fixed the crash.",
    "Version 2.14 of the tool fixed the crash.",
    "Release v1.2.3 of the tool fixed the error.",
    "The tool shows ERR-4711.",
    "The tool calls foo.bar_baz from /usr/share/kebab-case.txt.",
    "Restart it with python3.11 or ISO9001.",
]
QUERIES = {
    "vitamin D": 1,
    "vitamin A": 2,
    "vitamin a?": 2,
    "windows 8": 4,
    "functions in R": 6,
    "functions in c++": 7,
    "functions in C#": 8,
    ".NET": 9,
    "parse config": 11,
    "parseConfig": 11,
    "user profile image": 12,
    "userprofileimage": 12,
    "user_profile_image": 12,
    "http server": 13,
    "version 2.14": 15,
    "1.2.3": 16,
    "err 4711": 17,
    "ERR4711": 17,
    "bar_baz": 18,
    "foo.bar_baz": 18,
    "kebab case": 18,
    "/usr/share/kebab-case.txt": 18,
    "python 3.11": 19,
    "iso 9001": 19,
}


@pytest.fixture(scope="module")
def short_words() -> LexicalIndex:
    return LexicalIndex.build(SHORT_WORDS)


@pytest.mark.parametrize("query", QUERIES)
def test_letters_digits_and_identifiers_find_their_text(short_words, query):
    assert found_by_words(short_words.scores(query), 1).tolist() == [QUERIES[query]]


@pytest.mark.parametrize(
    ("texts", "queries", "languages"),
    [
        (["Der Daten\u00adschutz\u00adbeauftragte"], ["Datenschutzbeauftragte"], ["german"]),
        (["\ufeffFrankreich"], ["Frank\u200dreich\ufe0f"], [""]),
        (
            ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647"],
            ["\u0645\u06cc\u062e\u0648\u0627\u0647"],
            [""],
        ),
        (
            ["Filiale in İstanbul", "İzmir liman\u0131", "ISPARTA ve kar", "IĞDIR", "LINUX"],
            ["istanbul", "İZMİR", "\u0131sparta", "\u0131ğd\u0131r", "linux"],
            ["turkish", "german", ""],
        ),
        (["STRASSE", "MASSE"], ["Straße", "Maße"], ["german", ""]),
        (
            ["كِتَابٌ جَدِيدٌ", "محـــمد في البيت", "שָׁלוֹם עוֹלָם", "کیک", "مستشفى"],
            ["كتاب", "محمد", "שלום", "كيك", "مستشفي"],
            ["arabic", "persian", "none", ""],
        ),
        (
            [
                "the café is open",
                "Łódź",
                "smørrebrød",
                "ёлка",
                "1,000 men",
                "1\u202f500",
                "2'000",
                "x\u0323\u0301ay",
            ],
            ["cafe", "lodz", "Smorrebrod", "елка", "1000", "1500", "2000", "x\u0301\u0323ay"],
            ["english", "none", ""],
        ),
        (
            [
                "أحمد",
                "ٱلقرآن",
                "سؤال",
                "\u0661\u066c\u0660\u0660\u0660",
                "\u06f1\u06f2",
                "\u0967\u0968\u0969",
            ],
            ["احمد", "القران", "سوال", "1000", "12", "123"],
            ["arabic", "persian", "none", ""],
        ),
        (
            ["1,234.56", "7.654,3", "1_000_000", "3,00,000"],
            ["1234.56", "7654", "1000000", "300000"],
            ["english", ""],
        ),
        (
            ["\u039f\u0394\u039f\u03a3", "\u0391\u0398\u0397\u039d\u0391"],
            ["\u03bf\u03b4\u03cc\u03c2", "\u0391\u03b8\u03ae\u03bd\u03b1"],
            ["greek", ""],
        ),
        (["une vitamine D chez", "l'école d'art"], ["vitamine d", "école"], ["french"]),
    ],
)
def test_ignored_characters_and_capitals_do_not_matter(texts, queries, languages):
    for language in languages:
        index = LexicalIndex.build([*texts, "different"], language)
        found = [found_by_words(index.scores(query), 2).tolist() for query in queries]
        assert found == [[row] for row in range(len(texts))]


def test_a_character_that_is_a_word_is_found():
    texts = ["\u6211\u559d\u8336", "\u4ed6\u5403\u996d", "\ubb3c\uc744 \ub9c8\uc2e0\ub2e4"]
    index = LexicalIndex.build(texts, "none")
    for query, row in (("\u8336", 0), ("\u559d\u8336", 0), ("\u996d", 1), ("\ubb3c", 2)):
        assert found_by_words(index.scores(query), 3).tolist() == [row]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("l'heure d\u2019accord, don't, I'm, rock'n'roll", "heur accord don rock roll"),
        ("How do I? A man; hepatitis A and (a) B.", "how do man hepat a b"),
        ("e.g. U.S.A., z.B. J. Smith", "eg usa zb j smith"),
        ("T-cell and iPhone, PDFs, GmbH", "t cell tcell phone iphon pdfs gmb gmbh"),
        ("2019-11-12, 10,000 and 1,5", "2019 11 12 2019-11-12 10 000 10000 1 5 1,5"),
        ("__init__ _x --verbose -v x..y #12", "init x verbos v x y 12"),
        ("CD4+ H2O mp3 sha256sum", "cd4 h2 h2o mp3 sha 256 sum sha256sum"),
        ("東京タワー, ABC漢字! 人 第5章", "東京 京タ タワ ワー abc 漢字 人 第 5 章"),
        ("ประเ 서울시", "ปร ระ ะเ 서울 울시"),
        ("हिन्दी cafe\u0301 ﬁne x² № ㎐", "हिन्दी cafe fine x2 hz"),
        ("IT support, if it is; THE END", "it support the end"),
        ("IT IS THE END", "end"),
        ("_ . -- ++ # '", ""),
    ],
)
def test_words_of_texts(text, words):
    assert Words("english")(text) == words.split()


def test_parts_come_before_what_they_are_joined_to():
    assert parts_of("a1.b_c") == ["a1", "b", "c", "bc", "a1bc"]
    assert parts_of("XMLToJSON") == ["XML", "To", "JSON", "XMLToJSON"]
    assert parts_of("log4j-2.17") == ["log4j", "2", "17", "2.17", "log4j2.17"]


@given(st.text("aB1ß .,-_'+#\u00ad\u0301東\u0131İ", max_size=12))
def test_every_letter_and_digit_of_a_text_belongs_to_a_token(text):
    tokens = "".join(letter or token for letter, token in tokens_of(text))
    kept = [character for character in text if character.isalnum()]
    assert [character for character in kept if character.isdigit()] == [
        character for character in tokens if character.isdigit()
    ]
    assert all(Words("english")(text) == Words("english")(text + ending) for ending in " \n")


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "A b. ",
        "aB",
        "a_",
        "a.",
        "1.",
        "9a",
        "l'",
        "C++",
        "\u0316\u0301",
        "a\u00ad",
        "東",
        "I\u0307",
    ],
)
def test_the_time_grows_with_the_length(unit):
    """16 times the length takes less than 64 times as long. Quadratic growth would be 256."""
    taken = []
    for length in (500, 8_000):
        text, seconds = unit * (length // len(unit)), []
        for _ in range(2):
            words = Words("turkish")
            start = time.process_time()
            words(text)
            seconds.append(time.process_time() - start)
        taken.append(min(seconds))
    assert taken[1] < 64 * max(taken[0], 2e-4)


# BM25

TEXTS = [
    "The cats were sleeping on the warm roof.",
    "A cat chased two mice, and the mice chased a cat.",
    "Share prices fell sharply on Monday.",
    "The price of shares is falling again.",
    "!!!",
]


def bm25_by_formula(
    documents: list[list[str]], query: list[str], k1: float = 1.2, b: float = 0.75
) -> np.ndarray:
    counts = np.array([[words.count(word) for word in query] for words in documents])
    containing = (counts > 0).sum(axis=0)
    idf = np.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
    lengths = np.array([[len(words)] for words in documents])
    return (idf * counts / (counts + k1 * (1 - b + b * lengths / lengths.mean()))).sum(axis=1)


def test_scores_are_those_of_the_formula():
    index = LexicalIndex.build(TEXTS)  # in English
    stems = [
        ["cat", "were", "sleep", "warm", "roof"],
        ["cat", "chase", "two", "mice", "mice", "chase", "cat"],
        ["share", "price", "fell", "sharpli", "monday"],
        ["price", "share", "fall", "again"],
        [],
    ]
    queries = {
        "Cats chasing the mouse": ["cat", "chase", "mous"],
        "share PRICES, price": ["share", "price", "price"],
    }
    for query, words in queries.items():
        np.testing.assert_allclose(index.scores(query), bm25_by_formula(stems, words), rtol=1e-5)
    assert not index.scores("the of unknownword").any()


DETECTED = {
    ("Die Katze liegt auf dem Dach und schläft.",): "german",
    ("Le chat dort sur le toit.", "La maison est là."): "french",
    ("Bu kitap çok güzel ama biraz uzun, VE PAHALI DEĞİL.",): "turkish",
    ("Drukarka nie działa.", "Papier utknął w podajniku."): "polish",
    ("Tiskárna nefunguje.", "Papír se zasekl v podavači."): "czech",
    ("Imprimanta nu funcționează.", "Hârtia s-a blocat."): "romanian",
    ("A nyomtató nem működik.", "A papír elakadt."): "hungarian",
    ("प्रिंटर काम नहीं कर रहा है।", "कागज़ फँस गया है।"): "hindi",
    ("Printer tidak berfungsi.", "Kertas macet di dalam mesin."): "indonesian",
    ("Αυτό το βιβλίο δεν είναι εδώ.", "ΑΘΗΝΑ"): "greek",
    # Without a stemmer, unclear, several languages, and no language.
    ("Máy in màu bị kẹt giấy khi in hai mặt.", "Khóa van nước."): "none",
    ("東京は日本の首都です",): "none",
    ("Taxi", "Hotel"): "none",
    ("Die Katze liegt auf dem Dach.", "The dog is in the garden."): "none",
    ("sqlite3 libxml2 gtk4",): "none",
    ("Anna Müller", "Hans Schmidt", "Olga Petrova", "John Smith", "Maria Rossi"): "none",
    ("!!!", "12"): "none",
}


@pytest.mark.parametrize("texts", DETECTED)
def test_the_language_of_a_few_texts(texts):
    choice = choose_language(texts)
    assert (choice.language, DETECTED[texts]) == (DETECTED[texts], choice.language)
    assert choice.language in str(choice).replace("neither", "none")


def test_shares_of_languages_are_those_of_the_letters():
    german = ["Die Katze liegt auf dem Dach.", "Rechnung", "Drucker einschalten"] * 20
    english = ["The dog is in the garden.", "Invoice", "Turn on the printer"] * 60
    shares = languages_of([*german, *english])
    letters = [sum(map(str.isalpha, "".join(texts))) for texts in (german, english)]
    assert list(shares) == ["en", "de"]
    assert shares["de"] == pytest.approx(letters[0] / sum(letters), abs=0.03)
    assert set(NAMES) <= set(detector().labels)
    without = {"dutch_porter", "porter", "yiddish"}
    assert {*map(stemmer_of, NAMES), *without} == {*Stemmer.algorithms(), "none"}


def test_ignored_words_are_named_as_they_stand():
    assert Words("english").ignored("How do I stop it, and is it IT? It's B.") == [
        *("I", "it", "and", "is", "It's"),
    ]
    assert Words("none").ignored("of the") == []


def test_the_stemmer_of_the_language_is_used():
    index = LexicalIndex.build(["viele Häuser", "eine Katze"], "german")
    assert index.scores("Haus").tolist()[1] == 0
    assert index.scores("Häusern")[0] > 0
    for other in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index)):
        np.testing.assert_array_equal(other.scores("Häusern"), index.scores("Häusern"))
    message = r"language='klingon': there is no stemmer for it\. Use one of: .*german"
    with pytest.raises(ConfigError, match=message):
        LexicalIndex.build(TEXTS, "klingon")
    with pytest.raises(DataError, match="no words"):
        LexicalIndex.build(["!!!", "?"])


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 12))
def test_best_rows_are_the_first_of_a_stable_sort(scores, count):
    array = np.array(scores, np.float32)
    expected = np.argsort(-array, kind="stable")[:count]
    np.testing.assert_array_equal(best_rows(array, count), expected)
