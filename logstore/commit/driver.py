"""One batch from encoding to visible, with the encode step as a parameter: sink, data source, `produce`,
`LogStore.append` and the end of a transaction differ in nothing else.

    replay? → stage → encode → commit; from the start when a topic or the ledger changed meanwhile

`docs/protocols.md` has the steps of a commit and what is found when a process dies between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from logstore.clock import Clock
from logstore.commit.apply import ApplyMany
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committed, Ending
from logstore.commit.plan_folder import reporting_full_disk
from logstore.commit.staged_output import Filled, Outputs, StagedOutput
from logstore.commit.staging import StagedFile, TopicTarget
from logstore.errors import CommitConflict, TopicChanged
from logstore.ledger.rows import AppProgress, CommitRow

_TRIES_MAX = 5


class Batch(Protocol):
    """What an encode step gets: a place for its staged files. Close it in any case."""

    plan_id: str

    def output(self) -> StagedOutput: ...
    def outputs(self) -> Outputs:
        """The same for tasks in other processes."""

    def close(self) -> None: ...


B = TypeVar("B", bound=Batch)


class Commits(Protocol[B]):
    """The commit path of an open store, of either kind."""

    #: by app, what its next ledger row tells of the batch before; see `Committed.for_next_row`
    for_next_row: dict[str | None, dict[str, int]]

    @property
    def clock(self) -> Clock: ...

    def target(self, name: str) -> TopicTarget:
        """A topic as encoding tasks need it. Raises UnknownTopic, CorruptState."""

    def last_batch(self, app_id: str) -> AppProgress | None:
        """The app's last batch and who wrote it; None for an app the ledger does not know."""

    def batches_of(self, app_id: str, count: int) -> list[CommitRow]:
        """The newest rows of an app's commits, as far as they are kept, oldest first."""

    def check_replay(self, app: AppBatch) -> bool:
        """Whether the batch is committed already. Raises ReplayMismatch when it cannot be this app's next."""

    def finish_replay(self, app: AppBatch) -> None:
        """Make visible what a committed batch may still lack."""

    def begin(self, filled: Filled | None = None) -> B:
        """A place for staged files, or the one that was filled before."""

    def outputs(self, plan_id: str) -> Outputs:
        """For tasks that stage a batch which is begun only when it is committed."""

    def commit(
        self,
        staging: B,
        files: Sequence[StagedFile],
        targets: Mapping[str, TopicTarget],
        *,
        app: AppBatch | None = None,
        apply_many: ApplyMany | None = None,
        timings_ms: Mapping[str, int] | None = None,
        engine: str = "local",
        ending: Ending | None = None,
    ) -> Committed: ...

    def discard(self, plan_id: str) -> None:
        """Remove what was staged for a plan, unless a commit names it."""

    def tidy(self, done: Committed) -> None:
        """What a writer without a daemon does now and then behind its commits. That it fails fails no commit."""

    def finish(self, topic: str) -> None:
        """Leave nothing for others to do behind one's last commit to a topic."""


class EncodeAgain(Exception):
    """Raised by an encode step when what prevented it is resolved; `from` the original error."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Staged files, and the topics as they were when they were encoded."""

    files: Sequence[StagedFile]
    targets: Iterable[TopicTarget]


def append_batch(
    committer: Commits[B],
    encode: Callable[[B], Encoded],
    *,
    app: AppBatch | None = None,
    filled: Filled | None = None,
    apply_many: ApplyMany | None = None,
    timings_ms: Mapping[str, int] | None = None,
    engine: str = "local",
    ending: Ending | None = None,
) -> Committed:
    """Append what `encode` stages, all or none of it. With `app`, a batch that the ledger has is not written again.

    What was `filled` before is not encoded again. Raises what `encode` and
    `Committer.commit` raise.
    """
    attempt = 0
    while True:
        attempt += 1
        if app is not None and committer.check_replay(app):
            committer.finish_replay(app)
            if filled is not None:
                committer.discard(filled.plan_id)
            return Committed("", replayed=True)
        staging = committer.begin(filled)
        try:
            began = time.monotonic()
            with reporting_full_disk():
                encoded = encode(staging)
            timings = {} if filled is not None else {"encode": int((time.monotonic() - began) * 1000)}
            return committer.commit(
                staging,
                encoded.files,
                {target.id: target for target in encoded.targets},
                app=app,
                apply_many=apply_many,
                timings_ms=timings | dict(timings_ms or {}),
                engine=engine,
                ending=ending,
            )
        except (TopicChanged, CommitConflict):  # nothing was committed: look again
            if filled is not None or attempt >= _TRIES_MAX:
                raise
        except EncodeAgain as again:
            if attempt > _TRIES_MAX:
                raise again.__cause__ or again from None
        finally:
            staging.close()
