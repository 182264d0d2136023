"""The keys that say how a sentence is edited; objectives that edit have them in their groups."""

import dataclasses

from diffcse_jax.options import option

EDITS = ("replace", "insert", "delete", "mixed")


@dataclasses.dataclass(frozen=True)
class EditOptions:
    edit: str = option(
        "replace",
        "difference between a sentence and its edit (DiffCSE Tables 4 and 15): `replace` masks tokens and lets the "
        "generator fill them, `insert` puts in tokens of the generator, `delete` drops tokens, `mixed` does all three",
        choices=EDITS,
    )
    mask_ratio: float = option(
        0.30, "share of tokens masked before the generator fills them; `replace` and `mixed`", low=0.0, high=1.0
    )
    mask_style: str = option(
        "bert",
        "`bert`: 80 % [MASK], 10 % random, 10 % kept (code); `mask`: always [MASK] (paper)",
        choices=("bert", "mask"),
    )
    insert_ratio: float = option(
        0.15, "share of the gaps between tokens that get a new one; `insert` and `mixed`", low=0.0, high=1.0
    )
    delete_ratio: float = option(0.15, "share of tokens dropped; `delete` and `mixed`", low=0.0, high=1.0)

    @property
    def masked_share(self) -> float:
        """`mask_ratio`, where the edit replaces tokens."""
        return self.mask_ratio if self.edit in ("replace", "mixed") else 0.0

    @property
    def inserted_share(self) -> float:
        """`insert_ratio`, where the edit inserts tokens."""
        return self.insert_ratio if self.edit in ("insert", "mixed") else 0.0

    @property
    def deleted_share(self) -> float:
        """`delete_ratio`, where the edit drops tokens."""
        return self.delete_ratio if self.edit in ("delete", "mixed") else 0.0

    @property
    def edit_needs(self) -> frozenset[str]:
        """Members of `objectives.NEEDS`: parts of a step without which the edit cannot be made."""
        return frozenset({"mask_token"} if self.edit == "delete" else {"mask_token", "generator"})
