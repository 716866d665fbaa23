"""Every transformer of the installed diffusers is accepted when it is wrapped, or refused with a reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import diffusers.models.transformers as transformers
import pytest
import torch
from diffusers import ModelMixin

import cachedit
from cachedit.feature.arguments import find_time
from cachedit.feature.blocks import Tap


def classes() -> dict[str, type[ModelMixin]]:
    """All model classes of diffusers' transformer files."""
    found = {}
    for entry in pkgutil.iter_modules(transformers.__path__):
        module = importlib.import_module(f"{transformers.__name__}.{entry.name}")
        for name, cls in vars(module).items():
            if inspect.isclass(cls) and issubclass(cls, ModelMixin) and cls.__module__ == module.__name__:
                found[name] = cls
    return found


CLASSES = classes()


def built(name: str) -> ModelMixin | None:
    """The model with its default configuration and no weights; None where the defaults do not make a model."""
    try:
        with torch.device("meta"):
            return CLASSES[name]()
    except (TypeError, ValueError):
        return None


def refusal(model: ModelMixin) -> str | None:
    """Why the model is refused; None if it is accepted."""
    try:
        assert all(part.streams for part in Tap(model).places[0].parts)
        find_time(model, None)
    except cachedit.UnsupportedModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_denoiser_is_accepted_or_refused_with_a_reason(name: str) -> None:
    model = built(name)
    if model is None:
        pytest.skip("its default configuration does not make a model")
    reason = refusal(model)
    assert reason is None or (name in reason and len(reason) > 60)


def test_most_denoisers_are_accepted() -> None:
    models = [model for model in map(built, CLASSES) if model is not None]
    assert sum(refusal(model) is None for model in models) >= 60
