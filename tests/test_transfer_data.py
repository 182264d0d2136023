import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import transfer, transfer_data
from diffcse_jax.evaluation.transfer_data import Example


def write(folder, file, content):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_class_is_latin_1_with_one_sentence_a_line(tmp_path):
    # 0xa0 is a space and 0x85 ends a line in Latin-1, as in SentEval; an empty line is an empty sentence.
    path = write(tmp_path, "pos", b"caf\xe9  is\xa0good \n\ntwo\x85lines\n")
    assert [example.sentences for example in transfer_data.read_class(path, 1)] == [
        ("caf\u00e9 is good",),
        ("",),
        ("two",),
        ("lines",),
    ]
    assert {example.label for example in transfer_data.read_class(path, 1)} == {1}


def test_binary_tasks_read_both_classes_in_order(tmp_path):
    write(tmp_path, "CR/custrev.pos", b"b b\nc\na a a\n")
    write(tmp_path, "CR/custrev.neg", b"d\ne e\n")
    examples = transfer.CR(tmp_path).load("train")
    assert [(example.sentences[0], example.label) for example in examples] == [
        ("d", 0),
        ("c", 1),
        ("e e", 0),
        ("b b", 1),
        ("a a a", 1),
    ]


def test_trec_has_coarse_and_fine_labels(tmp_path):
    path = write(tmp_path, "TREC/TREC_10.label", b"NUM:dist How far is : it ?\nABBR:exp What  is caf\xe9 ?\n")
    assert transfer_data.read_trec(path) == [
        Example(("How far is : it ?",), 5),
        Example(("What is caf\u00e9 ?",), 0),
    ]


def test_sst_has_two_formats(tmp_path):
    binary = write(tmp_path, "binary", "a caf\u00e9\t1\nb\t0\n".encode())
    assert transfer_data.read_sst(binary) == [Example(("a caf\u00e9",), 1), Example(("b",), 0)]
    fine = write(tmp_path, "fine", b"4 so good\n0 bad\n")
    assert transfer_data.read_sst_fine(fine) == [Example(("so good",), 4), Example(("bad",), 0)]


def test_pairs_have_a_header_and_no_quoting(tmp_path):
    mrpc = write(tmp_path, "mrpc", b'\xef\xbb\xbfQuality\tid\tid\ts\ts\n1\t7\t8\tHe said " so\tso "\n0\t7\t8\tx\ty\n')
    assert transfer_data.read_mrpc(mrpc) == [Example(('He said " so', 'so "'), 1), Example(("x", "y"), 0)]
    sick = write(tmp_path, "sick", b"id\ta\tb\tscore\tlabel\n1\ta b\tc\t4.5\tENTAILMENT\n2\td\te\t1\tNEUTRAL\n")
    assert transfer_data.read_sick_entailment(sick) == [Example(("a b", "c"), 2), Example(("d", "e"), 1)]


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (transfer_data.read_sst, b"fine\t1\nno label\n", "line 2: expected at least 2 tab-separated columns, found 1"),
        (transfer_data.read_sst, b"fine\t1\nwrong\t2\n", "line 2: expected one of 0, 1 as label, found '2'"),
        (transfer_data.read_sst_fine, b"5 x\n", "line 1: expected one of 0, 1, 2, 3, 4 as label, found '5'"),
        (transfer_data.read_trec, b"HUM:ind Who ?\nHUM:ind\n", "line 2: expected 'LABEL:label question'"),
        (transfer_data.read_trec, b"Who ?\n", "line 1: expected 'LABEL:label question', found 'Who \\?'"),
        (transfer_data.read_trec, b"WHO:ind Who ?\n", "line 1: expected one of ABBR, DESC"),
        (
            transfer_data.read_mrpc,
            b"header\n1\t2\t3\ta\n",
            "line 2: expected at least 5 tab-separated columns, found 4",
        ),
        (transfer_data.read_mrpc, b"header\n", "no sentences"),
        (transfer_data.read_sick_entailment, b"header\n1\ta\tb\t3\tYES\n", "line 2: expected one of CONTRADICTION"),
        (transfer_data.read_sst, b"\xff\xfe\t1\n", "cannot read"),
        (transfer_data.read_mrpc, b"1\t2\t3\ta\tb\n0\t2\t3\tc\td\n", "line 1: expected a header, found an example"),
        (transfer_data.read_sick_entailment, b"1\ta\tb\t3\tNEUTRAL\n", "line 1: expected a header"),
        (lambda path: transfer_data.read_class(path, 1), b"good\nfine \x07\n", "line 2: holds the control character"),
        (lambda path: transfer_data.read_class(path, 1), random.Random(0).randbytes(2000), "is it text?"),
        (transfer_data.read_trec, b"", "no sentences"),
        (lambda path: transfer_data.read_class(path, 1), b"", "no sentences"),
    ],
)
def test_what_cannot_be_read_is_named(read, content, message, tmp_path):
    path = write(tmp_path, "data.txt", content)
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("read", [transfer_data.read_sst_fine, lambda path: transfer_data.read_class(path, 0)])
def test_a_missing_file_is_named(read, tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*absent"):
        read(tmp_path / "absent")


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "a b", "b a", "c d e"]), st.integers(0, 1)), max_size=30))
def test_the_order_is_stable(rows):
    ordered = transfer_data.in_order([Example((text, str(index)), label) for index, (text, label) in enumerate(rows)])
    keys = [(len(text.split()), label, int(index)) for (text, index), label in ordered]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("task", "split", "sizes"),
    [
        (transfer.MR, "train", [5331, 5331]),
        (transfer.CR, "train", [1368, 2407]),
        (transfer.TREC, "train", 5452),
        (transfer.TREC, "test", 500),
        (transfer.MRPC, "train", 4076),
        (transfer.MRPC, "test", 1725),
        (transfer.SICKEntailment, "train", 4500),
        (transfer.SICKEntailment, "dev", 500),
    ],
)
def test_sizes_of_the_real_data(task, split, sizes, data_dir):
    examples = task(data_dir / "senteval").load(split)
    labels = [example.label for example in examples]
    assert set(labels) == set(range(task.classes))
    assert sizes in (len(labels), [labels.count(label) for label in range(task.classes)])


def test_oddities_of_the_real_data(data_dir):
    folder = data_dir / "senteval"
    assert sum(not example.sentences[0] for example in transfer.CR(folder).load("train")) == 4
    reviews = " ".join(example.sentences[0] for example in transfer.MR(folder).load("train"))
    assert reviews.count("M-") == 316
