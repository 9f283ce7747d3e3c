"""Three kinds of errors to catch: each error is exactly one of them, and says everything in fields of its own."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from pathlib import Path

import pytest

from logstore import errors
from logstore.errors import DamagedLog, DuramenError, HistoryCompacted, UnknownTopic

ROOT = Path(__file__).resolve().parents[2]
BASES = (errors.DamageError, errors.RetriableError, errors.UsageError)
KINDS = {
    "DamageError": """
        CorruptBatch CorruptIndex CorruptSnapshot CorruptCheckpoint
        CorruptState DamagedLog DecompressionLimit LedgerError
        UnappliablePlan ObjectMissing ObjectTruncated
    """,
    "UsageError": """
        UnsupportedFormat NotEnoughMemory InvalidRecord NullKey RecordTooLarge
        AppendTooLarge InvalidTimestamp OffsetsOutOfOrder OffsetOverflow
        OutOfOrderSequence InvalidProducerEpoch TransactionCoordinatorFenced InvalidTransactionState
        OffsetOutOfRange BufferLimit InvalidTopic UnknownTopic UnknownRun
        TopicExists StrayDirectory UnknownConfig InvalidConfig
        NotAStore StoreVersionError UnsuitableFileSystem AccessDenied
        ReadOnlyStore ImportRefused ExportRefused
        InvalidPartition InvalidCommit ForkedProcess UnknownTransaction
        ReplayMismatch MissingBatches HistoryCompacted BackupRefused
        RecoveryChanged NotCompacted PackageMissing KernelsMissing
        UnknownBucket UnsuitableObjectStore
    """,
    "RetriableError": """
        LockHeld StoreInUse
        CommitConflict CommitUnknown TopicChanged
        DiskFull AppendUnfinished SegmentsChanged CleaningAborted
        ObjectStoreError ObjectExists ObjectChanged RequestConflict
        ObjectStoreThrottled ObjectStoreUnavailable StaleObjects
    """,
}
CONCRETE = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, DuramenError) and kind not in (DuramenError, *BASES)
}


def test_every_error_is_of_the_kind_that_the_table_says() -> None:
    found = {base.__name__: {name for name, kind in CONCRETE.items() if issubclass(kind, base)} for base in BASES}
    assert found == {base: set(names.split()) for base, names in KINDS.items()}
    assert sum(map(len, found.values())) == len(CONCRETE)


def test_the_page_has_every_error_below_its_kind() -> None:
    _, *sections = re.split(r"^## `(\w+)`$", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    written = {
        base: set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        for base, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert written == {base: set(names.split()) for base, names in KINDS.items()}


@pytest.mark.parametrize(
    "error",
    [
        UnknownTopic("there is no topic 'a'", topic="a", hint="Create it"),
        HistoryCompacted("gone", partition="a-0", earliest={"a-0": 7}),
        DamagedLog("unreadable").at(file="f", position=1, offset=2).with_hint("Run recover").reworded("row 3", row=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_whole_from_another_process(error: DuramenError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert (str(again), again.args) == (str(error), error.args)


def test_a_place_that_nobody_knows_better_stays() -> None:
    error = DamagedLog("unreadable", file="f", position=1, offset=2).at(position=9)
    assert error.where() == {"file": "f", "position": 9, "offset": 2}


def test_nobody_writes_into_an_error_from_outside() -> None:
    """Fields are set by the constructor and by the error's own methods."""
    patched = []
    for package in ("logstore", "streaming", "compaction_job", "duramen"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_field = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_field and isinstance(node.value, ast.Name) and node.value.id == "error":
                    patched.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [place for place in patched if not place.startswith("logstore/errors.py:")] == []
