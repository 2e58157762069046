"""The program `tidegate` with its commands, and the one place where an error becomes a
sentence and an exit code.

Exit codes: 0 success, 1 the work was done but something in it failed, 2 it could not be done as
asked, 130 interrupted.
"""

import io
import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated

import typer

import tidegate
from tidegate.cli.command_table import LazyCommands
from tidegate.core.errors import StoreTaken, TidegateError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

UNUSABLE = 2
STDERR = 2
DEBUG = "--debug"

app = typer.Typer(
    name="tidegate",
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidegate {tidegate.__version__}")
        raise typer.Exit


@app.callback()
def tidegate_command(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show where an error came from. It may also stand behind a command.")
    ] = False,
) -> None:
    """Batch inference through the idle capacity of model servers.

    \b
    Start here:
    tidegate run requests.jsonl --upstream http://localhost:8000/v1 -o out.jsonl
    """


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that was closed at the start (`2>&-`).

    Otherwise the next file or socket would get the free number: messages would be written into it,
    and the event loop would abort."""
    number = os.open(os.devnull, os.O_RDWR)
    while number <= STDERR:
        os.set_inheritable(number, True)
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    # Python has no object for a stream that was closed at the start.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", closefd=False)


class _Words(io.FileIO):
    """Stderr that drops what it cannot write: a full disk or a closed pipe must not
    stop the work."""

    def write(self, words: "ReadableBuffer", /) -> int:
        try:
            return super().write(words)
        except OSError:
            return memoryview(words).nbytes


def _let_words_be_lost() -> None:
    is_of_this_process = sys.stderr is sys.__stderr__
    if is_of_this_process:
        words = io.BufferedWriter(_Words(STDERR, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(words, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)


def _not_text() -> str:
    """Return the first argument, or the working directory, that is not valid UTF-8;
    empty if all are."""
    from tidegate.cli.terminal import terminal

    odd = [shown for name in (*sys.argv[1:], os.getcwd()) if (shown := terminal.as_text(name)) != name]
    return odd[0] if odd else ""


def main() -> None:
    """Run the console script."""
    _open_standard_streams()
    _let_words_be_lost()
    # Removed here, so that it may stand anywhere and no command has to declare it.
    debug = DEBUG in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]
    try:
        try:
            app(arguments, prog_name="tidegate")
        except StoreTaken:
            from tidegate.cli.terminal import server_client

            # A server took the store after this command had looked for one: nothing is done yet, so
            # ask the server now.
            if server_client.looks[-1:] != [None]:
                raise
            app(arguments, prog_name="tidegate")
    except TidegateError as error:
        if debug:
            traceback.print_exc()
        from tidegate.cli.terminal import terminal

        terminal.fail(str(error) or type(error).__name__)
        sys.exit(UNUSABLE)
    except UnicodeEncodeError:
        odd = _not_text()
        if debug or not odd:
            raise
        from tidegate.cli.terminal import terminal

        terminal.fail(f"{odd} is not UTF-8, so it cannot be used here: choose another name.")
        sys.exit(UNUSABLE)
    except OSError as error:
        if debug:
            traceback.print_exc()
        from tidegate.cli.terminal import terminal

        place = f"{error.filename}: " if error.filename else ""
        terminal.fail(
            f"{place}{error.strerror or error}. Check that the path is right and writable; --debug shows more."
        )
        sys.exit(UNUSABLE)
