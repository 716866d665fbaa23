"""One wrap of a pipeline: it answers its calls with rollouts, and keeps the record of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cachedit.borrowed import borrowed
from cachedit.video.decoder import StreamingDecoder, encoded
from cachedit.video.network import CausalNetwork
from cachedit.video.noise import Noise
from cachedit.video.presets import Preset
from cachedit.video.processors import Branch, Current
from cachedit.video.record import VideoRun
from cachedit.video.request import Request
from cachedit.video.rollout import Rollout
from cachedit.video.stream import Stream, Tools

FRAMES = 81  # of a call that does not say how many, as WanPipeline has it


class VideoSession:
    """Makes streams for a pipeline, which it is told at every call and does not hold.

    Attributes:
        preset: how the model is rolled out.
        current: what the processors on the model look at.
        run: the record of the last rollout; None before the first.
    """

    def __init__(self, described: str, preset: Preset) -> None:
        self.described, self.preset = described, preset
        self.current = Current()
        self.run: VideoRun | None = None

    def call(self, pipe: Any, prompt: Any = None, return_dict: bool = True, **arguments: Any) -> Any:
        """A whole video, as the pipeline's own call gives it.

        Raises:
            TypeError, ValueError: an argument that is not known or cannot be (``Request``).
        """
        made = borrowed("diffusers.pipelines.wan.pipeline_output", "WanPipelineOutput")
        if arguments.get("seconds") is None:
            arguments.setdefault("num_frames", FRAMES)
        stream, parts = self.stream(pipe, prompt, **arguments), []
        try:
            with pipe.progress_bar(total=stream.limit) as bar:
                for chunk in stream:
                    parts.append(chunk.frames)
                    bar.update(chunk.stop - chunk.start)
        finally:
            stream.close()
        frames = _joined(parts, arguments.get("output_type", "np"))
        return made(frames=frames) if return_dict else (frames,)

    def stream(self, pipe: Any, prompt: Any = None, *, state: dict[str, Any] | None = None, **arguments: Any) -> Stream:
        """Chunks of a video as they are made; with ``state`` those that follow where it was taken.

        Raises:
            TypeError, ValueError: an argument that is not known or cannot be (``Request``).
        """
        if state is not None:
            if prompt is not None or arguments:
                given = sorted([*arguments, *(["prompt"] if prompt is not None else [])])
                raise ValueError(f"got state and {', '.join(given)}; allowed: state alone, which holds everything else")
            return self._resumed(pipe, state)
        request = Request(prompt=prompt, **arguments)
        request.check(pipe, self.preset)
        return self._started(pipe, request)

    def _started(self, pipe: Any, request: Request) -> Stream:
        shape = request.latent_shape(pipe)
        network = CausalNetwork(pipe.transformer, self.current)
        dtype = torch.promote_types(pipe.transformer.dtype, torch.float32)
        noise = Noise(request.generator, pipe._execution_device, dtype, request.latents)
        given, source = _beginning(pipe, request, dtype)
        factor, frames = pipe.vae_scale_factor_temporal, request.frames
        rollout = Rollout(
            network, self._branches(pipe, network, request, shape), self.preset, shape, noise,
            guidance=request.guidance_scale, limit=None if frames is None else -(-(frames - 1) // factor) + 1,
            source=source, strength=1.0 if request.strength is None else request.strength,
        )  # fmt: skip
        rollout.skipping = request.skip_frames
        if request.callback_on_step_end is not None:
            rollout.between = _calls(pipe, request.callback_on_step_end)
        return self._stream(pipe, rollout, given, frames, request.words, request.output_type, request)

    def _branches(self, pipe: Any, network: CausalNetwork, request: Request, shape: Sequence[int]) -> list[Branch]:
        embeds, negative = pipe.encode_prompt(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=request.guided,
            num_videos_per_prompt=request.num_videos_per_prompt,
            prompt_embeds=_repeated(request.prompt_embeds, request),
            negative_prompt_embeds=_repeated(request.negative_prompt_embeds, request),
            max_sequence_length=request.max_sequence_length,
            device=pipe._execution_device,
        )
        texts = [embeds, negative] if request.guided else [embeds]
        made = [
            Branch(text.to(pipe._execution_device, pipe.transformer.dtype), self._cache(network, shape))
            for text in texts
        ]
        made[0].cache.on_evict = request.on_evict
        return made

    def _cache(self, network: CausalNetwork, shape: Sequence[int]) -> Any:
        preset = self.preset
        options = {"window": preset.window, "sink": preset.sink, "rope": preset.rope, "quant": preset.quant}
        options["pins"] = preset.recalled
        return network.cache((shape[0], shape[1], 1, *shape[2:]), **options)

    def _stream(
        self, pipe: Any, rollout: Rollout, given: Any, frames: int | None, words: str, output: str,
        request: Request | None = None,
    ) -> Stream:  # fmt: skip
        decodes = pipe.vae is not None and (output != "latent" or self.preset.overlap > 0)
        tools = Tools(
            encode=lambda text: pipe.encode_prompt(
                prompt=text,
                do_classifier_free_guidance=False,
                num_videos_per_prompt=1 if request is None else request.num_videos_per_prompt,
                max_sequence_length=512 if request is None else request.max_sequence_length,
                device=pipe._execution_device,
            )[0],
            show=lambda video: pipe.video_processor.postprocess_video(video, output_type=output),
            latent_of=lambda video: encoded(pipe.vae, video),
            remake=lambda state: self._resumed(pipe, state),
            free=pipe.maybe_free_model_hooks,
            factor=pipe.vae_scale_factor_temporal,
        )
        preset = self.preset
        self.run = VideoRun(
            self.described, preset.window, preset.sink, preset.rope, preset.quant or str(rollout.network.dtype),
            preset.context,
        )  # fmt: skip
        decoder = StreamingDecoder(pipe.vae) if decodes else None
        return Stream(rollout, decoder, tools, self.run, given=given, frames=frames, prompt=words, output_type=output)

    def _resumed(self, pipe: Any, state: dict[str, Any]) -> Stream:
        if Preset(**state["preset"]) != self.preset:
            raise ValueError(
                f"got the state of a stream with {Preset(**state['preset'])}; allowed: one of {self.preset}. Wrap the "
                "pipeline as it was when the state was taken."
            )
        network = CausalNetwork(pipe.transformer, self.current)
        dtype = torch.promote_types(pipe.transformer.dtype, torch.float32)
        noise = Noise.from_state(state["noise"], pipe._execution_device, dtype)
        branches = [Branch(embeds, self._cache(network, state["shape"])) for embeds in state["embeds"]]
        limit = state["limit"]
        rollout = Rollout(
            network, branches, self.preset, state["shape"], noise, guidance=state["guidance"], limit=limit,
            source=state["source"], strength=state["strength"],
        )  # fmt: skip
        stream = self._stream(pipe, rollout, None, state["frames"], state["prompt"], state["output_type"])
        stream.load_state_dict(state)
        return stream


def _beginning(pipe: Any, request: Request, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Latents that the video begins with, and latents that it follows."""
    given = request.image if request.image is not None else request.video
    if given is None:
        return None, None
    size = {"height": request.height, "width": request.width}
    if request.image is not None:
        frames = pipe.video_processor.preprocess(given, **size)[:, :, None]
    else:
        frames = pipe.video_processor.preprocess_video(given, **size)
    factor = pipe.vae_scale_factor_temporal
    if (frames.shape[2] - 1) % factor:
        raise ValueError(
            f"got a video of {frames.shape[2]} frames; allowed: 1 and a multiple of {factor}, such as "
            f"{(frames.shape[2] - 1) // factor * factor + 1}. Leave out the first frames."
        )
    latents = encoded(pipe.vae, frames).to(pipe._execution_device, dtype)
    latents = latents.expand(request.samples, -1, -1, -1, -1)
    return (latents, None) if request.strength is None else (None, latents)


def _repeated(embeds: torch.Tensor | None, request: Request) -> torch.Tensor | None:
    """Given embeddings once per video; the pipeline repeats only what it encodes itself."""
    return None if embeds is None else embeds.repeat_interleave(request.num_videos_per_prompt, 0)


def _calls(pipe: Any, callback: Any) -> Any:
    def between(step: int, timestep: float, latents: torch.Tensor) -> None:
        callback(pipe, step, timestep, {"latents": latents})

    return between


def _joined(parts: list[Any], output: str) -> Any:
    """The frames of all chunks as the frames of one video."""
    if output == "pil":
        return [[frame for part in parts for frame in part[sample]] for sample in range(len(parts[0]))]
    if output == "np":
        return np.concatenate(parts, 1)
    return torch.cat(parts, 2 if output == "latent" else 1)
