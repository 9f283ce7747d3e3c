"""Bringing topics back whose small files are lost or damaged, from whatever is left of them.

A topic's file comes back from the copy beside its state; without one from its directories, state, staged plans and the
ledger: id and number of partitions are then known, its settings only if a plan has them. What cannot be known is asked
for, or the topic comes back with "settings unknown". Damaged files are kept under another name; nothing that can be
read is removed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from logstore.commit.plan import TopicPlan, read_plan
from logstore.directory.ends import VERSION as ENDS_VERSION
from logstore.directory.sealed import read_sealed, whole_numbers
from logstore.errors import CorruptState, DuramenError
from logstore.segment.names import PARTITION_METADATA
from logstore.setting import format_value
from logstore.topic import new_topic_id
from logstore.topics.opened import OpenStore
from logstore.topics.places import is_log_of, segments_at, topic_id_at
from logstore.topics.registry import PARTITIONS_MAX, Topic, spelled
from logstore.upkeep.partition_repair import set_aside_file, state_of
from logstore.upkeep.strays import Stray, StrayKind, find_strays


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
    """The topic as far as it can be known; None when there is nothing to build one from."""
    name, notes = evidence.name, evidence.notes
    if store.fs.exists(store.layout.topic(name)) and evidence.damaged_file is None:
        notes.append("there is a topic of that name; the directories are beyond its partitions, and left")
        return None
    copy = _chosen_copy(evidence, copies)
    taken = [each for each in evidence.carried if each in living]
    if taken and len(taken) == len(evidence.carried) and copy is None:
        notes.append(f"the directories carry the id of topic {living[taken[0]]}; they are left where they are")
        return None
    for each in taken:  # its partition.metadata is in the wrong place
        del evidence.carried[each]
    if copy is not None:
        notes.append("brought back from the copy beside its state")
        topic_id = copy.id
    else:
        topic_id = _chosen_id(store, evidence, states, plans)
    partitions = _partitions(store, evidence, topic_id, copy, plans.get(topic_id))
    if not partitions:
        notes.append("nothing is left that says how many partitions it had")
        return None
    created_ms = _created_ms(store, evidence, topic_id)
    topic = copy or Topic(name, topic_id, partitions, {}, 1, created_ms, settings_unknown=True)
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


def _created_ms(store: OpenStore, evidence: _Evidence, topic_id: str) -> int:
    """When its first directory was made. What is older, Kafka's checkpoints say, may speak of another topic."""
    paths = [
        os.path.join(directory, PARTITION_METADATA)
        for directory in evidence.directories.values()
        if topic_id_at(store.fs, directory, limits=store.limits) == topic_id
    ]
    return min((store.fs.stat(path).mtime_ms for path in paths), default=store.clock.now_ms())


def _chosen_copy(evidence: _Evidence, copies: list[Topic]) -> Topic | None:
    """The copy whose id most directories carry; if no directory carries one, a copy with that name."""
    named = [copy for copy in copies if copy.name == evidence.name]
    named.sort(key=lambda copy: (evidence.carried[copy.id], copy.created_ms), reverse=True)
    return named[0] if named else None


def _fits(store: OpenStore, topic_id: str, evidence: _Evidence) -> bool:
    return bool(evidence.directories) and all(
        (state := state_of(store, topic_id, number)) is not None and is_log_of(store.fs, directory, state)
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
            state = state_of(store, topic_id, number)
            if state is not None and not state.is_as_made and is_log_of(store.fs, directory, state):
                evidence.notes.append("its id is from the state that fits its directories")
                return topic_id
    fitting = [topic_id for topic_id in sorted(each for each in states if each) if _fits(store, topic_id, evidence)]
    if len(fitting) == 1:  # lists as they were made fit many directories
        evidence.notes.append("its id is from the only state that fits its directories")
        return fitting[0]
    evidence.notes.append("nothing says what its id was; it gets a new one")
    return new_topic_id()


def _partitions(
    store: OpenStore, evidence: _Evidence, topic_id: str, copy: Topic | None, plan: TopicPlan | None
) -> int:
    """At least as many as any file mentions."""
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
