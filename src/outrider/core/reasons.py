"""Why a file could not be used, in words for a message that names it already."""

from __future__ import annotations


def why(error: OSError | UnicodeError) -> str:
    """Why a file cannot be read or written, without its name and the number of the error."""
    if isinstance(error, UnicodeError):
        return "it is no text in UTF-8"
    said = error.strerror or type(error).__name__
    return said[:1].lower() + said[1:]
