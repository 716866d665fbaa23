"""Decoding latents as they come: the autoencoder's causal features belong to the stream, not to the model."""

from __future__ import annotations

from typing import Any

import torch

from cachedit.borrowed import borrowed
from cachedit.errors import UnsupportedModelError


class StreamingDecoder:
    """Frames of latents, chunk by chunk, equal to those of the whole video at once.

    The causal convolutions of ``AutoencoderKLWan`` remember the frames before. The model itself forgets them at every
    ``encode`` and ``decode``; here they are kept by the stream, so that many streams can share one model.

    Args:
        vae: an ``AutoencoderKLWan``, or an autoencoder whose frames do not depend on each other
            (``config.scale_factor_temporal`` 1).

    Raises:
        UnsupportedModelError: another autoencoder.
        ImportError: this release of diffusers lacks a part of it (``cachedit.borrowed``).
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.factor = int(getattr(vae.config, "scale_factor_temporal", 0) or 0)
        self._causal = hasattr(vae, "_cached_conv_counts")
        if not self._causal and self.factor != 1:
            raise UnsupportedModelError(
                f"{type(vae).__name__} cannot decode a stream. Allowed: AutoencoderKLWan, or an autoencoder with "
                "config.scale_factor_temporal 1. Ask for output_type='latent' and decode at the end."
            )
        if self._causal and vae.config.patch_size is not None:
            self._unpatchify = borrowed("diffusers.models.autoencoders.autoencoder_kl_wan", "unpatchify")
        self.reset()

    def reset(self) -> None:
        """The next latent is the first of a video again."""
        self.decoded = 0  # latent frames so far
        self._features: list[Any] = [None] * (self.vae._cached_conv_counts["decoder"] if self._causal else 0)

    def frames_before(self, latents: int) -> int:
        """How many frames the first ``latents`` latent frames of a video are."""
        return 0 if latents == 0 else (latents - 1) * self.factor + 1

    @torch.no_grad()
    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Frames [B, 3, n, H, W] in [-1, 1] of the next latents [B, C, f, h, w]; the video's first one is one frame."""
        vae = self.vae
        weight = next(iter(vae.parameters()), latents)
        z = denormalised(vae, latents.to(weight.device, vae.dtype))
        if not self._causal:
            self.decoded += z.shape[2]
            return vae.decode(z, return_dict=False)[0]
        z, features, found = vae.post_quant_conv(z), list(self._features), []
        for index in range(z.shape[2]):
            frame, first = z[:, :, index : index + 1], self.decoded + index == 0
            found.append(vae.decoder(frame, feat_cache=features, feat_idx=[0], first_chunk=first))
        self._features, self.decoded = features, self.decoded + z.shape[2]
        frames = torch.cat(found, 2)
        if vae.config.patch_size is not None:
            frames = self._unpatchify(frames, patch_size=vae.config.patch_size)
        return frames.clamp(-1.0, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """What another decoder of this autoencoder needs to go on from here."""
        kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in self._features]
        return {"decoded": self.decoded, "features": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken."""
        self.decoded, self._features = state["decoded"], list(state["features"])


def denormalised(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents as the decoder takes them, from those that the denoiser makes."""
    mean, rate = _statistics(vae, latents)
    return latents / rate + mean


@torch.no_grad()
def encoded(vae: Any, frames: torch.Tensor) -> torch.Tensor:
    """Latents [B, C, f, h, w] as the denoiser makes them, of frames [B, 3, n, H, W] in [-1, 1], in float32."""
    weight = next(iter(vae.parameters()), frames)
    found = vae.encode(frames.to(weight.device, vae.dtype), return_dict=False)[0]
    latents = found.mode() if hasattr(found, "mode") else found
    mean, rate = _statistics(vae, latents)
    return ((latents - mean) * rate).to(torch.promote_types(latents.dtype, torch.float32))


def _statistics(vae: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean, and one over the deviation, in the form in which diffusers' pipelines take them."""
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    return mean.to(like.device, like.dtype), (1.0 / std).to(like.device, like.dtype)
