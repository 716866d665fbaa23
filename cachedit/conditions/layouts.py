"""Where the inputs of a model say which image tokens they are, and how its pipeline packs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Inputs = Mapping[str, Any]


class FluxLayout:
    """Flux: every token comes with its position, whose first axis is 0 for the image and more for references."""

    prompts = ("prompt", "prompt_embeds", "pooled_prompt_embeds")
    rescales_guidance = False

    def image_tokens(self, inputs: Inputs) -> int:
        """Leading tokens that belong to the image itself. Waits for the device."""
        ids = inputs["img_ids"]
        return int((ids.reshape(-1, ids.shape[-1])[:, 0] == 0).sum())

    def grid(self, inputs: Inputs) -> tuple[int, int]:
        """Rows and columns of the image's tokens. Waits for the device."""
        ids = inputs["img_ids"]
        ids = ids.reshape(-1, ids.shape[-1])[: self.image_tokens(inputs)]
        rows, columns = (ids[:, 1:3].amax(0) + 1).tolist()
        return int(rows), int(columns)

    def part(self, inputs: Inputs, rows: torch.Tensor) -> tuple[dict[str, Any], None]:
        """The same call with some of the image tokens, and the positions that its pass needs besides."""
        ids = inputs["img_ids"]
        ids = ids[0] if ids.ndim == 3 else ids
        return {**inputs, "hidden_states": inputs["hidden_states"][:, rows], "img_ids": ids[rows]}, None

    def without_references(self, inputs: Inputs, count: int) -> dict[str, Any]:
        """The same call with the first ``count`` tokens alone, which are the image."""
        return self.part(inputs, torch.arange(count, device=inputs["hidden_states"].device))[0]

    def text(self, pipe: Any, samples: int, given: Inputs) -> dict[str, Any]:
        """A prompt, or its embeddings, as arguments of the model."""
        embeds, pooled, ids = pipe.encode_prompt(
            prompt=given.get("prompt"),
            prompt_2=None,
            device=pipe._execution_device,
            num_images_per_prompt=samples,
            prompt_embeds=given.get("prompt_embeds"),
            pooled_prompt_embeds=given.get("pooled_prompt_embeds"),
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled, "txt_ids": ids}

    def encoded(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, h, w] of pixels [B, 3, H, W] in -1..1."""
        config = pipe.vae.config
        return (pipe.vae.encode(pixels).latent_dist.mode() - config.shift_factor) * config.scaling_factor


class QwenLayout:
    """QwenImage: positions follow from the shapes of all images, of which the first is the one that is made."""

    prompts = ("prompt", "prompt_embeds", "prompt_embeds_mask")
    rescales_guidance = True

    def image_tokens(self, inputs: Inputs) -> int:
        """Leading tokens that belong to the image itself."""
        return math.prod(inputs["img_shapes"][0][0])

    def grid(self, inputs: Inputs) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        _, rows, columns = inputs["img_shapes"][0][0]
        return rows, columns

    def part(self, inputs: Inputs, rows: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        """The same call with some of the image tokens, and the positions that its pass needs besides."""
        return {**inputs, "hidden_states": inputs["hidden_states"][:, rows]}, rows

    def without_references(self, inputs: Inputs, count: int) -> dict[str, Any]:
        """The same call with the first ``count`` tokens alone, which are the image."""
        shapes = [[sample[0]] for sample in inputs["img_shapes"]]
        return {**inputs, "hidden_states": inputs["hidden_states"][:, :count], "img_shapes": shapes}

    def text(self, pipe: Any, samples: int, given: Inputs) -> dict[str, Any]:
        """A prompt, or its embeddings, as arguments of the model."""
        embeds, mask = pipe.encode_prompt(
            prompt=given.get("prompt"),
            device=pipe._execution_device,
            num_images_per_prompt=samples,
            prompt_embeds=given.get("prompt_embeds"),
            prompt_embeds_mask=given.get("prompt_embeds_mask"),
        )
        return {"encoder_hidden_states": embeds, "encoder_hidden_states_mask": mask}

    def encoded(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, h, w] of pixels [B, 3, H, W] in -1..1."""
        config, latents = pipe.vae.config, pipe.vae.encode(pixels[:, :, None]).latent_dist.mode()
        mean, std = (latents.new_tensor(x).view(1, -1, 1, 1, 1) for x in (config.latents_mean, config.latents_std))
        return ((latents - mean) / std)[:, :, 0]


LAYOUTS: dict[str, type[FluxLayout] | type[QwenLayout]] = {
    "FluxTransformer2DModel": FluxLayout,
    "QwenImageTransformer2DModel": QwenLayout,
}
