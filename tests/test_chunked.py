"""A step in chunks, or without padding, is the step of the whole batch."""

import functools

import jax
import numpy as np
import pytest
from tiny_networks import (
    ENCODER,
    GENERATOR,
    MODERN,
    SIMCSE,
    VOCABULARY,
    config_of,
    deeper,
    random_batch,
    views_of,
)

from diffcse_jax.errors import ConfigError
from diffcse_jax.losses.total import prepare
from diffcse_jax.models.forward import Computation
from diffcse_jax.training import networks
from diffcse_jax.training.sharding import make_mesh, replicated, shard_batch
from diffcse_jax.training.step import loss_of_batch

BATCH_SIZE = 16
TANH = {"model": {"projector": "mlp"}}
OFF_DROPOUT = {"contrast": {"negatives": "off_dropout", "negative_ratio": 0.9}}
MLM = {"mlm": {"weight": 0.1}}
DCL = {"dcl": {"weight": 0.1}}
NOISE_AND_MEANS = {
    "contrast": {
        "positives": "mean",
        "samples": 3,
        "negatives": "noise",
        "similarity": "dot",
        "temperature": 1.0,
    }
}
NEAR_DUPLICATES = {"contrast": {"mask_duplicates": "similarity", "duplicate_similarity": 0.8}}
TWO_ENCODERS = {"contrast": {"second_encoder": True, "symmetric": True}}
BARLOW_TWINS = {"barlow_twins": {"weight": 0.1, "artificial_rows": 8}}
RANKING = {"consistency": {"weight": 1.0}, "distillation": {"weight": 0.1, "teachers": ("start",)}}
LABELLED = {
    "finetune": {
        "weight": 0.5,
        "tasks": {"pair": {"texts": ("a", "b"), "kind": "regression", "depth": 2}},
    }
}
RECONSTRUCTION = {
    "reconstruction": {"weight": 0.01, "blocks": 1},
    "generator": {"name_or_path": "start"},
}
PREFIXES = {"matryoshka": {"sizes": (8,)}, "model": {"projector": "none"}}
MASKED = {"generator": {"positions": "masked", "decode": "sample"}}
BOTH = {
    "data": {"pairs": "dropout", "max_length": 16},
    "difference": {"weight": 0.5, "sentence": "both"},
}
MIXED = {"difference": {"edit": "mixed", "condition": "pooled"}}
CORRECTIVE = {"difference": {"objective": "corrective_lm"}}
INSERTIONS = {"edited_contrast": {"weight": 0.5, "role": "negative", "edit": "insert"}}
CASES = {
    "hard negatives": (3, SIMCSE),
    "noise and means": (2, SIMCSE, NOISE_AND_MEANS),
    "ranking, labelled pairs": (2, SIMCSE, OFF_DROPOUT, RANKING, LABELLED, PREFIXES),
    "reconstruction": (3, SIMCSE, {"mlm": {"weight": 0.1, "tied": True}}, RECONSTRUCTION),
    "supervised difference": (
        4,
        NEAR_DUPLICATES,
        TWO_ENCODERS,
        BARLOW_TWINS,
        {"difference": {"weight": 0.5}},
    ),
    "difference, mixed edits of both sentences": (1, TANH, MASKED, BOTH, MIXED),
    "corrective LM of both sentences, edited negatives": (1, TANH, BOTH, CORRECTIVE, INSERTIONS),
    "masked LM": (1, SIMCSE, {"contrast": {"weight": 0.0}, "mlm": {"weight": 1.0, "tied": True}}),
    "all": (2, OFF_DROPOUT, DCL, MLM, {"difference": {"weight": 0.5}}),
}
FAST = SEVERAL_BLOCKS = {"hard negatives"}
MODERNBERT = {"reconstruction"}


@functools.cache
def evaluate(
    name: str, chunk_size: int, devices: int = 1, packed: bool = False
) -> tuple[dict, dict]:
    """Return metrics and gradients, with dropout."""
    columns, *parts = CASES[name]
    sizes = {
        "train": {"batch_size": BATCH_SIZE, "chunk_size": chunk_size},
        "mesh": {"data": devices},
    }
    config = config_of(*parts, sizes)
    encoder = deeper(ENCODER) if name in SEVERAL_BLOCKS else ENCODER
    networks_of = (MODERN, MODERN) if name in MODERNBERT else (encoder, GENERATOR)
    built = networks.build(config, *networks_of, VOCABULARY)
    computation = functools.partial(
        Computation, built.networks, chunks=config.train.chunks, devices=devices
    )

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def grad_of_objective(params, frozen, views, key):
        corruptions = prepare(config.losses, computation(frozen), views, key, config.run_info)

        def loss(params):
            return loss_of_batch(config, computation(params), views, corruptions, key)

        return jax.grad(loss, has_aux=True)(params)

    mesh = make_mesh(config)
    batch = random_batch(size=BATCH_SIZE, columns=columns)
    following = random_batch(size=BATCH_SIZE, seed=1) if config.needs("next_sentence") else None
    options = {"packed": packed, "devices": devices, "chunks": config.train.chunks}
    views = views_of(
        batch, **options, following=following, compares_views=config.needs("embeddings")
    )
    if config.finetune.tasks:
        views = views._replace(labels={"pair": np.arange(BATCH_SIZE, dtype=np.float32)})
    views = shard_batch(views, mesh)
    arrays = jax.device_put((built.params, built.frozen), replicated(mesh))
    grads, metrics = grad_of_objective(*arrays, views, jax.random.key(0))
    return metrics, grads


def assert_near(ours: dict, theirs: dict) -> None:
    """Every array within 1e-5, of its largest entry where that is above 1."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_neither_chunks_nor_packing_change_loss_and_gradients(name):
    """Both at once: what is computed otherwise in either of them would show. Chunks may be of one sentence."""
    ours, plain = evaluate(name, 1 if name == "all" else 8, packed=True), evaluate(name, 0)
    for of_ours, of_plain in zip(ours, plain, strict=True):
        assert_near(of_ours, of_plain)
    metrics, grads = plain
    assert any(np.abs(grad).max() > 1e-2 for grad in grads.values())
    _, *parts = CASES[name]
    config = config_of(*parts)
    if not config.matryoshka.sizes:  # which adds losses of prefixes
        expected = sum(
            each.weight * metrics[f"loss_{term}"] for term, each in config.losses.items()
        )
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "masked LM"])
def test_chunks_on_several_devices_are_the_batch_on_one(name):
    metrics, grads = evaluate(name, 0)
    many, many_grads = evaluate(name, 8, devices=8, packed=True)
    for name, value in metrics.items():
        np.testing.assert_allclose(many[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert_near(many_grads, grads)


@pytest.mark.parametrize(
    ("batch_size", "chunk_size", "chunks"),
    [(64, 0, 1), (64, 64, 1), (32, 64, 1), (96, 64, 2), (64, 48, 2), (100, 10, 10)],
)
def test_chunks_are_equal_and_as_few_as_can_be(batch_size, chunk_size, chunks):
    train = {"batch_size": batch_size, "chunk_size": chunk_size}
    assert config_of({"train": train}).train.chunks == chunks


def test_chunks_that_cannot_be():
    with pytest.raises(
        ConfigError, match=r"batch_size=62 can only be cut into equal chunks of 2 .*chunk_size=30"
    ):
        config_of({"train": {"batch_size": 62, "chunk_size": 30}})
    with pytest.raises(
        ConfigError, match=r"the chunk of 4 .*\.chunk_size=4.* is not divisible by the 8 devices"
    ):
        make_mesh(config_of({"train": {"batch_size": 64, "chunk_size": 4}}))
    with pytest.raises(
        ConfigError, match=r"the chunk of 16 .*\.chunk_size=20.* is not divisible by the 32 "
    ):
        make_mesh(
            config_of({"train": {"batch_size": 64, "chunk_size": 20}}), [jax.devices()[0]] * 32
        )
