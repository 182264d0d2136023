"""The checkpoint that a run starts from, as its users know it: with the pooler that it records."""

import dataclasses

from transformers import PreTrainedTokenizerFast

from diffcse_jax.config import OWN_POOLER, Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models import pooling_modules
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling_modules import RecordedPooler
from diffcse_jax.training.metrics import report

UNRECORDED = "avg"  # the `own` pooler of a checkpoint that records none: sentence-transformers takes the mean, too


@dataclasses.dataclass(frozen=True)
class Start:
    """The baseline of a run: the vector that users of its checkpoint take from it.

    Attributes:
        name: of the checkpoint, as the configuration has it.
        recorded: the pooler that it records; None for one that records none, such as a raw masked LM.
    """

    name: str
    checkpoint: Pretrained
    tokenizer: PreTrainedTokenizerFast
    recorded: RecordedPooler | None

    @property
    def head(self) -> Params | None:
        """The dense + tanh head of the recorded pooler `cls`, with which a projector that is kept begins."""
        return self.recorded.head if self.recorded else None

    @property
    def pooler_head(self) -> Params | None:
        """The dense + tanh head that it has, recorded or in the checkpoint; None where it has none."""
        return self.head or self.checkpoint.pooler

    def pooler(self, config: Config) -> str:
        """The pooler that it records, or else the run's."""
        pooler = self.recorded.pooler if self.recorded else config.encoding_pooler
        return "cls_before_pooler" if pooler == "cls" and self.pooler_head is None else pooler

    def encoder(self, config: Config) -> SentenceEncoder:
        """The start as users take it."""
        model = self.checkpoint
        return SentenceEncoder(
            model.config,
            model.transformer,
            self.tokenizer,
            pooler=self.pooler(config),
            pooler_head=self.pooler_head,
        )

    def is_trained_vector(self, config: Config) -> bool:
        """True if the vector that the run trains and exports is, before the first step, the start's own."""
        has_its_weights = config.encoding_pooler != "cls" or self.head is not None
        return has_its_weights and self.pooler(config) == config.encoding_pooler

    def about_pooler(self, asked: str, config: Config) -> str:
        """A sentence on the kind of checkpoint and how the run pools it; empty where there is nothing to say.

        Args:
            asked: the pooler as the user gave it.
            config: the run's, with `own` resolved.
        """
        if self.recorded is None:
            if asked != OWN_POOLER:
                return ""
            return (
                f"{self.name} records no pooler, so it is taken for a raw masked LM, and the vector is {UNRECORDED}, "
                "the mean over tokens; configs/base/masked_lm.py has the settings for such starts"
            )
        if asked == OWN_POOLER:
            return f"{self.name} is a sentence encoder: it records the pooler {self.recorded.pooler}, which is trained"
        if self.is_trained_vector(config):
            return ""
        return (
            f"notice: {self.name} is a sentence encoder: it records the pooler {self.recorded.pooler}, and this run "
            f"trains {config.encoding_pooler}, as model.pooler={asked!r} and its projector ask for; "
            "configs/base/sentence_encoder.py has the settings for such starts"
        )


def recorded_pooler(checkpoint: Pretrained, asked: str) -> RecordedPooler | None:
    """The pooler that a checkpoint records (`pooling_modules.recorded`); None where it records none.

    Raises:
        CheckpointError: one that cannot be followed, where it is asked for. Where it is not, a notice says so.
    """
    try:
        return pooling_modules.recorded(checkpoint)
    except CheckpointError as error:
        if asked == OWN_POOLER:
            raise
        report(f"notice: {error}; as the run's baseline it is read with the run's own pooler")
        return None


def with_own_pooler(config: Config, recorded: RecordedPooler | None) -> Config:
    """The configuration with `model.pooler="own"` resolved to what the checkpoint records.

    The pooler `cls` has a dense + tanh head, which is trained on as a projector that is kept.

    Raises:
        ConfigError: another projector is asked for than that head.
    """
    if config.model.pooler != OWN_POOLER:
        return config
    model = dataclasses.replace(config.model, pooler=recorded.pooler if recorded else UNRECORDED)
    if model.pooler == "cls":
        if model.projector == "batchnorm":
            raise ConfigError(
                f"model.projector={model.projector!r} with model.pooler={OWN_POOLER!r}: {model.name_or_path} records "
                "a dense + tanh head, which is trained on; use model.projector='none'"
            )
        model = dataclasses.replace(model, projector="mlp", projector_train_only=False)
    return Config.from_dict(config.to_dict() | {"model": dataclasses.asdict(model)})
