"""SimCSE with other dropout rates, and with the same dropout for both views (SimCSE Table 3).

Command:   diffcse study --config simcse_dropout
Model:     BERT-base, scored on STS-B dev.
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.

A rate applies to all hidden states, including the output of the embedding layer, and to attention
probabilities.
"""

from diffcse_jax.apps.study import Study

OTHER_RATES = (0.0, 0.01, 0.05, 0.15, 0.2, 0.5)


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "p=0.1": {},
            **{
                f"p={p}": {"model.hidden_dropout": (p,), "model.attention_dropout": (p,)}
                for p in OTHER_RATES
            },
            "fixed 0.1": {"model.dropout_masks": "shared"},
        },
        tasks=("STSBenchmark",),
    )
