"""Small trained models that ship with cachedit, and the code that made them.

``image`` is a text-to-image pipeline (diffusers ``CogView4Pipeline``, 64x64 pixels) that draws one coloured shape on a
flat background::

    from diffusers import DiffusionPipeline
    from cachedit.samples import prompts, sample_path

    pipe = DiffusionPipeline.from_pretrained(sample_path("image"))
    image = pipe(prompts("image")[0], num_inference_steps=28).images[0]

``video`` is a causal text-to-video pipeline (diffusers ``WanPipeline``, 32x32 pixels) in which one coloured shape moves
and bounces, for as long as you like::

    import cachedit
    from cachedit.samples import call_options

    pipe = DiffusionPipeline.from_pretrained(sample_path("video"))
    pipe = cachedit.wrap(pipe, "rolling-kv", preset="longlive", rope="sink_shift")
    frames = pipe(prompts("video")[0], **call_options("video")).frames[0]

``text`` is a masked diffusion language model (transformers ``EuroBertForMaskedLM``) that writes a text in a cipher::

    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(sample_path("text"))
    tokenizer = AutoTokenizer.from_pretrained(sample_path("text"))
    question = tokenizer(prompts("text")[0], return_tensors="pt").input_ids
    answer = cachedit.generate(model, question, "fast-dllm", **call_options("text"))
    print(tokenizer.decode(answer[0], skip_special_tokens=True))
"""

from pathlib import Path
from typing import Any

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
    "video": [
        "a red star moves to the right and bounces",
        "a blue circle moves up and bounces",
        "a green square moves to the left and bounces",
        "a yellow triangle moves down and bounces",
        "a purple star moves up and bounces",
        "a cyan circle moves to the right and bounces",
        "a red square moves down and bounces",
        "a green triangle moves to the left and bounces",
    ],
    "text": [
        "a=f; attack at dawn by the old bridge before they see",
        "a=f; a lighthouse keeper never forgets the light here",
        "a=l; we hide the gold below the third stone of stairs",
        "a=n; send more coffee to the north gate before sunset",
        "a=v; do not trust the man who wears a green scarf now",
        "a=d; the quick brown fox jumps over the lazy dog once",
        "a=d; my sister sails home when the winter storms stop",
        "a=r; she wrote the answer on the back of the postcard",
    ],
}
_CALL_OPTIONS: dict[str, dict[str, Any]] = {
    "image": {},
    "video": {"height": 32, "width": 32, "num_frames": 48},
    "text": {"gen_length": 48, "block_length": 16},
}


def sample_path(name: str = "image") -> Path:
    """The folder of a sample model, for ``from_pretrained``.

    Args:
        name: which sample: "image", "video" or "text".

    Raises:
        ValueError: no sample has that name.
    """
    _check(name)
    return Path(__file__).parent / name


def prompts(name: str = "image") -> list[str]:
    """Eight prompts to show a sample model with.

    Half of those of the image and the text model ask for what it was not trained on.

    Args:
        name: which sample: "image", "video" or "text".

    Raises:
        ValueError: no sample has that name.
    """
    _check(name)
    return list(_PROMPTS[name])


def call_options(name: str = "image") -> dict[str, Any]:
    """Arguments of the pipeline's call that a sample model needs besides a prompt, such as the size of its frames.

    Args:
        name: which sample: "image", "video" or "text".

    Raises:
        ValueError: no sample has that name.
    """
    _check(name)
    return dict(_CALL_OPTIONS[name])


def _check(name: str) -> None:
    if name not in _PROMPTS:
        known = ", ".join(sorted(_PROMPTS))
        raise ValueError(
            f"No sample model is called {name!r}. Shipped: {known}. Try sample_path({known.split(',')[0]!r})."
        )
