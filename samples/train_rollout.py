"""What the sample video model learns: the next three frames from the frames before them and a prompt.

A training sequence is what a rolling cache holds: perhaps the first chunk of a clip (the sink), then consecutive chunks
from a random place of it, at consecutive positions. Attention is causal between chunks of three frames, as in
CausVid (Yin et al., 2024, https://arxiv.org/abs/2412.07772), and each chunk has its own noise level, as in diffusion
forcing (Chen et al., 2024, https://arxiv.org/abs/2407.01392). Some of the first chunks, and a few of the others, are
context only: told to be clean, yet with a little noise and a little out of place, so that a rollout that goes on from
its own frames forgives their errors. The others learn the velocity ``noise - x0`` of a rectified flow, half of them at
the noise levels that the few-step sampler visits.

In some clips the prompt changes on the way; each chunk reads the prompt of its own time.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from diffusers.models.transformers.transformer_wan import WanAttention
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from .clips import Subject, all_subjects, draw_clips, headings, path
from .training import Budget, Trainer
from .video_model import (
    PATCH,
    TOKENS,
    build_autoencoder,
    build_denoiser,
    build_text_encoder,
    build_tokenizer,
    principal_components,
)

CHUNK = 3
"""Frames that are denoised together."""

LENGTHS = (4, 4, 4, 7)
"""Chunks of a training sequence, drawn with these odds: 12 frames, or 21 as in Self Forcing's window."""

SIGMAS = (1.0, 0.9375, 0.8333, 0.625, 0.36)
"""Noise levels of the few-step sampler; half of what is learned is learned at these."""

PROMPT_TOKENS = 12

_LATEST = 12  # chunks of a clip that may lie before a sequence
_CONTEXT = 0.15  # share of the chunks behind the first ones that are context only
_CONTEXT_NOISE = 0.3  # the highest noise level of a context chunk
_OUT_OF_PLACE = 0.02  # standard deviation of the place of a context frame, in canvas units
_SHIFT = 3.0  # of the random noise levels, towards noise
_CHANGES = 0.35  # share of the clips whose prompt changes


class TrainingAttention:
    """The attention of Wan in plain matrix products with an additive bias, for training only.

    The stock processor takes no mask for self-attention. Self-attention reads ``bias`` as [N or 1, 1, tokens, tokens],
    cross-attention as [N, 1, tokens, text tokens].
    """

    bias: torch.Tensor

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Arguments and result as diffusers' ``WanAttnProcessor``."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source))
        query, key, value = (t.unflatten(2, (attn.heads, -1)) for t in (query, key, attn.to_v(source)))
        if rotary_emb is not None:
            query, key = (self._rotate(states, *rotary_emb) for states in (query, key))
        query, key, value = (states.transpose(1, 2).to(value.dtype) for states in (query, key, value))
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        weights = (scores.float() + self.bias).softmax(-1).to(value.dtype)
        return attn.to_out[0]((weights @ value).transpose(1, 2).flatten(2))

    @staticmethod
    def _rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        first, second = states[..., 0::2], states[..., 1::2]
        turned = torch.stack([-second, first], -1).flatten(-2)
        return states * cosine + turned * sine


@dataclass
class Sequences:
    """A batch of training sequences of C chunks.

    Attributes:
        clean: latents, [N, 16, 3 C, 8, 8].
        context: the same with every frame a little out of place.
        prompts: two for each clip, before and after the change; the same where there is none.
        changed: [N, C], True for chunks after the change.
        learned: [N, C], False where a chunk follows neither from its prompt nor from the chunks before it.
    """

    clean: torch.Tensor
    context: torch.Tensor
    prompts: list[tuple[str, str]]
    changed: torch.Tensor
    learned: torch.Tensor


class ClipSource:
    """Draws training sequences without end."""

    def __init__(self) -> None:
        self.subjects = all_subjects()
        mean, basis, _ = principal_components(0)
        scale = torch.tensor(build_autoencoder().config.latents_std)
        self._matrix, self._offset = basis / scale, (mean @ basis) / scale

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """What the autoencoder's latents are after normalisation: [N, 3, F, 32, 32] to [N, 16, F, 8, 8]."""
        patches = patchify(frames, PATCH).movedim(1, -1)
        return (patches @ self._matrix - self._offset).movedim(-1, 1)

    def draw(self, count: int, chunks: int, generator: torch.Generator) -> Sequences:
        """A batch of sequences of that many chunks."""
        start, sink = self._starts(count, generator)
        indices = start[:, None] + torch.arange(chunks)  # of the chunks in the whole clip
        indices[sink, 1:] -= 1
        indices[sink, 0] = 0
        length = int(indices.max()) + 1
        pairs, changes = self._pairs(count, length, generator)
        frames = (indices[:, :, None] * CHUNK + torch.arange(CHUNK)).flatten(1)  # [N, 3 C]
        changed = indices >= changes[:, None]
        films = [
            [after if index // CHUNK >= change else before for index in range(length * CHUNK)]
            for (before, after), change in zip(pairs, changes.tolist(), strict=True)
        ]
        places = path(headings(films), generator).gather(1, frames[..., None].expand(-1, -1, 2))
        shown = [[film[frame] for frame in row] for film, row in zip(films, frames.tolist(), strict=True)]
        astray = places + _OUT_OF_PLACE * torch.randn(places.shape, generator=generator)
        learned = torch.ones(count, chunks, dtype=torch.bool)
        learned[(start > 0) & ~sink, 0] = False
        learned[sink, :2] = False
        return Sequences(
            clean=self.encode(draw_clips(shown, places)),
            context=self.encode(draw_clips(shown, astray)),
            prompts=[(before.prompt, after.prompt) for before, after in pairs],
            changed=changed,
            learned=learned,
        )

    @staticmethod
    def _starts(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks before each sequence, and whether it begins with the clip's first chunk all the same."""
        late = torch.rand(count, generator=generator) < 0.45
        start = torch.where(late, torch.randint(1, _LATEST + 1, (count,), generator=generator), 0)
        sink = (start > 1) & (torch.rand(count, generator=generator) < 0.6)
        return start, sink

    def _pairs(
        self, count: int, length: int, generator: torch.Generator
    ) -> tuple[list[tuple[Subject, Subject]], torch.Tensor]:
        """Subjects before and after the change of each clip, and the chunk at which it comes."""
        rows = torch.randint(len(self.subjects), (count, 2), generator=generator)
        constant = torch.rand(count, generator=generator) >= _CHANGES
        rows[constant, 1] = rows[constant, 0]
        pairs = [(self.subjects[before], self.subjects[after]) for before, after in rows.tolist()]
        return pairs, torch.randint(1, max(2, length), (count,), generator=generator)


class RolloutLoss:
    """The loss of one step: the mean squared error of the velocity over the learned chunks.

    Args:
        tokenizer: of the prompts.
        text_encoder: trained.
        denoiser: trained; its attention processors are replaced.
        batch: sequences of 12 frames per step; fewer of longer ones.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text_encoder: UMT5EncoderModel,
        denoiser: WanTransformer3DModel,
        batch: int,
    ) -> None:
        self.tokenizer, self.text_encoder, self.denoiser, self.batch = tokenizer, text_encoder, denoiser, batch
        self.source = ClipSource()
        self._self_attention, self._cross_attention = TrainingAttention(), TrainingAttention()
        for block in denoiser.blocks:
            block.attn1.processor, block.attn2.processor = self._self_attention, self._cross_attention

    def __call__(self, generator: torch.Generator) -> torch.Tensor:
        """The loss on a new batch."""
        chunks = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=generator))]
        count = max(1, self.batch * LENGTHS[0] // chunks)
        data = self.source.draw(count, chunks, generator)
        only_context = self._context(count, chunks, generator) | ~data.learned
        level = self._levels(count, chunks, generator)
        slight = (_CONTEXT_NOISE * (1.4 * torch.rand(count, chunks, generator=generator) - 0.4)).clamp(min=0)
        told = torch.where(only_context, 0.0, level)
        noise = torch.randn(data.clean.shape, generator=generator)
        clean = torch.where(_per_frame(only_context), data.context, data.clean)
        noisy = torch.lerp(clean, noise, _per_frame(torch.where(only_context, slight, level)))
        error = (self._velocity(data, noisy, told, generator) - (noise - clean)).square().mean((1, 3, 4))  # [N, F]
        weight = (~only_context).float().repeat_interleave(CHUNK, 1)
        return (error * weight).sum() / weight.sum().clamp(min=1)

    @staticmethod
    def _context(count: int, chunks: int, generator: torch.Generator) -> torch.Tensor:
        """Which chunks are context only, [N, C]: the first ones, none to all but one, and some behind."""
        first = torch.randint(chunks, (count, 1), generator=generator)
        return (torch.arange(chunks) < first) | (torch.rand(count, chunks, generator=generator) < _CONTEXT)

    @staticmethod
    def _levels(count: int, chunks: int, generator: torch.Generator) -> torch.Tensor:
        """A noise level for every chunk, [N, C]: 0 is data, 1 is noise."""
        free = torch.sigmoid(torch.randn(count, chunks, generator=generator))
        free = _SHIFT * free / (1 + (_SHIFT - 1) * free)
        visited = torch.tensor(SIGMAS)[torch.randint(len(SIGMAS), (count, chunks), generator=generator)]
        return torch.where(torch.rand(count, chunks, generator=generator) < 0.5, visited, free)

    def _velocity(
        self, data: Sequences, noisy: torch.Tensor, level: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        chunks = level.shape[1]
        self._self_attention.bias = _causal_bias(chunks)
        # A context for each call: weights that were cast without gradients must not be reused with them.
        with torch.autocast("cpu", torch.bfloat16):
            text, self._cross_attention.bias = self._text(data, generator)
            timestep = (1000 * level).repeat_interleave(CHUNK * TOKENS, 1)
            velocity = self.denoiser(noisy, timestep, text, return_dict=False)[0]
        return velocity.float()

    def _text(self, data: Sequences, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Both prompts of each clip and one padding token, and the bias that shows each chunk its own prompt.

        The pipeline pads prompts with zeros, to a length that its caller chooses, and does not mask them. So many equal
        keys are one key with the logarithm of their number as bias.
        """
        prompts = [prompt for pair in data.prompts for prompt in pair]
        tokens = self.tokenizer(prompts, padding="max_length", max_length=PROMPT_TOKENS, return_tensors="pt")
        present = tokens.attention_mask.bool()
        text = self.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        text = text.unflatten(0, (-1, 2)).flatten(1, 2)  # [N, 24, width]
        text = torch.nn.functional.pad(text, (0, 0, 0, 1))
        count, chunks = data.changed.shape
        shown = torch.stack([~data.changed, data.changed], 2)[..., None] & present.unflatten(0, (-1, 2))[:, None]
        bias = torch.where(shown.flatten(2), 0.0, float("-inf"))  # [N, C, 24]
        padding = 6.3 * torch.rand(count, 1, 1, generator=generator).expand(-1, chunks, -1)  # up to 512 keys
        bias = torch.cat([bias, padding], 2).repeat_interleave(CHUNK * TOKENS, 1)
        return text, bias[:, None]


def _per_frame(values: torch.Tensor) -> torch.Tensor:
    """[N, C] of chunks to [N, 1, 3 C, 1, 1] of frames."""
    return values.repeat_interleave(CHUNK, 1)[:, None, :, None, None]


def _causal_bias(chunks: int) -> torch.Tensor:
    """0 where a token may look, minus infinity where it may not, [1, 1, tokens, tokens]."""
    chunk = torch.arange(chunks).repeat_interleave(CHUNK * TOKENS)
    return torch.where(chunk[:, None] >= chunk[None], 0.0, float("-inf"))[None, None]


def train_rollout(
    folder: Path, budget: Budget, seed: int, batch: int = 16, every: int = 20, compiled: bool = False
) -> None:
    """Trains text encoder and denoiser; see the module's text.

    Args:
        folder: gets ``rollout.pt``, the checkpoint with the averaged weights.
        budget: how long to train.
        seed: of the weights, the data and the noise.
        batch: sequences of 12 frames per step.
        every: steps between two reports.
        compiled: compile the blocks; needs a C++ compiler.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    text_encoder, denoiser = build_text_encoder(len(tokenizer)), build_denoiser()
    loss = RolloutLoss(tokenizer, text_encoder, denoiser, batch)
    if compiled:
        for block in denoiser.blocks:
            block.compile(dynamic=False)  # one graph for each of the two lengths
    trainer = Trainer(
        {"text_encoder": text_encoder, "transformer": denoiser},
        loss,
        folder / "rollout.pt",
        budget,
        peak=1.5e-3,
        average=0.999,
        decay_from=0.5,
        seed=seed + 1,
        every=every,
    )
    trainer.run()
