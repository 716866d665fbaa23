"""Every strategy, one file each. Calling the package gives the registry: ``cachedit.strategies()``."""

if __name__ == "strategies":
    raise ImportError("import this package as cachedit.strategies; the bare name is not a module of its own")

import importlib
import pkgutil
import sys
from types import ModuleType

from cachedit.strategy import Strategy

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


class _Registry(ModuleType):
    """A package that can be called, because the function and the sub-package share the name ``strategies``."""

    def __call__(self) -> dict[str, type[Strategy]]:
        """Name -> class of every strategy, sorted by name."""
        return dict(sorted(Strategy.registry.items()))


sys.modules[__name__].__class__ = _Registry
