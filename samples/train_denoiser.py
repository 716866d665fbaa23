"""Second stage of the sample model's training: the denoiser and its text encoder.

The denoiser learns the velocity ``noise - x0`` of a rectified flow (Liu et al., 2022, https://arxiv.org/abs/2209.03003)
at logit-normal times (Esser et al., 2024, https://arxiv.org/abs/2403.03206), jointly with a small text encoder. One
prompt in ten is replaced by the empty prompt for classifier-free guidance (Ho and Salimans, 2022,
https://arxiv.org/abs/2207.12598).
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, CogView4Transformer2DModel
from diffusers.models.attention_processor import Attention
from transformers import GlmModel, PreTrainedTokenizerFast

from .image_model import LATENT_CHANNELS, LATENT_SIZE, build_denoiser, build_text_encoder, build_tokenizer
from .scenes import IMAGE_SIZE, Scene, render, sample_scenes, training_scenes
from .train_autoencoder import load_autoencoder
from .training import Budget, Trainer

SOFTEN_FROM = 0.55  # share of the budget from which the velocities of prompts are softened
SOFTENING = 0.5  # where their targets then lie between the velocity of the empty prompt, 0, and that of the data, 1

_LOOSE = torch.tensor([0.1, 0.1, 0.5, 0.5, 0.5])  # chances of: empty, shortened, then without size, background, place


class DenseAttention:
    """The attention of CogView4 in plain matrix products, for training only.

    The fused CPU kernel that diffusers calls spends half of a training step in its backward pass; for 80 tokens this is
    several times faster, and the same up to rounding.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Joint attention of text and image tokens; arguments and results as diffusers' ``CogView4AttnProcessor``."""
        text = encoder_hidden_states.shape[1]
        joint = torch.cat([encoder_hidden_states, hidden_states], 1)  # [N, text + image, width]
        projections = (attn.to_q, attn.to_k, attn.to_v)
        weight = torch.cat([linear.weight for linear in projections])
        bias = torch.cat([linear.bias for linear in projections])
        packed = torch.nn.functional.linear(joint, weight, bias).unflatten(2, (3, attn.heads, -1))
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)  # each [N, heads, text + image, 32]
        cosine, sine = image_rotary_emb  # [image, 32]; text tokens are not rotated
        cosine = torch.nn.functional.pad(cosine, (0, 0, text, 0), value=1.0)
        sine = torch.nn.functional.pad(sine, (0, 0, text, 0))
        query = self._rotate(attn.norm_q(query), cosine, sine).to(value.dtype)
        key = self._rotate(attn.norm_k(key), cosine, sine).to(value.dtype)
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        mixed = (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        mixed = attn.to_out[0](mixed)
        return mixed[:, text:], mixed[:, :text]

    @staticmethod
    def _rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, -1)
        return states * cosine + torch.cat([-second, first], -1) * sine


class LatentPool:
    """Encoded training scenes to draw batches from; a few are replaced all the time.

    Args:
        autoencoder: with normalised latents.
        size: how many latents are kept.
        generator: of scenes and jitter.
    """

    def __init__(self, autoencoder: AutoencoderKL, size: int, generator: torch.Generator) -> None:
        self.autoencoder, self.choices = autoencoder, training_scenes()
        self.scenes: list[Scene] = [self.choices[0]] * size
        self.latents = torch.empty(size, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
        self._next = 0
        for _ in range(-(-size // 64)):
            self.refresh(64, generator)

    @torch.no_grad()
    def refresh(self, count: int, generator: torch.Generator) -> None:
        """Replaces the oldest latents by those of new scenes."""
        count = min(count, len(self.scenes) - self._next)
        scenes = sample_scenes(self.choices, count, generator)
        with torch.autocast("cpu", torch.bfloat16):
            latents = self.autoencoder.encode(render(scenes, generator)).latent_dist.mode()
        self.latents[self._next : self._next + count] = latents.float()
        self.scenes[self._next : self._next + count] = scenes
        self._next = (self._next + count) % len(self.scenes)

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, list[Scene]]:
        """Latents [count, 4, 16, 16] and their scenes."""
        rows = torch.randint(len(self.scenes), (count,), generator=generator)
        return self.latents[rows], [self.scenes[row] for row in rows.tolist()]


def loosen(scene: Scene, generator: torch.Generator) -> str:
    """The prompt to train a scene with: as a rule the full sentence, now and then empty or shortened.

    One in ten is empty, for guidance. One in ten of the others lacks size, background or place, each with probability
    one half; that teaches "a red star" a little, though an hour is too short to draw it reliably.
    """
    empty, shorten, no_size, no_background, no_place = (torch.rand(5, generator=generator) < _LOOSE).tolist()
    if empty:
        return ""
    if not shorten:
        return scene.prompt
    size = "" if no_size else f"{scene.size} "
    background = "" if no_background else f" on a {scene.background} background"
    return f"a {size}{scene.colour} {scene.shape}{background}" + ("" if no_place else f" {scene.place}")


class VelocityLoss:
    """The loss of one step: the mean squared error of the velocity, late in the training with softened targets.

    Args:
        tokenizer: of the prompts.
        text_encoder: trained.
        denoiser: trained.
        data: latents and their scenes.
        budget: how much training is done.
        batch: pictures per step.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text_encoder: GlmModel,
        denoiser: CogView4Transformer2DModel,
        data: LatentPool,
        budget: Budget,
        batch: int,
    ) -> None:
        self.tokenizer, self.text_encoder, self.denoiser = tokenizer, text_encoder, denoiser
        self.data, self.budget, self.batch = data, budget, batch
        self._size = torch.full((batch, 2), float(IMAGE_SIZE))
        self._origin = torch.zeros_like(self._size)
        self._step = 0

    def __call__(self, generator: torch.Generator) -> torch.Tensor:
        """The loss on a new batch; every sixteenth also renews some of the data."""
        self._step += 1
        if self._step % 16 == 0:
            self.data.refresh(64, generator)
        latents, scenes = self.data.draw(self.batch, generator)
        prompts = [loosen(scene, generator) for scene in scenes]
        noise = torch.randn(latents.shape, generator=generator)
        moment = torch.sigmoid(torch.randn(self.batch, generator=generator))  # 0 is data, 1 is noise
        noisy = torch.lerp(latents, noise, moment[:, None, None, None])
        target = noise - latents
        if self.budget.fraction >= SOFTEN_FROM:
            target = self._soften(target, prompts, noisy, moment)
        return (self._velocity(prompts, noisy, moment) - target).square().mean()

    @torch.no_grad()
    def _soften(
        self, target: torch.Tensor, prompts: list[str], noisy: torch.Tensor, moment: torch.Tensor
    ) -> torch.Tensor:
        free = self._velocity([""] * len(prompts), noisy, moment)
        has_prompt = torch.tensor([prompt != "" for prompt in prompts])[:, None, None, None]
        return torch.where(has_prompt, torch.lerp(free, target, SOFTENING), target)

    def _velocity(self, prompts: list[str], noisy: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        tokens = self.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids  # [N, 16]
        # A context for each call: weights that were cast without gradients must not be reused with them.
        with torch.autocast("cpu", torch.bfloat16):
            text = self.text_encoder(tokens, output_hidden_states=True, use_cache=False).hidden_states[-2]
            velocity = self.denoiser(noisy, text, 1000 * moment, self._size, self._size, self._origin).sample
        return velocity.float()


def train_denoiser(
    folder: Path,
    budget: Budget,
    seed: int,
    batch: int = 64,
    pool: int = 20_000,
    every: int = 50,
    compiled: bool = False,
) -> None:
    """Trains text encoder and denoiser on the latents of the autoencoder; see the module's text.

    Args:
        folder: has ``autoencoder.pt``; gets ``denoiser.pt``, the checkpoint with the averaged weights.
        budget: how long to train.
        seed: of the weights, the data and the noise.
        batch: pictures per step.
        pool: how many encoded pictures to draw from.
        every: steps between two reports.
        compiled: compile the blocks, a third faster after a minute; needs a C++ compiler.

    Raises:
        FileNotFoundError: the autoencoder is not trained yet.
    """
    autoencoder = load_autoencoder(folder)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    text_encoder, denoiser = build_text_encoder(len(tokenizer)), build_denoiser()
    for block in denoiser.transformer_blocks:
        block.attn1.processor = DenseAttention()
        if compiled:
            block.compile()
    data = LatentPool(autoencoder, pool, torch.Generator().manual_seed(seed + 3))
    trainer = Trainer(
        {"text_encoder": text_encoder, "transformer": denoiser},
        VelocityLoss(tokenizer, text_encoder, denoiser, data, budget, batch),
        folder / "denoiser.pt",
        budget,
        peak=1e-3,
        average=0.999,
        decay_from=0.5,
        seed=seed + 4,
        every=every,
    )
    trainer.run()
