"""Settings: the table against Kafka's documented values, parsing, sources, files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.config import BrokerConfig, LogConfig, Source, resolve_broker, resolve_topic
from logstore.errors import InvalidConfig, UnknownConfig
from logstore.setting import format_value, parse_value
from logstore.settings import BROKER_SETTINGS, SETTINGS, STORE_FILE_NAMES, TOPIC_SETTINGS, topic_setting
from logstore.settings_file import dump_toml, load_toml, store_file_template

ROOT = Path(__file__).resolve().parents[2]
LONG_MAX = 9223372036854775807
HOUR = 3_600_000

# name, kind, default, minimum, maximum, choices, [(broker name, factor)]
TOPIC_ROWS = [
    ("segment.bytes", "int", 1073741824, 14, None, (), [("log.segment.bytes", 1)]),
    ("segment.ms", "long", 604800000, 1, None, (), [("log.roll.ms", 1), ("log.roll.hours", HOUR)]),
    ("segment.jitter.ms", "long", 0, 0, None, (), [("log.roll.jitter.ms", 1), ("log.roll.jitter.hours", HOUR)]),
    ("segment.index.bytes", "int", 10485760, 4, None, (), [("log.index.size.max.bytes", 1)]),
    ("index.interval.bytes", "int", 4096, 0, None, (), [("log.index.interval.bytes", 1)]),
    ("flush.messages", "long", LONG_MAX, 1, None, (), [("log.flush.interval.messages", 1)]),
    (
        "flush.ms",
        "long",
        LONG_MAX,
        0,
        None,
        (),
        [("log.flush.interval.ms", 1), ("log.flush.scheduler.interval.ms", 1)],
    ),
    (
        "retention.ms",
        "long",
        604800000,
        -1,
        None,
        (),
        [("log.retention.ms", 1), ("log.retention.minutes", 60000), ("log.retention.hours", HOUR)],
    ),
    ("retention.bytes", "long", -1, None, None, (), [("log.retention.bytes", 1)]),
    (
        "cleanup.policy",
        "list",
        frozenset({"delete"}),
        None,
        None,
        ("compact", "delete"),
        [("log.cleanup.policy", 1)],
    ),
    ("delete.retention.ms", "long", 86400000, 0, None, (), [("log.cleaner.delete.retention.ms", 1)]),
    ("min.compaction.lag.ms", "long", 0, 0, None, (), [("log.cleaner.min.compaction.lag.ms", 1)]),
    ("max.compaction.lag.ms", "long", LONG_MAX, 1, None, (), [("log.cleaner.max.compaction.lag.ms", 1)]),
    ("min.cleanable.dirty.ratio", "double", 0.5, 0, 1, (), [("log.cleaner.min.cleanable.ratio", 1)]),
    ("max.message.bytes", "int", 1048588, 0, None, (), [("message.max.bytes", 1)]),
    (
        "message.timestamp.type",
        "string",
        "CreateTime",
        None,
        None,
        ("CreateTime", "LogAppendTime"),
        [("log.message.timestamp.type", 1)],
    ),
    ("message.timestamp.before.max.ms", "long", LONG_MAX, 0, None, (), [("log.message.timestamp.before.max.ms", 1)]),
    ("message.timestamp.after.max.ms", "long", 3600000, 0, None, (), [("log.message.timestamp.after.max.ms", 1)]),
    (
        "compression.type",
        "string",
        "producer",
        None,
        None,
        ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
        [("compression.type", 1)],
    ),
    ("compression.gzip.level", "int", -1, 1, 9, (), [("compression.gzip.level", 1)]),
    ("compression.lz4.level", "int", 9, 1, 17, (), [("compression.lz4.level", 1)]),
    ("compression.zstd.level", "int", 3, -131072, 22, (), [("compression.zstd.level", 1)]),
    ("file.delete.delay.ms", "long", 60000, 0, None, (), [("log.segment.delete.delay.ms", 1)]),
    ("preallocate", "boolean", False, None, None, (), [("log.preallocate", 1)]),
    ("duramen.compaction.paused", "boolean", False, None, None, (), [("duramen.compaction.paused", 1)]),
    (
        "duramen.compaction.order",
        "string",
        "offset",
        None,
        None,
        ("offset", "timestamp", "header"),
        [("duramen.compaction.order", 1)],
    ),
    (
        "duramen.compaction.version.header",
        "string",
        "version",
        None,
        None,
        (),
        [("duramen.compaction.version.header", 1)],
    ),
    ("duramen.compaction.merge.bytes", "int", 0, 0, None, (), [("duramen.compaction.merge.bytes", 1)]),
    (
        "duramen.compaction.recompress.type",
        "string",
        "producer",
        None,
        None,
        ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
        [("duramen.compaction.recompress.type", 1)],
    ),
    ("duramen.compaction.recompress.after.ms", "long", 0, 0, None, (), [("duramen.compaction.recompress.after.ms", 1)]),
    ("duramen.key.ttl.ms", "long", -1, 1, None, (), [("duramen.key.ttl.ms", 1)]),
]

# name, kind, default, minimum
BROKER_ROWS = [
    ("log.cleaner.enable", "boolean", True, None),
    ("log.cleaner.threads", "int", 1, 0),
    ("log.cleaner.dedupe.buffer.size", "long", 134217728, 0),
    ("log.cleaner.io.buffer.size", "int", 524288, 0),
    ("log.cleaner.io.buffer.load.factor", "double", 0.9, None),
    ("log.cleaner.io.max.bytes.per.second", "double", 1.7976931348623157e308, None),
    ("log.cleaner.backoff.ms", "long", 15000, 0),
    ("log.retention.check.interval.ms", "long", 300000, 1),
    ("log.flush.scheduler.interval.ms", "long", LONG_MAX, None),
    ("log.flush.offset.checkpoint.interval.ms", "int", 60000, 0),
    ("log.flush.start.offset.checkpoint.interval.ms", "int", 60000, 0),
    ("replica.high.watermark.checkpoint.interval.ms", "long", 5000, None),
    ("num.recovery.threads.per.data.dir", "int", 2, 1),
    ("producer.id.expiration.ms", "int", 86400000, 1),
    ("log.initial.task.delay.ms", "long", 30000, 0),
    ("duramen.cleaner.hash", "string", "siphash", None),
    ("duramen.cleaner.retry.ms", "long", 60000, 0),
]


def test_table_has_kafkas_topic_settings_and_ours() -> None:
    found = [
        (
            setting.name,
            setting.kind.value,
            setting.default,
            setting.minimum,
            setting.maximum,
            setting.choices,
            [(synonym.name, synonym.factor) for synonym in setting.synonyms],
        )
        for setting in TOPIC_SETTINGS.values()
    ]
    assert found == TOPIC_ROWS


def test_table_has_kafkas_broker_settings_and_ours() -> None:
    found = [(s.name, s.kind.value, s.default, s.minimum) for s in BROKER_SETTINGS.values()]
    assert found == BROKER_ROWS


def test_every_setting_is_documented_and_its_default_is_valid() -> None:
    for setting in SETTINGS:
        assert len(setting.doc) > 20, setting.name
        assert parse_value(setting, setting.default) == setting.default
        assert parse_value(setting, format_value(setting.default)) == setting.default


def test_log_config_without_arguments_is_the_defaults() -> None:
    config = LogConfig()
    assert {each.name: getattr(config, each.name) for each in fields(LogConfig)} == {
        row[0].replace(".", "_"): row[2] for row in TOPIC_ROWS
    }
    assert LogConfig.from_mapping() == config
    assert config.delete
    assert not config.compact


def test_broker_config_without_arguments_is_the_defaults() -> None:
    config = BrokerConfig()
    assert {each.name: getattr(config, each.name) for each in fields(BrokerConfig)} == {
        row[0].replace(".", "_"): row[2] for row in BROKER_ROWS
    }
    assert BrokerConfig.from_mapping() == config


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("segment.bytes", "14", 14),
        ("segment.bytes", 14, 14),
        ("segment.bytes", " 2147483647 ", 2147483647),
        ("retention.ms", "-1", -1),
        ("retention.bytes", "-5", -1),
        ("cleanup.policy", "compact,delete", frozenset({"compact", "delete"})),
        ("cleanup.policy", " delete , compact ", frozenset({"compact", "delete"})),
        ("cleanup.policy", ["compact"], frozenset({"compact"})),
        ("cleanup.policy", "", frozenset()),
        ("cleanup.policy", [], frozenset()),
        ("min.cleanable.dirty.ratio", "0", 0.0),
        ("min.cleanable.dirty.ratio", 1, 1.0),
        ("min.cleanable.dirty.ratio", "2.5e-1", 0.25),
        ("compression.gzip.level", "-1", -1),
        ("compression.gzip.level", 9, 9),
        ("compression.zstd.level", "-131072", -131072),
        ("preallocate", "TRUE", True),
        ("preallocate", False, False),
    ],
)
def test_values_in_kafkas_spelling_and_as_toml_natives(name: str, given: object, expected: object) -> None:
    value = parse_value(topic_setting(name), given)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("segment.bytes", "13", ">= 14"),
        ("segment.bytes", "2147483648", "32 bits"),
        ("segment.bytes", True, "whole number"),
        ("segment.bytes", 1.0, "whole number"),
        ("segment.bytes", "1_000", "whole number"),
        ("segment.bytes", "\uff11\uff14", "whole number"),
        ("segment.bytes", "9" * 5000, "whole number"),
        ("segment.ms", "0", ">= 1"),
        ("segment.ms", "9223372036854775808", "64 bits"),
        ("retention.ms", "-2", ">= -1"),
        ("cleanup.policy", "compact;delete", "compact, delete"),
        ("cleanup.policy", [1], "list"),
        ("cleanup.policy", 7, "list"),
        ("min.cleanable.dirty.ratio", "1.1", "0..1"),
        ("min.cleanable.dirty.ratio", "nan", "finite"),
        ("min.cleanable.dirty.ratio", float("inf"), "finite"),
        ("min.cleanable.dirty.ratio", 10**400, "finite"),
        ("message.timestamp.type", "createtime", "CreateTime, LogAppendTime"),
        ("compression.type", "brotli", "producer, uncompressed"),
        ("compression.gzip.level", "0", "1..9 or -1"),
        ("compression.lz4.level", "18", "1..17"),
        ("compression.zstd.level", "23", "-131072..22"),
        ("preallocate", "yes", "true or false"),
        ("preallocate", 1, "true or false"),
        ("max.message.bytes", None, "whole number"),
    ],
)
def test_refused_values_say_what_was_expected(name: str, given: object, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_value(topic_setting(name), given)
    assert name in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UnknownConfig, match=r"Did you mean retention\.ms\?"):
        LogConfig.from_mapping({"retention.msec": 1})
    with pytest.raises(UnknownConfig, match=r"Did you mean log\.cleaner\.threads\?"):
        BrokerConfig.from_mapping({"log.cleaner.thread": 1})
    with pytest.raises(UnknownConfig, match="duramen config"):
        LogConfig.from_mapping({"zzzzzzzzzzzzzzzzzzzzzz": 1})


def test_names_of_the_other_level_are_explained() -> None:
    with pytest.raises(UnknownConfig, match=r"On a topic it is retention\.ms"):
        LogConfig.from_mapping({"log.retention.hours": 1})
    with pytest.raises(UnknownConfig, match="a setting of the store"):
        LogConfig.from_mapping({"log.cleaner.threads": 1})
    with pytest.raises(UnknownConfig, match=r"Its default for the store is log\.retention\.ms"):
        BrokerConfig.from_mapping({"retention.ms": 1})


def test_ms_before_minutes_before_hours() -> None:
    everything = {"log.retention.hours": 3, "log.retention.minutes": "2", "log.retention.ms": 1}
    for name, expected in (
        ("log.retention.ms", 1),
        ("log.retention.minutes", 120_000),
        ("log.retention.hours", 3 * HOUR),
    ):
        found = resolve_topic(broker=everything)["retention.ms"]
        assert (found.value, found.source, found.source_name) == (expected, Source.STORE_FILE, name)
        assert found.shadowed == tuple(
            other
            for other in ("log.retention.ms", "log.retention.minutes", "log.retention.hours")
            if other in everything and other != name
        )
        del everything[name]
    assert resolve_topic(broker=everything)["retention.ms"].source is Source.DEFAULT
    assert LogConfig.from_mapping(broker={"log.roll.hours": 1}).segment_ms == HOUR
    assert LogConfig.from_mapping(broker={"log.roll.jitter.hours": 2}).segment_jitter_ms == 2 * HOUR
    assert LogConfig.from_mapping(broker={"log.retention.hours": -1}).retention_ms == -1


def test_hours_that_overflow_milliseconds_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="out of range"):
        LogConfig.from_mapping(broker={"log.retention.hours": LONG_MAX // 1000})


def test_topic_beats_store_file_beats_default() -> None:
    resolved = resolve_topic({"segment.bytes": "100"}, broker={"log.segment.bytes": 200, "log.index.interval.bytes": 5})
    assert (resolved["segment.bytes"].value, resolved["segment.bytes"].source) == (100, Source.TOPIC)
    assert resolved["segment.bytes"].shadowed == ("log.segment.bytes",)
    assert (resolved["index.interval.bytes"].value, resolved["index.interval.bytes"].source) == (5, Source.STORE_FILE)
    assert (resolved["segment.ms"].value, resolved["segment.ms"].source) == (604800000, Source.DEFAULT)
    assert set(resolved) == set(TOPIC_SETTINGS)


def test_flush_ms_falls_back_to_the_flushers_interval() -> None:
    assert LogConfig.from_mapping(broker={"log.flush.scheduler.interval.ms": 250}).flush_ms == 250
    assert BrokerConfig.from_mapping({"log.flush.scheduler.interval.ms": 250}).log_flush_scheduler_interval_ms == 250


def test_min_compaction_lag_above_max_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"min\.compaction\.lag\.ms = 5 is above max\.compaction\.lag\.ms = 4"):
        LogConfig.from_mapping({"min.compaction.lag.ms": 5, "max.compaction.lag.ms": 4})
    with pytest.raises(InvalidConfig, match=r"log\.cleaner\.max\.compaction\.lag\.ms = 4"):
        LogConfig.from_mapping({"min.compaction.lag.ms": 5}, broker={"log.cleaner.max.compaction.lag.ms": 4})
    assert LogConfig.from_mapping({"min.compaction.lag.ms": 4, "max.compaction.lag.ms": 4}).min_compaction_lag_ms == 4


def test_dedupe_buffer_must_give_each_thread_more_than_a_mebibyte() -> None:
    with pytest.raises(InvalidConfig, match="a thread"):
        BrokerConfig.from_mapping({"log.cleaner.threads": 128})
    assert BrokerConfig.from_mapping({"log.cleaner.threads": 127}).log_cleaner_threads == 127


def test_store_file_checks_topic_defaults_too() -> None:
    with pytest.raises(InvalidConfig, match=r"log\.segment\.bytes = 3"):
        resolve_broker({"log.segment.bytes": 3})
    with pytest.raises(InvalidConfig, match=r"log\.retention\.hours"):  # even where a stronger name hides it
        resolve_broker({"log.retention.ms": 5, "log.retention.hours": "soon"})


def test_shipped_store_file_is_made_from_the_table_and_changes_nothing() -> None:
    path = ROOT / "conf" / "duramen.toml"
    assert path.read_text() == store_file_template(), "write it anew with logstore.settings_file.store_file_template()"
    loaded = load_toml(str(path))
    assert LogConfig.from_mapping(broker=loaded) == LogConfig()
    assert BrokerConfig.from_mapping(loaded) == BrokerConfig()
    named = {setting.synonyms[0].name if setting.synonyms else setting.name for setting in SETTINGS}
    assert set(loaded) == named - {setting.name for setting in SETTINGS if setting.matters_when_set}
    for setting in SETTINGS:
        assert setting.doc.split(".")[0][:60] in path.read_text().replace("\n# ", " ")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("changelog", {"compact"}),
        ("events", {"delete"}),
        ("changelog-with-retention", {"compact", "delete"}),
    ],
)
def test_shipped_topic_templates(name: str, policy: set[str]) -> None:
    config = LogConfig.from_mapping(load_toml(str(ROOT / "conf" / "topics" / f"{name}.toml")))
    assert config.cleanup_policy == policy


def test_every_shipped_topic_template_loads() -> None:
    found = sorted((ROOT / "conf" / "topics").glob("*.toml"))
    assert len(found) >= 3
    for path in found:
        LogConfig.from_mapping(load_toml(str(path)))


def test_toml_tables_dotted_and_quoted_keys_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "duramen.toml"
    path.write_text('log.roll.ms = 1\n"log.roll.hours" = 2\n[log.cleaner]\nthreads = 3\nio.buffer.size = 4\n')
    assert load_toml(str(path)) == {
        "log.roll.ms": 1,
        "log.roll.hours": 2,
        "log.cleaner.threads": 3,
        "log.cleaner.io.buffer.size": 4,
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a = 1\nb = \n", "line 2"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"a = 1\n\xff = 2\n", "line 2 is not UTF-8"),
        (b"a = " + b"[" * 100_000, "malformed TOML"),
        (b"a = " + b"9" * 10_000 + b"\n", "malformed TOML"),
        (b'a.b = 1\n"a.b" = 2\n', "a.b is given twice"),
        (b"#" * (1 << 20) + b"#", "larger than the limit"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "duramen.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidConfig) as caught:
        load_toml(str(path))
    assert says in str(caught.value)
    assert caught.value.file == str(path)


def test_missing_file_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot read"):
        load_toml(str(tmp_path / "none.toml"))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_settings_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(content)
    try:
        loaded = load_toml(str(path))
        BrokerConfig.from_mapping(loaded)
    except (InvalidConfig, UnknownConfig):
        pass


_ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=30),
    st.lists(st.sampled_from(["compact", "delete", "x"]), max_size=3),
    st.integers().map(str),
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(TOPIC_SETTINGS)), _ANY, max_size=5))
def test_accepted_overrides_survive_kafkas_spelling(overrides: dict[str, object]) -> None:
    try:
        resolved = resolve_topic(overrides)
    except InvalidConfig:
        return
    spelled = {name: format_value(resolved[name].value) for name in overrides}
    assert LogConfig.from_mapping(spelled) == LogConfig.from_resolved(resolved)


def test_dumped_toml_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    values = {setting.name: setting.default for setting in TOPIC_SETTINGS.values()}
    path.write_text(dump_toml(values))
    assert LogConfig.from_mapping(load_toml(str(path))) == LogConfig()


def test_store_file_names_cover_the_table() -> None:
    expected = {name for row in TOPIC_ROWS for name, _ in row[6]} | {row[0] for row in BROKER_ROWS}
    assert set(STORE_FILE_NAMES) == expected


def test_importing_settings_loads_nothing_heavy() -> None:
    heavy = {"numpy", "pyarrow", "numba", "pydantic", "rich", "typer"}
    code = f"import sys, logstore.config; print(sorted({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
