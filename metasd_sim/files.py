"""Files that are written whole or not at all, and never over another one unasked."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import InputError


def check_free(path: str | os.PathLike[str], force: bool = False) -> None:
    """Refuses, before the work, what `write_atomically` would refuse after it."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: expected the name of a file, found a folder; choose another name")
    if path.exists() and not force:
        raise InputError(f"{path}: expected no such file, found one; choose another name or pass --force")
    if not path.parent.is_dir():
        raise InputError(f"{path}: expected the folder {path.parent} to exist, found none; create it first")


def check_outputs(*paths: str | None, force: bool = False) -> None:
    """The same for all outputs of a command, each a place of its own; `-` is stdout, None no output."""
    given = [path for path in paths if path is not None]
    places = [path if path == "-" else os.path.realpath(path) for path in given]
    for number, path in enumerate(given):
        if places[number] in places[:number]:
            raise InputError(f"{path}: expected different places for different outputs, found it twice; choose another")
        if path != "-":
            check_free(path, force)


def check_folder_free(path: str | os.PathLike[str], force: bool = False) -> None:
    """The same for a folder, which `force` replaces."""
    path = Path(path)
    if path.exists() and not (force and path.is_dir()):
        raise InputError(f"{path}: expected no such folder, found one; choose another name or pass --force")
    if not path.parent.is_dir():
        raise InputError(f"{path}: expected the folder {path.parent} to exist, found none; create it first")


def write_atomically(path: str | os.PathLike[str], content: bytes, force: bool = False) -> None:
    """Writes all of `content` or nothing; refuses to overwrite unless `force`."""
    check_free(path, force)
    path = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            os.unlink(temporary)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise InputError(f"{path}: expected to write this file, found {reason}; choose another place") from error
        raise
