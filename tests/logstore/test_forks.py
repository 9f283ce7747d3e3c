"""Forked children of a process that has used a ledger: refused with an error, not aborted by a panic."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore.errors import DuramenError, ForkedProcess
from logstore.records.record import Record
from logstore.store import LogStore

RECORDS = [Record(b"key", b"value")]


def in_child(work: Callable[[], object]) -> object:
    """What `work` returns or raises in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            try:
                answer = work()
            except DuramenError as error:
                answer = error
            except BaseException as error:  # a panic of Rust code is no Exception
                answer = f"{type(error).__name__}: {error}"
            os.write(write, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else "the child died"


# The interpreter warns of forks in a process with threads, and this is one.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_child_of_a_process_that_wrote_may_read_but_is_refused_writes(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("orders")
        store.append("orders", RECORDS)

        def write_through_the_parents() -> object:
            return store.append("orders", RECORDS)

        def write_through_its_own() -> object:
            with LogStore(tmp_path / "store") as own:
                return own.append("orders", RECORDS)

        def read() -> object:
            with LogStore(tmp_path / "store") as own:
                return [record.value for record in own.reader(own.topic("orders"), 0).records(0)]

        for work in (write_through_the_parents, write_through_its_own):
            error = in_child(work)
            assert isinstance(error, ForkedProcess), error
            assert "spawn" in str(error)
        assert in_child(read) == [b"value"]
        store.append("orders", RECORDS)  # the parent is none the worse for it
        assert len(list(store.reader(topic, 0).records(0))) == 2


def test_a_child_forked_before_the_first_use_writes(tmp_path: Path) -> None:
    """Spark's workers are such children."""
    program = Path(__file__).with_name("fork_first.py")
    done = subprocess.run([sys.executable, str(program), str(tmp_path / "store")], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "1 0"), done.stderr
