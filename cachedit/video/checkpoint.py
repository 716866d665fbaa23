"""Weights of published causal models, put into a stock transformer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from cachedit.borrowed import borrowed
from cachedit.video.network import check_model

T = TypeVar("T", bound=nn.Module)

CONTAINERS = ("generator_ema", "generator", "model", "state_dict")  # what the weights lie under, best first
WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_orig_mod\.|_checkpoint_wrapped_module\.|^module\.")
PREFIXES = ("model.diffusion_model.", "model.", "transformer.")
ORIGINAL = ("self_attn.", "time_embedding.")  # parts of the names of the original code


def load_causal_checkpoint(transformer: T, path: str | Path) -> T:
    """Load published causal weights (Self Forcing, CausVid, LongLive, Krea ...) into a stock Wan transformer.

    A causal model differs from the one that it was made from in its weights alone. Taken are ``.safetensors`` and
    PyTorch files, which are read as weights only: a dict of tensors in the original or in diffusers' names, perhaps
    under ``generator_ema``, ``generator``, ``model`` or ``state_dict``, and with prefixes that training code leaves.

    Args:
        transformer: a ``WanTransformer3DModel`` of that size; its dtype and device stay.
        path: the file.

    Returns:
        ``transformer`` itself.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint, or not of this model. ``transformer`` is untouched after any error.
    """
    check_model(transformer)
    weights = _named(_tensors(Path(path)))
    have = transformer.state_dict()
    missing, unknown = sorted(have.keys() - weights.keys()), sorted(weights.keys() - have.keys())
    shapes = [
        f"{name} {list(weights[name].shape)} for {list(have[name].shape)}"
        for name in sorted(have.keys() & weights.keys())
        if weights[name].shape != have[name].shape
    ]
    wrong = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    if any(wrong.values()):
        said = "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in wrong.items() if names)
        raise ValueError(
            f"{path} does not fit to this {type(transformer).__name__}: {said}. Allowed: exactly its "
            f"{len(have)} tensors. Load the transformer that the weights were trained from, such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers for Self Forcing, CausVid and LongLive."
        )
    transformer.load_state_dict(weights, strict=True)
    return transformer


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}; give the path of a .safetensors or .pt file")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        reader: Any = load_file
    else:
        reader = _load_weights_only
    try:
        found = reader(path)
    except Exception as error:  # whatever a damaged or a foreign file leads the readers to
        raise ValueError(
            f"{path} cannot be read as weights ({type(error).__name__}: {str(error)[:200]}). Allowed: .safetensors, or "
            "a PyTorch file of tensors alone."
        ) from error
    for name in CONTAINERS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
            break
    weights = (
        {name: x for name, x in found.items() if isinstance(x, torch.Tensor)} if isinstance(found, Mapping) else {}
    )
    if not weights:
        held = sorted(map(str, found)) if isinstance(found, Mapping) else [type(found).__name__]
        raise ValueError(
            f"{path} holds no weights but {_some(held)}; allowed: tensors by name, or under {', '.join(CONTAINERS)}"
        )
    return weights


def _load_weights_only(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _named(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under diffusers' names."""
    weights = {WRAPPERS.sub("", name): x for name, x in weights.items()}
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): x for name, x in weights.items()}
    if any(part in name for name in weights for part in ORIGINAL):
        weights = borrowed("diffusers.loaders.single_file_utils", "convert_wan_transformer_to_diffusers")(weights)
    return weights


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
