"""`duramen report`: the console's pages of this moment, as one HTML file."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from duramen.commands.console import Schemas
from duramen.session import file_path, session, size_text
from duramen.terminal import raw


def report(
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Where to write it; - for standard output.")
    ] = "duramen-report.html",
    messages: Annotated[
        int,
        typer.Option("--messages", min=0, max=500, help="Include this many of the newest records of each partition."),
    ] = 0,
    schema: Schemas = None,
) -> None:
    """Write the console's pages, as of now, into one HTML file that needs no network and no server.

    It holds names, settings, sizes and the history of runs; keys and values only with --messages.
    """
    from duramen.console.formats import MessageSchemas
    from duramen.console.report import report_html
    from duramen.console.view import View

    file_path(file)
    with session.open_any() as store:
        html = report_html(View(store, schemas=MessageSchemas(schema or ())), messages_each=messages)
    data = html.encode()
    if file == "-":
        raw(sys.stdout).write(html)
        return
    temporary = f"{file}.tmp"
    with open(temporary, "wb") as opened:
        opened.write(data)
    os.replace(temporary, file)
    session.answer({"file": file, "size_bytes": len(data)}, lambda: print(f"Wrote {file} ({size_text(len(data))})"))
