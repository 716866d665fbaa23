"""cachedit: feature caching for diffusion transformers, attached by one line and taken off by one line.

>>> pipe = cachedit.wrap(pipe, "magcache")
>>> print(cachedit.last_run(pipe))
>>> cachedit.unwrap(pipe)
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

# In a source checkout strategies/, kernels/, calibration/ and samples/ lie beside this folder, else inside it.
_root = _Path(__file__).resolve().parent.parent
if not _Path(__file__).with_name("strategies").is_dir() and (_root / "strategies" / "__init__.py").is_file():
    __path__.append(str(_root))

from cachedit.errors import ProfileError, UnsupportedModelError
from cachedit.profile import Profile
from cachedit.run import Run, Step
from cachedit.strategy import Context, FeatureStrategy, Schedule, Strategy
from cachedit.wrap import cached, last_run, unwrap, wrap

if TYPE_CHECKING:
    from cachedit import strategies as strategies
    from cachedit import text as text
    from cachedit.text import generate as generate

__version__ = "0.1.0"
__all__ = [
    "Context",
    "FeatureStrategy",
    "Profile",
    "ProfileError",
    "Run",
    "Schedule",
    "Step",
    "Strategy",
    "UnsupportedModelError",
    "cached",
    "generate",
    "last_run",
    "strategies",
    "text",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> object:
    """Sub-packages and strategy classes (``cachedit.MagCache``) load on first use."""
    import importlib

    if name in ("calibration", "conditions", "kernels", "samples", "strategies", "text", "video"):
        return importlib.import_module(f"cachedit.{name}")
    if name == "generate":
        return importlib.import_module("cachedit.text").generate
    package: Any = importlib.import_module("cachedit.strategies")
    for cls in package().values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module 'cachedit' has no attribute {name!r}")
