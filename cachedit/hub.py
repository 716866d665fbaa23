"""Profiles that lie in a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from cachedit.errors import ProfileError

PREFIX = "hub:"
DEFAULT_FILE = "profile.json"


def download(reference: str) -> Path:
    """The file of a profile on the hub, from the hub's cache on this machine or from the network.

    Args:
        reference: ``hub:org/name``, ``hub:org/name/folder/file.json``, either with ``@revision`` at its end; the file
            is ``profile.json`` where it is not named.

    Raises:
        ProfileError: the reference is not of that form, or the file cannot be had, with the reason.
    """
    repository, file, revision = _parts(reference)
    from huggingface_hub import constants, hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except Exception as error:  # its own errors, those of its HTTP client (which changed), and of the file system
        offline = " while HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        reason = " ".join(str(error).split())[:240]
        raise ProfileError(
            f"cannot get profile {reference}: tried {file} of {constants.ENDPOINT}/{repository} at "
            f"{revision or 'its main revision'}{offline}: {type(error).__name__}: {reason} It would be kept in "
            f"{constants.HF_HUB_CACHE}. Without a network, get that file elsewhere and pass profile='FILE'."
        ) from error


def _parts(reference: str) -> tuple[str, str, str | None]:
    place, at, revision = reference.removeprefix(PREFIX).partition("@")
    parts = place.split("/")
    if len(parts) < 2 or not all(parts) or (at and not revision):
        raise ProfileError(
            f"got profile {reference}; allowed: hub:org/name, hub:org/name/file.json, and @revision after either."
        )
    return "/".join(parts[:2]), "/".join(parts[2:]) or DEFAULT_FILE, revision or None
