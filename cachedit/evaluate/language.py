"""A language model with its tokenizer, from what the command line names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cachedit.evaluate.loading import DTYPES, device_for, quiet

CLASSES = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")
"""Classes of transformers that may load a diffusion language model; the configuration tells which one does."""


@dataclass
class LanguageModel:
    """A language model, ready to answer.

    Attributes:
        model: of transformers, or of code beside its weights.
        tokenizer: of the model.
        name: as it was asked for.
    """

    model: nn.Module
    tokenizer: Any
    name: str

    @property
    def components(self) -> dict[str, Any]:
        """By name, as a diffusers pipeline has them."""
        return {"model": self.model, "tokenizer": self.tokenizer}

    def encode(self, prompt: str) -> torch.Tensor:
        """The tokens of a prompt, ``[1, P]``, on the model's device."""
        tokens = self.tokenizer(prompt, return_tensors="pt").input_ids
        return torch.as_tensor(tokens).to(next(self.model.parameters()).device)

    def encode_all(self, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of prompts, padded on the left, and which of them are no padding, ``[B, P]`` each."""
        rows = [self.encode(prompt)[0] for prompt in prompts]
        ids = rows[0].new_zeros(len(rows), max(map(len, rows)))
        seen = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            if len(row):
                ids[number, -len(row) :], seen[number, -len(row) :] = row, 1
        return ids, seen

    def text(self, tokens: torch.Tensor) -> str:
        """What tokens ``[n]`` say, without those that only mark something."""
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def options(self) -> dict[str, Any]:
        """Options of ``cachedit.generate`` that the tokenizer knows: which tokens mask and end."""
        named = {name: getattr(self.tokenizer, name, None) for name in ("mask_token_id", "eos_token_id")}
        return {name: value for name, value in named.items() if value is not None}


def is_language_model(model: str) -> bool:
    """True for a folder with one model of transformers, and no pipeline of diffusers.

    Args:
        model: a folder or a hub id; a hub id is asked for on the hub, or in what is kept of it here.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return (folder / "config.json").is_file() and not (folder / "model_index.json").is_file()
    if model.count("/") != 1 or model.startswith((".", "~", "/")):
        return False
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hf_hub_download(model, "model_index.json")
    except LocalEntryNotFoundError:
        return _is_kept(model)
    except EntryNotFoundError:
        return True
    except Exception:  # no such repository, no network: whoever loads it tells
        return False
    return False


def load_language_model(
    model: str, device: str | None = None, dtype: str | None = None, *, trust_remote_code: bool = False
) -> LanguageModel:
    """A language model and its tokenizer.

    Args:
        model: a folder that ``save_pretrained`` wrote, or a hub id.
        device: where it runs, see ``loading.device_for``.
        dtype: name of its floating type; None: float32 on the CPU, bfloat16 elsewhere.
        trust_remote_code: True lets code run that lies beside the weights.

    Raises:
        ValueError: it cannot be loaded, or not there, with the reason.
    """
    import transformers

    folder = Path(model).expanduser()
    source = str(folder) if folder.exists() else model
    place = device_for(device)
    kind = DTYPES[dtype] if dtype else torch.float32 if place.type == "cpu" else torch.bfloat16
    code = {"trust_remote_code": trust_remote_code}
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(source, **code)
            loader = getattr(transformers, _class_for(config))
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **code)
            loaded = loader.from_pretrained(source, torch_dtype=kind, **code)
    except Exception as error:  # the loaders of transformers, tokenizers, safetensors and the hub raise all kinds
        raise ValueError(
            f"cannot load language model {model}: {type(error).__name__}: {' '.join(str(error).split())[:240]}. "
            "Allowed: a folder with a model of transformers and its tokenizer, or a hub id that is cached here or can "
            "be downloaded."
        ) from error
    return LanguageModel(loaded.eval().to(place), tokenizer, model)


def _class_for(config: Any) -> str:
    """The auto class that loads a model with its head."""
    own: Sequence[str] = getattr(config, "auto_map", None) or ()
    named = [name for name in CLASSES if name in own]
    if named:
        return named[0]
    architecture = next(iter(getattr(config, "architectures", None) or [""]), "")
    return CLASSES[0] if architecture.endswith("ForMaskedLM") else CLASSES[1]


def _is_kept(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)
