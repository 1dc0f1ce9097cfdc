"""Files and folders: their hashes, and what is a folder and what a model of a hub."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_hash(path: Path) -> str:
    """sha256 of the content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def revision_of(spec: str) -> tuple[str, str | None]:
    """The folder `spec`, or else a hub's model and its revision: `org/name@revision`."""
    name, at, revision = spec.rpartition("@")
    return (spec, None) if Path(spec).exists() or not (at and name and revision) else (name, revision)
