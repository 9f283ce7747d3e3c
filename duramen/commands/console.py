"""`duramen console`: the store as a web page, on loopback, until it is stopped."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from duramen.commands.compact import stop_event
from duramen.session import session

Schemas = Annotated[
    list[str] | None,
    typer.Option(
        "--schema",
        metavar="TOPIC=FILE",
        help="Show a topic's values by an Avro schema (.avsc) or a Protobuf descriptor set (FILE#Message); "
        "TOPIC:key=FILE for keys. May be given again.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The token that actions need. DURAMEN_CONSOLE_TOKEN works, too; without both a new one is printed.",
        show_default=False,
    ),
]


def console(
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to serve on; off loopback every request needs the token."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for a free one.")] = 8787,
    token_file: TokenFile = None,
    schema: Schemas = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A host name under which the console may be asked, as behind a proxy. May be given again.",
            show_default=False,
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the store as a web page: topics, segments, what is due and why, runs, records. Until interrupted.

    Reading needs nothing on loopback. Compacting, pausing, resuming and retention need the token.
    """
    from duramen.console.opened import OpenConsole, find_token

    token = find_token(token_file)
    with (
        stop_event("stopping") as stopping,
        OpenConsole(
            session.path, token=token, host=host, port=port, schemas=schema or (), names=allow_host or ()
        ) as served,
    ):
        session.answer(
            {"url": served.url, "token": token.text if token.is_new else None, "read_only": served.is_read_only},
            lambda: print(f"The console of {session.path} is at\n\n    {served.link}\n\nStop it with Ctrl+C."),
        )
        sys.stdout.flush()
        if open_:
            import webbrowser

            webbrowser.open(served.url)  # without the token: others can read a command line
        while not stopping.wait(1.0):
            pass
