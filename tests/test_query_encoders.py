"""Models with a query encoder and a document encoder."""

import json
import pickle
import shutil

import numpy as np
import pytest
from tiny_model import HIDDEN, random_params, write_smallest_model

from diffcse_jax import SentenceEncoder, export
from diffcse_jax.apps import require_model
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation import CachedEncoder, encode_pairs
from diffcse_jax.evaluation.backends import TorchEncoder
from diffcse_jax.io import write_tensors
from diffcse_jax.models import hf, sentence_folder
from diffcse_jax.models.heads import RecordedHead
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.search.index import Index

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WORDS = ["how", "do", "i", "delete", "the", "account", "page", "of", "an", "old", "user"]
TEXTS = ["how do i delete the account", "page of an old user"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The starting checkpoint, and an export whose queries have other weights and a projection."""
    root = tmp_path_factory.mktemp("two")
    start = write_smallest_model(root / "start", WORDS)
    shutil.copytree(start, root / "trained")
    projection = np.random.default_rng(0).normal(size=(HIDDEN, HIDDEN)).astype(np.float32)
    projected = RecordedHead("avg").with_projection("avg", projection)
    sentence_folder.write(start, RecordedPooler("avg"), 1, HIDDEN)
    trained = RecordedPooler("avg", sentence_head=projected)
    sentence_folder.write(root / "trained", trained, 1, HIDDEN)
    config = hf.read(str(start)).config
    tensors = hf.to_hf(random_params(Transformer, config, seed=1), "transformer", config)
    write_tensors(root / "trained/model.safetensors", tensors)
    checkpoints = hf.Encoders(hf.read(str(start)), hf.read(str(root / "trained")))
    encoder = SentenceEncoder.of(
        checkpoints.documents,
        sentence_folder.recorded(checkpoints.documents),
        "two",
        queries=SentenceEncoder.from_pretrained(root / "trained"),
    )
    (root / "both").mkdir()
    export.write_folder(export.Source(checkpoints, encoder), root / "both")
    return root


@pytest.fixture(scope="module")
def both(folders):
    require_model(str(folders / "both"))
    return SentenceEncoder.from_pretrained(folders / "both")


def test_queries_and_documents_have_their_own_weights(folders, both):
    start, trained = (
        SentenceEncoder.from_pretrained(folders / name) for name in ("start", "trained")
    )
    named = SentenceEncoder.from_pretrained(
        folders / "both", pooler="mean"
    )  # of the document encoder
    copies = both, named, pickle.loads(pickle.dumps(both))
    for encoder in copies:
        np.testing.assert_array_equal(encoder.encode_document(TEXTS), start.encode(TEXTS))
        np.testing.assert_array_equal(encoder.encode_query(TEXTS), trained.encode(TEXTS))
    assert both.fingerprint() == start.fingerprint() != trained.fingerprint()
    pair = encode_pairs(CachedEncoder(both), TEXTS[:1], TEXTS[1:])
    np.testing.assert_array_equal(pair[0], trained.encode(TEXTS[:1]))
    np.testing.assert_array_equal(pair[1], start.encode(TEXTS[1:]))


def test_sentence_transformers_reads_both_encoders(folders, both):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(folders / "both"), device="cpu")
    ours = TorchEncoder(str(folders / "both"), "avg")
    for task in ("query", "document"):
        expected = both.encode(TEXTS, task=task)
        np.testing.assert_allclose(theirs.encode(TEXTS, task=task), expected, atol=1e-5)
    np.testing.assert_allclose(theirs.encode(TEXTS), both.encode_document(TEXTS), atol=1e-5)
    np.testing.assert_allclose(ours.encode(TEXTS), both.encode_document(TEXTS), atol=1e-5)
    np.testing.assert_allclose(ours.queries.encode(TEXTS), both.encode_query(TEXTS), atol=1e-5)


def test_encode_says_once_which_encoder_it_takes(folders):
    encoder = SentenceEncoder.from_pretrained(folders / "both")
    with pytest.warns(UserWarning, match="`encode` takes the document encoder") as warnings:
        first = encoder.encode(TEXTS)
    np.testing.assert_array_equal(
        first, encoder.encode(TEXTS)
    )  # a second warning would be an error
    assert len(warnings) == 1
    np.testing.assert_array_equal(first, encoder.encode(TEXTS, task="document"))
    with pytest.raises(ConfigError, match="task='doc': use 'query', 'document' or None"):
        encoder.encode(TEXTS, task="doc")


def test_the_name_of_a_prompt_decides_which_encoder_it_takes(folders):
    encoder = SentenceEncoder.from_pretrained(folders / "both", prompts={"query": "how "})
    of_queries = encoder.encode(TEXTS, prompt_name="query")
    np.testing.assert_array_equal(of_queries, encoder.encode_query(TEXTS))


def test_the_card_next_to_the_router_states_the_languages(folders, tmp_path):
    shutil.copytree(folders / "both", tmp_path / "both")
    (tmp_path / "both/README.md").write_text("---\nlanguage: de\n---\n")
    encoder = SentenceEncoder.from_pretrained(tmp_path / "both")
    assert encoder.languages == encoder.queries.languages == ("de",)


def test_an_index_of_the_start_stays_valid(folders, both, tmp_path):
    start = SentenceEncoder.from_pretrained(folders / "start")
    index = Index(start, TEXTS)
    index.save(tmp_path / "index")
    found = Index.load(tmp_path / "index", both)
    assert found.record.weights == both.record().weights
    expected = (
        both.encode_query(TEXTS, normalize=True) @ both.encode_document(TEXTS, normalize=True).T
    )
    scores = [{hit.text: hit.score for hit in hits} for hits in found.search(TEXTS)]
    for row, by_text in zip(expected, scores, strict=True):
        np.testing.assert_allclose([by_text[text] for text in TEXTS], row, atol=1e-6)
    found.add(["an old page"])
    np.testing.assert_allclose(
        found.embeddings.rows(np.array([2]))[0],
        start.encode("an old page", normalize=True),
        atol=1e-6,
    )
    with pytest.raises(ConfigError, match="Use the encoder of the folder"):
        Index.load(tmp_path / "index", SentenceEncoder.from_pretrained(folders / "both/query"))


def test_folders_that_are_not_two_whole_models_are_refused(folders, tmp_path):
    shutil.copytree(folders / "both", tmp_path / "both")
    with pytest.raises(CheckpointError, match=r"Name one of them: .*query or .*document$"):
        hf.read(str(tmp_path / "both"))
    router = tmp_path / "both/router_config.json"
    content = json.loads(router.read_text())
    content["structure"]["query"] = content["structure"]["document"]
    router.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"this Router is not supported\. Supported are two"):
        SentenceEncoder.from_pretrained(tmp_path / "both")


def test_a_model_with_two_encoders_is_exported_again(folders, tmp_path):
    check = export.export(folders / "both", tmp_path / "again", truncate_dim=8)
    assert max(check["maximal_absolute_difference"].values()) < 1e-5
    again = SentenceEncoder.from_pretrained(tmp_path / "again")
    assert again.dimension == again.queries.dimension == 8
