"""The documents of the API, as JSON Schema: what each answer holds. Times are in milliseconds since 1970, UTC."""

from __future__ import annotations

from duramen.console.schema import (
    Schema,
    anything,
    array,
    boolean,
    integer,
    mapping,
    nullable,
    number,
    one_of,
    record,
    ref,
    text,
)

#: a partition is in one of these, and so may a topic be asked for
STATES = ("due", "waiting", "paused", "set_aside", "not_compacted", "settings_unknown", "unreadable")
SECTIONS = ("clean", "dirty", "uncleanable", "active")
FORMATS = ("auto", "text", "json", "hex", "long", "avro", "protobuf")
RESULTS = ("running", "done", "failed", "skipped", "abandoned")
EVENTS = ("delete_horizon", "erasure_deadline", "key_ttl", "retention", "retry")
RANGES = ("3h", "2d", "30d")
ACTIONS = ("compact", "pause", "resume", "retain")

_MS = "milliseconds since 1970, UTC"
_topic, _partition = text("topic"), integer("partition", minimum=0)
_total = integer("how many there are in all, before paging", minimum=0)

ERROR = record(
    "Every error. `kind` is stable, `what` is for people.",
    error=record(
        status=integer("the HTTP status"),
        kind=text("stable name, such as UnknownTopic, BadRequest, Unauthorized"),
        what=text(),
        where=mapping({"type": ["string", "integer", "number", "null"]}, "topic, partition, file, parameter"),
        hint=nullable(text("what to do")),
    ),
)

JOB = record(
    "A job of the daemon",
    name=text("compaction, retention, flush or ledger"),
    interval_ms=nullable(integer("null: never")),
    running=boolean(),
    runs=integer(minimum=0),
    last_started_ms=nullable(integer(_MS)),
    last_ended_ms=nullable(integer(_MS)),
    ok=nullable(boolean("how its last run ended; null before the first")),
    problems=array(text()),
    next_ms=nullable(integer(_MS)),
)

RUNNING = record(
    "A pass that is under way",
    run_id=text(),
    topic=_topic,
    partition=_partition,
    engine=text(),
    started_ms=integer(_MS),
    step=nullable(text("index, rewrite or write; null when the process at work does not say")),
    done_bytes=nullable(integer("bytes read and written so far in this step")),
    total_bytes=nullable(integer("bytes the plan expects of this step")),
    bytes_per_second=nullable(number("over the last seconds")),
    left_ms=nullable(integer("time left by that rate")),
    seen_ms=nullable(integer("when the process at work last said so")),
)

FINDING = record(
    severity=one_of("warning", "error"),
    what=text(),
    where=nullable(text("partition, file or job")),
    hint=nullable(text()),
)

#: of a number of records
_EXACT = boolean("counted; false: at most so many, where compaction has thinned segments and not counted them")

POINT = record(
    "One moment of the history; figures are sums over the topic's partitions",
    time_ms=integer(_MS),
    size_bytes=integer(minimum=0),
    dirty_bytes=integer(minimum=0),
    records=integer(minimum=0),
    tombstones=integer(minimum=0),
)

STORE = record(
    "The header: the store as a whole",
    now_ms=integer("the store's clock"),
    stamp=text("changes whenever an answer of the API may have changed"),
    version=text("of Duramen"),
    store=record(
        path=text(),
        kind=one_of("directory", "bucket"),
        read_only=boolean(),
        id=nullable(text()),
        origin=nullable(
            record(
                "of what the store is a copy",
                source=text(),
                taken_ms=integer(_MS),
                restored_ms=nullable(integer(_MS)),
            )
        ),
    ),
    health=record(
        status=one_of("ok", "warning", "error"), findings=array(ref("Finding")), left_off=integer("findings not listed")
    ),
    space=record(
        free_bytes=nullable(integer("null: nobody can tell, as in a bucket")),
        total_bytes=nullable(integer()),
        log_bytes=integer("all partitions' logs"),
    ),
    totals=record(
        topics=integer(),
        partitions=integer(),
        segments=integer(),
        records=integer(),
        records_exact=_EXACT,
        clean_bytes=integer(),
        dirty_bytes=integer(),
        uncleanable_bytes=integer(),
        states=record("partitions by state", **{name: integer() for name in STATES}),
    ),
    daemon=record(
        "The scheduler, in this process or in another one",
        told=boolean("false: in a bucket processes do not tell what they are at"),
        running=boolean(),
        where=nullable(text("host and process")),
        seen_ms=nullable(integer("when it was last heard of")),
        jobs=array(ref("Job")),
    ),
    running=array(ref("Running"), "passes under way"),
    history=array(ref("Point"), "the store as a whole over the last three hours; up to 180 points, oldest first"),
    actions=record(
        enabled=boolean("false: read-only store, or a report"),
        why=nullable(text("why not")),
    ),
)

TOPIC = record(
    "A topic in the list",
    name=text(),
    id=text(),
    partitions=integer(minimum=0),
    segments=integer(minimum=0),
    size_bytes=integer(minimum=0),
    clean_bytes=integer(minimum=0),
    dirty_bytes=integer(minimum=0),
    uncleanable_bytes=integer("the active segments included", minimum=0),
    records=integer("counted by compaction where it was, offsets elsewhere", minimum=0),
    records_exact=_EXACT,
    keys=nullable(integer("of the segments compaction has counted; null: none", minimum=0)),
    tombstones=nullable(integer("likewise", minimum=0)),
    dirty_ratio=nullable(number("the highest of its partitions; null: not compacted", minimum=0, maximum=1)),
    dirty_ratio_max=nullable(number("min.cleanable.dirty.ratio", minimum=0, maximum=1)),
    policy=text("cleanup.policy: compact, delete or both; unknown"),
    compacted=boolean(),
    paused=boolean(),
    states=record("partitions by state", **{name: integer() for name in STATES}),
    last_record_ms=nullable(integer("time of the newest record")),
    next_ms=nullable(integer("the earliest moment one of its partitions can be due by time alone")),
    last_run_ms=nullable(integer("when its last pass ended")),
    error=nullable(text("why it cannot be read")),
    growth=array(ref("Point"), "last three hours, up to 60 points, oldest first", count_max=60),
)

TOPICS = record(
    now_ms=integer(_MS), total=_total, offset=integer(minimum=0), limit=integer(minimum=1), topics=array(ref("Topic"))
)

WHY = record(
    "Why and when a partition is compacted",
    topic=_topic,
    partition=_partition,
    state=one_of(*STATES),
    due=boolean(),
    why=text("one sentence"),
    rule=nullable(
        one_of(
            "ratio",
            "max_lag",
            "horizon",
            "expired",
            "recompress",
            "forced",
            "roll",
            doc="what makes it due; null when it is not",
        )
    ),
    held_by=nullable(
        one_of(
            "empty",
            "nothing_new",
            "ratio",
            "min_lag",
            "open_transaction",
            "not_flushed",
            "active_only",
            doc="what holds it back; null when it is due",
        )
    ),
    setting=nullable(text("the setting behind the rule")),
    dirty_ratio=nullable(number(minimum=0, maximum=1)),
    dirty_ratio_max=nullable(number("min.cleanable.dirty.ratio", minimum=0, maximum=1)),
    next_ms=nullable(integer("when it can be due by time alone; null: with new records only")),
    next_rule=nullable(one_of("horizon", "max_lag", "expired", "recompress", "min_lag")),
    late_ms=integer("for how long it has been due by max.compaction.lag.ms", minimum=0),
    next_horizon_ms=nullable(integer("when the first tombstone or marker may go")),
    paused=boolean(),
    unfinished=boolean("an earlier pass stopped in the middle; the next one goes on"),
    set_aside=nullable(
        record(reason=text(), failures=integer(), failed_ms=integer(_MS), retry_ms=integer("when it is tried again"))
    ),
    size_bytes=integer(minimum=0),
    dirty_bytes=integer(minimum=0),
    error=nullable(text("why the partition cannot be read")),
)

EXPLAINED = record(
    now_ms=integer(_MS),
    total=_total,
    offset=integer(minimum=0),
    limit=integer(minimum=1),
    partitions=array(ref("Why"), "most urgent first"),
)

PARTITION_FIGURES = record(
    partition=_partition,
    state=one_of(*STATES),
    why=text(),
    log_start_offset=integer(),
    log_end_offset=integer("the high watermark"),
    segments=integer(),
    size_bytes=integer(),
    clean_bytes=integer(),
    dirty_bytes=integer(),
    uncleanable_bytes=integer(),
    records=integer(),
    records_exact=_EXACT,
    keys=nullable(integer()),
    tombstones=nullable(integer()),
    dirty_ratio=nullable(number()),
    next_ms=nullable(integer()),
    last_record_ms=nullable(integer()),
    error=nullable(text()),
)

TOPIC_PAGE = record(
    "One topic with its partitions",
    now_ms=integer(_MS),
    topic=ref("Topic"),
    configs=mapping(text(), "the topic's own settings"),
    total=_total,
    offset=integer(minimum=0),
    limit=integer(minimum=1),
    partitions=array(ref("PartitionFigures")),
)

SEGMENT = record(
    "A segment, or neighbours of the same section taken together where there are very many",
    base_offset=integer(),
    end_offset=integer("of the next segment, or the log's end"),
    size_bytes=integer(),
    section=one_of(*SECTIONS),
    count=integer("segments taken together; 1 as a rule", minimum=1),
    largest_timestamp_ms=nullable(integer(_MS)),
    records=nullable(integer("counted by compaction; null: not yet")),
    keys=nullable(integer()),
    tombstones=nullable(integer()),
    run_id=nullable(text("the pass that wrote it, or last counted it")),
)

PARTITION = record(
    "One partition: its strip of segments, oldest first; their sizes add up to size_bytes",
    now_ms=integer(_MS),
    topic=_topic,
    partition=_partition,
    size_bytes=integer(),
    clean_bytes=integer(),
    dirty_bytes=integer(),
    uncleanable_bytes=integer(),
    log_start_offset=integer(),
    log_end_offset=integer("the high watermark"),
    last_stable_offset=integer(),
    first_dirty_offset=integer(),
    first_uncleanable_offset=integer(),
    records=integer(),
    records_exact=_EXACT,
    segments_total=integer(),
    segments=array(ref("Segment")),
    losses=array(
        record(
            "offsets whose records damage took",
            base_offset=integer(),
            end_offset=integer(),
            reason=text(),
            since_ms=integer(),
            at_most=boolean(),
        )
    ),
    why=ref("Why"),
    runs=array(ref("Run"), "its newest passes, newest first; at most 20"),
)

HISTORY = record(
    range=one_of(*RANGES), step_ms=integer("a point stands for so long"), points=array(ref("Point"), "oldest first")
)

RUN = record(
    "A pass over a partition, and its receipt",
    run_id=text(),
    kind=text("compaction"),
    topic=nullable(text()),
    partition=nullable(integer()),
    engine=text("local or spark"),
    started_ms=nullable(integer(_MS)),
    ended_ms=nullable(integer(_MS)),
    result=text("running, done, failed, skipped, abandoned"),
    reason=text(),
    before_bytes=nullable(integer()),
    after_bytes=nullable(integer()),
    removed=mapping(integer(), "records by reason: superseded, tombstone, aborted, marker, keyless, expired"),
    map_fill=nullable(number("share of the offset map that was used")),
    seconds=nullable(number()),
    workers=array(text()),
    airflow_run_id=nullable(text()),
    details=anything("more of the receipt: groups, segments, read_bytes, written_bytes, map_keys, dirty_ratio, …"),
)

RUNS = record(
    now_ms=integer(_MS),
    total=_total,
    runs=array(ref("Run"), "newest first"),
    next=nullable(text("give it as `position` for older ones; null: there are none")),
    summary=record(
        "all runs the filter chooses",
        results=mapping(integer()),
        removed=mapping(integer()),
        before_bytes=integer(),
        after_bytes=integer(),
    ),
    forgotten=record(
        "runs whose receipts were summed up since, of all topics",
        results=mapping(integer()),
        removed=mapping(integer()),
        read_bytes=integer(),
        written_bytes=integer(),
    ),
)

ESTIMATE = record(
    before_bytes=integer(),
    after_bytes=integer(),
    records=integer(),
    removed=mapping(integer(), "records by reason"),
    keys=integer(),
    map_full=boolean("the offset map is too small for one pass"),
    rough=boolean("only a part was read"),
)

WHAT_IF = record(
    "What would be due with other settings. `now` is what is due with those in force.",
    now_ms=integer(_MS),
    config=mapping(text(), "the settings that were tried"),
    total=_total,
    left_off=integer("due partitions for which nothing was read: the limit of work was reached"),
    now=ref("WhatIfTotals"),
    then=ref("WhatIfTotals"),
    partitions=array(
        record(
            topic=_topic,
            partition=_partition,
            due=boolean("with the settings tried"),
            due_now=boolean("with those in force"),
            state=one_of(*STATES),
            state_now=one_of(*STATES),
            why=text(),
            dirty_ratio=number(),
            size_bytes=integer(),
            dirty_bytes=integer(),
            read_bytes=integer(),
            extra_bytes=integer("free space a pass needs beside what is there"),
            groups=integer(),
            segments_after=nullable(integer("about so many segments by segment.bytes; null: not due")),
            estimate=nullable(ref("Estimate")),
        ),
        "due ones first",
    ),
)

WHAT_IF_TOTALS = record(
    due=integer("partitions"),
    read_bytes=integer(),
    extra_bytes=integer("of the partition that needs most"),
    saved_bytes=nullable(integer("of those that were estimated; null: none was")),
)

HORIZONS = record(
    "What happens on which day, by time alone",
    now_ms=integer(_MS),
    from_ms=integer(_MS),
    to_ms=integer(_MS),
    utc_offset_minutes=integer(),
    days=array(
        record(
            day=text("YYYY-MM-DD"),
            counts=record(**{name: integer() for name in EVENTS}),
        ),
        "days on which something happens",
    ),
    total=_total,
    events=array(
        record(
            time_ms=integer(_MS),
            kind=one_of(*EVENTS),
            topic=_topic,
            partition=_partition,
            what=text("one sentence"),
        ),
        "soonest first, at most `limit`",
    ),
)

_TIMING = record("milliseconds", last=nullable(integer()), p50=nullable(integer()), p95=nullable(integer()))

APP = record(
    "What one app committed, over the commits that were looked at",
    app_id=nullable(text("null: written by no query, as `duramen produce` does")),
    topics=array(text()),
    commits=integer(),
    rows=integer(),
    bytes=nullable(integer("null: the ledger of a bucket does not say")),
    dead_letters=integer("rows that went to a dead-letter topic"),
    replays=integer("batches that came again and were not written again"),
    void=integer("plans whose outcome was unknown; they hold no data"),
    last_batch_id=nullable(integer()),
    last_committed_ms=integer(_MS),
    first_committed_ms=integer("of the commits looked at"),
    commits_per_minute=nullable(number()),
    rows_per_second=nullable(number()),
    bytes_per_second=nullable(number()),
    timings=record(encode=_TIMING, plan=_TIMING, commit=_TIMING, append=_TIMING),
    series=array(
        record(time_ms=integer(_MS), commits=integer(), rows=integer(), bytes=integer(), dead_letters=integer()),
        "the same by time, up to 60 steps of equal length",
    ),
)

APPS = record(
    now_ms=integer(_MS),
    from_ms=integer("the moment from which commits were looked at"),
    step_ms=integer("of the series"),
    complete=boolean("false: there are more commits in that time than are looked at"),
    apps=array(ref("App"), "the one that committed last comes first"),
)

COMMIT = record(
    version=integer("of the ledger"),
    topic=text(),
    sequence=integer("the topic's"),
    app_id=nullable(text()),
    batch_id=nullable(integer()),
    query_id=nullable(text()),
    committed_ms=integer(_MS),
    rows=integer(),
    bytes=nullable(integer("null: the ledger of a bucket does not say")),
    dead_letters=integer(),
    void=boolean(),
    engine=text(),
    encode_ms=nullable(integer()),
    plan_ms=nullable(integer()),
    commit_ms=nullable(integer("null where nobody knows it any more")),
    append_ms=nullable(integer("likewise")),
    workers=array(text()),
)

COMMITS = record(
    now_ms=integer(_MS),
    commits=array(ref("Commit"), "newest first"),
    next=nullable(text("give it as `position` for older ones")),
)

BYTES = record(
    "Bytes of a record, made readable. `text` never holds anything that JSON cannot carry.",
    format=one_of("text", "json", "hex", "long", "avro", "protobuf", doc="what `text` is"),
    text=text(),
    length=integer("of the whole, in bytes"),
    cut=boolean("whether `text` shows only the first `shown` bytes"),
    shown=integer("bytes"),
    error=nullable(text("why the format asked for did not do; `text` is hex or text then")),
)

MESSAGE = record(
    partition=_partition,
    offset=integer(),
    timestamp_ms=nullable(integer(_MS)),
    timestamp_type=one_of("CreateTime", "LogAppendTime"),
    key=nullable(ref("Bytes")),
    value=nullable(ref("Bytes")),
    tombstone=boolean("a key without a value: it deletes the key"),
    headers=array(record(name=text("what is not UTF-8 is replaced"), value=nullable(ref("Bytes")))),
    headers_left_off=integer("headers not shown"),
    size_bytes=integer("key, value and headers"),
)

MESSAGES = record(
    now_ms=integer(_MS),
    topic=_topic,
    partition=nullable(integer("null: all partitions were searched for the key")),
    log_start_offset=nullable(integer("of that partition")),
    log_end_offset=nullable(integer("of that partition: where a reader stops")),
    messages=array(ref("Message"), "in the order of their offsets, or newest first with direction=backward"),
    next=nullable(text("give it as `position` to go on; null: there is nothing more")),
    complete=boolean("false: the limit of work was reached; `next` goes on where this ended"),
    scanned_bytes=integer("bytes of records that were looked at"),
)

ERASURE = record(
    "Every place in the store that may hold a key",
    now_ms=integer(_MS),
    topic=_topic,
    key=ref("Bytes"),
    erased=boolean("nothing holds it"),
    places=array(
        record(
            kind=one_of("segment", "deleted", "leftover", "staging", "run", "quarantine"),
            file=text("below the store"),
            partition=nullable(integer()),
            records=integer(),
            first_offset=nullable(integer()),
            last_offset=nullable(integer()),
            holds=text(),
            goes=text("when it goes, in words"),
            goes_ms=nullable(integer("the earliest moment, where that is known")),
            unreadable=boolean(),
        )
    ),
    gone_ms=nullable(integer("when the last of them can be gone; null: not known, or nothing is left")),
    removed_by=nullable(ref("Run")),
    log_starts=mapping(integer(), "by partition: offsets below this went by retention or delete-records"),
    scanned_bytes=integer(),
    note=text("what is not seen: copies outside of the store"),
)

SETTING = record(
    name=text(),
    scope=text("topic or broker"),
    type=text(),
    valid=text(),
    default=text(),
    value=text("the value in force"),
    source=text("default, store or topic"),
    source_name=text("the name it was given by"),
    shadowed=array(text(), "what it overrules"),
    broker_names=array(text()),
    no_effect=text("why the setting does nothing here; empty: it acts"),
    doc=text(),
)

SETTINGS = record(topic=nullable(text()), store_file=text(), settings=array(ref("Setting")))

DRY_RUN = record(
    "What an action would do. Send the same request with `digest` to do it; it can be used once.",
    action=one_of(*ACTIONS),
    dry_run=boolean(),
    digest=text(),
    expires_ms=integer("the digest is good until then"),
    summary=text("one sentence"),
    changes=boolean("false: there is nothing to do"),
    effects=array(
        record(
            topic=_topic,
            partition=nullable(integer()),
            what=text("one sentence"),
            bytes=nullable(integer("to read, or to be deleted")),
            extra_bytes=nullable(integer("free space it needs meanwhile")),
        ),
        "at most 1000",
    ),
    left_off=integer("effects not listed"),
)

STARTED = record(
    "The action was begun, or done",
    action_id=text(),
    action=one_of(*ACTIONS),
    dry_run=boolean(),
)

ACTION = record(
    "An action since the console was started",
    action_id=text(),
    action=one_of(*ACTIONS),
    topic=nullable(text()),
    partitions=nullable(array(integer())),
    state=one_of("running", "done", "failed"),
    started_ms=integer(_MS),
    ended_ms=nullable(integer(_MS)),
    summary=text("what is being done, or was"),
    problems=array(text()),
    done=integer("partitions ended so far"),
    total=integer("partitions to go through"),
)

ACTIONS_LIST = record(now_ms=integer(_MS), actions=array(ref("Action"), "newest first, at most 50"))

TOKEN = record(valid=boolean())

DOCUMENTS: dict[str, Schema] = {
    "Error": ERROR,
    "Job": JOB,
    "Running": RUNNING,
    "Finding": FINDING,
    "Point": POINT,
    "Store": STORE,
    "Topic": TOPIC,
    "Topics": TOPICS,
    "Why": WHY,
    "Explained": EXPLAINED,
    "PartitionFigures": PARTITION_FIGURES,
    "TopicPage": TOPIC_PAGE,
    "Segment": SEGMENT,
    "Partition": PARTITION,
    "History": HISTORY,
    "Run": RUN,
    "Runs": RUNS,
    "Estimate": ESTIMATE,
    "WhatIf": WHAT_IF,
    "WhatIfTotals": WHAT_IF_TOTALS,
    "Horizons": HORIZONS,
    "App": APP,
    "Apps": APPS,
    "Commit": COMMIT,
    "Commits": COMMITS,
    "Bytes": BYTES,
    "Message": MESSAGE,
    "Messages": MESSAGES,
    "Erasure": ERASURE,
    "Setting": SETTING,
    "Settings": SETTINGS,
    "DryRun": DRY_RUN,
    "Started": STARTED,
    "Action": ACTION,
    "Actions": ACTIONS_LIST,
    "Token": TOKEN,
}
