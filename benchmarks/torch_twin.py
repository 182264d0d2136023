"""The same train step in PyTorch, with the modules of transformers, to compare the JAX step with.

It computes the same as the authors' code, but faster: attention and AdamW are PyTorch's fused
versions, and similarities are one matrix product. It reads the same `Config` as the JAX step, for
single sentences and the defaults of the published code.

`benchmarks.torch_training` trains with this step.
"""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config

Step = Callable[[Tensor, Tensor], Tensor]

NOT_DECAYED = ("bias", "LayerNorm.weight")  # parameters with such names have no weight decay


class Twin(nn.Module):
    """Encoder, projector, discriminator and frozen generator, and the sum of their losses.

    Args:
        config: Decides which losses exist.
        encoder: A `BertModel` without pooler. The discriminator starts as a copy of it.
        generator: A masked LM; None if `config` does not train DiffCSE.
        vocabulary: The tokenizer's vocabulary.
    """

    def __init__(
        self,
        config: Config,
        encoder: nn.Module,
        generator: nn.Module | None,
        vocabulary: Vocabulary,
    ):
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        self.encoder = encoder
        hidden, deviation = encoder.config.hidden_size, encoder.config.initializer_range
        self.projector = PROJECTORS[config.model.projector](hidden)
        self.projector.apply(partial(_initialize, deviation=deviation))
        if "difference" in config.losses:
            self.discriminator = copy.deepcopy(encoder)
            self.token_classifier = nn.Linear(hidden, 2)  # with PyTorch's initial weights
            self.generator = generator.requires_grad_(False)
            self.register_buffer("special_ids", torch.tensor(vocabulary.special_ids))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute the loss of sentences, (batch, length). Each is its own second view."""
        views = (rows.repeat_interleave(2, dim=0) for rows in (input_ids, attention_mask))
        return self.loss_of_views(*views)

    def loss_of_views(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute the loss of views, (2 batch, length). Those of a sentence are neighbours."""
        projected = self.embed(input_ids, attention_mask)
        loss = self.contrast(projected, input_ids, attention_mask)
        if "difference" in self.config.losses:
            edited, replaced = self.edit(input_ids, attention_mask)
            difference = self.replaced_token_detection(edited, replaced, attention_mask, projected)
            loss = loss + self.config.difference.weight * difference
        return loss

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the projected embeddings of position 0 in float32."""
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.projector(states[:, 0]).float()

    def contrast(self, projected: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute InfoNCE, off-dropout if configured, and dimension-wise contrast."""
        options, dcl = self.config.contrast, self.config.dcl
        off_dropout = None
        if options.negatives == "off_dropout":
            self.encoder.eval()
            off_dropout = self.embed(input_ids[::2], attention_mask[::2])
            self.encoder.train()
        with torch.autocast(projected.device.type, enabled=False):
            z1, z2 = projected[::2], projected[1::2]
            if off_dropout is None:
                logits = F.normalize(z1) @ F.normalize(z2).T / options.temperature
                loss = F.cross_entropy(logits, torch.arange(len(z1), device=z1.device))
            else:
                loss = off_dropout_info_nce(
                    z1, z2, off_dropout, options.temperature, options.negative_ratio
                )
            if dcl.weight:
                loss = loss + dcl.weight * dimension_contrast(z1, z2, dcl.temperature)
        return loss

    @torch.no_grad()
    def edit(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return sentences by the generator, with its dropout, and where they differ."""
        masked = self.mask_tokens(input_ids)
        filled = self.generator(masked, attention_mask=attention_mask).logits.argmax(-1)
        return restore(filled, input_ids, attention_mask)

    def mask_tokens(self, input_ids: Tensor) -> Tensor:
        """Mask the selected tokens: 80 % become [MASK], 10 % become random tokens, 10 % stay."""
        ordinary = ~torch.isin(input_ids, self.special_ids)
        selected = ordinary & (
            torch.rand(input_ids.shape, device=input_ids.device) < self.config.difference.mask_ratio
        )
        draw = torch.rand(input_ids.shape, device=input_ids.device)
        masked = torch.where(selected & (draw < 0.8), self.vocabulary.mask_id, input_ids)
        random_ids = torch.randint_like(input_ids, self.vocabulary.size)
        return torch.where(selected & (draw >= 0.8) & (draw < 0.9), random_ids, masked)

    def replaced_token_detection(
        self, edited: Tensor, replaced: Tensor, attention_mask: Tensor, condition: Tensor
    ) -> Tensor:
        """Compute the mean cross-entropy over all positions, given the sentence embedding."""
        embedded = self.discriminator.embeddings(edited)
        states = torch.cat([condition.to(embedded.dtype)[:, None], embedded[:, 1:]], dim=1)
        length = attention_mask.shape[1]
        attends = attention_mask[:, None, None, :].bool().expand(-1, 1, length, -1)
        states = self.discriminator.encoder(states, attention_mask=attends).last_hidden_state
        logits = self.token_classifier(states).float()
        return F.cross_entropy(logits.flatten(0, 1), replaced.long().flatten())


def restore(filled: Tensor, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the generator's tokens, and where they differ.

    Position 0 is unchanged, and padding is 0.
    """
    filled[:, 0] = input_ids[:, 0]
    filled = filled * attention_mask
    return filled, (filled != input_ids) & (attention_mask > 0)


def off_dropout_info_nce(
    z1: Tensor, z2: Tensor, z: Tensor, temperature: float, ratio: float
) -> Tensor:
    """Compute off-dropout contrast. The ratio multiplies the positive logit (SimCSE++'s code)."""
    positive = ratio * F.cosine_similarity(z1, z2) / temperature
    unit = F.normalize(z)
    others = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)
    return (torch.logsumexp(torch.cat([positive[:, None], others], dim=1), dim=1) - positive).mean()


def dimension_contrast(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """Compute DCL: each dimension of one view should find itself in the other."""
    z1, z2 = (F.batch_norm(z, None, None, training=True) for z in (z1, z2))
    correlation = z1.T @ z2 / len(z1) / temperature
    return F.cross_entropy(correlation, torch.arange(len(correlation), device=z1.device))


class FormerAdamW(torch.optim.AdamW):
    """AdamW of transformers 4.2.1, which adds epsilon before it corrects the bias of v.

    The update is m / (sqrt(v) + eps) * sqrt(1 - b2^t) / (1 - b1^t). PyTorch corrects v first, so
    that its update with eps / sqrt(1 - b2^t) is the same. PyTorch also decays weights before the
    update and not after it, which differs by learning_rate^2 * weight_decay.
    """

    def __init__(self, parameters: Any, lr: float, **options: Any):
        super().__init__(parameters, lr=lr, **options)
        self.taken = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        self.taken += 1
        for group in self.param_groups:
            _, beta2 = group["betas"]
            group["eps"] = self.defaults["eps"] / math.sqrt(1 - beta2**self.taken)
        return super().step(closure)


def make_step(twin: Twin, config: Config, total_steps: int, *, compiled: bool) -> Step:
    """Return `(input_ids, attention_mask) -> loss`: gradients, clipping, AdamW and the schedule.

    As in the authors' trainer, all trained parameters are clipped together, and the learning rate
    falls linearly to 0. With `precision=bfloat16`, the forward pass computes by autocast.

    Args:
        twin: The networks.
        config: The configuration of the run.
        total_steps: The step at which the learning rate reaches 0.
        compiled: Compile forward and backward passes by `torch.compile`.
    """
    trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    options = config.optim
    groups = parameter_groups(twin, options.weight_decay)
    optimizer = FormerAdamW(groups, options.learning_rate, fused=True)
    factor = partial(_rate_factor, warmup=options.warmup_steps, total=total_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    # Compiled, there is one program for each length, as on our side.
    forward = torch.compile(twin, dynamic=False) if compiled else twin
    device_type = trained[0].device.type
    twin.train()

    def step(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = forward(input_ids, attention_mask)
        loss.backward()
        if options.clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, options.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def parameter_groups(twin: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters: those with weight decay, and those without it."""
    named = [(name, each) for name, each in twin.named_parameters() if each.requires_grad]
    decayed = [each for name, each in named if not any(part in name for part in NOT_DECAYED)]
    others = [each for name, each in named if any(part in name for part in NOT_DECAYED)]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _rate_factor(step: int, warmup: int, total: int) -> float:
    """Return what the learning rate is multiplied by after `step` steps."""
    if step < warmup:
        return step / warmup
    return max((total - step) / max(total - warmup, 1), 0.0)


def mlp_projector(hidden: int) -> nn.Module:
    """SimCSE's head."""
    return nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh())


def batchnorm_projector(hidden: int) -> nn.Module:
    """DiffCSE's head."""
    return nn.Sequential(
        nn.Linear(hidden, 2 * hidden, bias=False),
        nn.BatchNorm1d(2 * hidden),
        nn.ReLU(),
        nn.Linear(2 * hidden, hidden, bias=False),
        nn.BatchNorm1d(hidden, affine=False),
    )


PROJECTORS = {"mlp": mlp_projector, "batchnorm": batchnorm_projector}


def random_encoder(hf_config: Mapping[str, Any]) -> nn.Module:
    """Return a `BertModel` without pooler, with random weights."""
    return transformers.BertModel._from_config(
        _hf_config(hf_config), attn_implementation="sdpa", add_pooling_layer=False
    )


def random_generator(hf_config: Mapping[str, Any]) -> nn.Module:
    """Return a masked LM with random weights."""
    return transformers.AutoModelForMaskedLM.from_config(
        _hf_config(hf_config), attn_implementation="sdpa", trust_remote_code=False
    )


def _hf_config(values: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(**values)


def _initialize(module: nn.Module, deviation: float) -> None:
    """Initialise a layer of the projector as the authors' code does."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=deviation)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
