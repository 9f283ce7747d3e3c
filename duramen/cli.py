"""The `duramen` command: global options, the list of commands, and the one place where errors become words and numbers.

Exit codes: 0 done, 1 failed, 2 bad usage, 3 found damage. Nothing here imports the engine; commands do when they run.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Annotated, NoReturn

import typer

from duramen import __version__
from duramen.commands import runs, topics, transactions
from duramen.commands.backup import backup
from duramen.commands.compact import compact, pause, resume
from duramen.commands.config import config
from duramen.commands.console import console
from duramen.commands.consume import consume, get
from duramen.commands.copy import copy
from duramen.commands.cost import cost
from duramen.commands.dump import dump
from duramen.commands.maintain import maintain
from duramen.commands.offsets import describe, offsets
from duramen.commands.plan import explain, plan
from duramen.commands.produce import produce
from duramen.commands.prove_erased import prove_erased
from duramen.commands.recover import recover
from duramen.commands.report import report
from duramen.commands.restore import restore
from duramen.commands.retain import delete_records, retain
from duramen.commands.schedule import schedule
from duramen.commands.set_aside import set_aside
from duramen.commands.top import top
from duramen.commands.transfer import export, import_
from duramen.commands.verify import verify
from duramen.session import BAD_USAGE, DAMAGE, DONE, FAILED, INTERRUPTED, BadUsage, Output, session
from duramen.terminal import json_text, printable, safe_streams

# Typer brings its own click, so its base class for bad command lines is reached through the public one.
BadCommandLine: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="duramen",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A Kafka-format, broker-less, compacted log: topics, records, inspection and repair.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad usage, 3 found damage.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"duramen {__version__}")
        raise typer.Exit


@app.callback()
def options(
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="DIR|URL",
            envvar="DURAMEN_STORE",
            help="The store: the path of a directory, or the URL of one in a bucket, s3://BUCKET/PREFIX.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Output, typer.Option("--output", help="Text for people, JSON for programs.")] = Output.TEXT,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    session.store_path = store
    session.output = output
    session.debug = debug


app.add_typer(topics.app, name="topics")
app.add_typer(transactions.app, name="transactions")
app.add_typer(runs.app, name="runs", short_help="Show what compaction did: its runs and their receipts.")
#: each command with its line in the list, which 80 columns hold
for _command, _line in (
    (produce, "Append records from a file or a pipe."),
    (get, "Print the latest value of a key."),
    (consume, "Print records, from an offset or a time on."),
    (offsets, "Show where partitions begin and end."),
    (describe, "Show topics with every setting in force."),
    (explain, "Say whether compaction is due, why or why not, and when."),
    (plan, "Show what a compaction would do and remove."),
    (compact, "Compact what is due, the most urgent first."),
    (maintain, "Seal, retain, compact and clean up a store in a bucket."),
    (top, "Show partitions and running passes, live."),
    (pause, "Leave a topic out of compaction until it is resumed."),
    (resume, "Let a paused topic be compacted again."),
    (schedule, "Run the daemon: compaction, retention, flushing or sealing."),
    (console, "Show the store as a web page."),
    (report, "Write the console's pages into one HTML file."),
    (prove_erased, "Look for keys in everything that may still hold them."),
    (dump, "Print the contents of log files."),
    (verify, "Check every committed byte; change nothing."),
    (recover, "Repair the ledger and damaged partitions."),
    (set_aside, "Give up a committed batch that cannot be appended."),
    (retain, "Delete segments whose time or bytes are over."),
    (delete_records, "Delete the records of a partition below an offset."),
    (import_, "Adopt the topics of a stopped broker."),
    (export, "Make a directory that a broker can mount."),
    (restore, "Print the latest value of every key, now or as of a moment."),
    (backup, "Copy the whole store as of one moment, while appends go on."),
    (copy, "Copy topics into another store."),
    (config, "List the settings, explain one, or set those of a bucket."),
    (cost, "Estimate the requests and dollars a day of a bucket."),
):
    app.command(_command.__name__.strip("_").replace("_", "-"), short_help=_line)(_command)


def main() -> NoReturn:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of a command line; everything it says has been written, without a control character of the data."""
    with safe_streams():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    # The choice of output must hold for errors in the command line itself, before it is parsed.
    arguments = _output_first(arguments)
    session.output = Output.JSON if arguments[:2] == ["--output", "json"] else Output.TEXT
    session.debug = "--debug" in arguments
    session.so_far = session.done = None
    session.stopped = False
    try:
        code = app(arguments, standalone_mode=False, prog_name="duramen")
        sys.stdout.flush()
        if code == INTERRUPTED and not session.stopped:  # the command library turns the signal into a number
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as error:
        # The command library turns a broken pipe into an exit of its own, and ends so when it completed a line.
        if isinstance(error.__context__, BrokenPipeError):
            return _reader_left()
        return error.code if isinstance(error.code, int) else FAILED
    except (KeyboardInterrupt, typer.Abort):
        session.so_far = session.so_far or _left_by(arguments)
        _say("interrupted", kind="Interrupted")
        return INTERRUPTED
    except BadCommandLine as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help itself
            sys.stderr.write(f"{error}\n")
        else:
            where = error.where if isinstance(error, BadUsage) else None
            hint = None if where else f"`{_help(error)} --help` explains it."
            _say(_usage(error), kind="BadUsage", where=where, hint=hint)
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
    option = getattr(error, "option_name", None)
    if option in _OF_BROKERS:
        return f"{option} has no meaning here: there is no broker. Name the store's directory with --store DIR"
    if option == "--output":
        return "--output is text or json"
    text = str(getattr(error, "format_message", error.__str__)())
    for pattern, plain in _PLAIN.items():
        text = re.sub(pattern, plain, text)
    return text


#: how Kafka's tools are given the brokers
_OF_BROKERS = {"--bootstrap-server", "--bootstrap-servers", "--broker-list", "--zookeeper", "-b"}
#: what the parser says, and how people say it
_PLAIN = {
    r"is not a valid int(eger)?( range)?": "is not a whole number",
    r"is not a valid float( range)?": "is not a number",
    r"(-?[\d.]+) is not in the range x>=([\d.]+)": r"\1 is too small; the least is \2",
    r"(-?[\d.]+) is not in the range ([\d.]+)<=x<=([\d.]+)": r"\1 is not between \2 and \3",
    r"Got unexpected extra arguments? \((.*)\)": r"there is no place for '\1' here",
    r"Got unexpected extra argument\(s\) \((.*)\)": r"there is no place for '\1' here",
}


def _help(error: Exception) -> str:
    """The command whose help tells more."""
    context = getattr(error, "ctx", None)
    return str(context.command_path) if context is not None else "duramen"


#: what an interrupted command leaves, unless it says so itself
_INTERRUPTED = {
    "import": "Nothing was imported: what was copied is removed by the next sweep. The source is as it was.",
    "export": "The target is not complete, and a broker would notice. Run the export again.",
    "backup": "The copy is not complete, and no command opens it. Remove what is there and take the backup again.",
    "copy": "No topic came over that is not whole. Look which are there (`duramen topics list`), and copy the others.",
    "recover": "Each partition is either recovered or as it was. Run recover again.",
    "retain": "What was deleted stays deleted, the rest is done by the next run.",
    "compact": "What was compacted stays, the rest is as it was and is done by the next run.",
    "maintain": "Each step is whole or was not done; the next run goes on.",
    "delete-records": "The log start of each partition has moved or has not; `duramen offsets` shows which.",
    "topics": "A topic was changed as a whole or not at all; `duramen topics list` shows which.",
    "set-aside": "The batch is set aside or is not. Run the command again.",
    "schedule": "Every job that was under way is finished by the next run.",
}


def _left_by(arguments: list[str]) -> str:
    command = next((each for each in arguments if each in _INTERRUPTED), None)
    return "Nothing was changed." if command is None else _INTERRUPTED[command]


def _output_first(arguments: list[str]) -> list[str]:
    """The same command line with `--output text|json`, wherever it stood, at the beginning, where the parser wants it.

    Another value stays where it is: it may belong to an option of the command.
    """
    found: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return [*found, *rest, *arguments[at:]]
        name, equals, value = word.partition("=")
        after = at + 1
        if name == "--output" and not equals:
            value, after = "".join(arguments[at + 1 : at + 2]), at + 2
        if name == "--output" and value in {each.value for each in Output}:
            found = ["--output", value]
        else:
            rest += arguments[at:after]
        at = after
    return [*found, *rest]


def _failed(error: Exception) -> int:
    from logstore import errors

    if isinstance(error, errors.DuramenError):
        _say(error.what, kind=type(error).__name__, where=error.where(), hint=error.hint or _hint(error))
        if isinstance(error, (errors.UnknownConfig, errors.InvalidConfig, errors.InvalidTopic)):
            return BAD_USAGE
        return DAMAGE if isinstance(error, errors.DamageError) else FAILED
    if isinstance(error, OSError):
        where: dict[str, object] = {"file": error.filename} if error.filename is not None else {}
        _say(error.strerror or str(error), kind=type(error).__name__, where=where, hint=_system_hint(error))
        return FAILED
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        _say("not enough memory", kind="NotEnoughMemory", hint="Give the process more (`ulimit -v`, its container).")
        return FAILED
    hint = None if session.debug else "Run again with --debug to see where."
    _say(f"unexpected {type(error).__name__}: {error}", kind=type(error).__name__, hint=hint)
    return FAILED


def _hint(error: Exception) -> str | None:
    """What to do where the error does not say so itself."""
    from logstore import errors

    hints: dict[type[Exception], str] = {
        errors.OffsetOutOfRange: "`duramen offsets` shows where partitions begin and end.",
        errors.TopicExists: "`duramen topics describe` shows it, `duramen topics alter` changes it.",
        errors.InvalidPartition: "Partitions are counted from 0; leave it out to go by the key.",
        errors.InvalidTopic: "Choose another name.",
    }
    return hints.get(type(error))


def _system_hint(error: OSError) -> str | None:
    from logstore.errors import is_disk_full

    if is_disk_full(error):
        return "Make room on the store's disk and run it again; reading works meanwhile."
    return _SYSTEM_HINTS.get(type(error))


_SYSTEM_HINTS: dict[type[OSError], str] = {
    FileNotFoundError: "Check the path.",
    PermissionError: "This user lacks the right: use the owner's account, or change the file's mode.",
    IsADirectoryError: "A file is needed here.",
    NotADirectoryError: "A directory is needed here.",
}


def _say(what: str, *, kind: str, where: dict[str, object] | None = None, hint: str | None = None) -> None:
    """An error on stderr, in the form the user asked for."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        if session.json:
            error = {"kind": kind, "what": what, "where": where or {}, "hint": hint}
            if session.so_far is not None:
                error |= {"so_far": session.so_far, "done": session.done}
            sys.stderr.write(json_text({"error": error}) + "\n")
        else:
            text = what.rstrip(".")
            places = {name: value for name, value in (where or {}).items() if name != "line"}  # `what` begins with it
            if places:
                text += " (" + ", ".join(f"{name} {value}" for name, value in places.items()) + ")"
            sentences = [_sentence(each) for each in (f"error: {text}", hint, session.so_far) if each]
            sys.stderr.write(printable(" ".join(sentences)) + "\n")
        sys.stderr.flush()


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."


def _reader_left() -> int:
    """The reader of our output closed the pipe; that is not a failure."""
    # Python flushes stdout once more at exit; let that go nowhere instead of failing.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)
        os.close(nowhere)
    return DONE
