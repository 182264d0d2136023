"""The configuration: keys, types, ranges, overrides and combinations."""

import json
import re

import pytest

from diffcse_jax.config import (
    Config,
    checked_values,
    default_config,
    flat,
    known_keys,
    read_overrides,
)
from diffcse_jax.errors import ConfigError

KEYS = known_keys()


def test_every_key_is_documented_and_has_a_legal_default():
    for key, field in KEYS.items():
        assert field.metadata["doc"], key
        assert field.type in (
            str,
            int,
            float,
            bool,
            tuple[str, ...],
            tuple[float, ...],
            tuple[int, ...],
        ), key
    defaults = {key: field.default for key, field in KEYS.items()}
    for values in (defaults, {}, default_config().to_dict()):
        assert Config.from_dict(values) == Config()


COMPANIONS = {  # what makes the smallest and largest value possible
    "matryoshka.sizes": {"model.projector": "none"},
    "eval.metric": {"data.held_out": 0.1},
    "eval.beside": {"data.held_out": 0.1},
    "eval.hold": {"data.held_out": 0.1},
    "data.held_out": {"data.pairs": "lead"},
    "contrast.negative_ratio": {"contrast.negatives": "off_dropout"},
    "contrast.duplicate_similarity": {"contrast.mask_duplicates": "similarity"},
}


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("--config.train.steps=60", "train.steps", 60),
        ("--config.optim.learning_rate=3e-5", "optim.learning_rate", 3e-5),
        ("--config.generator.name_or_path=", "generator.name_or_path", ""),
        ("--config.matryoshka.sizes=64,128", "matryoshka.sizes", (64, 128)),
        ("--config.model.pooler=mean", "model.pooler", "avg"),
        ("--config.finetune.tasks.mine.ratio=4", "finetune.tasks.mine.ratio", 4),
    ],
)
def test_overrides_are_read_in_the_type_of_the_key(argument, key, value):
    found = read_overrides([argument])[key]
    assert (found, type(found)) == (value, type(value))
    assert read_overrides(argument.split("=", 1)) == {key: value}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--train.steps=3", "'--train.steps=3' is not an option. Write --config.train.steps=3."),
        (
            "--learning_rate",
            "'--learning_rate' is not an option. Write --config.optim.learning_rate=VALUE.",
        ),
        (
            "--config.train.steps",
            "--config.train.steps: the value is missing. Write --config.train.steps=VALUE.",
        ),
        ("--config.train.steps=abc", "train.steps: expected int, got 'abc'"),
        ("--config.distributed=perhaps", "distributed: expected bool, got 'perhaps'"),
        (
            "--config.model.pooler=last",
            "model.pooler: 'last' is not one of cls, cls_before_pooler, avg, avg_top2",
        ),
        (
            "--config.difference.lambda=1",
            "unknown key difference.lambda; did you mean difference.weight?",
        ),
        ("--config.optim.lr=1", "unknown key optim.lr; did you mean optim.learning_rate?"),
        ("--config.diference.weight=1", "unknown key diference.weight; did you mean difference.w"),
        ("--config.batch_size=1", "unknown key batch_size; did you mean train.batch_size?"),
        ("--config.model=minilm", "unknown key model; did you mean model.name_or_path?"),
        (
            "--config.finetune.tasks.mine.fil=1",
            "unknown key finetune.tasks.mine.fil; did you mean finetune.tasks.min",
        ),
    ],
)
def test_overrides_that_cannot_be_read(argument, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        read_overrides([argument])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": 3}, "optim=3: expected a group of keys"),
        ({"foo": {}}, "unknown key foo"),
        (
            {"finetune": {"tasks": {"mine": {"depth": 0}}}},
            "finetune.tasks.mine.depth: 0 is below 1",
        ),
        ({"distributed": 1}, "distributed: expected bool, got 1"),
        (
            {"finetune.tasks.My task.depth": 2},
            "finetune.tasks.My task: 'My task' is not a valid name. Use lower-case",
        ),
        (
            {"model.hidden_dropout": 0.1},
            "model.hidden_dropout: expected a tuple of float such as (0.1,), got 0.1",
        ),
        ({"optim.learning_rate": 10**400}, "optim.learning_rate: expected float, got 1000"),
        ({"optim.learning_rate": float("nan")}, "optim.learning_rate: nan is below"),
    ],
)
def test_wrong_keys_and_types_are_refused(values, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Config.from_dict(values)


def test_groups_that_users_name():
    values = {"file": "rows.csv", "texts": ("a", "b"), "ratio": 3}
    config = Config.from_dict(
        {"finetune": {"weight": 1.0, "tasks": {"mine": values}}, "difference": {"weight": 0.0}}
    )
    assert {**values, "depth": 1}.items() <= flat(
        config.to_dict()["finetune"]["tasks"]["mine"]
    ).items()
    assert flat(config.to_dict())["finetune.tasks.mine.ratio"] == 3
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert (again, hash(again)) == (config, hash(config))
    assert list(config.losses) == ["contrast", "finetune"]
    assert list(Config.from_dict({"finetune": {"tasks": {"empty": {}}}}).finetune.tasks) == [
        "empty"
    ]


def test_values_outside_the_choices_or_the_bounds_are_refused():
    for key, field in KEYS.items():
        of_type = (
            (lambda value: (value,)) if isinstance(field.default, tuple) else type(field.default)
        )
        if choices := field.metadata["choices"]:
            message = f"^{key}: 'other' is not one of {', '.join(choices)}$"
            with pytest.raises(ConfigError, match=message):
                Config.from_dict({key: of_type("other")})
        for name, step, word in (("low", -1, "below"), ("high", 0.01, "above")):
            if (bound := field.metadata[name]) is not None:
                legal = Config.from_dict(COMPANIONS.get(key, {}) | {key: of_type(bound)})
                assert flat(legal.to_dict())[key] == of_type(bound)
                assert Config.from_dict(json.loads(json.dumps(legal.to_dict()))) == legal
                beyond = bound + (step if isinstance(bound, float) else round(step) or 1)
                with pytest.raises(ConfigError, match=f"^{key}: .* is {word} {bound}$"):
                    Config.from_dict({key: of_type(beyond)})


NO_DROPOUT = {"model.hidden_dropout": (0.0,), "model.attention_dropout": (0.0,) * 12}
TEACHERS = {"distillation.weight": 1.0, "distillation.teachers": ("start", "b")}
NO_GENERATOR = {"generator.name_or_path": "", "generator.head_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model.projector_train_only": False},
            "needs model.projector='mlp' and model.pooler='cls'",
        ),
        (NO_GENERATOR, "difference.weight > 0 needs a generator"),
        ({"contrast.weight": 0.0, "difference.weight": 0.0}, "nothing to train"),
        ({"contrast.negative_ratio": 0.9}, "negative_ratio=0.9 is read only with other positives"),
        (
            {"contrast.samples": 10},
            "contrast.samples=10 is read only with contrast.positives='mean'",
        ),
        ({"contrast.duplicate_similarity": 0.9}, "only with contrast.mask_duplicates='similarity'"),
        ({"eval.metric": "pairs_retrieval"}, "eval.metric='pairs_retrieval' needs eval.pairs_file"),
        (
            {"eval.beside": ("lead_retrieval",)},
            "eval.beside='lead_retrieval' needs held-out documents",
        ),
        (
            {"contrast.second_encoder": True, "contrast.negatives": "mean"},
            "contrast.negatives='mean' compares embeddings of one encoder",
        ),
        ({"eval.tasks": ()}, "eval.metric='stsb_spearman' needs STSBenchmark in eval.tasks"),
        ({"matryoshka.sizes": (8,)}, "model.projector='batchnorm' is dropped when encoding"),
        (
            {"difference.sentence": "next"},
            "difference.weight > 0 needs documents. Set data.pairs='dropout'",
        ),
        (
            {"data.pairs": "crops", "difference.sentence": "both"},
            "data.pairs='crops' makes another span the positive",
        ),
        (
            {"data.pairs": "neighbours", "data.augmentation": "crop"},
            "data.augmentation='crop' changes the second view of single sentences, but with data.pairs='neighbours' it",
        ),
        (
            {"data.augmentation": "synonyms"},
            "data.augmentation='synonyms' needs data.synonyms_file",
        ),
        (
            TEACHERS | {"distillation.poolers": ("avg",)},
            "distillation.poolers has 1 value for 2 teachers",
        ),
        (TEACHERS | {"distillation.shares": (0.0, 0.0)}, "distillation.shares are all 0"),
        (TEACHERS | {"distillation.poolers": ("avg", "")}, "model.pooler is the pooler of `start`"),
        (
            {"difference.objective": "conditional_mlm", "difference.edit": "insert"},
            "='rtd': 'conditional_mlm'",
        ),
        (
            {"difference.objective": "corrective_lm", "difference.edit": "insert"},
            "='rtd': 'corrective_lm' recovers",
        ),
        (
            {"difference.objective": "corrective_lm", "difference.discriminator": "a"},
            "='rtd', the task of ELECTRA",
        ),
    ],
)
def test_impossible_combination_is_refused(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_dict(values)


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        ("model", {"train.step": 1}, r"unknown key train\.step; did you mean train\.steps\?"),
        ("model", {"train.steps": 1}, r"model=.*: use Config\.from_dict\(values\)"),
        ("train", {"step": 1}, r"unknown key train\.step; did"),
    ],
)
def test_values_where_groups_belong_are_refused(group, values, message):
    config = Config()
    vars(config)[group] = values  # tests check the types of arguments
    with pytest.raises(ConfigError, match=message):
        config.__post_init__()


@pytest.mark.parametrize(
    ("values", "got"), [(["train.steps=1"], "list"), ({5: 1}, "the key 5"), (None, "NoneType")]
)
def test_values_are_a_dict(values, got):
    with pytest.raises(ConfigError, match=f"^overrides: give a dict of values, .* not {got}$"):
        checked_values("overrides", values)
