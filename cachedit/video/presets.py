"""How published causal video models are rolled out: numbers only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

TABLE = 1000  # noise levels in the table that the published samplers look theirs up in


def shifted(level: float, shift: float) -> float:
    """A noise level in [0, 1] after the timestep shift of flow matching."""
    return shift * level / (1 + (shift - 1) * level)


def warped(steps: tuple[int, ...], shift: float) -> tuple[float, ...]:
    """Noise levels of nominal steps out of 1000 that are shifted (``warp_denoising_step``)."""
    return tuple(shifted(step / TABLE, shift) for step in steps)


def looked_up(steps: tuple[int, ...], shift: float) -> tuple[float, ...]:
    """Noise levels of timesteps that are used as they are: the nearest of the shifted table."""
    table = [shifted(1 - index / TABLE, shift) for index in range(TABLE)]
    return tuple(min(table, key=lambda level: abs(TABLE * level - step)) for step in steps)


@dataclass(frozen=True)
class Preset:
    """One family of causal models.

    Attributes:
        name: what ``preset=`` takes.
        paper: where it is described.
        chunk: latent frames that are denoised together.
        sigmas: noise levels of the steps, from 1 down.
        timesteps: what the model is told of each.
        window: latent frames that a chunk attends to, itself and the sink included.
        sink: leading latent frames that stay.
        rope: how positions are kept (``RollingKVCache``).
        context: "commit" rolls the ring; "recompute" fills it anew from the last clean latents before every chunk;
            "restart" does so once it is full; "wave" denoises several chunks at once, each a step behind the one before
            it.
        overlap: clean latents that a ring is filled with anew.
        context_sigma: noise level of what is committed.
        quant: how committed frames are kept: None, "int8" or "fp8".
        recalled: frames that left the window and are attended to again (``History``).
        remembered: frames that are kept for that.
    """

    name: str
    paper: str
    chunk: int
    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    window: int
    sink: int = 0
    rope: str = "absolute"
    context: Literal["commit", "recompute", "restart", "wave"] = "commit"
    overlap: int = 0
    context_sigma: float = 0.0
    quant: str | None = None
    recalled: int = 0
    remembered: int = 0

    @property
    def open_frames(self) -> int:
        """Latent frames that are being denoised at once."""
        return self.chunk * len(self.sigmas) if self.context == "wave" else self.chunk

    def changed(self, **options: Any) -> Preset:
        """This preset with the options that are not None; with other noise levels, the timesteps follow them."""
        given = {name: value for name, value in options.items() if value is not None}
        if "sigmas" in given:
            given["timesteps"] = tuple(TABLE * sigma for sigma in given["sigmas"])
        return replace(self, **given)


_FEW = warped((1000, 750, 500, 250), shift=5)
_ROLLING = warped((1000, 800, 600, 400, 200), shift=5)
_CAUSVID = (1000, 757, 522)
_KREA = (1000, 937, 833, 625)


def _times(sigmas: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(TABLE * sigma for sigma in sigmas)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("self-forcing", "arXiv 2506.08009", 3, _FEW, _times(_FEW), window=21),
        Preset(
            "causvid", "arXiv 2412.07772", 3, looked_up(_CAUSVID, 8), _CAUSVID, window=21, context="restart", overlap=3
        ),
        Preset("longlive", "arXiv 2509.22622", 3, _FEW, _times(_FEW), window=12, sink=3),
        Preset("krea", "krea-realtime-video", 3, looked_up(_KREA, 5), _KREA, window=6, context="recompute", overlap=3),
        Preset(
            "rolling-forcing", "arXiv 2509.25161", 3, _ROLLING, _times(_ROLLING), window=21, sink=3, rope="sink_shift",
            context="wave",
        ),
    )
}  # fmt: skip


def preset(name: str) -> Preset:
    """The preset of that name, in any spelling up to case, ``-`` and ``_``.

    Raises:
        ValueError: there is none.
    """
    spelled = name.lower().replace("_", "-") if isinstance(name, str) else name
    if spelled not in PRESETS:
        raise ValueError(
            f"got preset={name!r}; allowed: {', '.join(PRESETS)}, each of which chunk=, sigmas= and so on change"
        )
    return PRESETS[spelled]


def check_preset(chosen: Preset) -> None:
    """Refuse numbers that cannot be rolled out.

    Raises:
        ValueError: with what was given and what is allowed.
    """
    if type(chosen.chunk) is not int or chosen.chunk < 1:
        raise ValueError(f"got chunk={chosen.chunk!r}; allowed: 1 latent frame or more")
    levels = chosen.sigmas
    falling = all(before > after for before, after in zip(levels, levels[1:], strict=False))
    if not levels or not falling or levels[0] > 1 or levels[-1] <= 0:
        raise ValueError(
            f"got sigmas={levels!r}; allowed: falling noise levels from at most 1 to above 0, such as {_FEW}. The last "
            "step goes to 0 by itself."
        )
    if not 0 <= chosen.context_sigma < 1:
        raise ValueError(f"got context_sigma={chosen.context_sigma!r}; allowed: a noise level from 0 to below 1")
    if chosen.recalled and chosen.context != "commit":
        raise ValueError(
            f"got recalled={chosen.recalled} with preset {chosen.name!r}, whose ring is not rolled chunk by chunk; "
            "allowed: presets such as 'self-forcing' and 'longlive'"
        )
    need = chosen.open_frames + (chosen.overlap if chosen.context in ("recompute", "restart") else 0)
    if chosen.window - chosen.sink < chosen.open_frames or chosen.window < need:
        raise ValueError(
            f"got a window of {chosen.window} latent frames with a sink of {chosen.sink}, while {chosen.open_frames} "
            f"are denoised at once behind {need - chosen.open_frames} that are filled in; allowed: window - sink of "
            f"{chosen.open_frames} or more, and a window of {need} or more. Take a larger window or a smaller chunk."
        )
