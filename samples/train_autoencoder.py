"""First stage of the sample model's training: the autoencoder between pictures and latents."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from .image_model import build_autoencoder
from .scenes import Scene, all_scenes, held_out, render, sample_scenes, training_scenes
from .training import Budget, Trainer, read_checkpoint, write_atomically

LATENT_NOISE = 0.3  # the decoder learns to forgive errors of the denoiser up to this share of the latents' deviation


def train_autoencoder(folder: Path, budget: Budget, seed: int, batch: int = 16, every: int = 50) -> None:
    """Trains the autoencoder and writes ``autoencoder.pt`` with the averaged, normalised weights.

    Args:
        folder: where the checkpoint and the weights go.
        budget: how long to train.
        seed: of the weights and the data.
        batch: pictures per step.
        every: steps between two reports.
    """
    torch.manual_seed(seed)
    model = build_autoencoder()
    scenes = training_scenes()

    def loss(generator: torch.Generator) -> torch.Tensor:
        images = render(sample_scenes(scenes, batch, generator), generator)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = model.encode(images).latent_dist
            latents = posterior.sample()
            strength = LATENT_NOISE * torch.rand(batch, 1, 1, 1, generator=generator)
            noise = torch.randn(latents.shape, generator=generator) * latents.detach().std((0, 2, 3), keepdim=True)
            output = model.decode(latents + strength * noise).sample
        error = output.float() - images
        divergence = posterior.kl().float().mean() / images[0].numel()
        return error.abs().mean() + 2 * error.square().mean() + 1e-3 * divergence

    trainer = Trainer(
        {"autoencoder": model},
        loss,
        folder / "autoencoder_checkpoint.pt",
        budget,
        peak=2e-3,
        average=0.998,
        decay_from=0.3,
        seed=seed + 1,
        every=every,
    )
    trainer.run()
    trainer.use_average()
    generator = torch.Generator().manual_seed(seed + 2)
    normalise_latents(model, render(sample_scenes(scenes, 512, generator), generator))
    decibels = reconstruction_psnr(model, [scene for scene in all_scenes() if held_out(scene)], generator)
    print(f"PSNR on held-out scenes: {decibels:.2f} dB", flush=True)
    summary = {"steps": budget.taken, "minutes": budget.elapsed / 60, "psnr": decibels}
    write_atomically(folder / "autoencoder.pt", {"weights": model.state_dict(), "summary": summary})


@torch.no_grad()
def normalise_latents(model: AutoencoderKL, images: torch.Tensor) -> None:
    """Folds a shift and a scale per channel into the 1x1 convolutions around the latents.

    Afterwards latents have mean 0 and standard deviation 1 in each channel, reconstructions are the same, and
    ``scaling_factor`` stays 1.

    Args:
        model: changed in place.
        images: pictures to measure on, [N, 3, 64, 64] in [-1, 1].
    """
    latents = torch.cat([model.encode(part).latent_dist.mode() for part in images.split(64)])  # [N, 4, 16, 16]
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    channels = latents.shape[1]
    inward, outward = model.quant_conv, model.post_quant_conv
    inward.weight[:channels] /= deviation[:, None, None, None]
    inward.bias[:channels] = (inward.bias[:channels] - mean) / deviation
    inward.bias[channels:] -= 2 * deviation.log()  # the second half is the logarithm of the variance
    outward.bias += (outward.weight[:, :, 0, 0] * mean).sum(1)
    outward.weight *= deviation[None, :, None, None]


@torch.no_grad()
def reconstruction_psnr(model: AutoencoderKL, scenes: Sequence[Scene], generator: torch.Generator) -> float:
    """Mean peak signal-to-noise ratio in dB of decoded over original pictures."""
    images = render(scenes, generator)
    output = torch.cat([model.decode(model.encode(part).latent_dist.mode()).sample for part in images.split(64)])
    error = (output.clamp(-1, 1) - images).square().mean((1, 2, 3))  # [N]
    return (10 * torch.log10(4 / error)).mean().item()


def load_autoencoder(folder: Path) -> AutoencoderKL:
    """The trained autoencoder of a training folder, frozen.

    Raises:
        FileNotFoundError: the stage has not run.
    """
    model = build_autoencoder()
    model.load_state_dict(read_checkpoint(folder / "autoencoder.pt", "autoencoder")["weights"])
    return model.eval().requires_grad_(False)
