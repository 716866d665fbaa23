"""Edits of one part of an image: the model computes the foreground, and the background is read from a bank."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from cachedit.conditions.bank import KVBank
from cachedit.conditions.passes import Pass
from cachedit.conditions.picture import foreground, packed_latents
from cachedit.conditions.session import ConditionSession, Passed, Stock
from cachedit.errors import UnsupportedModelError

STEPS = 28  # of a call that does not say how many
SEPARATE = ("encoder_hidden_states", "encoder_hidden_states_mask", "pooled_projections")  # by sample


@dataclass(frozen=True)
class Edit:
    """How an image is edited.

    mode: noise the original anew at every step, or find the noise that leads to it.
    skip: leading steps that are left out.
    source_guidance: embedded guidance for the original; None is that of the call.
    bias: added to the attention scores of the background.
    restart: after an inversion, the foreground begins from noise all the same.
    dtype: of what is kept; None is the model's.
    """

    mode: Literal["inversion_free", "inversion"]
    skip: int
    source_guidance: float | None
    bias: float
    restart: bool
    dtype: torch.dtype | None


@dataclass
class Original:
    """What is edited.

    x0:    its tokens [B, N, C].
    noise: of the run, [B, N, C].
    words: its own prompt as arguments of the model.
    inside, outside: rows of the foreground and of the background.
    """

    x0: torch.Tensor
    noise: torch.Tensor
    words: dict[str, Any]
    inside: torch.Tensor
    outside: torch.Tensor

    def at(self, level: Any) -> torch.Tensor:
        """The original at a noise level, [B, N, C]."""
        return (1 - level) * self.x0 + level * self.noise


class EditSession(ConditionSession):
    """Runs the pipeline on the latents of an image, whose background never moves (KV-Edit, arXiv 2502.17363)."""

    def __init__(self, described: str, pipe: Any, edit: Edit) -> None:
        super().__init__(described, pipe)
        if "image" in inspect.signature(type(pipe).__call__).parameters:
            raise UnsupportedModelError(
                f"{type(pipe).__name__} takes an image itself, and makes of it what an edit cannot undo. Allowed: a "
                "pipeline that makes an image from text, such as FluxPipeline or QwenImagePipeline."
            )
        self.edit = edit
        self._original: Original | None = None
        self._velocity: torch.Tensor | None = None  # of the original at this step

    def call(self, pipe: Any, stock: Stock, *arguments: Any, **named: Any) -> Any:
        """The pipeline's own call with a few more arguments.

        Args:
            pipe: the pipeline.
            stock: its call.
            *arguments: nothing but the prompt.
            **named: those of the pipeline, and

                * ``image``: what is edited (``packed_latents``);
                * ``mask_image``: white where it is to change (``foreground``);
                * ``source_prompt``: what the image shows, or ``source_prompt_embeds`` and what else the pipeline takes
                  with embeddings, each with ``source_`` before its name.

        Raises:
            ValueError: an argument is missing, or one that the edit itself decides is given.
        """
        if arguments:
            named["prompt"], *rest = arguments
            if rest:
                raise ValueError(f"got {len(arguments)} positional arguments; allowed: the prompt. Name the others.")
        self._check(named)
        words = {name: named.pop(f"source_{name}", None) for name in self.layout.prompts}
        size = pipe.default_sample_size * pipe.vae_scale_factor
        image, mask = named.pop("image"), named.pop("mask_image")
        named["height"], named["width"] = named.get("height") or size, named.get("width") or size
        x0, grid = packed_latents(pipe, self.layout, image, named["height"], named["width"])
        batch = _prompts(named) * (named.get("num_images_per_prompt") or 1)
        named["latents"] = x0.expand(batch, -1, -1).clone()
        if named.get("sigmas") is None:
            named["sigmas"] = self._levels(named.get("num_inference_steps") or STEPS)
        named["num_inference_steps"] = len(named["sigmas"])
        rows = foreground(mask, grid).to(x0.device)
        others = torch.ones(x0.shape[1], dtype=torch.bool, device=x0.device).index_fill(0, rows, False)
        noise = _noise(named["latents"], named.get("generator"))
        with torch.no_grad():
            text = self.layout.text(pipe, 1, words)
        self._original = Original(named["latents"].clone(), noise, text, rows, others.nonzero().flatten())
        return super().call(pipe, stock, **named)

    def end(self) -> None:
        """A run is over, however it ended."""
        super().end()
        self._original = self._velocity = None

    def predict(self, passed: Passed, inputs: dict[str, Any]) -> torch.Tensor:
        """The velocity of the foreground; that of the background is zero, so that it stays what it is."""
        original, latents = self._original, inputs["hidden_states"]
        assert original is not None
        free, spent, level = self.edit.mode == "inversion_free", 0, self._level(self.step)
        if free and self.branch == 0:
            self.banks[0] = bank = KVBank(dtype=self.edit.dtype)
            self._velocity = self._source(passed, inputs, original.at(level).to(latents.dtype), level, bank)
            spent = latents.shape[1]
        elif not free and self.step == 0 and self.branch == 0:
            latents[:, original.inside] = self._inverted(passed, inputs)[:, original.inside]
            spent = latents.shape[1] * self.steps
        state = latents
        if free:
            state = (original.at(level) - original.x0 + latents).to(latents.dtype)
        part, rows = self.layout.part({**inputs, "hidden_states": state}, original.inside)
        bank = self.banks[0 if free else self.step]
        found = passed(Pass(banks=[bank], bias=self.edit.bias, rows=rows), part)
        if self._velocity is not None:
            found = found - self._velocity[:, original.inside]
        self.note(spent + len(original.inside), len(original.outside))
        if not free:
            self.banks.pop(self.step - 1, None)
        whole = found.new_zeros(found.shape[0], latents.shape[1], found.shape[2])
        return whole.index_copy(1, original.inside, found)

    def _inverted(self, passed: Passed, inputs: dict[str, Any]) -> torch.Tensor:
        """The original at the highest level, found by integrating upwards; every evaluation is kept on the host.

        A bank belongs to the step that leads down again over the same interval, so that what the background would do
        in it is exactly the inversion undone.
        """
        assert self._original is not None
        x = self._original.x0.to(inputs["hidden_states"].dtype)
        for step in reversed(range(self.steps)):
            low, high = self._level(step + 1), self._level(step)
            self.banks[step] = bank = KVBank(device="cpu", dtype=self.edit.dtype)
            x = x + (high - low) * self._source(passed, inputs, x, low, bank)
        return self._original.at(self._level(0)).to(x.dtype) if self.edit.restart else x

    def _source(
        self, passed: Passed, inputs: dict[str, Any], x: torch.Tensor, level: torch.Tensor, bank: KVBank
    ) -> torch.Tensor:
        """What the model predicts for the original with its own prompt; the bank takes its background."""
        original, batch = self._original, x.shape[0]
        assert original is not None
        words = {
            name: value.repeat_interleave(batch // value.shape[0], 0)
            if name in SEPARATE and value is not None
            else value
            for name, value in original.words.items()
        }
        given = {**inputs, **words, "hidden_states": x, "timestep": torch.full_like(inputs["timestep"], 1.0) * level}
        if self.edit.source_guidance is not None and inputs.get("guidance") is not None:
            given["guidance"] = torch.full_like(inputs["guidance"], self.edit.source_guidance)
        _, rows = self.layout.part(given, torch.arange(x.shape[1], device=x.device))
        return passed(Pass(into=bank, record=original.outside, rows=rows), given)

    def _level(self, step: int) -> torch.Tensor:
        """Noise level of a step, on the device of the latents; the schedule ends with 0."""
        assert self._original is not None
        scheduler = self._scheduler
        return scheduler.sigmas[step + (scheduler.begin_index or 0)].to(self._original.x0.device)

    def _levels(self, steps: int) -> Any:
        if steps <= self.edit.skip:
            raise ValueError(
                f"got num_inference_steps={steps} with skip={self.edit.skip}; allowed: {self.edit.skip + 1} or more"
            )
        return np.linspace(1.0, 1 / steps, steps)[self.edit.skip :]

    def _check(self, named: dict[str, Any]) -> None:
        missing = [name for name in ("image", "mask_image") if named.get(name) is None]
        if all(named.get(f"source_{name}") is None for name in self.layout.prompts):
            missing.append("source_prompt")
        if missing:
            raise ValueError(
                f"an edit needs {', '.join(missing)}. Call the pipeline with image=, mask_image= and source_prompt=, "
                "or unwrap it to make an image from nothing."
            )
        if named.get("latents") is not None:
            raise ValueError("got latents, which an edit takes from image; drop them")
        negative = any(named.get(name) is not None for name in ("negative_prompt", "negative_prompt_embeds"))
        if self.layout.rescales_guidance and negative and named.get("true_cfg_scale", 4.0) > 1:
            raise ValueError(
                "got a negative prompt for a pipeline that rescales what guidance gives, which an edit's background of "
                "zero velocity does not survive; allowed: none, or true_cfg_scale=1"
            )


def _prompts(named: dict[str, Any]) -> int:
    prompt = named.get("prompt")
    if prompt is None:
        return named["prompt_embeds"].shape[0] if named.get("prompt_embeds") is not None else 1
    return 1 if isinstance(prompt, str) else len(prompt)


def _noise(like: torch.Tensor, generator: Any) -> torch.Tensor:
    from diffusers.utils.torch_utils import randn_tensor

    return randn_tensor(like.shape, generator=generator, device=like.device, dtype=like.dtype)
