"""Batches: what they hold, their order and their shapes, and what each epoch draws again."""

import collections
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.batch import Batch
from diffcse_jax.config import DataConfig
from diffcse_jax.data.batches import (
    BatchShape,
    BatchSource,
    Packing,
    Shards,
    choose_lengths,
    choose_shapes,
)
from diffcse_jax.data.sampling import (
    Augmentation,
    Crops,
    Neighbours,
    begins_word,
    examples_of,
    open_augmentation,
)
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import ROW, Examples, TokenStore, build_or_open
from diffcse_jax.errors import DataError

EXAMPLES, BATCH, PER_EPOCH, PAD, LONGEST = 21, 4, 5, 9999, 32


def store_of(folder: Path, lengths: np.ndarray, documents: list[int] | None = None) -> TokenStore:
    """Write examples with these lengths by column. Each token of example `i` is `i`."""
    folder.mkdir(exist_ok=True)
    np.arange(len(lengths)).repeat(lengths.sum(axis=1)).astype(np.uint16).tofile(
        folder / "token_ids"
    )
    np.save(folder / "offsets.npy", np.concatenate([[0], lengths.ravel().cumsum()]))
    rows = np.zeros(len(lengths), ROW)
    rows["document"] = (
        np.arange(len(documents)).repeat(documents) if documents else np.arange(len(rows))
    )
    rows["follows"] = np.diff(rows["document"], prepend=-1) == 0
    np.save(folder / "rows.npy", rows)
    columns = ["sentence", "positive"][: lengths.shape[1]]
    meta = {
        "columns": columns,
        "max_length": LONGEST,
        "account": [],
        "beyond_limits": [],
        "unknown": 0,
        "dtype": "uint16",
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return TokenStore(folder)


def lengths_of(examples: int, columns: int) -> np.ndarray:
    lengths = np.random.default_rng(0).integers(3, LONGEST + 1, (examples, columns))
    return np.maximum(lengths // (1 + np.arange(examples) % 3)[:, None], 3)


def with_documents(folder: Path, documents: list[int]) -> TokenStore:
    return store_of(folder, lengths_of(sum(documents), 1), documents)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    return store_of(tmp_path_factory.mktemp("store"), lengths_of(EXAMPLES, 2))


def source_of(examples: Examples, **options) -> BatchSource:
    return BatchSource(
        examples, **{"batch_size": BATCH, "steps": 40, "seed": 3, "pad_token_id": PAD, **options}
    )


def without_layouts(batch: Batch) -> Batch:
    return batch._replace(
        layout=None, anchor_layout=None, next=batch.next and without_layouts(batch.next)
    )


def assert_same(left: Batch, right: Batch) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def check_layouts(views: Batch) -> set[int]:
    """Check that a layout has a slot for each token, and return the numbers of slots."""
    laid_out = [rows for rows in (views.rows, views.anchors) if rows.layout is not None]
    for rows in laid_out:
        assert (
            rows.layout.positions < rows.layout.slots.shape[1]
        ).sum() == rows.attention_mask.sum()
    return {rows.layout.positions.shape[1] for rows in laid_out}


# Order


def test_order_depends_only_on_seed_and_epoch(store):
    sources = [source_of(store, seed=seed) for seed in (3, 4)]
    epochs = itertools.product(sources, (range(PER_EPOCH), range(PER_EPOCH, 2 * PER_EPOCH)))
    orders = {
        tuple(np.concatenate([source[i].input_ids[:, 0, 0] for i in steps]))
        for source, steps in epochs
    }
    assert len(orders) == 4
    # each at most once
    assert all(len(set(order)) == len(order) == PER_EPOCH * BATCH for order in orders)
    assert_same(source_of(store)[17], source_of(store, steps=100)[17])


# Content and shapes


def test_batches_have_few_lengths_and_hold_their_sentences(store):
    source = source_of(store)
    lengths = sorted({shape.length for shape in source.shapes})
    assert lengths[-1] == 32
    assert len(lengths) <= 2
    for step in range(len(source)):
        views = source[step]
        rows, length = views.input_ids[:, 0, 0], views.input_ids.shape[-1]
        assert length == min(
            candidate for candidate in lengths if candidate >= store.lengths(rows).max()
        )
        np.testing.assert_array_equal(views.attention_mask.sum(-1), store.lengths(rows))
        expected = np.where(views.attention_mask == 1, rows[:, None, None], PAD)
        np.testing.assert_array_equal(views.input_ids, expected)
        assert np.all(np.diff(views.attention_mask, axis=-1) <= 0)  # padding comes last
        assert {array.dtype for array in jax.tree.leaves(views)} == {np.dtype(np.int32)}


def test_layouts_hold_every_token_in_few_shapes(store):
    source = source_of(store, shards=Shards(range(2), 2), packing=Packing(chunks=2, anchors=True))
    assert len(source.shapes) <= 4
    slots, padded = set(), source_of(store)
    for step in range(20):
        slots |= check_layouts(source[step])
        assert_same(without_layouts(source[step]), padded[step])  # a layout changes nothing else
    assert len(slots) > 1


def test_chunks_leave_out_the_padding_of_the_shorter_column(tmp_path):
    """Each chunk has both texts of its pairs, so that none has only the longer ones."""
    store = store_of(tmp_path, np.tile([4, LONGEST], (EXAMPLES, 1)))
    views = source_of(store, packing=Packing(chunks=2))[0]
    assert views.layout.positions.shape == (2, (4 + LONGEST) * BATCH // 2)


def test_processes_hold_slices_of_the_global_batch(store):
    whole = source_of(store, shards=Shards(range(4), 4), packing=Packing())
    parts = [
        source_of(store, shards=Shards(range(i, i + 1), 4), packing=Packing()) for i in range(4)
    ]
    for step in range(12):
        assert_same(
            jax.tree.map(lambda *slices: np.concatenate(slices), *(part[step] for part in parts)),
            whole[step],
        )


def test_shapes_compute_the_fewest_positions(store):
    # a length is added if batches would be padding
    assert choose_lengths([30] * 9 + [100], 128) == (32, 128)
    assert choose_lengths([100] * 10, 128) == choose_lengths([128] * 10, 128) == (128,)
    needed = (
        [BatchShape(32, 12)] * 50
        + [BatchShape(32, 13)] * 49
        + [BatchShape(32, 14)] * 20
        + [BatchShape(32, 5)]
    )
    assert choose_shapes(needed, (32,), 12_000) == tuple(
        BatchShape(32, share) for share in (12, 13, 14, 16)
    )
    # In a short run, a second program costs more than it saves. The shape without packing is not
    # used.
    assert choose_shapes(needed, (32,), 120) == tuple(BatchShape(32, share) for share in (14, 16))
    assert BatchShape.of(10, 0.7).capacity(80) == 60  # 12 sixteenths
    with pytest.raises(ValueError, match="a batch of 4 does not split evenly over 3 shards"):
        source_of(store, shards=Shards(range(1), 3))


def test_augmented_views_are_new_in_each_epoch(store):
    """They change with the step, but not with shards or layouts. Anchors stay the same."""
    single, seen = copy.copy(store), collections.defaultdict[bytes, set[bytes]](set)
    single.columns, single.token_ids = ("sentence",), np.arange(len(store.token_ids))
    options = {"augmentation": Augmentation("word_deletion", 0.4, np.ones(PAD + 1, bool))}
    plain, source = source_of(single), source_of(single, **options)
    packed = source_of(single, packing=Packing(anchors=True), **options)
    half = source_of(single, shards=Shards(range(1, 2), 2), **options)
    for step in range(30):
        views = source[step]
        assert_same(without_layouts(packed[step]), views)
        assert_same(half[step], jax.tree.map(lambda values: values[BATCH // 2 :], views))
        anchors, seconds = np.moveaxis(views.input_ids, 1, 0)
        assert_same(anchors, plain[step].input_ids[:, 0, : anchors.shape[1]])
        np.testing.assert_array_equal(views.attention_mask > 0, views.input_ids != PAD)
        for anchor, second in zip(anchors, seconds, strict=True):
            assert {*second} <= {*anchor, PAD}
            seen[anchor.tobytes()].add(second.tobytes())
    assert max(map(len, seen.values())) > 1


# Neighbours


def test_a_next_sentence_is_drawn_from_the_following_ones(tmp_path):
    neighbours = Neighbours(with_documents(tmp_path, [1, 6, 2]), within=3)
    rng, drawn = np.random.default_rng(0), []
    for _ in range(600):
        pairs = neighbours.gather(neighbours.order(rng), LONGEST, PAD)[0][:, :, 0].tolist()
        assert sorted(sentence for sentence, _ in pairs) == [1, 2, 3, 4, 5, 7]  # every example once
        drawn += pairs
    for sentence, choices in {
        1: [2, 3, 4],
        2: [3, 4, 5],
        3: [4, 5, 6],
        4: [5, 6],
        5: [6],
        7: [8],
    }.items():
        counts = [drawn.count([sentence, choice]) for choice in choices]
        assert sum(counts) == 600
        assert all(
            abs(count - 600 / len(choices)) < 5 * np.sqrt(600 / len(choices)) for count in counts
        )


def test_next_sentences_are_positives_or_come_with_the_views(tmp_path):
    documents = [1, 9, 4, 1, 7, 2, 12]
    neighbours, ends = Neighbours(with_documents(tmp_path, documents)), np.cumsum(documents)
    pairs = {sentence: sentence + 1 for sentence in range(ends[-1]) if sentence + 1 not in ends}
    as_positives, padded = source_of(neighbours), source_of(neighbours, next_sentence=True)
    options = {"shards": Shards(range(2), 2), "packing": Packing(chunks=2, anchors=True)}
    source, slots = source_of(neighbours, next_sentence=True, **options), set()
    for step in range(30):
        assert as_positives[step].next is None
        assert all(
            pairs[anchor] == positive
            for anchor, positive in as_positives[step].input_ids[:, :, 0].tolist()
        )
        views = source[step]
        jax.tree.map(np.testing.assert_array_equal, without_layouts(views), padded[step])
        np.testing.assert_array_equal(views.input_ids[:, 0], views.input_ids[:, 1])
        following = views.next.rows
        assert [pairs[i] for i in views.rows.input_ids[:, 0].tolist()] == following.input_ids[
            :, 0
        ].tolist()
        assert following.input_ids.shape == views.rows.input_ids.shape
        np.testing.assert_array_equal(following.attention_mask > 0, following.input_ids != PAD)
        slots |= check_layouts(views) | check_layouts(views.next)
    assert slots


# Crops

PASSAGES = (17, 18, 40, 400, 1000)  # tokens, [CLS] and [SEP] included; the first is too short


def test_crops_are_two_spans_of_a_passage(tmp_path):
    """Passage `i` has the tokens `1000 * (i + 1)`, its [CLS], and the following numbers."""
    store = store_of(tmp_path, np.array(PASSAGES)[:, None])
    store.token_ids = np.concatenate(
        [1000 * (i + 1) + np.arange(n) for i, n in enumerate(PASSAGES)]
    )
    crops, generator, shares = Crops(store, max_length=64), np.random.default_rng(0), []
    for _ in range(300):
        order = crops.order(generator)
        input_ids, lengths = crops.gather(order, 64, PAD)
        np.testing.assert_array_equal(crops.lengths(order), lengths)
        rows = crops.text_rows(order).tolist()
        assert sorted(rows) == [1, 2, 3, 4]
        for row, ids, length in zip(
            np.repeat(rows, 2), input_ids.reshape(8, 64), lengths.ravel(), strict=True
        ):
            first, last, start = 1000 * (row + 1), 1000 * (row + 1) + PASSAGES[row] - 1, ids[1]
            span = range(start, start + length - 2)
            assert first < start <= start + length - 3 < last
            assert ids.tolist() == [first, *span, last] + [PAD] * (64 - length)
        assert lengths.min() == 10  # of the passage of 16 tokens, eight are half
        shares.append((lengths[rows.index(3)] - 2) / 398)
    # then cut
    np.testing.assert_allclose(np.quantile(shares, [0, 0.125, 1]), [0.1, 0.15, 62 / 398], atol=0.01)
    assert abs(np.corrcoef(np.transpose(shares))[0, 1]) < 0.15  # two draws, not one


# Cloze pairs

TITLED = {"title": "A clock", "text": "this is a clock that tells the time of the day"}
UNTITLED = {
    "text": "without a title or second sentence there is no lead so unbelievably many windows are taken out"
}
# each character is a token, and only the first begins a word
JAPANESE = "\u3042\u3044\u3046\u3048\u304a\u304b" * 6
PROMPTS = ("ask: ", "the passage is: ")


def cloze_of(
    folder: Path, model: Path, documents: list[dict], share: float = 1.0
) -> tuple[Examples, Any]:
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, documents)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    data = DataConfig(str(folder / "a.jsonl"), pairs="lead", cloze=share, max_length=64)
    store = build_or_open(open_corpus(data), tokenizer, 64, folder / "cache", prompts=PROMPTS)
    sizes = [len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in PROMPTS]
    return examples_of(store, data, tokenizer, next_sentence=False, prompt_tokens=sizes), tokenizer


def test_a_window_is_taken_out_of_text_without_a_lead(tmp_path, minilm_dir):
    cloze, tokenizer = cloze_of(tmp_path / "a", minilm_dir, [TITLED, UNTITLED, {"text": JAPANESE}])
    generator, sizes, queries = np.random.default_rng(0), set(), set()
    for _ in range(100):
        order = cloze.order(generator)
        input_ids, lengths = cloze.gather(order, 64, 0)
        np.testing.assert_array_equal(cloze.lengths(order), lengths)
        np.testing.assert_array_equal((input_ids != 0).sum(axis=-1), lengths)
        assert np.all((input_ids == tokenizer.sep_token_id).sum(axis=-1) == 1)
        pairs = {row: tokenizer.batch_decode(ids, skip_special_tokens=True)
                 for row, ids in zip(cloze.text_rows(order).tolist(), input_ids, strict=True)}  # fmt: skip
        assert pairs[0] == [
            f"ask : {TITLED['title'].lower()}",
            f"the passage is : {TITLED['text']}",
        ]
        for row, words, space in ((1, UNTITLED["text"].split(), " "), (2, [*JAPANESE], "")):
            query, rest = (text.partition(":")[2].strip() for text in pairs[row])
            size = len(query.split() if space else query)
            at = [i for i in range(len(words)) if space.join(words[i : i + size]) == query]
            assert rest in [space.join(words[:i] + words[i + size :]) for i in at]
            sizes.add((row, size))
            queries.add(query)
    # of 17 and 36
    assert sizes == {*((1, size) for size in range(5, 13)), *((2, size) for size in range(5, 26))}
    assert len(queries) > 100  # new ones in each epoch


def test_texts_with_leads_are_the_same_with_cloze_pairs(tmp_path, minilm_dir):
    plain, _ = cloze_of(tmp_path / "plain", minilm_dir, [TITLED] * 2, share=0.0)
    same, _ = cloze_of(tmp_path / "same", minilm_dir, [TITLED] * 2)
    assert type(plain) is type(same) is TokenStore
    half, _ = cloze_of(tmp_path / "half", minilm_dir, [TITLED, *[UNTITLED] * 4], share=0.5)
    rows = [sorted(half.text_rows(half.order(np.random.default_rng(seed)))) for seed in range(20)]
    assert all(len(each) == len(half) == 3 and each[0] == 0 for each in rows)
    assert {row for each in rows for row in each} == {*range(5)}


# Options


def test_texts_that_cannot_give_examples_are_refused(tmp_path, minilm_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    with pytest.raises(DataError, match="no document of 3 has two sentences"):
        Neighbours(with_documents(tmp_path, [1, 1, 1]))
    data, store = DataConfig("a.txt", pairs="dropout"), with_documents(tmp_path, [2, 2])
    assert examples_of(store, data, tokenizer, next_sentence=False) is store
    assert isinstance(examples_of(store, data, tokenizer, next_sentence=True), Neighbours)
    for pairs, next_sentence in ("dropout", True), ("neighbours", False), ("passages", False):
        with pytest.raises(DataError, match="wiki1m has shuffled sentences"):
            examples_of(
                store, DataConfig("wiki1m", pairs=pairs), tokenizer, next_sentence=next_sentence
            )
    store.offsets = np.array([0, 17])  # with [CLS] and [SEP]
    with pytest.raises(DataError, match="no document has the 16 tokens that two crops need"):
        Crops(store, 32)


# Augmented views (SimCSE Table 1)

CLS, SEP, UNK = 1, 2, 3
NAMES = [
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "run",
    "##ning",
    "##s",
    "fast",
    "quick",
    "##ly",
    "very",
    "dog",
    "[MASK]",
]
WORD_PIECE = transformers.BertTokenizer(vocab={name: index for index, name in enumerate(NAMES)})
BEGINS = np.array([not name.startswith("##") for name in NAMES])
# fast: quick, very quickly; running: fastly
SYNONYMS = {(7,): ((8,), (10, 8, 9)), (4, 5): ((7, 9),)}
sentences = st.lists(st.integers(UNK + 1, len(NAMES) - 1), max_size=LONGEST - 2).map(
    lambda ids: [CLS, *ids, SEP]
)
texts = st.lists(sentences, min_size=1, max_size=5)
seeds = st.integers(0, 1000)


def words_of(ids: list[int]) -> list[tuple[int, ...]]:
    """Return the words between the first and the last token."""
    starts = [i for i in range(1, len(ids) - 1) if i == 1 or BEGINS[ids[i]]]
    return [tuple(ids[start:end]) for start, end in itertools.pairwise([*starts, len(ids) - 1])]


def augmented(
    texts: list[list[int]], seed: int, kind: str, ratio: float = 0.3, synonyms=None
) -> list[list[int]]:
    lengths = np.array([len(ids) for ids in texts])
    input_ids = np.array([ids + [0] * (LONGEST - len(ids)) for ids in texts], np.int32)
    augmentation = Augmentation(kind, ratio, BEGINS, synonyms or {})
    new_ids, new_lengths = augmentation(input_ids, lengths, np.random.default_rng(seed))
    found = [ids[:length].tolist() for ids, length in zip(new_ids, new_lengths, strict=True)]
    assert all((ids[0], ids[-1]) == (CLS, SEP) for ids in found)
    return found


@given(
    texts,
    seeds,
    st.sampled_from(["crop", "word_deletion", "delete_one_word"]),
    st.sampled_from([0, 0.1, 0.5, 1]),
)
def test_whole_words_are_removed_and_at_least_one_is_kept(texts, seed, kind, ratio):
    for before, after in zip(texts, augmented(texts, seed, kind, ratio), strict=True):
        words, kept = words_of(before), words_of(after)
        count = len(words)
        removed = {
            "crop": count - max(np.rint((1 - ratio) * count), 1),
            "word_deletion": min(np.rint(ratio * count), count - 1),
            "delete_one_word": min(1, count - 1),
        }[kind]
        assert len(kept) == count - max(removed, 0)
        rest = iter(words)
        assert all(word in rest for word in kept)  # in their order
        if kind == "crop":
            assert any(words[i : i + len(kept)] == kept for i in range(count + 1))


@given(texts, seeds)
def test_one_word_of_the_table_is_replaced(texts, seed):
    for before, after in zip(
        texts, augmented(texts, seed, "synonyms", synonyms=SYNONYMS), strict=True
    ):
        words = words_of(before)
        possible = [
            [token for word in [*words[:i], synonym, *words[i + 1 :]] for token in word][
                : LONGEST - 2
            ]
            for i, word in enumerate(words)
            for synonym in SYNONYMS.get(word, ())
        ]
        assert after[1:-1] in (possible or [before[1:-1]])


def test_where_words_begin():
    np.testing.assert_array_equal(begins_word(WORD_PIECE.backend_tokenizer), BEGINS)
    # of two-character tokens that no WordPiece made
    byte_level = {"<s>": 0, "Ġthe": 1, "##": 2, "re": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_level, []))
    assert begins_word(backend).tolist() == [False, True, False, False]
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "##re": 1}, "the"))
    assert begins_word(word_level).tolist() == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fast\tquick\nrun\n",
            r"synonyms\.tsv, line 2: expected a word and its synonyms, separated by tabs",
        ),
        ("fast\tqu\0ick\n", r"synonyms\.tsv, line 1: with NUL bytes"),
        ("quick\tswift\n", "does not contain a word and a synonym of the vocabulary"),
        (None, r"cannot read .*synonyms\.tsv"),
    ],
)
def test_a_table_of_synonyms_is_read_in_tokens_or_refused(tmp_path, text, message):
    path = tmp_path / "synonyms.tsv"
    if text is not None:
        path.write_text(text)
    data = DataConfig(augmentation="synonyms", synonyms_file=str(path))
    with pytest.raises(DataError, match=message):
        open_augmentation(data, WORD_PIECE)
    path.write_text("fast\tquick\tvery quickly\n\nrunning\tfastly\nquick\tswift\nswift\tquick\n")
    assert open_augmentation(data, WORD_PIECE).synonyms == SYNONYMS
