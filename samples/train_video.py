"""Trains the sample text-to-video model ``samples/video`` from nothing, on one CPU core in about half an hour.

Run from the repository root, in this order; the first stage resumes from its checkpoint::

    python -m cachedit.samples.train_video rollout --minutes 58 --compile
    python -m cachedit.samples.train_video export
    python -m cachedit.samples.train_video evaluate
    python -m cachedit.samples.train_video gif

The model is a stock diffusers ``WanPipeline`` that draws three frames at a time from those before them;
:mod:`.video_model` builds its parts, :mod:`.train_rollout` is the training and :mod:`.track` the judge.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from PIL import Image

import cachedit

from . import call_options, prompts, sample_path
from .clips import BACKGROUND, COLOURS, all_subjects
from .exporting import export_pipeline, load_averaged
from .track import ASPECTS, bounces, follow
from .train_rollout import train_rollout
from .training import Budget, read_checkpoint
from .video_model import build_autoencoder, build_denoiser, build_text_encoder, build_tokenizer

DEFAULT_FOLDER = Path("build/train_video")
DEFAULT_MINUTES = 58.0
ENLARGED = 4  # side of a pixel in the GIF


def build_pipeline(folder: Path) -> WanPipeline:
    """The pipeline with the averaged weights of a training folder.

    Raises:
        FileNotFoundError: the training has not run.
    """
    tokenizer = build_tokenizer()
    averaged = read_checkpoint(folder / "rollout.pt", "rollout", "train_video")["averaged"]
    modules = {"text_encoder": build_text_encoder(len(tokenizer)), "transformer": build_denoiser()}
    load_averaged(modules, averaged)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    return WanPipeline(tokenizer=tokenizer, vae=build_autoencoder(), scheduler=scheduler, **modules)


def load_pipeline(path: Path) -> WanPipeline:
    """Loads an exported pipeline, with a rolling cache on it and without a progress bar."""
    pipe = WanPipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    return cachedit.wrap(pipe, "rolling-kv", preset="longlive", rope="sink_shift")


def roll_out(pipe: WanPipeline, prompts: Sequence[str], frames: int, seed: int = 0, **arguments: Any) -> torch.Tensor:
    """Runs the pipeline on a batch of prompts.

    Args:
        pipe: the sample pipeline, with a rolling cache on it.
        prompts: N prompts.
        frames: length F of the clips.
        seed: of the noise.
        arguments: for the pipeline.

    Returns:
        Clips [N, 3, F, 32, 32], RGB in [-1, 1].
    """
    arguments = call_options("video") | arguments | {"num_frames": frames}
    generator = torch.Generator().manual_seed(seed)
    clips = pipe(list(prompts), generator=generator, output_type="pt", **arguments).frames
    return clips.float().transpose(1, 2) * 2 - 1


def evaluate(pipe: WanPipeline, frames: int, seed: int = 0) -> None:
    """Prints the share of right frames over all prompts, early and late in rollouts, and how often shapes bounced."""
    subjects = all_subjects()
    clips = roll_out(pipe, [subject.prompt for subject in subjects], frames, seed)
    for first in range(0, frames, 24):
        part = clips[:, :, first : first + 24]
        shares = [follow(clip, subject) for clip, subject in zip(part, subjects, strict=True)]
        means = {aspect: round(sum(share[aspect] for share in shares) / len(shares), 3) for aspect in ASPECTS}
        print(json.dumps({"frames": f"{first} to {first + part.shape[2] - 1}"} | means), flush=True)
    counts = [bounces(clip, subject) for clip, subject in zip(clips, subjects, strict=True)]
    print(json.dumps({"clips": len(subjects), "bounces": f"{min(counts)} to {max(counts)}"}), flush=True)


def write_gif(pipe: WanPipeline, path: Path, frames: int, seed: int = 0) -> None:
    """Draws the eight prompts side by side, four in a row, as an animation.

    Args:
        pipe: the sample pipeline, with a rolling cache on it.
        path: the GIF to write.
        frames: its length.
        seed: of the noise.
    """
    clips = roll_out(pipe, prompts("video"), frames, seed)  # [8, 3, F, 32, 32]
    rows = torch.nn.functional.pad(clips, (1, 1, 1, 1), value=1.0).unflatten(0, (2, 4))
    film = ((rows.permute(3, 0, 4, 1, 5, 2).flatten(1, 2).flatten(2, 3) + 1) * 127.5).round().byte()
    palette = _palette()
    size = (film.shape[2] * ENLARGED, film.shape[1] * ENLARGED)
    pictures = [
        Image.fromarray(frame.numpy()).quantize(palette=palette, dither=Image.Dither.NONE).resize(size)
        for frame in film
    ]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=80, loop=0, optimize=True)


def _palette() -> Image.Image:
    """White, and ten shades from the background to each colour: faint noise would make a GIF five times as large."""
    shares = torch.linspace(0, 1, 10)[:, None]
    background = torch.tensor(BACKGROUND)
    shades = [background + shares * (torch.tensor(colour) - background) for colour in COLOURS.values()]
    palette = Image.new("P", (1, 1))
    palette.putpalette((torch.cat([*shades, torch.ones(1, 3)]) * 255).round().byte().flatten().tolist())
    return palette


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one stage; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m cachedit.samples.train_video", description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("rollout", "export", "evaluate", "gif"))
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="checkpoint (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=sample_path("video"), help="the pipeline (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="train for this many steps in all")
    length.add_argument("--minutes", type=float, help="train for this many minutes in all")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 12 frames per step (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=96, help="of a rollout (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile the denoiser's blocks; needs a C++ compiler")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.stage == "rollout":
        minutes = DEFAULT_MINUTES if options.steps is None and options.minutes is None else options.minutes
        budget = Budget(options.steps, minutes)
        train_rollout(options.folder, budget, options.seed, options.batch, compiled=options.compile)
    elif options.stage == "export":
        export_pipeline(build_pipeline(options.folder), options.output)
    elif options.stage == "evaluate":
        evaluate(load_pipeline(options.output), options.frames, options.seed)
    else:
        write_gif(load_pipeline(options.output), options.output / "rollout.gif", options.frames, options.seed)


if __name__ == "__main__":
    main()
