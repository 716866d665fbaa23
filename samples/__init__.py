"""Small trained models that ship with cachedit, and the code that made them.

``image`` is a text-to-image pipeline (diffusers ``CogView4Pipeline``, 64x64 pixels) that draws one coloured shape on a
flat background::

    from diffusers import DiffusionPipeline
    from cachedit.samples import prompts, sample_path

    pipe = DiffusionPipeline.from_pretrained(sample_path("image"))
    image = pipe(prompts("image")[0], num_inference_steps=28).images[0]
"""

from pathlib import Path

_PROMPTS = {
    "image": [
        "a large red star on a dark blue background at the top left",
        "a large blue square on a white background in the centre",
        "a small green triangle on a white background at the bottom right",
        "a large purple circle on a light yellow background at the bottom left",
        "a small yellow moon on a black background in the centre",
        "a large orange cross on a white background at the top left",
        "a small red heart on a dark green background at the bottom left",
        "a small cyan ring on a black background at the top right",
    ],
}


def sample_path(name: str = "image") -> Path:
    """The folder of a sample model, for ``from_pretrained``.

    Args:
        name: which sample; "image" is the only one.

    Raises:
        ValueError: no sample has that name.
    """
    _check(name)
    return Path(__file__).parent / name


def prompts(name: str = "image") -> list[str]:
    """Eight prompts to show a sample model with; half of them ask for combinations it was not trained on.

    Args:
        name: which sample; "image" is the only one.

    Raises:
        ValueError: no sample has that name.
    """
    _check(name)
    return list(_PROMPTS[name])


def _check(name: str) -> None:
    if name not in _PROMPTS:
        known = ", ".join(sorted(_PROMPTS))
        raise ValueError(
            f"No sample model is called {name!r}. Shipped: {known}. Try sample_path({known.split(',')[0]!r})."
        )
