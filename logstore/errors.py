"""Every error Duramen raises on purpose, flat, one condition a class.

An error says what happened, where (file, position, offset, partition) and, when there is one, the way out. Each is one
of three kinds, by the remedy: repair (`DamageError`), try later (`RetriableError`), change the call (`UsageError`).
`kafka_code` is the number Apache Kafka gives the same condition on the wire.

    try:
        store.append("orders", [Record(b"42", b"ordered")])
    except errors.RetriableError as error:
        print("later:", error.what, error.hint)
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar, TypeVar

Error = TypeVar("Error", bound="DuramenError")


class DuramenError(Exception):
    """Base of all errors raised on purpose."""

    kafka_code: ClassVar[int] = -1

    def __init__(
        self,
        what: str,
        *,
        partition: object = None,
        file: str | None = None,
        position: int | None = None,
        offset: int | None = None,
        row: int | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.partition = None if partition is None else str(partition)
        self.file = file
        self.position = position
        self.offset = offset
        #: which of the given rows it is about, counted from 0; `what` calls it "row N"
        self.row = row
        self.hint = hint
        super().__init__(what)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (Spark workers); rebuild them without calling each subclass's own signature.
        return (_rebuild, (type(self), self.__dict__.copy()))

    def at(self: Error, *, file: str | None = None, position: int | None = None, offset: int | None = None) -> Error:
        """This error with the place where it happened, as the caller knows it; None keeps what is set already."""
        self.file = self.file if file is None else file
        self.position = self.position if position is None else position
        self.offset = self.offset if offset is None else offset
        return self

    def with_hint(self: Error, hint: str) -> Error:
        """This error with another way out."""
        self.hint = hint
        return self

    def reworded(self: Error, what: str, *, row: int | None = None) -> Error:
        """This error with another text, and the row as the reader counts."""
        self.what, self.args = what, (what,)
        self.row = self.row if row is None else row
        return self

    def where(self) -> dict[str, object]:
        """The known places, in reading order; empty when the condition has none."""
        places = {"partition": self.partition, "file": self.file, "position": self.position, "offset": self.offset}
        return {name: value for name, value in places.items() if value is not None}

    def __str__(self) -> str:
        text = self.what
        places = self.where()
        if places:
            text += " (" + ", ".join(f"{name} {value}" for name, value in places.items()) + ")"
        if self.hint:
            text += f". {self.hint}"
        return text


def _rebuild(kind: type[DuramenError], state: dict[str, object]) -> DuramenError:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    error.args = (state.get("what"),)
    return error


class DamageError(DuramenError):
    """Stored bytes or files are damaged or missing. `duramen verify` shows what, `duramen recover` repairs."""


class RetriableError(DuramenError):
    """Nothing is wrong with the call: it may succeed later. A lock is held, the disk is full, another writer was first.

    `CommitUnknown` and `AppendUnfinished` come when a batch may be committed or is; only a batch with an app_id and
    a batch_id is recognised when it is written again.
    """


class UsageError(DuramenError):
    """The call cannot succeed as it is: an argument, a name, a setting, or the place it runs in must change first."""


# --- bytes on disk -----------------------------------------------------------------------------------------------


class CorruptBatch(DamageError):
    """A record batch or legacy message whose bytes cannot be what was written."""

    kafka_code = 2


class CorruptIndex(DamageError):
    """An index file whose size or entries break the format's rules."""


class CorruptSnapshot(DamageError):
    """A producer snapshot with a wrong version, length or checksum."""


class CorruptCheckpoint(DamageError):
    """A text checkpoint or metadata file that does not follow its frame."""


class CorruptState(DamageError):
    """A state file of the store with a wrong version, length or checksum."""


class DamagedLog(DamageError):
    """Committed data could not be read back; `duramen recover` repairs it."""


class UnsupportedFormat(UsageError):
    """A magic, codec or version this release does not know."""

    kafka_code = 76


class DecompressionLimit(DamageError):
    """A compressed payload would grow beyond the configured limit."""

    kafka_code = 10


# --- appending ---------------------------------------------------------------------------------------------------


class InvalidRecord(UsageError):
    """A record or batch that breaks a rule of the topic or of the format."""

    kafka_code = 87


class NullKey(InvalidRecord):
    """A record without key on a compacted topic."""


class RecordTooLarge(UsageError):
    """A batch larger than max.message.bytes."""

    kafka_code = 10


class AppendTooLarge(UsageError):
    """One append larger than segment.bytes."""

    kafka_code = 18


class InvalidTimestamp(UsageError):
    """A record timestamp outside message.timestamp.before/after.max.ms."""

    kafka_code = 32


class OffsetsOutOfOrder(UsageError):
    """Ready-made batches whose offsets do not increase from the log's end."""


class OffsetOverflow(UsageError):
    """An offset more than 2^31-1 above its segment's base."""


class OutOfOrderSequence(UsageError):
    """A producer's sequence number that does not follow its last one."""

    kafka_code = 45


class InvalidProducerEpoch(UsageError):
    """A producer epoch below the one already seen."""

    kafka_code = 47


class TransactionCoordinatorFenced(UsageError):
    """A transaction marker from an older coordinator."""

    kafka_code = 52


class InvalidTransactionState(UsageError):
    """A transactional batch or marker that does not fit the producer's open transaction."""

    kafka_code = 48


# --- reading -----------------------------------------------------------------------------------------------------


class OffsetOutOfRange(UsageError):
    """A position below the log start or beyond the log end."""

    kafka_code = 1


class BufferLimit(UsageError):
    """A single batch is larger than the read buffer may become."""

    kafka_code = 10


# --- names, settings, stores -------------------------------------------------------------------------------------


class InvalidTopic(UsageError):
    """A topic name outside Kafka's rule."""

    kafka_code = 17


class UnknownTopic(UsageError):
    """No such topic or partition in the store; `topic` has its name where a row asked for it."""

    kafka_code = 3

    def __init__(self, what: str, *, topic: str | None = None, **places: Any) -> None:
        super().__init__(what, **places)
        self.topic = topic


class UnknownRun(UsageError):
    """No run of compaction in the ledger has this id."""


class TopicExists(UsageError):
    """A topic of that name is already there."""

    kafka_code = 36


class StrayDirectory(UsageError):
    """A directory is in a partition's place, and nothing proves which topic it belongs to."""


class UnknownConfig(UsageError):
    """A configuration name that does not exist; the message has the nearest one."""

    kafka_code = 40


class InvalidConfig(UsageError):
    """A configuration value of the wrong type or outside its range."""

    kafka_code = 40


class NotAStore(UsageError):
    """The folder is not a Duramen store."""


class StoreVersionError(UsageError):
    """The store was written by a newer release, or needs an upgrade."""


class UnsuitableFileSystem(UsageError):
    """The file system lacks something the store relies on."""


class AccessDenied(UsageError):
    """The store belongs to another user, and this one lacks the rights."""


class ReadOnlyStore(AccessDenied):
    """Nothing can be written to the store: it is mounted read-only, or this user may only read it. Reading works."""


class NotEnoughMemory(UsageError):
    """The process may not use as much memory as the work takes; nothing was changed."""


class LockHeld(RetriableError):
    """Another process holds a lock for longer than the wait that was allowed."""


class StoreInUse(RetriableError):
    """A broker or another process uses the directory exclusively."""


class ImportRefused(UsageError):
    """A Kafka log directory that cannot be taken in as it is."""


class ExportRefused(UsageError):
    """A target directory that cannot become a broker's."""


class InvalidPartition(InvalidRecord):
    """A record sent to a partition its topic does not have."""

    kafka_code = 3


# --- the ledger --------------------------------------------------------------------------------------------------


class InvalidCommit(UsageError):
    """A commit, run or statistics row whose texts or numbers cannot be right; nothing was written."""


class CommitConflict(RetriableError):
    """The ledger no longer shows what the caller saw: another commit touched the app or a topic; look again."""


class CommitUnknown(RetriableError):
    """The commit may or may not have happened; look for its plan id before doing anything else."""


class ForkedProcess(UsageError):
    """A child of a process that had used a ledger; the ledger's library does not survive a fork."""


class LedgerError(DamageError):
    """The ledger's files are damaged, foreign, or disagree with what is known."""


# --- object storage ----------------------------------------------------------------------------------------------


class ObjectMissing(DamageError):
    """No object of that name is in the bucket."""


class ObjectTruncated(DamageError):
    """An object has fewer bytes than were asked for."""


class ObjectStoreError(RetriableError):
    """Base of what object storage answers when a request may succeed later.

    `may_be_applied`: whether the write may have happened, or may happen still. False for reads.
    """

    def __init__(self, what: str, *, may_be_applied: bool = False, **places: Any) -> None:
        super().__init__(what, **places)
        self.may_be_applied = may_be_applied


class ObjectExists(ObjectStoreError):
    """An object was to be created, and another one is there."""


class ObjectChanged(ObjectStoreError):
    """An object was to be replaced, and it is no longer the one that was seen."""


class RequestConflict(ObjectStoreError):
    """Two conditional writes of one key met; this one did nothing."""


class ObjectStoreThrottled(ObjectStoreError):
    """Object storage asks for fewer requests, for longer than the caller waits."""


class ObjectStoreUnavailable(ObjectStoreError):
    """Object storage does not answer, or answers with an error of its own."""


class StaleObjects(RetriableError):
    """Objects of a batch or a pass were written too long ago to be named now; nothing was committed."""


class UnknownBucket(UsageError):
    """The bucket or container does not exist, or lies in another region."""


class UnsuitableObjectStore(UsageError):
    """The endpoint ignores the conditions of writes, or lets two of them win: a store there would lose data."""


# --- committing --------------------------------------------------------------------------------------------------


class UnknownTransaction(UsageError):
    """A transaction that is not open, or not the one that was looked at; nothing was written."""


class TopicChanged(RetriableError):
    """A topic was altered or re-created while a batch for it was encoded; encode it again."""


class ReplayMismatch(UsageError):
    """An app's batch id went backwards, or another query writes under its app_id."""


class MissingBatches(ReplayMismatch):
    """A batch that leaves out others of its app: the store is older than the query's checkpoint."""


class DiskFull(RetriableError):
    """There is not enough room for what is about to be written; nothing was changed."""


def is_disk_full(error: OSError) -> bool:
    """Whether the system had no room, or the user none left of theirs."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class AppendUnfinished(RetriableError):
    """A committed batch that could not be appended; it stands, and the next writer of its topics finishes it."""


class UnappliablePlan(DamagedLog):
    """A committed batch that cannot be appended as it was staged; `duramen set-aside` is the way out."""


class HistoryCompacted(UsageError):
    """Compaction has removed records of the moment that was asked for; `earliest` has the first exact offset of each
    partition."""

    def __init__(self, what: str, *, earliest: dict[str, int] | None = None, **places: Any) -> None:
        super().__init__(what, **places)
        self.earliest = earliest or {}


class BackupRefused(UsageError):
    """A target that cannot become a copy of the store."""


class RecoveryChanged(UsageError):
    """Recovery would cost more than what was agreed to; nothing was changed."""


class SegmentsChanged(RetriableError):
    """Segments that were to be replaced are not what they were; the output was dropped."""


class CleaningAborted(RetriableError):
    """A pass of compaction was stopped; the log is as it was, but for groups already replaced."""


class NotCompacted(UsageError):
    """The topic's cleanup.policy does not include compact."""


class PackageMissing(UsageError):
    """A part of Duramen needs a package that is not installed here."""


class KernelsMissing(UsageError):
    """The installation has no compiled kernels for this machine, and no compiler to make them."""
