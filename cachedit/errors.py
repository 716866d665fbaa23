"""The errors that are cachedit's own. Wrong options raise the usual TypeError and ValueError."""


class UnsupportedModelError(ValueError):
    """The model, or the way it is called, cannot be cached; the message says why and what to do."""


class ProfileError(ValueError):
    """A profile is missing, damaged, newer than this library, or was made for another model."""
