"""Desks of the app that serve a pipeline of our own, whatever model is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachedit.app.desk import Desk
from cachedit.app.settings import Settings


def serving(build: Callable[[], Any], folder: Path, loaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk whose shelf gets what ``build`` makes; each is entered into ``loaded``."""

    def load(*_: Any, **__: Any) -> Any:
        loaded.append(build())
        return loaded[-1]

    monkeypatch.setattr("cachedit.evaluate.loading.load_pipeline", load)
    return Desk(Settings(folder=folder))
