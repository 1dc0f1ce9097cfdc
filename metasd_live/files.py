"""Hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_hash(path: Path) -> str:
    """sha256 of the content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
