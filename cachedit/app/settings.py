"""What the app was started with, and what it therefore allows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """How the app is served.

    Attributes:
        model: a folder or a hub id; "" is the sample.
        folder: everything that the app writes lies in it.
        host: address that it listens at.
        share: True if Gradio's public link is asked for.
        kept: most pipelines that are kept in memory.
        device, dtype: for ``evaluate.loading.load_pipeline``.
        trust_remote_code: True if code that lies beside the weights of a hub model may run.
    """

    model: str = ""
    folder: Path = Path("cachedit-app")
    host: str = "127.0.0.1"
    share: bool = False
    kept: int = 2
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False

    @property
    def public(self) -> bool:
        """True if others than whoever started it may reach it."""
        return self.share or self.host not in LOOPBACK

    def allowed_model(self, model: str) -> str:
        """The model that a visitor asks for.

        Raises:
            ValueError: it is not the one that was started with, and the app is public.
        """
        asked = model.strip()
        if self.public and asked != self.model:
            raise ValueError(
                f"model {asked or 'of the sample'} is not served here. Allowed: "
                f"{self.model or 'the sample'}, as this app is open to others. For another one, start your own: "
                "cachedit app --model MODEL"
            )
        return asked

    def allowed_profile(self, profile: str) -> str | None:
        """The profile that a visitor asks for; None for the one that is found for the model.

        Raises:
            ValueError: it is a file outside of the app's folder, and the app is public.
        """
        asked = profile.strip()
        is_name = re.fullmatch(r"\w[\w.-]*", asked) is not None and not Path(asked).exists()
        if self.public and asked and not is_name and not self._inside(asked):
            raise ValueError(
                f"profile {asked} is not open to visitors. Allowed: the name of a profile, or one that you calibrated "
                "here, as this app is open to others."
            )
        return asked or None

    def _inside(self, path: str) -> bool:
        return Path(path).resolve().is_relative_to(self.folder.resolve())
