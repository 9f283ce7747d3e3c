"""A commit file of a ledger table: whether it is whole, and of which version it is.

A commit carries a checksum of its actions and its version: delta-rs writes neither.
"""

from __future__ import annotations

import json
import re
import zlib

_ADDED = re.compile(r"(\d{20})-[0-9a-f]{32}-[0-9a-f]{8}\.parquet\Z")
SEAL = "duramenSeal"
OF_VERSION = "duramenVersion"


def seal_of(adds: list[tuple[str, int]], removes: list[str], transactions: list[tuple[str, int]]) -> str:
    text = json.dumps([sorted(adds), sorted(removes), sorted(transactions)])
    return f"{zlib.crc32(text.encode()):08x}"


def is_whole(data: bytes) -> bool:
    """Whether a commit file holds all its actions; one without our seal only has to be readable."""
    try:
        # Not splitlines(): texts may hold U+0085 and other line ends that JSON does not escape.
        actions = [json.loads(line) for line in data.decode().split("\n") if line]
        found = {key: [action[key] for action in actions if key in action] for key in ("add", "remove", "txn")}
        seals = [action["commitInfo"].get(SEAL) for action in actions if "commitInfo" in action]
        adds = [(str(add["path"]), int(add["size"])) for add in found["add"]]
        removes = [str(remove["path"]) for remove in found["remove"]]
        transactions = [(str(txn["appId"]), int(txn["version"])) for txn in found["txn"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    if not actions:
        return False
    return not seals or seals[0] is None or seals[0] == seal_of(adds, removes, transactions)


def is_of_version(data: bytes, version: int) -> bool:
    """Whether a whole commit file can be the one of this version: it says so.

    One of an older release is known by its data file, which is named for the newest row: that is of the commit's own
    version, or older where the commit puts it in place of others.
    """
    actions = [json.loads(line) for line in data.decode().split("\n") if line]
    if any("metaData" in action for action in actions):  # the commit that makes the table; nothing changes it later
        return version == 0
    stated = [action["commitInfo"].get(OF_VERSION) for action in actions if "commitInfo" in action]
    if stated and stated[0] is not None:
        return bool(stated[0] == str(version))
    named = [int(found[1]) for action in actions if "add" in action and (found := _ADDED.match(action["add"]["path"]))]
    newest = max(named, default=version)
    return newest <= version if any("remove" in action for action in actions) else newest == version
