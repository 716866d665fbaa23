"""Small trained models that ship with cachedit, and the code that made them.

``image`` is a text-to-image pipeline (diffusers ``CogView4Pipeline``, 64x64 pixels) that draws one coloured shape on a
flat background::

    from diffusers import DiffusionPipeline
    from cachedit.samples import prompts, sample_path

    pipe = DiffusionPipeline.from_pretrained(sample_path("image"))
    image = pipe(prompts("image")[0], num_inference_steps=28).images[0]

``text`` is a masked diffusion language model (transformers ``EuroBertForMaskedLM``) that does sums and writes out how::

    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(sample_path("text"))
    tokenizer = AutoTokenizer.from_pretrained(sample_path("text"))
    question = tokenizer(prompts("text")[0], return_tensors="pt").input_ids
    answer = cachedit.generate(model, question, "fast-dllm", gen_length=96, block_length=16)
    print(tokenizer.decode(answer[0], skip_special_tokens=True))
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
    "text": [
        "30; a - 2; b - 5; c + 9; d + 7; e - 3; f + 3; g + 2; h - 4; i - 4; j - 7",
        "24; a - 6; b + 9; c + 2; d + 9; e + 7; f + 6; g - 1; h - 6; i + 2; j - 6",
        "44; a - 2; b - 5; c + 1; d + 6; e - 4; f + 6; g - 5; h - 5",
        "28; a + 1; b + 9; c + 8; d + 8; e - 2; f + 9; g + 2; h - 3; i - 4",
        "82; a + 7; b + 8; c - 6; d - 2; e - 7; f + 8; g + 7; h - 5; i - 3; j - 9",
        "39; a + 4; b - 8; c + 7; d + 5; e + 9; f + 6",
        "77; a - 8; b - 3; c + 8; d + 8; e + 4; f - 1; g + 6; h - 1; i - 2; j + 4",
        "78; a - 4; b - 1; c + 6; d + 9; e + 6; f - 4; g + 4",
    ],
}


def sample_path(name: str = "image") -> Path:
    """The folder of a sample model, for ``from_pretrained``.

    Args:
        name: which sample: "image" or "text".

    Raises:
        ValueError: no sample has that name.
    """
    _check(name)
    return Path(__file__).parent / name


def prompts(name: str = "image") -> list[str]:
    """Eight prompts to show a sample model with; half of them ask for what it was not trained on.

    Args:
        name: which sample: "image" or "text".

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
