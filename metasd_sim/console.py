"""What the command lines share: errors in one line, JSON for machines, tables and progress for people."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .errors import InputError
from .files import write_atomically


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
    """Prints a table: the first column on the left, the others, numbers as a rule, on the right."""
    if quiet:
        return
    view = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        view.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        view.add_row(*map(str, row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(view)


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A progress display on stderr; silent where `quiet` or where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as display:
        yield display
