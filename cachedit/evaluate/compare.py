"""Run a pipeline bare and with caches on the same prompts and noise, and measure what each cache gains and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachedit.calibration.tally import Progress, Tally
from cachedit.evaluate.comparison import Comparison
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.experiment import Experiment
from cachedit.evaluate.taking import judge, take

__all__ = ["Configuration", "compare", "judge", "take"]


def compare(
    pipe: Any,
    configurations: Sequence[Configuration],
    prompts: Sequence[str],
    steps: int,
    *,
    seed: int = 0,
    repeats: int = 1,
    call_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure caches against the bare pipeline, with everything in memory. ``report.measure`` keeps files.

    For every prompt the bare pipeline and each cache run one after the other, so that a machine that slows down slows
    all of them; one run of each comes first and is not counted. Latency is the whole call: text encoder, denoiser,
    decoder. Prompt ``i`` starts from the noise of ``seed + i`` in every configuration.

    Args:
        pipe: a diffusers pipeline that takes ``prompt`` and ``num_inference_steps``. Left without a cache.
        configurations: the caches, each with its own row in the result.
        prompts: at least one.
        steps: ``num_inference_steps``.
        seed: of the first prompt's noise.
        repeats: measured runs of each prompt; the medians are reported.
        call_options: further arguments of the pipeline's call (``guidance_scale``, ``height`` ...).
        progress: called as ``progress(done, total, text)``, in steps of all runs.

    Returns:
        Conditions, one row for "baseline" and one for each configuration, and the pictures.

    Raises:
        ValueError: nothing to compare, or the pipeline is not driven by prompts.
        ProfileError, UnsupportedModelError, TypeError: as ``cachedit.wrap``, before the first run.
    """
    experiment = Experiment(
        pipe, configurations, prompts, steps, seeds=(seed,), repeats=repeats, call_options=call_options
    )
    experiment.work.tally = Tally(progress, experiment.expected_steps())
    return experiment.run()
