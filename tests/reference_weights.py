"""The heads of the reference that tests/reference carries: drawn from a seed instead of stored."""

import numpy as np


def extra_weights() -> dict[str, np.ndarray]:
    """Draw what MiniLM lacks: projectors and heads, under the authors' names and in PyTorch's layout.

    `RandomState` draws the same numbers in every version of NumPy. All heads are random, including
    the generator's called `fitted`.
    """
    draw = np.random.RandomState(0).normal
    weights = {
        "mlp.dense.weight": draw(0, 0.05, (384, 384)),
        "mlp.dense.bias": draw(0, 0.05, 384),
        "projection_mlp.net.0.weight": draw(0, 0.05, (768, 384)),
        "projection_mlp.net.1.weight": draw(1, 0.1, 768),
        "projection_mlp.net.1.bias": draw(0, 0.1, 768),
        "projection_mlp.net.3.weight": draw(0, 0.05, (384, 768)),
        "electra_head.weight": draw(0, 0.05, (2, 384)),
        "electra_head.bias": draw(0, 0.05, 2),
    }
    for head in ("fitted", "random"):
        weights |= {
            f"generator_{head}.transform.dense.weight": draw(0, 0.02, (384, 384)),
            f"generator_{head}.transform.dense.bias": draw(0, 0.02, 384),
            f"generator_{head}.transform.LayerNorm.weight": draw(1, 0.1, 384),
            f"generator_{head}.transform.LayerNorm.bias": draw(0, 0.1, 384),
            f"generator_{head}.bias": draw(0, 0.1, 30522),
        }
    return {name: array.astype(np.float32) for name, array in weights.items()}
