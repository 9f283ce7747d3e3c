"""The `duramen` command: global options, the list of commands, and the one place where errors become words and numbers.

Exit codes: 0 done, 1 failed, 2 bad usage, 3 found damage. Nothing here imports the engine; commands do when they run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, NoReturn

import typer

from duramen.commands import topics, transactions
from duramen.commands.backup import backup
from duramen.commands.compact import compact, explain, pause, plan, prove_erased, resume
from duramen.commands.config import config
from duramen.commands.consume import consume
from duramen.commands.dump import dump
from duramen.commands.maintain import delete_records, recover, retain, verify
from duramen.commands.offsets import describe, offsets
from duramen.commands.produce import get, produce
from duramen.commands.restore import restore
from duramen.commands.schedule import schedule
from duramen.commands.set_aside import set_aside
from duramen.commands.transfer import export, import_
from duramen.session import BAD_USAGE, DAMAGE, DONE, FAILED, INTERRUPTED, Output, session
from duramen.terminal import json_text, printable, safe_streams

# Typer brings its own click, so its base class for bad command lines is reached through the public one.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="duramen",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A Kafka-format, broker-less, compacted log: topics, records, inspection and repair.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad usage, 3 found damage.",
)


@app.callback()
def options(
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="DIR", envvar="DURAMEN_STORE", help="The store's directory.", show_default=False
        ),
    ] = None,
    output: Annotated[Output, typer.Option("--output", help="Text for people, JSON for programs.")] = Output.TEXT,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    session.store_path = store
    session.output = output
    session.debug = debug


app.add_typer(topics.app, name="topics")
app.add_typer(transactions.app, name="transactions")
app.command()(produce)
app.command()(get)
app.command()(consume)
app.command()(offsets)
app.command()(describe)
app.command()(explain)
app.command()(plan)
app.command()(compact)
app.command()(pause)
app.command()(resume)
app.command()(schedule)
app.command("prove-erased")(prove_erased)
app.command()(dump)
app.command()(verify)
app.command()(recover)
app.command("set-aside")(set_aside)
app.command()(retain)
app.command("delete-records")(delete_records)
app.command("import")(import_)
app.command()(export)
app.command()(restore)
app.command()(backup)
app.command()(config)


def main() -> NoReturn:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of a command line; everything it says has been written, without a control character of the data."""
    with safe_streams():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    # The choice of output must hold for errors in the command line itself, before it is parsed.
    session.output = Output.JSON if _asks_for_json(arguments) else Output.TEXT
    session.debug = "--debug" in arguments
    try:
        code = app(arguments, standalone_mode=False, prog_name="duramen")
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as error:
        # The command library turns a broken pipe into an exit of its own.
        return _reader_left() if isinstance(error.__context__, BrokenPipeError) else FAILED
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted", kind="Interrupted")
        return INTERRUPTED
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help itself
            sys.stderr.write(f"{error}\n")
        else:
            _say(_usage(error), kind="BadUsage", hint="`duramen COMMAND --help` shows the way.")
        return BAD_USAGE
    except Exception as error:
        if session.debug:
            import traceback

            traceback.print_exc()
        return _failed(error)


def _usage(error: Exception) -> str:
    """What was wrong, with the option's name where the parser knows it."""
    if isinstance(error, typer.BadParameter) and not error.param:
        return str(error.message)
    return str(getattr(error, "format_message", error.__str__)())


def _asks_for_json(arguments: list[str]) -> bool:
    for at, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return False
        if argument == "--output=json" or (argument == "--output" and arguments[at + 1 : at + 2] == ["json"]):
            return True
    return False


def _failed(error: Exception) -> int:
    from logstore import errors

    if isinstance(error, errors.DuramenError):
        _say(error.what, kind=type(error).__name__, where=error.where(), hint=error.hint)
        if isinstance(error, (errors.UnknownConfig, errors.InvalidConfig, errors.InvalidTopic)):
            return BAD_USAGE
        return DAMAGE if isinstance(error, _damage_errors()) else FAILED
    if isinstance(error, OSError):
        where: dict[str, object] = {"file": error.filename} if error.filename is not None else {}
        _say(error.strerror or str(error), kind=type(error).__name__, where=where)
        return FAILED
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        _say("not enough memory", kind="NotEnoughMemory", hint="Give the process more (`ulimit -v`, its container).")
        return FAILED
    hint = None if session.debug else "Run again with --debug to see where."
    _say(f"unexpected {type(error).__name__}: {error}", kind=type(error).__name__, hint=hint)
    return FAILED


def _damage_errors() -> tuple[type[Exception], ...]:
    """Conditions that mean bytes on disk are not what was written."""
    from logstore import errors

    return (
        errors.CorruptBatch,
        errors.CorruptIndex,
        errors.CorruptSnapshot,
        errors.CorruptCheckpoint,
        errors.CorruptState,
        errors.DamagedLog,
        errors.LedgerError,
        errors.DecompressionLimit,
    )


def _say(what: str, *, kind: str, where: dict[str, object] | None = None, hint: str | None = None) -> None:
    """An error on stderr, in the form the user asked for."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        if session.json:
            document = {"error": {"kind": kind, "what": what, "where": where or {}, "hint": hint}}
            sys.stderr.write(json_text(document) + "\n")
        else:
            text = what.rstrip(".")
            if where:
                text += " (" + ", ".join(f"{name} {value}" for name, value in where.items()) + ")"
            sys.stderr.write(printable(f"error: {text}." + (f" {hint}" if hint else "")) + "\n")
        sys.stderr.flush()


def _reader_left() -> int:
    """Whoever read our output has had enough; that is no failure."""
    # Python flushes stdout once more at exit; let that go nowhere instead of failing.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)
        os.close(nowhere)
    return DONE
