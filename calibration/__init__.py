"""collect -> fit -> profile: what is measured once per model, and the profiles that come with the library."""

if __name__ == "calibration":
    raise ImportError("import this package as cachedit.calibration; the bare name is not a module of its own")

from cachedit.calibration.calibrate import calibrate

__all__ = ["calibrate"]
