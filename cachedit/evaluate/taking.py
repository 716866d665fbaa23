"""One timed run of one prompt, and its quality."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.panel import Panel
from cachedit.evaluate.pictures import is_video, pictures
from cachedit.evaluate.shot import Shot
from cachedit.wrap import last_run, unwrap

OnStep = Callable[[], None]


def take(
    pipe: Any,
    configuration: Configuration | None,
    shot: Shot,
    steps: int,
    call_options: dict[str, Any],
    on_step: OnStep | None = None,
) -> None:
    """One timed run of one prompt; the result is added to ``shot``.

    Args:
        pipe: the pipeline.
        configuration: the cache; None for none.
        shot: what is drawn.
        steps: ``num_inference_steps``, where the cache does not say how many there are.
        call_options: further arguments of the call.
        on_step: called after every step where the pipeline allows it; what it raises ends the run.
    """
    if configuration is None:
        unwrap(pipe)
    else:
        configuration.attach(pipe)
    # With offload the pipeline's own device is where it rests, not where it runs.
    place: Any = getattr(pipe, "_execution_device", None) or getattr(pipe, "device", "cpu")
    device = torch.device(place)
    generator = torch.Generator().manual_seed(shot.seed)
    options = {"output_type": "np", **_calling(pipe, on_step), **call_options}
    if configuration is None or configuration.found().own_steps() is None:
        options["num_inference_steps"] = steps
    with torch.no_grad(), warnings.catch_warnings():
        # A cache that never fired is told in words in the result's note.
        warnings.filterwarnings("ignore", r"cachedit: .* reused no step", UserWarning)
        _synchronise(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start, worked = time.perf_counter(), time.process_time()
        output = pipe(prompt=shot.prompt, generator=generator, **options)
        _synchronise(device)
    shot.latencies.append(time.perf_counter() - start)
    shot.processor.append(time.process_time() - worked)
    if device.type == "cuda":
        shot.peak_memory = max(shot.peak_memory or 0, torch.cuda.max_memory_allocated(device))
    shot.pictures, shot.video = pictures(output), is_video(output)
    shot.run = last_run(pipe) if configuration is not None else None


def judge(shot: Shot, reference: Shot, panel: Panel | None = None) -> None:
    """Quality of a cached run against the bare one of the same prompt and noise.

    Args:
        shot: the cached run.
        reference: the bare one.
        panel: the metrics; None: PSNR, SSIM and st-lpips.
    """
    a, b = shot.look(), reference.look()
    shot.identical = torch.equal(a, b)
    shot.quality = (panel or Panel()).judge(a, b, shot.prompt, shot.video)


def _calling(pipe: Any, on_step: OnStep | None) -> dict[str, Any]:
    """The argument that makes a pipeline call ``on_step``; none where it takes no such argument."""
    if on_step is None or "callback_on_step_end" not in inspect.signature(pipe.__call__).parameters:
        return {}
    called = on_step

    def callback(pipe: Any, index: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        called()
        return {}

    return {"callback_on_step_end": callback}


def _synchronise(device: torch.device) -> None:
    """Wait for the device, whose work is otherwise still under way when the call returns."""
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).synchronize()
