"""Trains the sample text-to-image model ``samples/image`` from nothing, on one CPU core in about 85 minutes.

Run from the repository root, in this order; every stage resumes from its checkpoint::

    python -m cachedit.samples.train_image autoencoder --minutes 18
    python -m cachedit.samples.train_image denoiser --minutes 66 --compile
    python -m cachedit.samples.train_image export
    python -m cachedit.samples.train_image contact-sheet
    python -m cachedit.samples.train_image evaluate

The model is a stock diffusers ``CogView4Pipeline``; :mod:`.image_model` builds its parts, :mod:`.train_autoencoder` and
:mod:`.train_denoiser` are the two training stages.

Pictures this simple need little guidance, and at the default scale 5 of the pipeline colours would leave the palette.
So in the last part of the training a prompt's velocity aims only half-way from that of the empty prompt to the data:
scale 5 then acts like 2.5, scale 2 like no guidance, and scale 1 is too weak to use.
"""

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import CogView4Pipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image, ImageDraw

from . import sample_path
from .exporting import export_pipeline, load_averaged
from .image_model import build_denoiser, build_text_encoder, build_tokenizer
from .judge import accuracy
from .scenes import all_scenes, held_out, sample_scenes, training_scenes
from .train_autoencoder import load_autoencoder, train_autoencoder
from .train_denoiser import train_denoiser
from .training import Budget, read_checkpoint

DEFAULT_FOLDER = Path("build/train")
DEFAULT_MINUTES = {"autoencoder": 18.0, "denoiser": 66.0}


def build_pipeline(folder: Path) -> CogView4Pipeline:
    """The pipeline with the averaged weights of a training folder.

    Raises:
        FileNotFoundError: a stage has not run.
    """
    tokenizer = build_tokenizer()
    averaged = read_checkpoint(folder / "denoiser.pt", "denoiser")["averaged"]
    modules = {"text_encoder": build_text_encoder(len(tokenizer)), "transformer": build_denoiser()}
    load_averaged(modules, averaged)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    return CogView4Pipeline(tokenizer=tokenizer, vae=load_autoencoder(folder), scheduler=scheduler, **modules)


def load_pipeline(path: Path) -> CogView4Pipeline:
    """Loads an exported pipeline without a progress bar."""
    pipe = CogView4Pipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: CogView4Pipeline, prompts: Sequence[str], seed: int = 0, **arguments: Any) -> torch.Tensor:
    """Runs the pipeline on a batch of prompts.

    Args:
        pipe: the sample pipeline.
        prompts: N prompts.
        seed: of the noise.
        arguments: for the pipeline, for example ``guidance_scale``; 28 steps unless given.

    Returns:
        Pictures [N, 3, 64, 64], RGB in [-1, 1].
    """
    arguments = {"num_inference_steps": 28} | arguments
    generator = torch.Generator().manual_seed(seed)
    return pipe(list(prompts), generator=generator, output_type="pt", **arguments).images.float() * 2 - 1


def evaluate(pipe: CogView4Pipeline, count: int, guidances: Sequence[float], seed: int = 0) -> None:
    """Prints the judged accuracy at each guidance scale, on training and on held-out combinations."""
    generator = torch.Generator().manual_seed(seed)
    for label, wanted in (("trained", False), ("held out", True)):
        scenes = sample_scenes([scene for scene in all_scenes() if held_out(scene) == wanted], count, generator)
        for guidance in guidances:
            images = draw(pipe, [scene.prompt for scene in scenes], seed, guidance_scale=guidance)
            shares = {key: round(value, 3) for key, value in accuracy(images, scenes).items()}
            print(json.dumps({"combinations": label, "guidance": guidance, "count": count} | shares), flush=True)


def contact_sheet(pipe: CogView4Pipeline, path: Path, seed: int = 0) -> None:
    """Draws four by six captioned pictures at the default guidance, the last two rows of held-out combinations.

    Args:
        pipe: the sample pipeline.
        path: the PNG to write.
        seed: of the scenes and the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    scenes = sample_scenes(training_scenes(), 12, generator)
    scenes += sample_scenes([scene for scene in all_scenes() if held_out(scene)], 12, generator)
    images = draw(pipe, [scene.prompt for scene in scenes], seed)
    cell, caption, columns = 128, 56, 6
    sheet = Image.new("RGB", (columns * (cell + 8), 4 * (cell + caption)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (scene, image) in enumerate(zip(scenes, images, strict=True)):
        left, top = index % columns * (cell + 8) + 4, index // columns * (cell + caption) + 4
        pixels = ((image.permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
        sheet.paste(Image.fromarray(pixels).resize((cell, cell), Image.Resampling.LANCZOS), (left, top))
        lines = textwrap.wrap(scene.prompt, 24)
        pen.multiline_text((left, top + cell + 1), "\n".join(lines), fill="black", spacing=1)
    sheet.save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one stage; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m cachedit.samples.train_image", description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("autoencoder", "denoiser", "export", "evaluate", "contact-sheet"))
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="checkpoints (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=sample_path(), help="the pipeline (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="train for this many steps in all")
    length.add_argument("--minutes", type=float, help="train for this many minutes in all")
    parser.add_argument("--batch", type=int, help="pictures per step (default: 16 autoencoder, 64 denoiser)")
    parser.add_argument(
        "--pool", type=int, default=20_000, help="encoded pictures for the denoiser (default: %(default)s)"
    )
    parser.add_argument("--count", type=int, default=60, help="pictures to evaluate per row (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile the denoiser's blocks; needs a C++ compiler")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.stage in DEFAULT_MINUTES:
        minutes = options.minutes
        if options.steps is None and minutes is None:
            minutes = DEFAULT_MINUTES[options.stage]
        budget = Budget(options.steps, minutes)
    if options.stage == "autoencoder":
        train_autoencoder(options.folder, budget, options.seed, options.batch or 16)
    elif options.stage == "denoiser":
        batch = options.batch or 64
        train_denoiser(options.folder, budget, options.seed, batch, options.pool, compiled=options.compile)
    elif options.stage == "export":
        export_pipeline(build_pipeline(options.folder), options.output)
    elif options.stage == "evaluate":
        evaluate(load_pipeline(options.output), options.count, (1.0, 2.0, 3.0, 5.0), options.seed)
    else:
        contact_sheet(load_pipeline(options.output), options.output / "contact_sheet.png", options.seed)


if __name__ == "__main__":
    main()
