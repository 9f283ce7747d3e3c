"""`duramen transactions`: open ones of imported topics, and their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import DryRun, OneTopic, Topics, chosen_topics
from duramen.session import count_text, print_table, session, time_text

if TYPE_CHECKING:
    from logstore.commit.transactions import OpenTransaction

app = typer.Typer(
    help="List and abort open transactions of imported topics.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("list")
def list_(topics: Topics = None) -> None:
    """Show transactions without an end, which hold back read_committed readers and compaction."""
    with session.open_any() as store:
        found = [
            each
            for topic in chosen_topics(store, topics)
            for number in range(topic.partitions)
            for each in store.open_transactions(topic, number)
        ]
    documents = [_document(each) for each in found]

    def text() -> None:
        if not documents:
            print("No open transactions")
            return
        print_table(
            ["partition", "producer id", "epoch", "coordinator epoch", "first offset", "last append"],
            [
                [
                    f"{each['topic']}-{each['partition']}",
                    each["producer_id"],
                    each["producer_epoch"],
                    each["coordinator_epoch"],
                    each["first_offset"],
                    time_text(each["last_timestamp_ms"]),
                ]
                for each in documents
            ],
        )
        print(count_text(len(documents), "open transaction"))

    session.answer({"transactions": documents}, text)


@app.command()
def abort(
    topic: OneTopic,
    partition: Annotated[int, typer.Option("--partition", metavar="N", min=0, help="The partition.")],
    producer_id: Annotated[
        int, typer.Option("--producer-id", metavar="ID", min=0, help="Whose transaction; see `transactions list`.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: DryRun = False,
) -> None:
    """End an open transaction with an ABORT marker: its records are never committed."""
    from logstore.commit.transactions import abort_transaction, find_transaction

    with session.open_any() as store:
        found = find_transaction(store, topic, partition, producer_id)
        document: dict[str, Any] = {
            "transaction": _document(found),
            "aborted": not dry_run,
            "marker_offset": None,
            "last_stable_offset": None,
        }
        if not dry_run:
            session.confirm(
                f"Abort the transaction of producer {producer_id} in {topic}-{partition}, from offset"
                f" {found.first_offset} on? Its records will never be committed.",
                yes=yes,
            )
            done = abort_transaction(store, topic, partition, producer_id)
            document |= {"marker_offset": done.marker_offset, "last_stable_offset": done.last_stable_offset}

    def text() -> None:
        name = f"the transaction of producer {producer_id} in {topic}-{partition}, from offset {found.first_offset} on"
        if dry_run:
            print(f"Would abort {name}")
        else:
            print(
                f"Aborted {name}: marker at offset {document['marker_offset']}, last stable offset"
                f" {document['last_stable_offset']}"
            )

    session.answer(document, text)


def _document(transaction: OpenTransaction) -> dict[str, Any]:
    return {
        "topic": transaction.partition.topic,
        "partition": transaction.partition.partition,
        "producer_id": transaction.producer_id,
        "producer_epoch": transaction.producer_epoch,
        "coordinator_epoch": transaction.coordinator_epoch,
        "first_offset": transaction.first_offset,
        "last_timestamp_ms": transaction.last_timestamp_ms,
    }
