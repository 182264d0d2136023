"""The objectives side by side on a 6-block BERT that needs no hub: minutes a run on two CPU cores, on any text.

Command:   python -m diffcse_jax.study configs/studies/minilm.py --config.data.train_file=sentences.txt
Encoder:   MiniLM, trained as in `configs/diffcse_minilm.py`: 150 steps of 32, learning rate 3e-5, own masked-LM head.
Start:     the first two rows: MiniLM as it is used (mean pooling), and with the pooler that is trained here. It is a
           sentence encoder already; the second of them is where training begins.

The dropout schedules `mask 4` and `mask 11` (`configs/studies/dropout_masks.py`) are those of twelve blocks: a block of
the six has the mean of the rates of the two that it stands for.
"""

from diffcse_jax.study import Study

OFF_DROPOUT = {"contrast.negatives": "off_dropout", "contrast.negative_ratio": 0.9}
DCL = {"dcl.weight": 0.1, "dcl.temperature": 5.0}
SIMCSE = {"model.projector": "mlp", "difference.objective": "none"}
MASK_4 = (0.5, 0.5, 0.1, 0.1, 0.1, 0.1)  # of twelve: 0.5 in blocks 1 to 4
MASK_11 = (0.25, 0.1, 0.1, 0.1, 0.1, 0.1)  # of twelve: 0.3 and 0.2 in blocks 1 and 2


def get_study() -> Study:
    once = ("off-dropout", "DCL", "without contrast", "mask 4", "mask 11")
    return Study(
        base="diffcse_minilm",
        variants={
            "SimCSE": SIMCSE,
            "SimCSE++": SIMCSE | OFF_DROPOUT | DCL,
            "DiffCSE": {},
            "DiffCSE + SimCSE++": OFF_DROPOUT | DCL,
            "off-dropout": SIMCSE | OFF_DROPOUT,
            "DCL": SIMCSE | DCL,
            "without contrast": {"contrast.weight": 0.0},
            "mask 4": {"model.hidden_dropout": MASK_4, "model.attention_dropout": MASK_4},
            "mask 11": {"model.hidden_dropout": MASK_11, "model.attention_dropout": MASK_11},
        },
        seeds=(1, 2, 3),
        seeds_of=dict.fromkeys(once, (1,)),
        start=("own", "cls_before_pooler"),
    )
