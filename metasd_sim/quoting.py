"""Quotes in the small languages of the command line: within "..." every sign is part of a name.

A quote within them is written twice.
"""

from __future__ import annotations

import re

from .errors import InputError

QUOTED = r'"(?:[^"]|"")*"'
_SPECIAL = re.compile(r'[",()]')


def unquote(text: str) -> str:
    """What a name in quotes is; any other text as it stands."""
    return text[1:-1].replace('""', '"') if re.fullmatch(QUOTED, text, re.DOTALL) else text


def quote(name: str) -> str:
    """The name as `unquote` reads it: in quotes where it holds a sign that a specification may hold."""
    return '"' + name.replace('"', '""') + '"' if _SPECIAL.search(name) else name


def split_parts(text: str, what: str = "list") -> list[str]:
    """At the commas outside quotes and parentheses; the parts keep their quotes. Errors say `what` it is."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        if not quoted:
            depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    if depth or quoted:
        raise InputError(
            f"{what}: expected parentheses and quotes in pairs, found {text!r}; put a name with such signs in quotes, "
            f'for instance ngram:"a(1.safetensors"'
        )
    return parts
