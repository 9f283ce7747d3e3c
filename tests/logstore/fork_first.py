"""Uses a ledger first in a forked child; prints how many records are there then, and how the child ended."""

from __future__ import annotations

import os
import sys

from logstore.records.record import Record
from logstore.store import LogStore


def main(path: str) -> None:
    child = os.fork()
    if child == 0:
        with LogStore(path, create=True) as store:
            store.create_topic("orders")
            store.append("orders", [Record(b"key", b"value")])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    with LogStore(path) as store:
        found = list(store.reader(store.topic("orders"), 0).records(0))
    print(len(found), os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1])
