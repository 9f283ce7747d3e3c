"""Wrong uses of the command, each with the full text it answers: what was wrong, where, and what to do.

Read the messages as a new user would. `PLACE` stands for the folder of the test.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from duramen.cli import run
from logstore.records.record import Record
from logstore.store import LogStore

FILES = {
    "file": b"hello\n",
    "other/x": b"",
    "no-value.jsonl": b'{"key": "a", "value": "b"}\n{"key": "a"}\n',
    "no-json.jsonl": b'{"key": "a", "value": "b"}\nhello\n',
    "no-key.jsonl": b'\n\n{"key": "a", "value": "b"}\n{"value": "b"}\n',
    "partition.jsonl": b'{"key": "a", "value": "b", "partition": 7}\n',
    "timestamp.jsonl": b'{"key": "a", "value": "b", "timestamp": -5}\n',
    "base64.jsonl": b'{"key": "a", "value": "%%"}\n',
    "binary.jsonl": b"\xff\xfe\n",
    "headers.jsonl": b'{"key": "a", "value": "b", "headers": {"a": 1}}\n',
    "bad.toml": b"x = = 1\n",
    "typo.toml": b'"segmnt.bytes" = 5\n',
    "notes.log": b"these are notes\n",
}


@pytest.fixture(scope="module", autouse=True)
def place() -> Iterator[str]:
    """A store with topics, and everything that is none."""
    with tempfile.TemporaryDirectory(prefix="duramen-wrong-") as name:
        before = os.getcwd()
        os.chdir(name)
        for path, data in FILES.items():
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).write_bytes(data)
        Path("empty").mkdir()
        with LogStore("newer", create=True):
            Path("newer/version").write_text("9\n")
        with LogStore("store", create=True) as store:
            store.create_topic("orders", partitions=2, configs={"cleanup.policy": "compact"})
            store.create_topic("events")
            store.append("orders", [Record(b"k", b"v")])
            store.append("events", [Record(b"k", b"\xff\xfe")])
        yield os.path.realpath(name)
        os.chdir(before)


#: the command line, its exit code, and all it says on stderr
WRONG = [
    (
        "topics list",
        2,
        (
            "error: no store given: use --store DIR or --store URL before the command, or set DURAMEN_STORE. "
            "`duramen topics list --help` explains it.\n"
        ),
    ),
    (
        "--store nowhere topics list",
        1,
        (
            "error: no store here (file PLACE/nowhere). There is no such directory. Check the path, or make "
            "a store with `duramen topics create`.\n"
        ),
    ),
    (
        "--store file topics list",
        1,
        ("error: no store here: this is a file, and a store is a directory (file PLACE/file). Check the path.\n"),
    ),
    (
        "--store file topics create t",
        1,
        ("error: no store here: this is a file, and a store is a directory (file PLACE/file). Check the path.\n"),
    ),
    (
        "--store empty topics list",
        1,
        (
            "error: no store here (file PLACE/empty). The directory exists, but is not a store. Check the "
            "path, or make a store with `duramen topics create`.\n"
        ),
    ),
    (
        "--store other topics create t",
        1,
        ("error: the directory holds other things (x) (file PLACE/other). Give a new directory.\n"),
    ),
    (
        "--store newer topics list",
        1,
        (
            "error: the store has format version 9, this release knows 1 (file PLACE/newer/version). Install "
            "the release that wrote it, or a newer one.\n"
        ),
    ),
    (
        "frobnicate",
        2,
        ("error: No such command 'frobnicate'. `duramen --help` explains it.\n"),
    ),
    (
        "--store store topics creat t",
        2,
        ("error: No such command 'creat'. Did you mean 'create'? `duramen topics --help` explains it.\n"),
    ),
    (
        "--store store topics create",
        2,
        ("error: Missing argument 'NAME'. `duramen topics create --help` explains it.\n"),
    ),
    (
        "--store store topics create a/b",
        2,
        ("error: topic name 'a/b' has a character outside a-z A-Z 0-9 . _ -. Choose another name.\n"),
    ),
    (
        "--store store topics create orders",
        1,
        (
            "error: there is a topic orders already. `duramen topics describe` shows it, `duramen topics "
            "alter` changes it.\n"
        ),
    ),
    (
        "--store store topics create t --partitions 0",
        2,
        (
            "error: Invalid value for '--partitions': 0 is too small; the least is 1. `duramen topics create "
            "--help` explains it.\n"
        ),
    ),
    (
        "--store store topics create t --partitions many",
        2,
        (
            "error: Invalid value for '--partitions': 'many' is not a whole number. `duramen topics create "
            "--help` explains it.\n"
        ),
    ),
    (
        "--store store topics create t --config segmnt.bytes=1",
        2,
        ("error: no topic setting is called 'segmnt.bytes'. Did you mean segment.bytes?\n"),
    ),
    (
        "--store store topics create t --config segment.bytes=big",
        2,
        (
            "error: segment.bytes = 'big' is not a whole number of 32 bits, nor one with a unit (b, k, kb, "
            "kib, m, mb, mib, g, gb, gib, t, tb, tib).\n"
        ),
    ),
    (
        "--store store topics create t --config segment.bytes=1",
        2,
        ("error: segment.bytes = '1' is out of range; expected >= 14.\n"),
    ),
    (
        "--store store topics create t --config cleanup.policy=shred",
        2,
        ("error: cleanup.policy has 'shred'; expected a list of compact, delete; may be empty.\n"),
    ),
    (
        "--store store topics create t --config segment.bytes",
        2,
        ("error: --config takes name=value, not 'segment.bytes'. `duramen topics create --help` explains it.\n"),
    ),
    (
        "--store store topics create t --config-file missing.toml",
        2,
        ("error: cannot read the settings file: No such file or directory (file missing.toml).\n"),
    ),
    (
        "--store store topics create t --config-file bad.toml",
        2,
        ("error: malformed TOML on line 1: Invalid value (file bad.toml).\n"),
    ),
    (
        "--store store topics create t --config-file typo.toml",
        2,
        ("error: no topic setting is called 'segmnt.bytes' (file typo.toml). Did you mean segment.bytes?\n"),
    ),
    (
        "--store store topics alter orders",
        2,
        (
            "error: nothing to alter: give --config, --config-file, --unset, --partitions or --defaults. "
            "`duramen topics alter --help` explains it.\n"
        ),
    ),
    (
        "--store store topics alter orders --partitions 1",
        2,
        ("error: topic orders has 2 partitions; their number can only grow.\n"),
    ),
    (
        "--store store topics delete orders",
        2,
        (
            "error: Delete orders, 2 partitions and all their records? Not a terminal; pass --yes to "
            "confirm, or look first with --dry-run. `duramen topics delete --help` explains it.\n"
        ),
    ),
    (
        "--store store topics describe order",
        1,
        ("error: no topic is called order. Did you mean orders?\n"),
    ),
    (
        "--store store produce order no-value.jsonl",
        1,
        ("error: no topic is called order. Did you mean orders?\n"),
    ),
    (
        "--store store produce orders missing.jsonl",
        1,
        ("error: No such file or directory (file missing.jsonl). Check the path.\n"),
    ),
    (
        "--store store produce orders no-value.jsonl",
        2,
        (
            "error: line 2: there is no value (null is a tombstone) (file no-value.jsonl). No line of "
            "no-value.jsonl is appended.\n"
        ),
    ),
    (
        "--store store produce orders no-json.jsonl",
        2,
        (
            "error: line 2: not a JSON object (Expecting value at column 1) (file no-json.jsonl). No line of "
            "no-json.jsonl is appended.\n"
        ),
    ),
    (
        "--store store produce orders no-key.jsonl",
        1,
        (
            "error: line 4 has no key; a compacted topic needs a key in every record (partition orders). No "
            "line of no-key.jsonl is appended.\n"
        ),
    ),
    (
        "--store store produce orders partition.jsonl",
        1,
        (
            "error: line 1 asks for partition 7; the topic has 2. Partitions are counted from 0; leave it "
            "out to go by the key. No line of partition.jsonl is appended.\n"
        ),
    ),
    (
        "--store store produce orders timestamp.jsonl",
        1,
        (
            "error: line 1 has the timestamp -5; a timestamp is at least 0 (partition orders). Leave it null "
            "for the time of encoding. No line of timestamp.jsonl is appended.\n"
        ),
    ),
    (
        "--store store produce orders base64.jsonl --encoding base64",
        2,
        (
            "error: line 1: a key or value is not base64; --encoding utf8 takes text as it is (file "
            "base64.jsonl). No line of base64.jsonl is appended.\n"
        ),
    ),
    (
        "--store store produce orders binary.jsonl",
        2,
        ("error: line 1: not UTF-8 (file binary.jsonl). No line of binary.jsonl is appended.\n"),
    ),
    (
        "--store store produce orders headers.jsonl",
        2,
        (
            'error: line 1: headers are a list of pairs: [["name", "value"], …] (file headers.jsonl). No '
            "line of headers.jsonl is appended.\n"
        ),
    ),
    (
        "--store store produce orders no-value.jsonl --compression brotli",
        2,
        (
            "error: --compression is 'brotli'; use none, gzip, snappy, lz4 or zstd. `duramen produce --help` "
            "explains it.\n"
        ),
    ),
    (
        "--store store produce orders no-value.jsonl --app-id a --from-line 2",
        2,
        (
            "error: --app-id and --from-line exclude each other: the app id knows from which line to go on. "
            "`duramen produce --help` explains it.\n"
        ),
    ),
    (
        "--store store produce orders empty",
        1,
        ("error: Is a directory (file empty). A file is needed here.\n"),
    ),
    (
        "--store store consume orders --from-offset 99",
        2,
        (
            "error: an offset means something in one partition only: give one topic, and --partition too. "
            "`duramen consume --help` explains it.\n"
        ),
    ),
    (
        "--store store consume orders --from-offset 99 --partition 0",
        1,
        (
            "error: position 99 is beyond the log end 1 (partition orders-0, offset 99). `duramen offsets` "
            "shows where partitions begin and end.\n"
        ),
    ),
    (
        "--store store consume orders --partition 7",
        1,
        ("error: topic orders has partitions 0 to 1 (partition orders-7).\n"),
    ),
    (
        "--store store consume orders --from-offset last",
        2,
        (
            "error: --from-offset takes a number, earliest or latest, not 'last'. `duramen consume --help` "
            "explains it.\n"
        ),
    ),
    (
        "--store store consume events",
        1,
        ("error: the value is not UTF-8 (offset 0). Use --encoding base64.\n"),
    ),
    (
        "--store store consume orders --format json",
        2,
        (
            "error: --format 'json' shows nothing of a record; there are %t topic, %p partition, %o offset, %k key, "
            "%s value, %T timestamp, %h headers, %K and %S lengths. Without it, records are JSON. `duramen consume "
            "--help` explains it.\n"
        ),
    ),
    (
        "--store store consume orders --encoding hex",
        2,
        (
            "error: Invalid value for '--encoding': 'hex' is not one of 'utf8', 'base64'. `duramen consume "
            "--help` explains it.\n"
        ),
    ),
    (
        "--store store consume",
        2,
        ("error: Missing argument 'TOPIC...'. `duramen consume --help` explains it.\n"),
    ),
    (
        "--store store offsets orders --timestamp yesterday",
        2,
        (
            "error: --timestamp takes earliest, latest, max-timestamp or a time: 'yesterday' is not a time; write "
            "milliseconds, ISO 8601 (2026-11-01T10:00Z) or how long ago (-90s, -15m, -1h, -7d). "
            "`duramen offsets --help` explains it.\n"
        ),
    ),
    (
        "--store store offsets orders --partition 9",
        1,
        ("error: topic orders has partitions 0 to 1 (partition orders-9).\n"),
    ),
    (
        "--store store get orders nokey",
        1,
        ("nokey has no value in orders\n"),
    ),
    (
        "--store store get orders",
        2,
        ("error: Missing argument 'KEY'. `duramen get --help` explains it.\n"),
    ),
    (
        "--store store get orders %% --encoding base64",
        2,
        ("error: KEY is not base64: Only base64 data is allowed. `duramen get --help` explains it.\n"),
    ),
    (
        "--store store restore orders --as-of-offsets 5",
        2,
        ('error: --as-of-offsets is not JSON of the form {"0": 23, "1": 42}. `duramen restore --help` explains it.\n'),
    ),
    (
        "--store store restore orders --as-of-offsets '{\"0\":1}'",
        2,
        ("error: --as-of-offsets lacks partition 1; topic orders has partitions 0 to 1.\n"),
    ),
    (
        '--store store restore orders --as-of-offsets \'{"0":99,"1":0}\'',
        1,
        (
            "error: --as-of-offsets asks for 99, the log ends at 1 (partition orders-0, offset 99). `duramen "
            "offsets` shows where partitions begin and end.\n"
        ),
    ),
    (
        '--store store restore orders --as-of-offsets \'{"0":1,"1":0}\' --as-of-timestamp 5',
        2,
        ("error: --as-of-offsets and --as-of-timestamp exclude each other. `duramen restore --help` explains it.\n"),
    ),
    (
        "--store store restore orders --format parquet",
        2,
        ("error: Parquet is not for standard output: give --output-file FILE. `duramen restore --help` explains it.\n"),
    ),
    (
        "--store store restore orders --output-file nowhere/x",
        2,
        ("error: --output-file nowhere/x: there is no directory nowhere. `duramen restore --help` explains it.\n"),
    ),
    (
        "dump notes.log",
        2,
        (
            "error: notes.log is not a file of a log: those have names such as 00000000000000000000.log. To "
            "see the records of a topic, use `duramen consume`. `duramen dump --help` explains it.\n"
        ),
    ),
    (
        "dump missing.log",
        1,
        ("error: No such file or directory (file missing.log). Check the path.\n"),
    ),
    (
        "dump empty",
        2,
        ("error: no file of a log was given, and the folders given hold none. `duramen dump --help` explains it.\n"),
    ),
    (
        "--store store dump orders",
        1,
        ("error: No such file or directory (file orders). Check the path.\n"),
    ),
    (
        "--store store compact events",
        2,
        ("error: there is no place for 'events' here. `duramen compact --help` explains it.\n"),
    ),
    (
        "--store store compact --engine flink",
        2,
        (
            "error: Invalid value for '--engine': 'flink' is not one of 'local', 'spark'. `duramen compact "
            "--help` explains it.\n"
        ),
    ),
    (
        "--store store explain order",
        1,
        ("error: no topic is called order. Did you mean orders?\n"),
    ),
    (
        "--store store delete-records orders",
        2,
        ("error: Missing option '--partition'. `duramen delete-records --help` explains it.\n"),
    ),
    (
        "--store store delete-records orders --partition 0 --before-offset 99 --yes",
        1,
        (
            "error: cannot delete up to 99: the high watermark is 1 (partition orders-0, offset 99). "
            "`duramen offsets` shows where partitions begin and end.\n"
        ),
    ),
    (
        "--store store delete-records orders --partition 0 --before-offset latest",
        2,
        (
            "error: Delete the records of orders-0 from 0 up to (not including) 1? Not a terminal; pass "
            "--yes to confirm, or look first with --dry-run. `duramen delete-records --help` explains it.\n"
        ),
    ),
    (
        "--store store retain order",
        1,
        ("error: no topic is called order. Did you mean orders?\n"),
    ),
    (
        "--store store import missing",
        1,
        ("error: there is no such directory (file PLACE/missing). Check the path.\n"),
    ),
    (
        "--store store import empty",
        1,
        ("error: there are no topic-N directories (file PLACE/empty). Give the directory that holds them.\n"),
    ),
    (
        "--store store import s3://bucket/store",
        2,
        (
            "error: s3://bucket/store is a URL; give the path of a file or directory on this machine. `duramen "
            "import --help` explains it.\n"
        ),
    ),
    (
        "--store store export s3://bucket/store",
        2,
        (
            "error: s3://bucket/store is a URL; give the path of a file or directory on this machine. `duramen "
            "export --help` explains it.\n"
        ),
    ),
    (
        "--store store report s3://bucket/report.html",
        2,
        (
            "error: s3://bucket/report.html is a URL; give the path of a file or directory on this machine. "
            "`duramen report --help` explains it.\n"
        ),
    ),
    (
        "--store store restore orders --output-file s3://bucket/x",
        2,
        (
            "error: s3://bucket/x is a URL; give the path of a file or directory on this machine. `duramen "
            "restore --help` explains it.\n"
        ),
    ),
    (
        "--store store export store",
        1,
        ("error: the target lies inside the store (file PLACE/store). Give a directory elsewhere.\n"),
    ),
    (
        "--store store export newer",
        1,
        ("error: the target is another store (file PLACE/newer). Give a directory elsewhere.\n"),
    ),
    (
        "--store store export file",
        1,
        ("error: the target is not a directory (file PLACE/file). Give a new directory.\n"),
    ),
    (
        "--store store backup other",
        1,
        ("error: the target is not empty (x) (file PLACE/other). Give a new directory.\n"),
    ),
    (
        "--store store backup store",
        1,
        ("error: the target lies inside the store (file PLACE/store). Give a directory elsewhere.\n"),
    ),
    (
        "--store store config segmnt.bytes",
        2,
        ("error: no setting is called 'segmnt.bytes'. Did you mean segment.bytes?\n"),
    ),
    (
        "--store store prove-erased orders",
        2,
        ("error: Missing argument 'KEY...'. `duramen prove-erased --help` explains it.\n"),
    ),
    (
        "--store store transactions abort orders",
        2,
        ("error: Missing option '--partition'. `duramen transactions abort --help` explains it.\n"),
    ),
    (
        "--store store schedule --interval compaction=soon",
        2,
        (
            "error: --interval compaction takes milliseconds, not 'soon'; 30s, 5m, 2h and 1d work, too. "
            "`duramen schedule --help` explains it.\n"
        ),
    ),
    (
        "--store store schedule --interval nothing=5",
        2,
        ("error: there is no job 'nothing'. The jobs are compaction, flush, ledger, retention.\n"),
    ),
    (
        "--output xml topics list",
        2,
        ("error: Invalid value for '--output': 'xml' is not one of 'text', 'json'. `duramen --help` explains it.\n"),
    ),
    (
        "--store s4://bucket/store topics list",
        2,
        ("error: no store has a URL that begins with s4://. Did you mean s3://bucket/store?\n"),
    ),
    (
        "--store hdfs://name/store topics list",
        2,
        (
            "error: no store has a URL that begins with hdfs://. Give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://CONTAINER/PREFIX, or the path of a directory.\n"
        ),
    ),
    (
        "--store s3:/bucket/store topics create x",
        2,
        ("error: no store has a URL that begins with s3:/. Did you mean s3://bucket/store?\n"),
    ),
    (
        "--store s3:bucket/store topics create x",
        2,
        ("error: no store has a URL that begins with s3:. Did you mean s3://bucket/store?\n"),
    ),
    (
        "--store file:///data/store topics create x",
        2,
        ("error: file:///data/store is a URL of a directory. Give its path: /data/store.\n"),
    ),
    (
        "--store s3://key:secret@bucket/store topics list",
        2,
        (
            "error: the URL of a store is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, without "
            "credentials or parameters. Give credentials, region, endpoint and account by the environment or as "
            "storage options.\n"
        ),
    ),
    (
        "--store az://container/store topics list",
        2,
        (
            "error: az://container/store cannot be opened: Generic MicrosoftAzure error: Account must be specified. "
            "Name the account: the storage option account_name, or AZURE_STORAGE_ACCOUNT_NAME.\n"
        ),
    ),
    (
        "--store memory://nothing/here topics list",
        1,
        (
            "error: memory://nothing/here is not a store: it has no duramen.json. Look at the URL, or create the store "
            "there (create=True; `duramen topics create`).\n"
        ),
    ),
    (
        "--store /proc/store topics create x",
        1,
        ("error: No such file or directory (file /proc/store). Check the path.\n"),
    ),
    (
        "--store store top --once --interval 0",
        2,
        ("error: Invalid value for '--interval': 0.0 is not between 0.1 and 3600. `duramen top --help` explains it.\n"),
    ),
    (
        "--store store set-aside",
        2,
        ("error: Missing argument 'TOPIC'. `duramen set-aside --help` explains it.\n"),
    ),
    (
        "--store store verify order",
        1,
        ("error: no topic is called order. Did you mean orders?\n"),
    ),
]


@pytest.mark.parametrize(("line", "code", "said"), WRONG, ids=[line for line, _, _ in WRONG])
def test_a_wrong_use_is_answered_with_what_where_and_what_to_do(
    line: str, code: int, said: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DURAMEN_STORE", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        found = run(shlex.split(line))
    assert (found, err.getvalue().replace(place, "PLACE")) == (code, said)


def test_there_are_more_than_thirty() -> None:
    assert len(WRONG) > 30
    assert all(code for _, code, _ in WRONG)


@pytest.mark.parametrize("command", ["verify", "retain", "recover"])
def test_a_partition_that_a_topic_in_a_bucket_lacks_is_an_error(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}/store"
    with LogStore(url, create=True) as store:
        store.create_topic("orders", partitions=2)
    monkeypatch.setenv("DURAMEN_STORE", url)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        assert run([command, "orders", "--partition", "9"]) == 1
    assert err.getvalue() == "error: topic orders has partitions 0 to 1 (partition orders-9).\n"


def test_an_endpoint_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        assert run(["--store", "s3://bucket/store", "topics", "list"]) == 2
    assert err.getvalue() == (
        "error: AWS_ENDPOINT_URL is 'localhost:9000', which is no URL. An endpoint is http://HOST:PORT or "
        "https://HOST.\n"
    )
