"""What a video is asked for with: the arguments of a call, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cachedit.video.presets import Preset
from cachedit.video.sampling import Skipping

OUTPUTS = ("np", "pt", "pil", "latent")


@dataclass
class Request:
    """The arguments of ``video(...)`` and ``video.stream(...)``; those of ``WanPipeline`` mean what they mean there.

    Attributes:
        prompt, negative_prompt: text, or one text per sample.
        height, width: of the frames, in pixels.
        num_frames: exactly so many are made; None for a stream without end.
        num_inference_steps: only to say what the preset says.
        guidance_scale: above 1 there are two branches; few-step models are made for 1.
        num_videos_per_prompt: samples for each prompt.
        generator: one, or one per sample; it is copied, not drawn from.
        latents: the noise that the chunks start from, [B, C, F, h, w], as far as it reaches.
        prompt_embeds, negative_prompt_embeds: instead of text.
        output_type: "np", "pt", "pil" or "latent".
        max_sequence_length: tokens of the text.
        image: the video begins with it.
        video: frames; the video continues them, or follows them under ``strength``.
        strength: noise level up to which ``video`` is noised; None continues it.
        seconds, fps: another way to say ``num_frames``.
        callback_on_step_end: called as ``WanPipeline`` calls it, with the latents of the chunk.
        skip_frames: frames of a chunk that steps leave out and fill in from the others (``Skipping``).
        on_evict: called with a branch's ring and the latent frames that leave it, before they do.
    """

    prompt: str | list[str] | None = None
    negative_prompt: str | list[str] | None = None
    height: int = 480
    width: int = 832
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float = 1.0
    num_videos_per_prompt: int = 1
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    latents: torch.Tensor | None = None
    prompt_embeds: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    output_type: str = "np"
    max_sequence_length: int = 512
    image: Any = None
    video: Any = None
    strength: float | None = None
    seconds: float | None = None
    fps: float = 16.0
    callback_on_step_end: Callable[..., Any] | None = None
    skip_frames: Skipping | None = None
    on_evict: Callable[..., Any] | None = None

    @property
    def guided(self) -> bool:
        """True with a second branch."""
        return self.guidance_scale > 1.0

    @property
    def samples(self) -> int:
        """Videos that are made at once."""
        count = len(self.prompt) if isinstance(self.prompt, list) else 1
        if self.prompt_embeds is not None:
            count = self.prompt_embeds.shape[0]
        return count * self.num_videos_per_prompt

    @property
    def frames(self) -> int | None:
        """Frames of the whole video; None for no end."""
        return self.num_frames if self.seconds is None else max(1, round(self.seconds * self.fps))

    @property
    def words(self) -> str:
        """The prompt for the record."""
        return " | ".join(self.prompt) if isinstance(self.prompt, list) else self.prompt or ""

    def latent_shape(self, pipe: Any) -> tuple[int, int, int, int]:
        """Samples, channels, height and width of the latents of a frame."""
        factor = pipe.vae_scale_factor_spatial
        return self.samples, pipe.transformer.config.in_channels, self.height // factor, self.width // factor

    def check(self, pipe: Any, preset: Preset) -> None:
        """Refuse what cannot be made.

        Raises:
            ValueError: with what was given, what is allowed, and what to do.
        """
        self._check_size(pipe)
        self._check_text(pipe)
        self._check_start(pipe)
        if self.skip_frames is not None and preset.context == "wave":
            raise ValueError(
                f"got skip_frames with preset {preset.name!r}, whose chunks are open together; allowed: others"
            )
        if preset.recalled and self.samples > 1:
            raise ValueError(
                f"got {self.samples} samples with recalled={preset.recalled}, and each would find other frames; "
                "allowed: one video at a time"
            )
        if self.num_inference_steps not in (None, len(preset.sigmas)):
            raise ValueError(
                f"got num_inference_steps={self.num_inference_steps}; allowed: {len(preset.sigmas)}, the steps of "
                f"preset {preset.name!r}, or nothing. Wrap with sigmas=(...) for other noise levels."
            )
        if self.output_type not in OUTPUTS or (self.output_type != "latent" and pipe.vae is None):
            having = "" if pipe.vae is not None else "; this pipeline has no vae, so only 'latent'"
            raise ValueError(f"got output_type={self.output_type!r}; allowed: {', '.join(OUTPUTS)}{having}")

    def _check_size(self, pipe: Any) -> None:
        factor = pipe.vae_scale_factor_spatial
        rows, columns = (factor * size for size in pipe.transformer.config.patch_size[1:])
        if self.height < rows or self.width < columns or self.height % rows or self.width % columns:
            raise ValueError(
                f"got frames of {self.height} x {self.width}; allowed: a height that is a multiple of {rows} and a "
                f"width that is one of {columns}. The nearest is {max(1, round(self.height / rows)) * rows} x "
                f"{max(1, round(self.width / columns)) * columns}."
            )
        if self.num_frames is not None and self.seconds is not None:
            raise ValueError("got num_frames and seconds; allowed: one of the two, or neither for a stream without end")
        if self.num_frames is not None and (type(self.num_frames) is not int or self.num_frames < 1):
            raise ValueError(f"got num_frames={self.num_frames!r}; allowed: 1 or more")
        if self.seconds is not None and not (self.seconds > 0 and self.fps > 0):
            raise ValueError(f"got seconds={self.seconds!r} at fps={self.fps!r}; allowed: numbers above 0")

    def _check_text(self, pipe: Any) -> None:
        if (self.prompt is None) == (self.prompt_embeds is None):
            raise ValueError("got prompt and prompt_embeds both or neither; allowed: one of the two")
        if self.negative_prompt is not None and self.negative_prompt_embeds is not None:
            raise ValueError("got negative_prompt and negative_prompt_embeds; allowed: one of the two")
        lacks = self.prompt is not None or (self.guided and self.negative_prompt_embeds is None)
        if lacks and pipe.text_encoder is None:
            raise ValueError(
                "this pipeline has no text encoder; allowed: prompt_embeds, and negative_prompt_embeds where "
                f"guidance_scale is above 1 (it is {self.guidance_scale})"
            )

    def _check_start(self, pipe: Any) -> None:
        batch, channels, height, width = self.latent_shape(pipe)
        shape = None if self.latents is None else tuple(self.latents.shape)
        if shape is not None and (len(shape) != 5 or (*shape[:2], *shape[3:]) != (batch, channels, height, width)):
            raise ValueError(
                f"got latents of shape {list(shape)}; allowed: [{batch}, {channels}, frames, {height}, {width}] for "
                f"frames of {self.height} x {self.width}"
            )
        if isinstance(self.generator, (list, tuple)) and len(self.generator) != batch:
            raise ValueError(f"got {len(self.generator)} generators for {batch} samples; allowed: one, or one each")
        if self.image is not None and self.video is not None:
            raise ValueError("got image and video; allowed: one of the two")
        if (self.image is not None or self.video is not None) and pipe.vae is None:
            raise ValueError("got an image or a video, and this pipeline has no vae to encode it; load one")
        if self.strength is not None and (self.video is None or not 0 < self.strength <= 1):
            raise ValueError(
                f"got strength={self.strength!r} {'without' if self.video is None else 'with'} a video; allowed: a "
                "noise level above 0 and up to 1, with video="
            )
