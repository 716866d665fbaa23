"""What is taken from inner modules of other libraries, which may move or rename it at any release."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

TESTED = {"diffusers": "0.39 to 0.42", "transformers": "5.3 to 5.24"}
"""Library -> the releases at whose ends the tests are run (``.ci/ends``)."""


@functools.cache
def borrowed(module: str, name: str) -> Any:
    """An object of an inner module.

    Raises:
        ImportError: this release of the library does not have it there; tells which ones do.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        library = module.partition(".")[0]
        raise ImportError(
            f"cachedit needs {module}.{name}, and {library} {importlib.metadata.version(library)} has no such thing. "
            f"Allowed: {library} {TESTED[library]}, with which cachedit is tested. Install one of these, or a newer "
            "cachedit."
        ) from error
