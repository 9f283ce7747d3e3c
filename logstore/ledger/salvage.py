"""Reads a ledger table as it lies on disk, without delta-rs: what is damaged, and all that can still be read.

For `verify`, which changes nothing, and for the repair, which needs the rows of a table that no longer opens. Never
writes. An error of the system is passed on: it says nothing about a file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

from logstore.address_space import check_address_space
from logstore.files import FileSystem, read_whole
from logstore.forks import DELTA
from logstore.ledger.commit_file import is_of_version, is_whole
from logstore.ledger.data_file import DATA_FILE_BYTES_MAX, empty_table, parse_data, parse_parquet
from logstore.ledger.delta_log import CHECKPOINT_NAME, COMMIT_NAME, HINT_NAME, LOG_FILE_BYTES_MAX, LOG_FOLDER
from logstore.ledger.gate import Gate
from logstore.ledger.loaded_table import REBUILT, raise_system_error
from logstore.ledger.proof import is_as_proved, read_proofs


@dataclass(frozen=True, slots=True)
class Damage:
    what: str
    file: str
    #: a power cut may leave this; opening the table sets it aside, and nothing that was acknowledged is gone
    is_torn: bool = False


@dataclass(slots=True)
class Salvage:
    path: str
    damage: list[Damage] = field(default_factory=list)
    #: nothing of the table is there
    is_missing: bool = False
    #: every commit from the beginning, or from a checkpoint, to the newest one could be read
    is_chained: bool = True
    #: the newest version that any file tells of
    version: int = -1
    #: application transaction -> (the version by which it was so, its value)
    transactions: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: rows of files that a readable commit or checkpoint names
    named: pa.Table | None = None
    #: rows of other readable files: superseded ones, ones whose commit is lost, ones that never were committed
    others: pa.Table | None = None


@dataclass(slots=True)
class _Log:
    live: dict[str, int | None] = field(default_factory=dict)  # name -> rows, where the log tells
    named: set[str] = field(default_factory=set)


def salvage(fs: FileSystem, path: str, schema: pa.Schema, *, data: bool = True, others: bool = False) -> Salvage:
    """What is left of the table at `path`: its log, with `data` its rows, with `others` also those of files that the
    log does not name.
    """
    check_address_space()
    found = Salvage(path, named=empty_table(schema), others=empty_table(schema))
    gate = Gate(fs, path + ".gate")
    with gate.shared() if fs.exists(gate.path) else contextlib.nullcontext():
        if not fs.exists(path) and fs.exists(path + REBUILT):
            found.path = path + REBUILT  # its rebuild is complete but for the name
        log = _read_log(fs, found)
        if data:
            _read_live(fs, found, log, schema)
            if not found.damage:
                _check_loads(found, schema)
        if others and fs.exists(found.path):
            _read_others(fs, found, log, schema)
    return found


# --- the log ----------------------------------------------------------------------------------------------------------


def _read_log(fs: FileSystem, found: Salvage) -> _Log:
    folder, log = os.path.join(found.path, LOG_FOLDER), _Log()
    names = fs.listdir(folder) if fs.exists(folder) else []
    commits = sorted(int(match[1]) for name in names if (match := COMMIT_NAME.match(name)))
    checkpoints = sorted(int(match[1]) for name in names if (match := CHECKPOINT_NAME.match(name)))
    found.version = max([-1, *commits, *checkpoints])
    if not commits and not checkpoints:
        found.is_missing, found.is_chained = True, False
        found.damage.append(Damage("the table is missing", found.path))
        return log
    base, proofs = -1, read_proofs(fs, found.path)
    for version in reversed(checkpoints):
        path = os.path.join(folder, f"{version:020d}.checkpoint.parquet")
        data = _read(fs, path)
        actions = _checkpoint(data) if is_as_proved(proofs, version, data) else None
        if actions is not None:
            base = version
            _apply(found, log, version, actions)
            break
        found.damage.append(Damage("a checkpoint is damaged", path, is_torn=True))
    _check_hint(fs, found, os.path.join(folder, HINT_NAME), checkpoints)
    present = set(commits)
    if base >= max([0, *commits]):  # delta-rs commits to no version without the file of the one before
        path = _commit_path(folder, base)
        if base not in present or _commit(_read(fs, path), base) is None:
            state = "damaged" if base in present else "missing"
            found.damage.append(Damage(f"the commit file of the last checkpoint is {state}", path))
    for version in range(base + 1, max([base, *commits]) + 1):
        path = _commit_path(folder, version)
        if version not in present:
            found.is_chained = False
            found.damage.append(Damage("a commit file is missing", path))
            continue
        data = _read(fs, path)
        actions = _commit(data, version)
        if actions is not None:
            _apply(found, log, version, actions)
            continue
        is_torn = version == commits[-1] and version > 0 and not is_whole(data)
        found.is_chained = found.is_chained and is_torn
        found.damage.append(Damage("a commit file is damaged", path, is_torn=is_torn))
    if not found.is_chained:  # a torn checkpoint is damage if the commits it sums up are gone
        found.damage = [Damage(each.what, each.file) for each in found.damage]
    return log


def _commit_path(folder: str, version: int) -> str:
    return os.path.join(folder, f"{version:020d}.json")


def _check_hint(fs: FileSystem, found: Salvage, path: str, checkpoints: list[int]) -> None:
    try:
        version = json.loads(_read(fs, path))["version"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, RecursionError):
        version = None
    if version not in checkpoints:
        found.damage.append(Damage("the hint at the last checkpoint does not hold", path, is_torn=True))


def _commit(data: bytes, version: int) -> list[dict[str, Any]] | None:
    if not is_whole(data) or not is_of_version(data, version):
        return None
    return [json.loads(line) for line in data.decode().split("\n") if line]


def _checkpoint(data: bytes) -> list[dict[str, Any]] | None:
    try:
        table = parse_parquet(data)
        columns = [name for name in ("add", "txn") if name in table.column_names]
        rows = table.select(columns).to_pylist()
    except (ValueError, pa.ArrowInvalid):
        return None
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _apply(found: Salvage, log: _Log, version: int, actions: Iterable[dict[str, Any]]) -> None:
    for action in actions:
        if "add" in action:
            name = os.path.basename(str(action["add"]["path"]))
            log.live[name] = _row_count(action["add"].get("stats"))
            log.named.add(name)
        elif "remove" in action:
            log.live.pop(os.path.basename(str(action["remove"]["path"])), None)
        elif "txn" in action:
            found.transactions[str(action["txn"]["appId"])] = (version, int(action["txn"]["version"]))


def _row_count(stats: object) -> int | None:
    try:
        return int(json.loads(str(stats))["numRecords"])
    except (ValueError, KeyError, TypeError):
        return None


# --- the data ---------------------------------------------------------------------------------------------------------


def _read_live(fs: FileSystem, found: Salvage, log: _Log, schema: pa.Schema) -> None:
    tables = [empty_table(schema)]
    for name, count in sorted(log.live.items()):
        path = os.path.join(found.path, name)
        try:
            rows = _rows(fs, path, schema)
        except FileNotFoundError:
            found.damage.append(Damage("a data file is missing", path))
            continue
        if rows is None or (count is not None and rows.num_rows != count):
            found.damage.append(Damage("a data file is damaged", path))
            continue
        tables.append(rows)
    found.named = pa.concat_tables(tables)


def _check_loads(found: Salvage, schema: pa.Schema) -> None:
    """What the log says of itself (columns, protocol) has no checksum: it holds if delta-rs takes it."""
    DELTA.enter()
    try:
        columns = DeltaTable(found.path).schema().to_json()
    except (DeltaError, OSError) as error:
        raise_system_error(error)
        found.damage.append(Damage(f"delta-rs cannot load it: {error}", found.path))
        return
    if columns != Schema.from_arrow(schema).to_json():
        found.damage.append(Damage("the table has other columns than this release writes", found.path))


def _read_others(fs: FileSystem, found: Salvage, log: _Log, schema: pa.Schema) -> None:
    named, others = [found.named], [empty_table(schema)]
    for name in fs.listdir(found.path):
        if not name.endswith(".parquet") or name in log.live:
            continue
        with contextlib.suppress(FileNotFoundError):  # the data of a commit that lost its race goes at any time
            rows = _rows(fs, os.path.join(found.path, name), schema)
            if rows is not None:
                # A named file that is live no more was merged: its rows were committed all the same.
                (named if name in log.named else others).append(rows)
    found.named, found.others = pa.concat_tables(named), pa.concat_tables(others)


def _rows(fs: FileSystem, path: str, schema: pa.Schema) -> pa.Table | None:
    try:
        rows = parse_data(os.path.basename(path), _read(fs, path, DATA_FILE_BYTES_MAX))
        return rows.select(schema.names).cast(schema)
    except MemoryError:
        raise
    except (ValueError, KeyError, pa.ArrowException):
        return None


def _read(fs: FileSystem, path: str, limit: int = LOG_FILE_BYTES_MAX) -> bytes:
    return read_whole(fs, path, limit=limit)
