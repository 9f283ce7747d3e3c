"""The wheel in an environment of its own, outside the checkout: what is in it, and what works with it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

from logstore.records.processor import LEVELS
from package.build import ROOT
from package.conftest import Installed

FIRST_WRITE_S_MAX = 2.0

WRITE = """
import time
from duramen import LogStore
from duramen.logstore.records.record import Record
with LogStore({store!r}, create=True) as store:
    store.create_topic("orders")
    store.append("orders", [Record(b"key", b"value")] * 10)
print(time.process_time())
"""


def test_the_wheel_has_every_part_and_nothing_at_the_top_that_could_collide(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"duramen", "pyspark_duramen.py"}
    expected = {
        *(f"duramen/{name}/py.typed" for name in ("logstore", "streaming", "compaction_job")),
        "duramen/py.typed",
        "duramen/airflow_dags/duramen_compaction.py",
        *(f"duramen/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*") if path.is_file()),
        "duramen/logstore/records/compiled/kernels.json",
        *(
            f"duramen/logstore/records/compiled/{level.name}.so"
            for level in LEVELS
            if level.machine == platform.machine()
        ),
    }
    assert expected <= set(names)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{platform.machine()}.whl")


def test_no_module_of_the_wheel_imports_a_package_by_its_name_in_the_checkout(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    pattern = re.compile(r"^\s*(?:from|import) (?:logstore|streaming|compaction_job)\b", re.MULTILINE)
    strays = [
        name for name in archive.namelist() if name.endswith(".py") and pattern.search(archive.read(name).decode())
    ]
    assert strays == []


def test_the_sdist_has_what_a_build_needs(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "conf/duramen.toml", "airflow_dags/duramen_restore.py"} <= names
    assert {"pyspark_duramen.py", "logstore/records/compiler.py", "README.md", "LICENSE"} <= names


def test_the_base_install_needs_no_compiler_and_says_its_version(base: Installed) -> None:
    installed = base.run(base.python, "-m", "pip", "list", "--format=json")
    names = {each["name"].lower() for each in json.loads(installed.stdout)}
    assert not names & {"numba", "llvmlite", "pyspark", "pandas"}
    assert base.run(base.python, "-m", "pip", "check").returncode == 0
    version = next(each["version"] for each in json.loads(installed.stdout) if each["name"] == "duramen")
    assert base.script("import duramen; print(duramen.__version__)").strip() == version


def test_the_first_write_of_a_fresh_process_compiles_nothing(base: Installed) -> None:
    """Processor time: other suites run beside this one."""
    times = [float(base.script(WRITE.format(store=str(base.work / f"first-{n}")))) for n in range(2)]
    assert max(times) < FIRST_WRITE_S_MAX, times


def test_an_installation_that_cannot_be_written_and_no_home(base: Installed) -> None:
    """Read-only containers: the folders lose their write bits, and root the right to ignore them."""
    folders = [base.environment, *(path for path in base.environment.rglob("*") if path.is_dir())]
    modes = {folder: folder.stat().st_mode for folder in folders}
    lesser = ["setpriv", "--bounding-set=-dac_override,-fowner", "--"] if os.getuid() == 0 else []
    program = (
        "import os, sys\n"
        "try:\n"
        "    open(os.path.join(sys.prefix, 'probe'), 'w')\n"
        "except PermissionError:\n"
        "    pass\n"
        "else:\n"
        "    sys.exit('the installation can be written')\n"
    ) + WRITE.format(store=str(base.work / "read-only-installation"))
    try:
        for folder in folders:
            folder.chmod(0o555)
        done = base.run(*lesser, base.python, "-c", program, HOME="/proc/none", XDG_CACHE_HOME="/dev/null")
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < FIRST_WRITE_S_MAX


def test_every_command_helps(base: Installed) -> None:
    command = base.environment / "bin" / "duramen"
    listing = base.run(command, "--help").stdout
    names = re.findall(r"^  ([a-z][a-z-]+)", listing.split("Commands:")[-1], re.MULTILINE)
    assert {"produce", "compact", "restore", "verify"} <= set(names)
    for name in names:
        done = base.run(command, name, "--help")
        assert done.returncode == 0, (name, done.stderr)
        assert "Usage" in done.stdout


def test_a_stranger_called_streaming_is_left_alone(base: Installed, dist: Path) -> None:
    """mosaicml-streaming installs a top-level package `streaming`; both work beside each other."""
    target = base.work / "stranger"
    command = [base.python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, "mosaicml-streaming"]
    assert base.run(*command).returncode == 0
    assert (target / "streaming" / "__init__.py").exists()
    text = (
        "import importlib.util, sys\n"
        "from duramen import LogStore\n"
        "import duramen.streaming.options\n"
        f"assert importlib.util.find_spec('streaming').origin.startswith({str(target)!r})\n"
        "assert 'streaming' not in sys.modules\n"
    )
    base.script(text, PYTHONPATH=str(target))


def test_the_scheduler_serves_metrics(scheduled: Installed) -> None:
    store = str(scheduled.work / "scheduled")
    scheduled.script(WRITE.format(store=store))
    text = (
        "import urllib.request\n"
        "from duramen.compaction_job.scheduler import Scheduler\n"
        f"with Scheduler({store!r}, metrics_port=None) as daemon:\n"
        "    port = daemon.metrics_address[1]\n"
        "    print(urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics').read().decode())\n"
    )
    assert 'duramen_log_bytes{partition="0"' in scheduled.script(text)


def test_without_shipped_kernels_the_compiler_says_so_once_and_fills_its_cache(compiler: Installed) -> None:
    folder = Path(compiler.script("import duramen.logstore.records as r; print(r.__path__[0])").strip()) / "compiled"
    folder.rename(folder.with_name("elsewhere"))
    cache = str(compiler.work / "cache")
    told = []
    try:
        for number in range(2):
            program = WRITE.format(store=str(compiler.work / f"compiled-{number}"))
            done = compiler.run(compiler.python, "-c", program, DURAMEN_CACHE_DIR=cache)
            assert done.returncode == 0, done.stderr
            told.append(done.stderr.splitlines())
    finally:
        folder.with_name("elsewhere").rename(folder)
    assert told == [
        ["duramen: compiling the kernels for this processor; this takes about half a minute, once"],
        [],
    ]


# --- with Spark -------------------------------------------------------------------------------------------------------

SPARK = """
import json, sys
from pyspark.sql import SparkSession
from duramen import LogSink, LogStore, restore_into_delta, restore_state

store, with_delta = sys.argv[1], sys.argv[2:] == ["delta"]
builder = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", 2)
)
if with_delta:
    import delta

    builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension").config(
        "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    )
    spark = delta.configure_spark_with_delta_pip(builder).getOrCreate()
    restore_into_delta(spark, store=store, topic="stream", path=store + "-table")
    print("ANSWER " + json.dumps({"table": spark.read.format("delta").load(store + "-table").count()}))
    sys.exit()
with LogStore(store, create=True) as made:
    for name in ("batch", "stream"):
        made.create_topic(name, partitions=2, configs={"cleanup.policy": "compact"})
spark = builder.getOrCreate()
rows = spark.range(100).selectExpr("cast(id % 10 as string) key", "cast(id as string) value")
rows.write.format("duramen").mode("append").option("store", store).option("topic", "batch").save()
rows.write.parquet(store + "-rows")
stream = spark.readStream.schema(rows.schema).parquet(store + "-rows")
query = (
    stream.writeStream.foreachBatch(LogSink(store=store, topic="stream", app_id="app"))
    .option("checkpointLocation", store + "-checkpoint").trigger(availableNow=True).start()
)
query.awaitTermination()
read = spark.read.format("duramen").option("store", store).option("subscribe", "batch,stream").load()
counts = {row["topic"]: row["count"] for row in read.groupBy("topic").count().collect()}
print("ANSWER " + json.dumps({"counts": counts, "state": restore_state(spark, store=store, topic="stream").df.count()}))
"""


def answer_of(done: subprocess.CompletedProcess[str]) -> object:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(re.findall(r"^ANSWER (.*)$", done.stdout, re.MULTILINE)[0])


def test_batch_write_stream_source_and_restore(spark: Installed) -> None:
    done = spark.run(spark.python, "-c", SPARK, spark.work / "spark")
    assert answer_of(done) == {"counts": {"batch": 100, "stream": 100}, "state": 10}


def test_compaction_by_spark_submit(spark: Installed) -> None:
    store = str(spark.work / "submitted")
    spark.script(WRITE.format(store=store))
    command = spark.environment / "bin" / "duramen"
    spark.run(command, "--store", store, "topics", "alter", "orders", "--config", "cleanup.policy=compact")
    application = spark.run(spark.python, "-m", "duramen.job", "submit-file").stdout.strip()
    assert application.startswith(str(spark.environment))
    submit = spark.environment / "bin" / "spark-submit"
    done = spark.run(submit, "--master", "local[1]", application, "--store", store, "--force", "--roll-active")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    report = json.loads(done.stdout)
    assert [run["result"] for run in report["runs"]] == ["done"]
    answer = spark.run(command, "--store", store, "consume", "orders", "--from-offset", "earliest")
    assert len(answer.stdout.splitlines()) == 1


def test_the_dags_of_the_wheel_are_sound_python_and_name_modules_that_are_there(spark: Installed) -> None:
    """The airflow suite runs the same files in a real Airflow; here they are those of the wheel."""
    text = (
        "import importlib.resources\n"
        "folder = importlib.resources.files('duramen') / 'airflow_dags'\n"
        "for name in ('duramen_compaction.py', 'duramen_restore.py'):\n"
        "    compile((folder / name).read_text(), name, 'exec')\n"
    )
    spark.script(text)
    store = str(spark.work / "planned")
    spark.script(WRITE.format(store=store))
    for step in ("plan", "retain"):
        done = spark.run(spark.python, "-m", "duramen.job", step, "--store", store)
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


def test_the_demo_is_in_the_wheel(spark: Installed) -> None:
    done = spark.run(spark.python, "-m", "duramen.demo", "--help")
    assert done.returncode == 0, done.stderr


def test_restore_into_a_delta_table(delta: Installed, spark: Installed) -> None:
    done = delta.run(delta.python, "-c", SPARK, spark.work / "spark", "delta")
    assert answer_of(done) == {"table": 10}
