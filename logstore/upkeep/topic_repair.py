"""Bringing topics back whose small files are lost or damaged, from whatever is left of them.

A topic's file comes back from the copy beside its state; without one from its directories, state, staged plans and the
ledger: id and number of partitions are then known, its settings only if a plan has them. What cannot be known is asked
for, or the topic comes back with "settings unknown". `partition.metadata` and segment lists are written again. Damaged
files are kept under another name; nothing that can be read is removed.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from logstore.commit.plan import TopicPlan, read_plan
from logstore.config import format_value
from logstore.directory.checkpoint import read_offset_checkpoint, write_partition_metadata
from logstore.directory.ends import VERSION as ENDS_VERSION
from logstore.directory.sealed import read_sealed, whole_numbers
from logstore.directory.state import PartitionState, read_state, write_state
from logstore.directory.trees import is_directory
from logstore.errors import CorruptCheckpoint, CorruptState, DuramenError
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.quarantine import folders, read_reason
from logstore.partition.salvage import Partition, has_wrong_list, reasons
from logstore.segment.names import (
    CLEANER_OFFSET_CHECKPOINT,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_OFFSET_CHECKPOINT,
    PARTITION_METADATA,
    DirectoryState,
    partition_directory_name,
)
from logstore.topic import TopicPartition, new_topic_id
from logstore.topics.opened import OpenStore
from logstore.topics.places import is_log_of, segments_at, topic_id_at
from logstore.topics.placing import make_partition
from logstore.topics.registry import PARTITIONS_MAX, Topic, spelled
from logstore.upkeep.strays import Stray, StrayKind, find_strays

#: an id that differs from a topic's in no more characters is that topic's, damaged
_DAMAGED_CHARS = 2


@dataclass(frozen=True, slots=True)
class TopicRepair:
    """A topic that is, or would be, brought back; `topic` None: it cannot be, and `notes` says why."""

    name: str
    topic: Topic | None
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Evidence:
    """What is left of one topic."""

    name: str
    directories: dict[int, str] = field(default_factory=dict)
    #: ids its directories carry
    carried: Counter[str] = field(default_factory=Counter)
    damaged_file: str | None = None
    notes: list[str] = field(default_factory=list)


def repair_topics(
    store: OpenStore,
    names: Iterable[str] | None = None,
    *,
    configs: Mapping[str, object] | None = None,
    dry_run: bool = False,
) -> list[TopicRepair]:
    """Bring back every topic (of `names`) whose file is lost or damaged; `configs` are settings for them all.

    Raises UnknownConfig, InvalidConfig, LockHeld.
    """
    store.resolve(configs or {})
    strays = find_strays(store)
    living = {topic.id: topic.name for name in store.topic_names() for topic in _read(store, name)}
    copies = [copy for each in strays if each.kind is StrayKind.STATE for copy in _copy(store, each)]
    states = {each.topic_id for each in strays if each.kind is StrayKind.STATE}
    plans = _plans(store) if strays else {}
    repairs = []
    for evidence in _gathered(strays):
        if names is not None and evidence.name not in names:
            continue
        topic = _definition(store, evidence, living, copies, states, plans, configs or {})
        if topic is not None and not dry_run:
            _bring_back(store, topic, evidence)
        repairs.append(TopicRepair(evidence.name, topic, tuple(evidence.notes)))
    return repairs


def _read(store: OpenStore, name: str) -> list[Topic]:
    try:
        return [store.topic(name)]
    except DuramenError:
        return []


def _copy(store: OpenStore, stray: Stray) -> list[Topic]:
    copy = store.registry.read_copy(stray.topic_id) if stray.topic_id else None
    return [] if copy is None else [copy]


def _gathered(strays: list[Stray]) -> list[_Evidence]:
    found: dict[str, _Evidence] = {}
    for stray in strays:
        if stray.name is None or stray.kind is StrayKind.METADATA:
            continue
        evidence = found.setdefault(stray.name, _Evidence(stray.name))
        if stray.kind is StrayKind.TOPIC_FILE:
            evidence.damaged_file = stray.file
            evidence.notes.append(stray.what)
        elif stray.partition is not None:
            evidence.directories[stray.partition] = stray.file
            if stray.topic_id is not None:
                evidence.carried[stray.topic_id] += 1
    return [found[name] for name in sorted(found)]


def _plans(store: OpenStore) -> dict[str, TopicPlan]:
    """The newest staged plan of each topic id."""
    found: dict[str, TopicPlan] = {}
    for entry in store.fs.listdir(store.layout.staging):
        if not entry.endswith("-plan"):
            continue
        try:
            plan = read_plan(store.fs, os.path.join(store.layout.staging, entry), limits=store.limits)
        except (FileNotFoundError, CorruptState):
            continue
        for topic in plan.topics:
            known = found.get(topic.topic_id)
            if known is None or known.sequence < topic.sequence:
                found[topic.topic_id] = topic
    return found


def _definition(
    store: OpenStore,
    evidence: _Evidence,
    living: Mapping[str, str],
    copies: list[Topic],
    states: set[str | None],
    plans: Mapping[str, TopicPlan],
    configs: Mapping[str, object],
) -> Topic | None:
    """The topic as far as it can be known; None when there is nothing to make one of."""
    name, notes = evidence.name, evidence.notes
    if store.fs.exists(store.layout.topic(name)) and evidence.damaged_file is None:
        notes.append("there is a topic of that name; the directories are beyond its partitions, and left")
        return None
    taken = next((each for each in evidence.carried if each in living), None)
    if taken is not None:
        notes.append(f"the directories carry the id of topic {living[taken]}; they are left where they are")
        return None
    copy = _chosen_copy(evidence, copies)
    if copy is not None:
        notes.append("brought back from the copy beside its state")
        topic_id = copy.id
    else:
        topic_id = _chosen_id(store, evidence, states, plans)
    partitions = _partitions(store, evidence, topic_id, copy, plans.get(topic_id))
    if not partitions:
        notes.append("nothing is left that tells how many partitions it had")
        return None
    topic = copy or Topic(name, topic_id, partitions, {}, 1, store.clock.now_ms(), settings_unknown=True)
    if copy is None:
        topic = _with_settings(store, topic, plans.get(topic_id), notes)
    if configs:
        topic = replace(topic, configs=spelled({**topic.configs, **configs}), settings_unknown=False)
    if topic.settings_unknown:
        notes.append(
            f"its settings are not known: nothing of it is deleted or compacted until "
            f"`duramen topics alter {name}` gives them"
        )
    return replace(topic, partitions=max(partitions, topic.partitions), config_version=topic.config_version + 1)


def _chosen_copy(evidence: _Evidence, copies: list[Topic]) -> Topic | None:
    """The copy that the most directories speak for; of copies that none speaks for, one that has the name."""
    named = [copy for copy in copies if copy.name == evidence.name]
    named.sort(key=lambda copy: (evidence.carried[copy.id], copy.created_ms), reverse=True)
    return named[0] if named else None


def _fits(store: OpenStore, topic_id: str, evidence: _Evidence) -> bool:
    return bool(evidence.directories) and all(
        (state := _state(store, topic_id, number)) is not None and is_log_of(store.fs, directory, state)
        for number, directory in evidence.directories.items()
    )


def _chosen_id(store: OpenStore, evidence: _Evidence, states: set[str | None], plans: Mapping[str, TopicPlan]) -> str:
    by_weight = [topic_id for topic_id, _ in evidence.carried.most_common()]
    for topic_id in [*(each for each in by_weight if each in states), *by_weight]:
        evidence.notes.append("its id is from partition.metadata")
        return topic_id
    for topic_id, plan in plans.items():
        if plan.topic == evidence.name and topic_id in states:
            evidence.notes.append("its id is from a staged plan")
            return topic_id
    for topic_id in sorted(each for each in states if each):
        for number, directory in evidence.directories.items():
            state = _state(store, topic_id, number)
            if state is not None and not state.is_as_made and is_log_of(store.fs, directory, state):
                evidence.notes.append("its id is from the state that fits its directories")
                return topic_id
    fitting = [topic_id for topic_id in sorted(each for each in states if each) if _fits(store, topic_id, evidence)]
    if len(fitting) == 1:  # lists as they were made fit many directories
        evidence.notes.append("its id is from the only state that fits its directories")
        return fitting[0]
    evidence.notes.append("nothing tells its id; it gets a new one")
    return new_topic_id()


def _partitions(
    store: OpenStore, evidence: _Evidence, topic_id: str, copy: Topic | None, plan: TopicPlan | None
) -> int:
    """At least as many as anything tells of."""
    counts = [number + 1 for number, path in evidence.directories.items() if _is_partition(store, path)]
    if copy is not None:
        counts.append(copy.partitions)
    if plan is not None:
        counts.append(plan.partitions)
    folder = store.layout.topic_state(topic_id)
    if store.fs.exists(folder):
        counts += [int(entry) + 1 for entry in store.fs.listdir(folder) if entry.isascii() and entry.isdigit()]
        try:
            path = store.layout.ends(topic_id)
            if store.fs.exists(path):
                document = read_sealed(store.fs, path, version=ENDS_VERSION, limit=store.limits.side_file_bytes)
                counts.append(len(whole_numbers(document, "high_watermarks", file=path)))
        except CorruptState:
            pass
    return min(max(counts, default=0), PARTITIONS_MAX)


def _is_partition(store: OpenStore, directory: str) -> bool:
    return topic_id_at(store.fs, directory, limits=store.limits) is not None or bool(segments_at(store.fs, directory))


def _with_settings(store: OpenStore, topic: Topic, plan: TopicPlan | None, notes: list[str]) -> Topic:
    """A plan has every setting that was in force; those that are not the store's must be the topic's own."""
    if plan is None:
        return topic
    defaults = store.topic_settings()
    own = {
        name: value
        for name, value in plan.configs.items()
        if name in defaults and value != format_value(defaults[name].value)
    }
    notes.append("its settings are those of its last staged batch")
    return replace(topic, configs=spelled(own), config_version=plan.config_version, settings_unknown=False)


def _bring_back(store: OpenStore, topic: Topic, evidence: _Evidence) -> None:
    with store.locks.lease(topic.id, what=f"bring {topic.name} back"):
        store.fs.mkdir(store.layout.topic_state(topic.id))
        store.fs.fsync_dir(store.layout.state)
        store.registry.write_copy(topic)
        if evidence.damaged_file is not None:
            kept = set_aside_file(store, evidence.damaged_file)
            evidence.notes.append(f"the damaged file is kept as {kept}")
        store.registry.create(topic)


def set_aside_file(store: OpenStore, path: str) -> str:
    """Keep a damaged file in `staging/`, where nobody reads it and no sweep takes it."""
    kept = store.layout.work("damaged")
    store.fs.rename(path, kept)
    store.fs.fsync_dir(os.path.dirname(path))
    return kept


# --- partitions ----------------------------------------------------------------------------------------------------


def repair_partition(store: OpenStore, topic: Topic, number: int, *, dry_run: bool = False) -> list[str]:
    """Give a partition back its `partition.metadata`, directory and segment list where they are lost or damaged.

    Returns what was done, or with `dry_run` what would be. A directory that is not the partition's own is set aside as
    a broker does. What the log itself lacks is for its recovery to find out.
    """
    partition = topic.partition(number)
    directory = store.layout.partition(partition)
    done: list[str] = []
    with store.locks.partition(topic.id, number, what=f"repair {partition}"):
        store.check_exists(topic)
        state = _repair_state(store, topic, partition, done, dry_run)
        _repair_epochs(store, directory, done, dry_run)
        carried = store.topic_id_at(directory)
        if carried == topic.id:
            return done
        if is_directory(store.fs, directory):
            if carried is None and _may_be_log_of(store, directory, state):
                done.append("partition.metadata was missing or damaged, and is written again")
            elif carried is not None and _is_log_after_all(store, topic, directory, state, carried):
                done.append(f"partition.metadata named topic id {carried}, but the log is this topic's: written again")
            else:
                aside = os.path.join(
                    store.layout.logs, partition_directory_name(partition, DirectoryState.STRAY, uuid.uuid4().hex)
                )
                if not dry_run:
                    store.fs.rename(directory, aside)
                    store.fs.fsync_dir(store.layout.logs)
                done.append(f"a directory of another topic lay in its place; it is set aside as {aside}")
        if dry_run:
            if state is not None and not state.is_as_made and not is_directory(store.fs, directory):
                done.append("its directory is gone; an empty one takes its place")
            return done
        if is_directory(store.fs, directory):
            write_partition_metadata(store.fs, os.path.join(directory, PARTITION_METADATA), topic.id)
            return done
        if state is not None and not state.is_as_made:
            done.append("its directory is gone; an empty one takes its place")
        make_partition(store, topic, partition, state)
    return done


def _repair_epochs(store: OpenStore, directory: str, done: list[str], dry_run: bool) -> None:
    """A checkpoint of leader epochs that cannot be read goes: the log's recovery finds them in the batches."""
    try:
        LeaderEpochs.load(store.fs, directory, limits=store.limits)
    except CorruptCheckpoint as error:
        if not dry_run:
            set_aside_file(store, os.path.join(directory, LEADER_EPOCH_CHECKPOINT))
        done.append(f"{LEADER_EPOCH_CHECKPOINT} is damaged ({error.what}), and made again")


def _may_be_log_of(store: OpenStore, directory: str, state: PartitionState | None) -> bool:
    """Whether a directory of the right name and without an owner can be the partition's, damaged perhaps."""
    if state is None or not state.segments:
        return True
    found = segments_at(store.fs, directory)
    *sealed, active = state.segments
    return any(found.get(each.base_offset) == each.size_bytes for each in sealed) or active.base_offset in found


def _is_log_after_all(
    store: OpenStore, topic: Topic, directory: str, state: PartitionState | None, carried: str
) -> bool:
    """Whether a directory that names another topic is the partition's all the same, damaged perhaps.

    A directory keeps its name as long as its topic lives. So the id of one that lives under another name is in the
    wrong file, unless the whole directory was moved: then the log fits that topic.
    """
    if state is not None and is_log_of(store.fs, directory, state):
        return True
    other = next((each for each in store.topics() if each.id == carried and each.name != topic.name), None)
    if not _may_be_log_of(store, directory, state):
        return False
    if other is None:  # nobody's: a damaged id, unless the directory is what is left of a topic, or came from elsewhere
        return _differ(carried, topic.id) <= _DAMAGED_CHARS and not store.marks.is_deleted(carried)
    theirs = [_state(store, other.id, number) for number in range(other.partitions)]
    ours_fitting = _fitting(store, directory, state)
    theirs_fitting = max(_fitting(store, directory, each) for each in theirs)
    if ours_fitting != theirs_fitting:
        return ours_fitting > theirs_fitting
    return not any(is_log_of(store.fs, directory, each) for each in theirs)


def _differ(one: str, other: str) -> int:
    """In how many characters two ids differ; they are random, so that those of two topics differ in nearly all."""
    return sum(left != right for left, right in zip(one, other, strict=True))


def _fitting(store: OpenStore, directory: str, state: PartitionState | None) -> int:
    """How many sealed segments of the list are there, to the byte."""
    found = segments_at(store.fs, directory)
    return sum(found.get(each.base_offset) == each.size_bytes for each in state.segments[:-1]) if state else 0


def _repair_state(
    store: OpenStore, topic: Topic, partition: TopicPartition, done: list[str], dry_run: bool
) -> PartitionState | None:
    """The partition's segment list, made again where it is lost; None for a partition nobody has written to."""
    path = store.layout.partition_state(topic.id, partition.partition)
    try:
        state = read_state(store.fs, path, limits=store.limits)
    except CorruptState as error:
        done.append(f"the segment list is damaged: {error.what}")
        if not dry_run:
            set_aside_file(store, path)
        state = None
    if state is not None and _is_of_another(store, topic, partition, state):
        done.append("the segment list is another partition's")
        if not dry_run:
            set_aside_file(store, path)
        state = None
    is_there = store.fs.exists(store.layout.partition(partition))
    if state is not None or not (is_there or _committed_end(store, topic, partition)):
        return state  # it is there, or the partition was never written
    state = rebuilt_state(store, topic, partition)
    if state.log_start_offset:
        done.append(
            f"the log start {state.log_start_offset} is from Kafka's checkpoint; what was deleted since may be back"
        )
    elif is_there and segments_at(store.fs, store.layout.partition(partition)):
        done.append("the log start is not known; what was deleted in front of it may be back")
    if not dry_run:
        store.fs.mkdir(store.layout.topic_state(topic.id))
        write_state(store.fs, path, state)
    source = "the directory" if is_there else "what is known of its end: its directory is gone, too"
    done.append(f"the segment list was missing or damaged, and is made again from {source}")
    return state


def rebuilt_state(store: OpenStore, topic: Topic, partition: TopicPartition) -> PartitionState:
    """What is known of a partition whose list is lost, without segments: the log's own opening finds those."""
    directory = store.layout.partition(partition)
    log_start, first_dirty = _checkpointed(store, topic, partition)
    # Of all but its last segment anything may have been compacted away; without one, of all there was.
    found = segments_at(store.fs, directory) if store.fs.exists(directory) else ()
    last_base = max(found) if found else _committed_end(store, topic, partition)
    noted = (read_reason(store.fs, folder) for folder in folders(store.fs, directory))
    return PartitionState(
        log_start_offset=log_start,
        first_dirty_offset=first_dirty,
        thinned_offset=max(first_dirty, last_base),
        losses=reasons(data for data in noted if data is not None),
    )


def _committed_end(store: OpenStore, topic: Topic, partition: TopicPartition) -> int:
    try:
        return store.ends(topic).high_watermarks[partition.partition]
    except CorruptState:
        return 0


def _is_of_another(store: OpenStore, topic: Topic, partition: TopicPartition, state: PartitionState) -> bool:
    directory = store.layout.partition(partition)
    if state.swap is not None or not store.fs.exists(directory):
        return False  # names change in the middle of a replacement
    config, now_ms = store.log_config(topic), store.clock.now_ms()
    return has_wrong_list(Partition(store.fs, directory, str(partition), state, None, config, store.limits, now_ms))


def _checkpointed(store: OpenStore, topic: Topic, partition: TopicPartition) -> tuple[int, int]:
    """Log start and first dirty offset from Kafka's checkpoint files, if they were written since the topic came to be.

    Older ones may speak of another topic of the same name.
    """
    found = []
    for name in (LOG_START_OFFSET_CHECKPOINT, CLEANER_OFFSET_CHECKPOINT):
        path = os.path.join(store.layout.logs, name)
        offset = 0
        try:
            if store.fs.stat(path).mtime_ms >= topic.created_ms:
                offset = read_offset_checkpoint(store.fs, path, limits=store.limits).get(partition, 0)
        except (FileNotFoundError, CorruptCheckpoint):
            pass
        found.append(offset)
    return found[0], found[1]


def _state(store: OpenStore, topic_id: str, number: int) -> PartitionState | None:
    try:
        return read_state(store.fs, store.layout.partition_state(topic_id, number), limits=store.limits)
    except CorruptState:
        return None
