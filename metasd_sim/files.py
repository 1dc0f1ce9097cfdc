"""Files: written whole or not at all, never over another one unasked, and read as their format says."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from .errors import InputError


def read_text(path: str | os.PathLike[str]) -> str:
    """The characters of a UTF-8 file, every one of them but the byte-order mark that some editors put first."""
    return Path(path).read_bytes().decode("utf-8-sig")


def split_lines(text: str) -> list[str]:
    """Lines end with `\\n`, or `\\r\\n` as some editors write it; whatever else looks like an end is part of one."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def read_json(text: str) -> Any:
    """A JSON value; everything that is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def lone_surrogate(text: str) -> str | None:
    """The first character that is half of one, which no UTF-8 text holds and no tokenizer reads; escaped, or None."""
    return next((ascii(letter)[1:-1] for letter in text if "\ud800" <= letter <= "\udfff"), None)


def read_safetensors(path: str | os.PathLike[str], what: str) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of a file of numpy's types; `what` names in errors what the file should have been."""
    if os.path.isdir(path):
        raise InputError(f"{path}: expected {what}, found a folder; name a file in it")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            # a type that numpy lacks, bfloat16 say, raises whatever the library's version likes
            return file.metadata() or {}, {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"{path}: expected {what}, found no such file") from None
    except Exception as error:  # whatever a damaged or foreign file makes the library raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}: expected {what}, found a damaged or other file ({reason})") from None


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
