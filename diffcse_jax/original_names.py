"""Names that the papers and the PyTorch originals have for what is a key here."""

KEYS = {
    # the papers
    "lambda": "difference.weight",
    "tau": "contrast.temperature",
    # DiffCSE's and SimCSE's train.py
    "attention_probs_dropout_prob": "model.attention_dropout",
    "batchnorm": "model.projector",
    "do_mlm": "mlm.weight",
    "eval_steps": "eval.every",
    "fp16": "precision",
    "generator_name": "generator.name_or_path",
    "hidden_dropout_prob": "model.hidden_dropout",
    "lambda_weight": "difference.weight",
    "logging_steps": "train.log_every",
    "lr": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "mask_ratio": "difference.mask_ratio",
    "masking_ratio": "difference.mask_ratio",
    "max_grad_norm": "optim.clip_norm",
    "max_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_steps": "train.steps",
    "metric_for_best_model": "eval.metric",
    "mlm_probability": "mlm.mask_ratio",
    "mlm_weight": "mlm.weight",
    "mlp_only_train": "model.projector_train_only",
    "model_name_or_path": "model.name_or_path",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "pooler_type": "model.pooler",
    "save_steps": "eval.every",
    "temp": "contrast.temperature",
}


def key_for(name: str) -> str:
    """The key for such a name, `lambda` as well as `difference.lambda` or `dcl.lambda`; empty where none is known."""
    group, _, leaf = name.rpartition(".")
    key = KEYS.get(leaf.lower(), "")
    return f"{group}.{key.rpartition('.')[2]}" if key and group else key
