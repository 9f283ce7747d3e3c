"""`duramen set-aside`, as typed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.produce import table_of
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.errors import AppendUnfinished
from logstore.records.record import Record
from logstore.store import LogStore


def test_a_batch_whose_staged_files_are_gone_is_given_up_only_when_asked(duramen: Any, store_path: Path) -> None:
    path = store_path
    with LogStore(path, create=True) as store:
        store.create_topic("orders")
        committer = Committer(store)
        target = committer.target("orders")
        staging = Staging(store)
        writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=1)
        writer.write(target, table_of([Record(b"k", b"v")] * 3).to_batches()[0])

        def die(*_: object) -> None:
            raise OSError("killed here")

        with pytest.raises(AppendUnfinished):
            committer.commit(staging, [writer.finish()], {target.id: target}, apply_many=die)
        shutil.rmtree(staging.folder)
    assert duramen("set-aside", "orders").code == 2, "nobody is here to ask"
    look = duramen("set-aside", "orders", "--dry-run", output="json")
    assert (look.code, look.json["set_aside"]["lost_records"]) == (3, 3)
    done = duramen("set-aside", "orders", "--yes", output="json")
    assert done.code == 3
    assert done.json["set_aside"]["losses"][0]["from"] == 0
    assert done.json["set_aside"]["losses"][0]["to"] == 3
    assert duramen("set-aside", "orders", "--yes").code == 0
    with LogStore(path) as store:
        store.append("orders", [Record(b"k", b"after")])
        assert [(each.offset, each.value) for each in store.reader(store.topic("orders"), 0).records(0)] == [
            (3, b"after")
        ]
