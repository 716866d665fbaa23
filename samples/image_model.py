"""The components of the sample text-to-image model, with random weights: what its training starts from."""

import torch
from diffusers import AutoencoderKL, CogView4Transformer2DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import GlmConfig, GlmModel, PreTrainedTokenizerFast

from .scenes import IMAGE_SIZE, all_scenes

LATENT_CHANNELS = 4
LATENT_SIZE = 16
PROMPT_TOKENS = 16
TEXT_WIDTH = 96


def build_autoencoder() -> AutoencoderKL:
    """The autoencoder, factor 4, with random weights: [N, 3, 64, 64] pictures to [N, 4, 16, 16] latents."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
        mid_block_add_attention=False,
        force_upcast=False,
        scaling_factor=1.0,
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for the prompts of :mod:`.scenes`: lower case, begin token, padding on the left."""
    words = sorted({word for scene in all_scenes() for word in scene.prompt.split()})
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<bos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    spellings = [normalizers.Replace(old, new) for old, new in (("gray", "grey"), ("center", "centre"))]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *spellings])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("removed")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=PROMPT_TOKENS,
    )


def build_text_encoder(vocabulary: int) -> GlmModel:
    """The text encoder with random weights; the pipeline reads what its first layer returns, [N, 16, 96]."""
    config = GlmConfig(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=TEXT_WIDTH // 4,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=0,
    )
    return GlmModel(config)


def build_denoiser() -> CogView4Transformer2DModel:
    """The denoiser, with every block an identity at first: its modulation and the output start at zero."""
    model = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=8,
        attention_head_dim=32,
        num_attention_heads=5,
        text_embed_dim=TEXT_WIDTH,
        time_embed_dim=96,
        condition_dim=16,
        pos_embed_max_size=LATENT_SIZE // 2,
        sample_size=LATENT_SIZE,
        rope_axes_dim=(LATENT_SIZE // 2, LATENT_SIZE // 2),
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)
    for linear in (*(block.norm1.linear for block in model.transformer_blocks), model.norm_out.linear, model.proj_out):
        torch.nn.init.zeros_(linear.weight)
    return model
