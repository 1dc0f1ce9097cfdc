"""What the command lines share: errors in one line, JSON for machines, tables and progress for people."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .errors import InputError
from .files import write_atomically

WIDTH = 100  # columns of a table where no terminal says otherwise
LONGEST_NAME = 40
GAP = 2  # between columns


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        option = re.fullmatch(r"argument (--\S+): expected one argument", message)
        remedy = f"write {option[1]}=VALUE if the value starts with -, and " if option else ""
        raise InputError(f"{message}; {remedy}see {self.prog} --help")


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser whose errors are InputErrors: one line, without the usage text."""
    return _Parser(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_command(
    commands: Any, name: str, help_text: str, example: str, run: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:
    """A subcommand with an example in its help and the options that all share."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_text,
        description=help_text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    add_common(command)
    return command


def add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seed", type=int, default=0, help="seed of all randomness (default: %(default)s)")
    command.add_argument("--json", metavar="PATH", help="write the results as JSON; - is stdout, without tables")
    command.add_argument("--quiet", action="store_true", help="no tables and no progress")
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.add_argument("--force", action="store_true", help="overwrite existing files")


def run(build_parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    """Parses and runs; bad input and failed files become one line on stderr and exit code 2."""
    with _any_terminal():
        return _run(build_parser, argv)


def _run(build_parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    command = build_parser()
    try:
        arguments = command.parse_args(argv)
        if getattr(arguments, "json", None) == "-":
            arguments.quiet = True
        arguments.run(arguments)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except (InputError, OSError) as error:
        if "--debug" in (sys.argv[1:] if argv is None else argv):
            raise
        print(f"{command.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def _readable(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that a terminal cannot show: the like of them, or their number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


_ASCII = {"\u00b1": "+-", "\u2026": "..."}
codecs.register_error("metasd-readable", _readable)


@contextmanager
def _any_terminal() -> Iterator[None]:
    """Whatever stdout and stderr cannot encode is printed all the same: no work is lost to printing."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="metasd-readable")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            if not stream.closed:
                stream.reconfigure(errors=errors)


def write_json(value: Any, path: str | None, force: bool = False) -> None:
    """`value` as JSON to a file (atomically), to stdout for `-`, nowhere for None."""
    if path is None:
        return
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        write_atomically(path, text.encode(), force)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], quiet: bool = False) -> None:
    """Prints a table: the first column on the left, the others, numbers as a rule, on the right.

    It is never wider than the terminal, or `WIDTH` where there is none: headers are broken at spaces, long names
    anywhere, and columns that still find no room come in a further block under the same names.
    """
    if quiet:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)

    def shown(value: object) -> str:
        """As this terminal can print it, so that the columns stay straight; names are no markup."""
        return str(value).encode(console.encoding, "metasd-readable").decode(console.encoding)

    cells = [[shown(value) for value in column] for column in zip(columns, *rows, strict=True)]
    console.print(Text(shown(title), style="italic"))
    for block in _blocks(cells, console.width):
        view = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
        for number, (column, width) in enumerate(block):
            justify: JustifyMethod = "right" if number else "left"
            view.add_column(Text(column[0]), justify=justify, width=width, overflow="fold")
        for row in zip(*(column[1:] for column, _ in block), strict=True):
            view.add_row(*map(Text, row))
        console.print(view)
        console.print()


def _blocks(cells: Sequence[list[str]], room: int) -> Iterator[list[tuple[list[str], int]]]:
    """The columns, header first, with their widths, as many in a block as there is `room` for."""
    # a header may be broken into its words; names may be broken anywhere, numbers nowhere
    least = [max([*map(cell_len, column[1:]), *map(cell_len, column[0].split())]) for column in cells]
    least[0] = min(least[0], LONGEST_NAME)
    blocks = [[0]]
    for number in range(1, len(cells)):
        used = sum(least[one] + GAP for one in blocks[-1])
        if used + least[number] > room and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(number)
    for block in blocks:
        free = room - sum(least[one] for one in block) - GAP * (len(block) - 1)
        shown = []
        for one in block:  # what is left over lets headers stand on one line
            more = max(map(cell_len, cells[one])) - least[one]
            width = least[one] + (more if more <= free else 0)
            free -= width - least[one]
            shown.append((cells[one], width))
        if free < 0:  # two columns too wide for any terminal
            shown[-1] = (shown[-1][0], max(shown[-1][1] + free, 1))
        yield shown


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A progress display on stderr; silent where `quiet` or where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as display:
        yield display
