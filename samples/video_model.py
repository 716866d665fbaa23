"""The components of the sample text-to-video model: what its training starts from.

Only the denoiser and the text encoder are trained. The autoencoder is a stock ``AutoencoderKLWan`` whose weights are
set by hand: it maps each patch of 4x4 pixels to its first 16 principal components, exactly linear up to rounding.
"""

from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from .clips import all_subjects, draw_clips, headings, path

LATENT_CHANNELS = 16
LATENT_SIZE = 8
TEXT_WIDTH = 64
PATCH = 4  # pixels of a latent, along each side
TOKENS = (LATENT_SIZE // 2) ** 2
"""Of one frame in the denoiser."""

_WIDTH = 36  # channels inside the autoencoder: each component, its negative, and a constant; the rest stay 0
_CONSTANT = 768.0  # so large beside the components that the last normalisation is the same for every patch


def build_autoencoder(seed: int = 0) -> AutoencoderKLWan:
    """The autoencoder: [N, 3, F, 32, 32] frames to [N, 16, F, 8, 8] latents, each frame by itself.

    Its residual and attention blocks add zero. What is left is a convolution, a normalisation to unit length, SiLU and
    a convolution. Beside a large constant channel the normalisation is a constant factor, and as
    ``silu(z) - silu(-z) = z`` the pair of a component and its negative passes SiLU unchanged.

    Args:
        seed: of the clips whose principal components are taken.
    """
    mean, components, deviation = principal_components(seed)
    # Dividing by the root of the deviation keeps strong components stronger, yet gives fine detail some weight.
    scale = deviation.sqrt() * deviation.mean().sqrt()
    model = AutoencoderKLWan(
        base_dim=_WIDTH,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1],
        num_res_blocks=0,
        temperal_downsample=[],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=scale.tolist(),
        in_channels=3 * PATCH**2,
        out_channels=3 * PATCH**2,
        patch_size=PATCH,
        scale_factor_temporal=1,
        scale_factor_spatial=PATCH,
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, 1.0 if name.endswith("gamma") else 0.0)
    back = torch.eye(LATENT_CHANNELS) * _CONSTANT / _WIDTH**0.5  # undoes the normalisation
    with torch.no_grad():
        _set_line(model.encoder, components.T, -components.T @ mean, back)
        model.encoder.conv_out.bias[LATENT_CHANNELS:] = -30.0  # the logarithm of the variance: none
        _set_line(model.decoder, torch.eye(LATENT_CHANNELS), torch.zeros(LATENT_CHANNELS), components @ back)
        model.decoder.conv_out.bias.copy_(mean)
        for pointwise in (model.quant_conv, model.post_quant_conv):
            pointwise.weight[:, :, 0, 0, 0] = torch.eye(pointwise.weight.shape[0])
    return model.eval().requires_grad_(False)


def principal_components(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean [48], first components [48, 16] and their standard deviations [16] of the 4x4 patches of drawn clips."""
    generator = torch.Generator().manual_seed(seed)
    subjects = [[subject] * 20 for subject in all_subjects()]
    patches = patchify(draw_clips(subjects, path(headings(subjects), generator)), PATCH)
    patches = patches.movedim(1, -1).flatten(0, -2)  # [patches, 48]
    mean = patches.mean(0)
    basis, variance, _ = torch.linalg.svd((patches - mean).T @ (patches - mean) / len(patches))
    basis = basis[:, :LATENT_CHANNELS]
    basis = basis * basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()  # the sign of a component is free
    return mean, basis, variance[:LATENT_CHANNELS].sqrt()


def _set_line(part: Any, inward: torch.Tensor, offset: torch.Tensor, outward: torch.Tensor) -> None:
    """Makes an encoder or decoder compute ``outward @ (inward @ x + offset)``: centre taps of the newest frame only."""
    part.conv_in.weight[: 2 * LATENT_CHANNELS, :, 2, 1, 1] = torch.cat([inward, -inward])
    part.conv_in.bias[: 2 * LATENT_CHANNELS] = torch.cat([offset, -offset])
    part.conv_in.bias[2 * LATENT_CHANNELS] = _CONSTANT
    rows = outward.shape[0]
    part.conv_out.weight[:rows, : 2 * LATENT_CHANNELS, 2, 1, 1] = torch.cat([outward, -outward], 1)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for the prompts of :mod:`.clips`: lower case, end token, padding on the right."""
    words = sorted({word for subject in all_subjects() for word in subject.prompt.split()})
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("removed")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=512,
    )


def build_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    """The text encoder with random weights: tokens to [N, length, 64]."""
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    return UMT5EncoderModel(config)


def build_denoiser() -> WanTransformer3DModel:
    """The denoiser, with every block an identity at first: its modulation and the output start at zero."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=5,
        attention_head_dim=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=480,
        num_layers=8,
        cross_attn_norm=True,
        rope_max_seq_len=1024,
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)
    silent = [model.condition_embedder.time_proj, model.proj_out, *(block.attn2.to_out[0] for block in model.blocks)]
    for linear in silent:
        torch.nn.init.zeros_(linear.weight)
    for table in (model.scale_shift_table, *(block.scale_shift_table for block in model.blocks)):
        torch.nn.init.zeros_(table)
    return model
