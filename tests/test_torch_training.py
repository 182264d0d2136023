"""Training in PyTorch by the authors' procedure: 20 steps, the optimizer, the loop, the record."""

import itertools
import json

import numpy as np
import pytest
import torch
import transformers
from reference_networks import REFERENCES, VOCABULARY, reference_config
from reference_weights import extra_weights
from tiny_model import HIDDEN, MAX_LENGTH, write_tiny_model

from benchmarks import torch_training, torch_twin, workload
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError, DataError

SIMCSE = {"model": {"projector": "mlp"}, "difference": {"weight": 0.0}}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STEPS = 6  # of the reference's twenty
TIMES = {"seconds", "training_seconds"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("simcse.lr3e-5", {**SIMCSE, "optim": {"learning_rate": 3e-5}}),
        ("diffcse.lr7e-6.lam0.005", {"optim": {"learning_rate": 7e-6}}),
    ],
)
def test_steps_are_those_of_the_authors_trainer(name, groups, minilm_dir, monkeypatch):
    """Losses and gradient norms of the authors' code, with given masks and without dropout."""
    folder = REFERENCES[0]
    expected = json.loads((folder / "train.json").read_text())[name]
    inputs = {
        key.removeprefix("pair."): torch.tensor(array.astype(np.int64)).flatten(0, 1)
        for key, array in np.load(folder / "inputs.npz").items()
        if key.startswith("pair.")
    }
    twin = reference_twin(reference_config(**groups), minilm_dir)
    monkeypatch.setattr(twin, "forward", twin.loss_of_views)  # the reference's views differ
    monkeypatch.setattr(twin, "mask_tokens", lambda _: inputs["mlm_input_ids"])
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    recorded = lambda *args: norms.append(clip(*args).item())  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)

    step = torch_twin.make_step(twin, twin.config, total_steps=20, compiled=False)
    losses = [step(inputs["input_ids"], inputs["attention_mask"]).item() for _ in range(STEPS)]
    # The smallest losses are differences of numbers near 1, which float32 rounds by 6e-8.
    np.testing.assert_allclose(losses, expected["losses"][:STEPS], rtol=1e-4, atol=6e-8)
    np.testing.assert_allclose(norms, expected["grad_norms_before_clip"][:STEPS], rtol=1e-3)


def reference_twin(config: Config, minilm_dir) -> torch_twin.Twin:
    """MiniLM with the projectors and heads of the reference."""
    extra = {name: torch.tensor(array) for name, array in extra_weights().items()}

    def part(prefix: str, place: str = "") -> dict[str, torch.Tensor]:
        names = (name for name in extra if name.startswith(prefix))
        return {place + name.removeprefix(prefix): extra[name] for name in names}

    start = {"pretrained_model_name_or_path": minilm_dir, **NO_DROPOUT}
    encoder = transformers.BertModel.from_pretrained(**start, add_pooling_layer=False)
    generator = None
    if "difference" in config.losses:
        generator = transformers.BertForMaskedLM.from_pretrained(**start)
        head = generator.cls.predictions
        missing, unexpected = head.load_state_dict(part("generator_fitted."), strict=False)
        assert not unexpected
        assert set(missing) <= {"decoder.weight", "decoder.bias"}  # tied
    twin = torch_twin.Twin(config, encoder, generator, VOCABULARY)
    batchnorm = config.model.projector == "batchnorm"
    projector = part("projection_mlp.net.") if batchnorm else part("mlp.dense.", "0.")
    missing, unexpected = twin.projector.load_state_dict(projector, strict=False)
    assert not unexpected
    assert all("running" in name or "num_batches" in name for name in missing)
    if generator:
        twin.token_classifier.load_state_dict(part("electra_head."))
    return twin


def test_adamw_is_that_of_transformers_4_2_1():
    """With gradients so small that it matters where epsilon is added."""
    rate, decay, epsilon, beta1, beta2 = 1e-3, 0.1, 1e-8, 0.9, 0.999
    gradients = 1e-8 * np.random.default_rng(0).normal(size=(4, 50))
    expected, m, v = np.ones(50), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        size = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        expected = expected - size * m / (np.sqrt(v) + epsilon)
        expected = expected - rate * decay * expected

    def moved(kind: type[torch.optim.AdamW]) -> np.ndarray:
        parameter = torch.nn.Parameter(torch.ones(50, dtype=torch.float64))
        optimizer = kind([parameter], lr=rate, weight_decay=decay, fused=True)
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient)
            optimizer.step()
        return parameter.detach().numpy()

    np.testing.assert_allclose(moved(torch_twin.FormerAdamW), expected, atol=4 * decay * rate**2)
    assert np.abs(moved(torch.optim.AdamW) - expected).max() > 100 * 4 * decay * rate**2


@pytest.mark.slow
def test_schedule_clipping_and_decay_are_those_of_a_trainer(tmp_path, monkeypatch):
    """The parameters after five steps of the Trainer of transformers, with the same AdamW."""
    rate, decay, clip, warmup = 1e-3, 0.1, 0.05, 2
    optim = {
        "learning_rate": rate,
        "weight_decay": decay,
        "clip_norm": clip,
        "warmup_steps": warmup,
    }
    groups = {"difference": {"weight": 0.0}, "optim": optim, "precision": "float32"}
    config = Config.from_dict(groups)
    batches = torch.randint(5, 200, (5, 6, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 8, dtype=torch.long)

    def new_twin() -> torch_twin.Twin:
        torch.manual_seed(0)
        encoder = torch_twin.random_encoder(workload.ENCODERS["tiny"] | NO_DROPOUT)
        twin = torch_twin.Twin(config, encoder, None, workload.vocabulary("tiny"))
        # Without dropout, only other tokens make views differ.
        monkeypatch.setattr(twin, "forward", twin.loss_of_views)
        return twin

    class Model(torch.nn.Module):  # the Trainer would write into the twin's configuration
        def __init__(self):
            super().__init__()
            self.twin = new_twin()

        def forward(self, input_ids, attention_mask):
            return self.twin(input_ids, attention_mask)

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, **_):
            return model(**inputs)

    theirs, ours = Model(), new_twin()
    start = {name: value.clone() for name, value in ours.state_dict().items()}
    rows = [{"input_ids": row, "attention_mask": mask[0]} for row in batches.flatten(0, 1)]
    options = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        max_steps=5,
        per_device_train_batch_size=6,
        learning_rate=rate,
        weight_decay=decay,
        max_grad_norm=clip,
        warmup_steps=warmup,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    InOrder(
        theirs,
        options,
        train_dataset=rows,
        optimizer_cls_and_kwargs=(torch_twin.FormerAdamW, {"lr": rate, "fused": True}),
    ).train()
    norms, clip_norm = [], torch.nn.utils.clip_grad_norm_
    recorded = lambda *args: norms.append(clip_norm(*args).item())  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    step = torch_twin.make_step(ours, config, total_steps=5, compiled=False)
    for input_ids in batches:
        step(input_ids, mask)
    assert min(norms) > 2 * clip
    for name, value in theirs.twin.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    moved = [(value - start[name]).abs().max().item() for name, value in ours.named_parameters()]
    assert np.median(moved) > rate


def test_batches_are_permutations_and_the_last_one_of_an_epoch_is_short():
    rows = [[101, *[7] * index, 102] for index in range(10)]
    torch.manual_seed(0)
    batches = list(itertools.islice(torch_training.endless_batches(rows, 4, pad_id=0), 6))
    assert [len(ids) for ids, _ in batches] == [4, 4, 2] * 2
    words = [(mask.sum(dim=1) - 2).tolist() for _, mask in batches]
    epochs = [list(itertools.chain(*epoch)) for epoch in (words[:3], words[3:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    for ids, mask in batches:
        assert ids.shape[1] == mask.sum(dim=1).max()
        assert ((ids == 0) == (mask == 0)).all()
    torch.manual_seed(0)
    first, _ = next(torch_training.endless_batches(rows, 4, pad_id=0))
    assert (first == batches[0][0]).all()


@pytest.fixture(scope="module")
def command(tmp_path_factory, minilm_dir):
    """The arguments of a run on tiny models: 22 lines, of which one is empty, in batches of 4."""
    folder = tmp_path_factory.mktemp("torch_training")
    write_tiny_model(folder / "start", minilm_dir, blocks=1)
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    sizes |= {"vocab_size": 30522, "max_position_embeddings": MAX_LENGTH}
    generator = transformers.BertConfig(**sizes)
    transformers.BertForMaskedLM(generator).save_pretrained(folder / "generator")
    lines = ["", *(f"Sentence {i} has {i % 7} words more." for i in range(21)), ""]
    (folder / "text.txt").write_text("\n".join(lines))
    stsb = folder / "senteval/STS/STSBenchmark"
    stsb.mkdir(parents=True)
    for split in ("dev", "test"):
        pairs = ((i, f"This is {i} and {split}.", f"That was {i * i} then.") for i in range(30))
        rows = (f"a\tb\tc\t{i}\t{i % 5}\t{first}\t{second}\n" for i, first, second in pairs)
        (stsb / f"sts-{split}.csv").write_text("".join(rows))
    settings = {
        "model.name_or_path": folder / "start",
        "generator.name_or_path": folder / "generator",
        "data.train_file": folder / "text.txt",
        "eval.data_dir": folder / "senteval",
        "train.batch_size": 4,
        "train.log_every": 5,
        "eval.every": 4,
        "optim.learning_rate": 1e-3,
    }
    return [
        "--config",
        "diffcse_base",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]


def test_record(command, tmp_path):
    file, again = tmp_path / "records" / "diffcse.jsonl", tmp_path / "again.jsonl"
    torch_training.main([*command, "--seeds", "1,2", "--record", str(file)])
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["seed"], second["seed"]) == (1, 2)
    assert first["digest"] == second["digest"]
    assert first["steps"] == 12  # two epochs of six batches: the last has two sentences
    assert first["text"]["lines"] == 22
    assert [step for step, _ in first["dev"]] == [4, 8, 12]
    assert [step for step, _ in first["loss"]] == [5, 10, 12]
    scores = {step: score for step, score in first["dev"]}
    assert first["best"]["dev"] == max(scores.values()) == scores[first["best"]["step"]]
    assert first["best"]["test"].keys() == first["last"]["test"].keys() == {"STSBenchmark"}
    assert (first["best"]["test"] == first["last"]["test"]) == (first["best"]["step"] == 12)
    assert set(first["missing"]) == {*(f"STS{year}" for year in range(12, 17)), "SICKRelatedness"}
    assert {"torch", "transformers"} <= first["versions"].keys()
    assert first["loss"] != second["loss"]

    torch_training.main([*command, "--seeds", "2,1", "--record", str(file)])
    assert len(file.read_text().splitlines()) == 2  # nothing is left to train
    torch_training.main([*command, "--config.train.seed=2", "--record", str(again)])
    repeated = json.loads(again.read_text())
    changes = TIMES | {"overrides"}  # where the seed is now
    assert {key for key in second if repeated[key] != second[key]} <= changes
    with pytest.raises(ConfigError, match="another configuration"):
        torch_training.main([*command, "--config.train.epochs=1", "--record", str(file)])


def test_embeddings_are_those_of_position_0_without_dropout(command):
    overrides = dict(argument.removeprefix("--config.").split("=") for argument in command[2:])
    folder = overrides["model.name_or_path"]
    model = transformers.BertModel.from_pretrained(folder).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [
        "A long sentence with many more words than the others.",
        "Short.",
        "word " * 100,
        "Two words.",
    ]
    found = torch_training.TwinEncoder(model, tokenizer).encode(texts, batch_size=2)
    assert model.training
    model.eval()
    for text, embedding in zip(texts, found, strict=True):
        tokens = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        with torch.no_grad():
            alone = model(**tokens).last_hidden_state[0, 0].numpy()
        np.testing.assert_allclose(embedding, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("train.chunk_size=2", ConfigError, "train.chunk_size=2"),
        ("mesh.data=2", ConfigError, "mesh.data=2.*0 or 1"),
        ("contrast.hard_negative_weight=2", ConfigError, "hard_negative_weight"),
        ("difference.edit=insert", ConfigError, "difference.edit='insert'"),
        ("generator.positions=masked", ConfigError, "generator.positions='masked'"),
        ("generator.name_or_path=", ConfigError, "trains no masked-LM head"),
        ("model.pooler=avg", ConfigError, "model.pooler='avg'"),
        ("model.projector_train_only=False", ConfigError, "projector_train_only"),
        ("model.hidden_dropout=0.1,0.2", ConfigError, "hidden_dropout"),
        ("eval.every=13", ConfigError, "from 1 to 12"),
        ("eval.metric=halves_retrieval", ConfigError, "eval.metric"),
        ("data.train_file=wiki1m", DataError, "local .txt files"),
        ("optim.schedule=constant", ConfigError, "optim.schedule='constant'"),
    ],
)
def test_what_the_authors_do_not_do_is_refused(override, error, message, command, tmp_path):
    record = tmp_path / "record.jsonl"
    with pytest.raises(error, match=message):
        torch_training.main([*command, f"--config.{override}", "--record", str(record)])
    assert not record.exists()


def test_a_generator_without_a_head_is_refused(command, tmp_path):
    overrides = dict(argument.removeprefix("--config.").split("=") for argument in command[2:])
    start = overrides["model.name_or_path"]
    arguments = [f"--config.generator.name_or_path={start}", "--record", str(tmp_path / "record")]
    with pytest.raises(CheckpointError, match=r"lacks the weights .*cls\.predictions"):
        torch_training.main([*command, *arguments])


def test_simcse_has_no_generator_that_could_be_refused():
    groups = {"generator": {"positions": "masked", "name_or_path": ""}}
    torch_training.check(Config.from_dict(SIMCSE | groups))
    with pytest.raises(ConfigError, match=r"generator\.positions"):
        torch_training.check(Config.from_dict(groups))
