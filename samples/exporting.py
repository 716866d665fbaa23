"""From a training folder to files that ``from_pretrained`` reads, for all samples."""

from pathlib import Path
from typing import Any

import torch


def load_averaged(modules: dict[str, torch.nn.Module], averaged: dict[str, torch.Tensor]) -> None:
    """Gives modules the averaged weights of a checkpoint, and ends their training.

    Args:
        modules: by the names under which they were trained.
        averaged: their weights, each under "name.key".
    """
    for name, module in modules.items():
        prefix = f"{name}."
        weights = {key.removeprefix(prefix): value for key, value in averaged.items() if key.startswith(prefix)}
        module.load_state_dict(weights, strict=False)  # buffers are not averaged
        module.eval().requires_grad_(False)


def export_pipeline(pipe: Any, output: Path) -> None:
    """Writes a pipeline, denoiser and autoencoder in half precision.

    Args:
        pipe: with the trained weights.
        output: for ``DiffusionPipeline.from_pretrained``.
    """
    pipe.transformer.half()
    pipe.vae.half()  # diffusers loads both in float32 again; transformers would not, so the text encoder stays as it is
    pipe.save_pretrained(output)
    finish(output, output / "model_index.json", output / "tokenizer" / "tokenizer_config.json")


def finish(output: Path, *configurations: Path) -> None:
    """Makes written configurations readable for transformers 4 too, and tells what the model takes on disk."""
    for file in configurations:
        # transformers 5 writes a class name that transformers 4 does not know; both know this one.
        file.write_text(file.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"wrote {output}, {size / 1e6:.2f} MB", flush=True)
