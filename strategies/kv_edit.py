"""KVEdit: edit one part of an image while the rest is attended to from a bank, and does not change at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cachedit.conditions.edit import Edit, EditSession
from cachedit.conditions.strategy import ConditionStrategy
from cachedit.kernels.eight_bits import FORMATS

from .checks import check_choice, check_count, check_number


@dataclass(frozen=True)
class KVEdit(ConditionStrategy):
    """Compute the masked part of an image over kept keys and values of the rest (KV-Edit, arXiv 2502.17363).

    For FluxPipeline and QwenImagePipeline, whose calls then also take ``image``, ``mask_image`` and ``source_prompt``.
    The background's latents stay bit for bit what they are.

    mode:            "inversion_free" noises the image anew at every step and keeps one step's keys and values;
                     "inversion" finds the noise that leads to the image, and keeps those of all steps on the host.
    skip:            leading steps, of the most noise, that are left out; more keep more of the original.
    source_guidance: embedded guidance for the image's own prompt (paper: 1.5); None: that of the call.
    bias:            added to the attention scores of background tokens (the released code: 1; 0 adds nothing, and
                     then an edit to the image's own prompt and guidance gives the image).
    restart:         with "inversion", the foreground begins from noise and not from what was found.
    dtype:           None keeps keys and values as they are, "int8" and "fp8" in eight bits.
    """

    mode: Literal["inversion_free", "inversion"] = "inversion_free"
    skip: int = 4
    source_guidance: float | None = 1.5
    bias: float = 0.0
    restart: bool = False
    dtype: Literal["int8", "fp8"] | None = None

    paper: ClassVar[str] = "arXiv 2502.17363"

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a value out of range.
        """
        check_choice(self, "mode", ("inversion_free", "inversion"))
        check_choice(self, "dtype", (None, "int8", "fp8"))
        check_count(self, "skip")
        if self.source_guidance is not None:
            check_number(self, "source_guidance")
        if self.restart and self.mode != "inversion":
            raise ValueError('KVEdit restart=True; allowed: with mode="inversion", as the other never inverts')

    def session(self, pipe: Any) -> EditSession:
        """A session that runs the pipeline on an image."""
        edit = Edit(self.mode, self.skip, self.source_guidance, self.bias, self.restart, FORMATS[self.dtype])
        return EditSession(repr(self), pipe, edit)
