"""Training the query encoder alone."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from tiny_model import HIDDEN, write_tiny_model
from tiny_run import stop_first_run

from diffcse_jax import SentenceEncoder, api
from diffcse_jax.config import Config, flat, shipped_config
from diffcse_jax.data.queries import make_query, word_frequencies
from diffcse_jax.data.sources import open_split
from diffcse_jax.documents.sentences import words
from diffcse_jax.errors import ConfigError, DataError, Interrupted
from diffcse_jax.losses.ranking import kl_divergence
from diffcse_jax.models.heads import HeadLayer, RecordedHead, SentenceHead
from diffcse_jax.models.layers import bind, definition
from diffcse_jax.models.pooling import normalize
from diffcse_jax.models.sentence_folder import NO_PROMPTS, Prompts, RecordedPooler, write
from diffcse_jax.run_folder.checkpoints import read_encoder, read_parameters
from diffcse_jax.run_folder.records import read_metrics
from diffcse_jax.search.index import Index
from diffcse_jax.search.ranking import Request, rank
from diffcse_jax.search.vector_store import EncoderRecord
from diffcse_jax.training import queries
from diffcse_jax.training.queries import Queries, RankedQueries, Teacher
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.train import train_in_folder

PASSAGES = [
    f"The pump number {number} lifts water to the {word}. It needs a {word} valve, which opens slowly."
    for number, word in enumerate(
        ("tower", "roof", "canal", "bridge", "garden", "cellar", "quarry", "port")
    )
]


class Hashes:
    """An encoder whose embeddings are functions of the text."""

    name, prompts, languages = "hashes", NO_PROMPTS, ()

    def encode_document(self, texts, **_):
        rows = [np.random.default_rng(sum(text.encode())).normal(size=6) for text in texts]
        return normalize(np.array(rows, np.float32))

    encode_query = encode_document

    def split(self, passages, prompt=""):
        return list(passages)

    def record(self, prompt=""):
        return EncoderRecord(self.name, "avg", "float32", 6, "0123", prompt)

    def largely_unknown(self, texts):
        return [False] * len(texts)


NORMALIZE = (HeadLayer("Normalize"),)
TEXTS = ["a valve for the roof", "pump number 5"]
ASKED = Queries(TEXTS, np.array([1, 5]), Hashes().encode_query(TEXTS))


@pytest.fixture(scope="module")
def index():
    return Index(Hashes(), PASSAGES, mode="hybrid", weight=0.4)


def test_the_loss_is_the_divergence_over_ranked_passages():
    rng = np.random.default_rng(0)
    scores, teacher = rng.normal(size=(2, 3, 5)).astype(np.float32)
    teacher[0, 2] = teacher[1, :2] = -np.inf
    expected = []
    for row, of_teacher in zip(scores.astype(float), teacher.astype(float), strict=True):
        ranked = np.isfinite(of_teacher)
        p = softmax(of_teacher[ranked])
        expected.append((p * (np.log(p) - log_softmax(row[ranked]))).sum())
    logits = jnp.asarray(teacher)
    np.testing.assert_allclose(kl_divergence(jnp.asarray(scores), logits), expected, rtol=1e-5)
    gradient = jax.grad(lambda each: kl_divergence(each, logits).sum())(jnp.asarray(scores))
    np.testing.assert_array_equal(np.asarray(gradient)[~np.isfinite(teacher)], 0)
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-6)


def test_queries_are_parts_of_their_passages():
    frequencies = word_frequencies(PASSAGES)
    assert frequencies["pump"] == len(PASSAGES)
    assert frequencies["roof"] == 1
    generator = np.random.default_rng(0)
    made = [make_query(PASSAGES[1], frequencies, generator) for _ in range(60)]
    assert "It needs a roof valve, which opens slowly." in made
    windows = [text for text in made if text in PASSAGES[1]]
    others = [text for text in made if text not in PASSAGES[1]]
    assert windows
    assert others
    of_passage = set(words(PASSAGES[1].lower().replace(".", "").replace(",", "")))
    assert all(2 <= len(words(text)) <= 6 and {*words(text)} <= of_passage for text in others)
    again = np.random.default_rng(0)
    assert [make_query(PASSAGES[1], frequencies, again) for _ in range(60)] == made
    assert make_query("pump", frequencies, generator) == "pump"


def test_the_teacher_ranks_as_a_hybrid_search_without_the_own_passage(index):
    scores = Teacher(index.contents, 0.4).scores(ASKED, np.arange(len(PASSAGES)))
    hits = rank(index.contents, Request(ASKED.texts, ASKED.vectors, "hybrid", len(PASSAGES)), 0.4)
    for row, own, found in zip(scores, ASKED.rows, hits, strict=True):
        others = [hit for hit in found if hit.id != str(own)]
        assert [str(place) for place in np.argsort(-row)[:-1]] == [hit.id for hit in others]
        np.testing.assert_allclose(
            sorted(row[np.isfinite(row)]), sorted(hit.score for hit in others), rtol=1e-5
        )
        assert row[own] == -np.inf


def test_of_many_passages_the_best_and_a_sample_are_ranked(index, monkeypatch):
    monkeypatch.setattr(queries, "MOST_RANKED", 6)
    asked = dataclasses.replace(ASKED, vectors=index.embeddings.rows(np.array([3, 4])))
    teacher = Teacher(index.contents, 0.4)
    candidates = teacher.candidates(asked, 1)
    assert len(np.unique(candidates)) == 6
    assert {3, 4} <= {*candidates.tolist()}  # the nearest ones
    assert 1 in candidates  # by words
    np.testing.assert_array_equal(candidates, teacher.candidates(asked, 1))
    drawn = [teacher.candidates(asked, seed) for seed in range(20)]
    assert {*np.concatenate(drawn).tolist()} == {*range(len(PASSAGES))}


def test_each_pass_has_every_query_once(index):
    values = flat(shipped_config("adapt_queries").to_dict())
    config = Config.from_dict(values | {"train.batch_size": 3})
    asked = Queries(PASSAGES, np.arange(8), Hashes().encode_query(PASSAGES))
    source = RankedQueries(
        config, make_mesh(config, jax.devices()[:1]), asked, Teacher(index.contents, 0.4)
    )
    passes = [
        [text for step in range(3) for text in source.texts(3 * n + step + 1)] for n in range(4)
    ]
    assert all({*each} == {*PASSAGES} and len(each) == 9 for each in passes)
    assert len({*map(tuple, passes)}) > 1
    for step in range(12):
        ranked = source[step].ranked
        np.testing.assert_array_equal(ranked.queries, Hashes().encode_query(source.texts(step + 1)))
        own = [PASSAGES.index(text) for text in source.texts(step + 1)]
        np.testing.assert_array_equal(np.argmin(ranked.scores, axis=1), own)


def test_a_projection_follows_the_modules_of_the_head():
    kernel = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    embeddings = normalize(np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32))
    for layers, expected in (
        ((), embeddings @ kernel),
        (NORMALIZE, normalize(embeddings @ kernel)),
    ):
        head = RecordedHead("avg", layers).with_projection("avg", kernel)
        network = bind(definition(partial(SentenceHead, head.layers)), head.params)
        np.testing.assert_allclose(network(jnp.asarray(embeddings)), expected, atol=1e-6)
        np.testing.assert_array_equal(head.projection, kernel)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("contrast.weight", 1.0, r"Set contrast\.weight to 0"),
        ("data.pairs", "lead", r"Set data\.pairs='dropout' and data\.held_out"),
        ("data.prompts", ("none",), r"Leave data\.prompts out"),
        ("model.projector", "mlp", r"model\.projector='none'"),
        ("eval.metric", "halves_retrieval", r"eval\.metric=halves_retrieval: .* does not use"),
        ("eval.hold", ("halves_retrieval",), r"eval\.hold=halves_retrieval: .* does not use"),
        ("eval.max_drop", 1.0, r"eval\.max_drop limits"),
        ("train.chunk_size", 16, r"Leave train\.chunk_size and train\.chunking out"),
        ("train.chunking", "auto", r"Leave train\.chunk_size and train\.chunking out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(key, value, message, tmp_path):
    values = flat(shipped_config("adapt_queries").to_dict()) | {key: value}
    with pytest.raises(ConfigError, match=message):
        queries.train_queries(Config.from_dict(values), tmp_path / "run")


def test_what_was_read_is_accounted_for(tmp_path, capfd):
    (tmp_path / "notes.bin").write_bytes(b"\0")
    for number, passage in enumerate(PASSAGES):
        (tmp_path / f"{number}.md").write_text(passage)
    values = flat(shipped_config("adapt_queries").to_dict())
    values["data.train_file"] = str(tmp_path)
    is_held_out, documents = queries._divided(open_split(Config.from_dict(values).data))
    assert len(is_held_out) == len(documents) == len(PASSAGES)
    printed = capfd.readouterr().err
    assert "8 documents" in printed
    assert "skipped 1 file" in printed


def test_text_without_documents_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n")
    values = flat(shipped_config("adapt_queries").to_dict())
    values["data.train_file"] = str(tmp_path / "text.txt")
    with pytest.raises(DataError, match=r"text\.txt: no usable text"):
        queries._divided(open_split(Config.from_dict(values).data))


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    Index(None, PASSAGES, mode="lexical").save(tmp_path / "words")
    values = flat(shipped_config("adapt_queries").to_dict())
    values |= {"data.train_file": str(tmp_path / "words")}
    with pytest.raises(ConfigError, match="words holds words alone"):
        queries.open_text(Config.from_dict(values))
    values |= {"data.columns": ("text",)}
    with pytest.raises(ConfigError, match=r"Leave data\.columns out"):
        queries.open_text(Config.from_dict(values))


def test_the_documents_of_an_index_are_those_that_it_was_made_of(tmp_path):
    """With their titles, also if a document has several passages and several sections."""
    sentences = [f"{text} Part {part} of it." for part in range(3) for text in PASSAGES]
    (tmp_path / "text").mkdir()
    for number in range(4):
        text = " ".join(sentences[number:])
        page = f"# Pumps {number}\n\n{text}\n\n# Valves {number}\n\n{text}"
        (tmp_path / f"text/{number}.md").write_text(page)
    index = Index(Hashes(), str(tmp_path / "text"))
    assert len(index.passages) > 16
    index.save(tmp_path / "index")
    values = flat(shipped_config("adapt_queries").to_dict())
    found = []
    for name in ("text", "index"):
        values["data.train_file"] = str(tmp_path / name)
        split, _ = queries.open_text(Config.from_dict(values))
        found.append(
            [
                [(section.title, section.sentences()) for section in document.sections]
                for _, document in split.all()
            ]
        )
    assert found[0] == found[1]


def test_an_index_with_another_prompt_is_refused(tmp_path, minilm_dir):
    start = write_tiny_model(tmp_path / "start", minilm_dir, blocks=1, pooler=False)
    prompts = Prompts({"other": "other: "})
    write(start, RecordedPooler("avg", prompts=prompts), 1, HIDDEN)
    encoder = SentenceEncoder.from_pretrained(start)
    Index(encoder, PASSAGES, prompt_name="other").save(tmp_path / "index")
    values = flat(shipped_config("adapt_queries").to_dict())
    values |= {"data.train_file": str(tmp_path / "index"), "model.name_or_path": str(start)}
    values |= {"data.max_length": 24}
    with pytest.raises(ConfigError, match="'other: '"):
        queries.train_queries(Config.from_dict(values), tmp_path / "run")


def test_a_start_that_cuts_its_embeddings_is_refused(tmp_path, minilm_dir, capfd):
    start = write_tiny_model(tmp_path / "start", minilm_dir, blocks=1, pooler=False)
    write(start, RecordedPooler("avg", truncate_dim=8), 1, HIDDEN)
    (tmp_path / "text.txt").write_text("\n\n".join(PASSAGES))
    values = flat(shipped_config("adapt_queries").to_dict())
    values |= {"data.train_file": str(tmp_path / "text.txt"), "model.name_or_path": str(start)}
    values |= {"data.max_length": 24}
    with pytest.raises(ConfigError, match="cuts its embeddings to 8 dimensions, and queries can"):
        queries.train_queries(Config.from_dict(values), tmp_path / "run")
    assert "A run trains, compares and exports whole ones" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_resumes_and_exports_both_encoders(tmp_path, minilm_dir, monkeypatch, capfd):
    start = write_tiny_model(tmp_path / "start", minilm_dir, blocks=1, pooler=False)
    write(start, RecordedPooler("avg"), 1, HIDDEN)
    text = tmp_path / "text.txt"
    documents = (f"{each}\nDocument {i} has {i * i} pages." for i, each in enumerate(PASSAGES * 7))
    text.write_text("\n\n".join(documents))
    changes = {
        "model.name_or_path": str(start), "data.train_file": str(text), "data.max_length": 24,
        "train.steps": 4, "train.batch_size": 8, "eval.every": 2, "eval.keep_start": False,
        "optim.learning_rate": 1e-2,
    }  # fmt: skip
    config = Config.from_dict(flat(shipped_config("adapt_queries").to_dict()) | changes)
    api.run(config, tmp_path / "whole")
    stop_first_run(monkeypatch)
    (tmp_path / "resumed").mkdir()
    with pytest.raises(Interrupted):
        train_in_folder(config, tmp_path / "resumed")
    train_in_folder(config, tmp_path / "resumed")
    whole, resumed = (
        read_parameters(tmp_path / name / "checkpoints/4")[0] for name in ("whole", "resumed")
    )
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)

    # From an index of the same documents: nothing is encoded again, and the result is the same.
    capfd.readouterr()
    values = flat(config.to_dict()) | {"data.train_file": str(tmp_path / "whole/passages")}
    api.run(Config.from_dict(values), tmp_path / "of_index")
    assert "passages with" not in capfd.readouterr().err
    of_index = read_parameters(tmp_path / "of_index/checkpoints/4")[0]
    jax.tree.map(np.testing.assert_array_equal, of_index, whole)
    assert not (tmp_path / "of_index/passages").exists()

    both = SentenceEncoder.from_pretrained(tmp_path / "whole")
    before = SentenceEncoder.from_pretrained(start)
    np.testing.assert_array_equal(both.encode_document(PASSAGES), before.encode(PASSAGES))
    assert np.abs(both.encode_query(PASSAGES) - before.encode(PASSAGES)).max() > 1e-3
    assert Index.load(tmp_path / "whole/passages", both).record.weights == before.fingerprint()
    # Halfway between no change and the trained map.
    values = flat(config.to_dict()) | {"eval.interpolate": (0.5,)}
    api.run(Config.from_dict(values), tmp_path / "halfway")
    kernels = [
        read_encoder(tmp_path / name).checkpoint.sentence_head.projection
        for name in ("halfway", "whole")
    ]
    np.testing.assert_allclose(kernels[0], (kernels[1] + np.eye(HIDDEN)) / 2, atol=1e-6)

    *_, step, evaluation = read_metrics(tmp_path / "whole")
    assert step["loss_query_distillation"] == step["loss"] > 0
    assert 0 < evaluation["dev/teacher_agreement"] <= 100
