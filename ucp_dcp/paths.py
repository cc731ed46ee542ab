"""Relative paths inside a checkpoint, as ``docs/format.md`` ("Folder") allows them.

Every path that is read from a manifest, an index or a foreign checkpoint passes through :func:`checked_path` before anything
is done with it, so no file of a checkpoint can name something outside its root.
"""

from __future__ import annotations

from .errors import FormatError

__all__ = ["checked_path"]

_MAX_LENGTH = 4096
"""Longest path in UTF-8 bytes; the limit of Linux (PATH_MAX), above that of object stores (1,024)."""


def checked_path(path: str) -> str:
    """Return ``path`` unchanged when it is a relative path that cannot leave its root.

    The separator is ``/``. Raises FormatError for anything that is not a string, is empty, absolute or too long, is not valid
    UTF-8, holds a backslash or a NUL, or has an empty, ``.`` or ``..`` segment.
    """
    if not isinstance(path, str):
        raise FormatError(f"a path is a {type(path).__name__}, expected a string")
    if not path:
        raise FormatError("a path is empty; expected a path relative to the checkpoint root")
    try:
        length = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        raise FormatError(f"path {_shown(path)} is not valid Unicode text") from None
    if length > _MAX_LENGTH:
        raise FormatError(f"path {_shown(path)} has {length} bytes; at most {_MAX_LENGTH} are allowed")
    if "\\" in path or "\0" in path:
        raise FormatError(f"path {_shown(path)} holds a backslash or a NUL; paths use '/' only")
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise FormatError(
                f"path {_shown(path)} has the segment {segment!r}; expected a path relative to the checkpoint root without "
                "empty, '.' or '..' segments"
            )
    return path


def _shown(path: str) -> str:
    """The path for a message: escaped, and cut when it is long."""
    return ascii(path if len(path) <= 200 else path[:200] + "...")
