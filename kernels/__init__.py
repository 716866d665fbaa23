"""What runs on the device. Knows tensors and nothing else."""

if __name__ == "kernels":
    # The repository root precedes site-packages on sys.path, and a library probing for Hugging Face's
    # "kernels" reached this folder. Hand over to the real one; without it, be an empty module.
    import importlib.machinery as _machinery
    import importlib.util as _util
    import os as _os
    import sys as _sys

    _root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
    _spec = _machinery.PathFinder.find_spec(__name__, [p for p in _sys.path if _os.path.abspath(p or ".") != _root])
    __version__ = "0"
    if _spec is not None and _spec.loader is not None:
        _sys.modules[__name__] = _module = _util.module_from_spec(_spec)
        _spec.loader.exec_module(_module)
else:
    from cachedit.kernels.attention import cached_attention
    from cachedit.kernels.capture import Statistics, capture
    from cachedit.kernels.forecast import forecast
    from cachedit.kernels.kv_cache import KVCache
    from cachedit.kernels.low_pass import low_pass
    from cachedit.kernels.rope_scatter_kv import rope_scatter_kv
    from cachedit.kernels.subset_attention import subset_attention

    __all__ = [
        "KVCache",
        "Statistics",
        "cached_attention",
        "capture",
        "forecast",
        "low_pass",
        "rope_scatter_kv",
        "subset_attention",
    ]
