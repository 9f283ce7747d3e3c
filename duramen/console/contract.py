"""The API: every path, its parameters and its answers, in one table from which requests are checked and the OpenAPI
document is made. What is not in this table is not served.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duramen.console.documents import ACTIONS, DOCUMENTS, FORMATS, RANGES, RESULTS, STATES
from duramen.console.schema import (
    Schema,
    array,
    boolean,
    integer,
    nullable,
    number,
    one_of,
    record,
    ref,
    text,
    with_optional,
)
from logstore.limits import INT64_MAX

PREFIX = "/api/v1"
PAGE_DEFAULT, PAGE_MAX = 50, 1000
MESSAGES_DEFAULT, MESSAGES_MAX = 50, 500
VALUE_BYTES_DEFAULT, VALUE_BYTES_MAX = 2048, 1 << 20
KEY_CHARS_MAX = 8192
SEARCH_CHARS_MAX = 249
DAY_MS = 86_400_000
YEAR_MS = 366 * DAY_MS

TOPIC_SORTS = ("name", "size", "records", "keys", "tombstones", "dirty_ratio", "partitions", "segments", "last_record")
KEY_FORMATS = ("text", "hex", "long", "json")
#: of the path: nothing else is a topic's name
TOPIC_NAME = text(length_max=249, pattern=r"^[a-zA-Z0-9._\-]{1,249}$")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: Schema
    doc: str
    default: Any = None
    in_path: bool = False

    def as_openapi(self) -> dict[str, Any]:
        schema = self.schema if self.default is None else self.schema | {"default": self.default}
        return {
            "name": self.name,
            "in": "path" if self.in_path else "query",
            "required": self.in_path,
            "description": self.doc,
            "schema": schema,
        }


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    method: str
    path: str
    doc: str
    answer: str
    parameters: tuple[Parameter, ...] = ()
    #: of the body; None: there is none
    body: Schema | None = None
    needs_token: bool = False
    #: errors that can come of it, beside those that can come of every request
    errors: tuple[int, ...] = ()
    #: with `dry_run=false`
    done: str | None = None


def _in_path(name: str, schema: Schema, doc: str) -> Parameter:
    return Parameter(name, schema, doc, in_path=True)


_TOPIC = _in_path("topic", TOPIC_NAME, "the topic's name")
_PARTITION = _in_path("partition", integer(minimum=0, maximum=(1 << 31) - 1), "the partition's number")
_LIMIT = Parameter("limit", integer(minimum=1, maximum=PAGE_MAX), "how many at most", PAGE_DEFAULT)
_OFFSET = Parameter("offset", integer(minimum=0, maximum=1 << 31), "how many to leave out first", 0)
_ONE_TOPIC = Parameter("topic", TOPIC_NAME, "only this topic")
_ORDER = Parameter("order", one_of("asc", "desc"), "ascending or descending", "asc")
_POSITION = Parameter("position", text(length_max=512), "where to go on: `next` of the answer before")
_TIME = integer(minimum=0, maximum=INT64_MAX)
_KEY_FORMAT = Parameter("key_format", one_of(*KEY_FORMATS), "how `key` is written", "text")
_SHOWN = (
    Parameter("key_as", one_of(*FORMATS), "how keys are shown", "auto"),
    Parameter("value_as", one_of(*FORMATS), "how values and header values are shown", "auto"),
    Parameter(
        "value_bytes",
        integer(minimum=16, maximum=VALUE_BYTES_MAX),
        "keys, values and headers are cut behind so many bytes",
        VALUE_BYTES_DEFAULT,
    ),
)
_ISOLATION = Parameter(
    "isolation",
    one_of("read_uncommitted", "read_committed"),
    "read_committed leaves out aborted and open transactions",
    "read_uncommitted",
)

_DRY_RUN = Parameter("dry_run", boolean(), "say what would be done, and give the digest that doing it needs", True)
_DIGEST = nullable(text("of the dry run of the same action; needed without dry_run", length_max=128))
_ACTION_TOPIC = text(length_max=249)
_PARTITIONS = nullable(array(integer(minimum=0, maximum=(1 << 31) - 1), count_max=1000))


def _action(name: str, doc: str, body: Schema) -> Operation:
    return Operation(
        f"action_{name}",
        "POST",
        f"/actions/{name}",
        doc,
        "DryRun",
        (_DRY_RUN,),
        body,
        needs_token=True,
        errors=(404, 409, 415),
        done="Started",
    )


OPERATIONS: tuple[Operation, ...] = (
    Operation("store", "GET", "/store", "The header: store, health, space, jobs, passes under way.", "Store"),
    Operation(
        "topics",
        "GET",
        "/topics",
        "The topics, by page.",
        "Topics",
        (
            Parameter("search", text(length_max=SEARCH_CHARS_MAX), "a part of the name, in any case"),
            Parameter("state", one_of(*STATES), "only topics with a partition in this state"),
            Parameter("sort", one_of(*TOPIC_SORTS), "by what", "name"),
            _ORDER,
            _LIMIT,
            _OFFSET,
        ),
    ),
    Operation(
        "topic",
        "GET",
        "/topics/{topic}",
        "One topic and its partitions, by page.",
        "TopicPage",
        (_TOPIC, _LIMIT, _OFFSET),
        errors=(404,),
    ),
    Operation(
        "history",
        "GET",
        "/topics/{topic}/history",
        "How a topic grew.",
        "History",
        (_TOPIC, Parameter("range", one_of(*RANGES), "how far back", "3h")),
        errors=(404,),
    ),
    Operation(
        "partition",
        "GET",
        "/topics/{topic}/partitions/{partition}",
        "One partition: its segments, and why and when it is compacted.",
        "Partition",
        (_TOPIC, _PARTITION),
        errors=(404,),
    ),
    Operation(
        "explain",
        "GET",
        "/explain",
        "Why and when, for all partitions of compacted topics or of one topic, most urgent first.",
        "Explained",
        (_ONE_TOPIC, Parameter("state", one_of(*STATES), "only partitions in this state"), _LIMIT, _OFFSET),
        errors=(404,),
    ),
    Operation(
        "runs",
        "GET",
        "/runs",
        "Passes of compaction, newest first.",
        "Runs",
        (
            _ONE_TOPIC,
            Parameter("partition", integer(minimum=0, maximum=(1 << 31) - 1), "only this partition"),
            Parameter("result", one_of(*RESULTS), "only passes that ended like this"),
            Parameter("from_ms", _TIME, "started then or later"),
            Parameter("to_ms", _TIME, "started before"),
            _LIMIT,
            _POSITION,
        ),
    ),
    Operation(
        "run",
        "GET",
        "/runs/{run_id}",
        "One pass with its receipt.",
        "Run",
        (_in_path("run_id", text(length_max=4096), "the run's id"),),
        errors=(404,),
    ),
    Operation(
        "what_if",
        "GET",
        "/what-if",
        "What would be due, and what it would save, with other settings. Nothing is changed.",
        "WhatIf",
        (
            _ONE_TOPIC,
            Parameter("ratio", number(minimum=0, maximum=1), "min.cleanable.dirty.ratio"),
            Parameter("min_lag_ms", _TIME, "min.compaction.lag.ms"),
            Parameter("max_lag_ms", integer(minimum=1, maximum=INT64_MAX), "max.compaction.lag.ms"),
            Parameter("segment_bytes", integer(minimum=14, maximum=(1 << 31) - 1), "segment.bytes"),
            Parameter("estimate", boolean(), "read records to say what would be saved; slower", False),
            _LIMIT,
            _OFFSET,
        ),
        errors=(404,),
    ),
    Operation(
        "horizons",
        "GET",
        "/horizons",
        "Delete horizons, erasure deadlines and what else time alone brings, by day.",
        "Horizons",
        (
            _ONE_TOPIC,
            Parameter("from_ms", _TIME, "the first moment; now without it"),
            Parameter("to_ms", _TIME, "up to then; 90 days later without it"),
            Parameter("utc_offset_minutes", integer(minimum=-840, maximum=840), "whose days they are", 0),
            _LIMIT,
        ),
        errors=(404,),
    ),
    Operation(
        "apps",
        "GET",
        "/apps",
        "What each app commits: rate, rows, bytes, times.",
        "Apps",
        (
            Parameter(
                "range_ms", integer(minimum=1000, maximum=YEAR_MS), "how far back, from the newest commit", DAY_MS
            ),
        ),
    ),
    Operation(
        "commits",
        "GET",
        "/commits",
        "Commits, newest first.",
        "Commits",
        (
            Parameter("app", text(length_max=4096), "only this app_id"),
            _ONE_TOPIC,
            Parameter("limit", integer(minimum=1, maximum=200), "how many at most", PAGE_DEFAULT),
            _POSITION,
        ),
    ),
    Operation(
        "messages",
        "GET",
        "/topics/{topic}/messages",
        "Records by offset, time or key. Without any of them the newest of the partition.",
        "Messages",
        (
            _TOPIC,
            Parameter("partition", integer(minimum=0, maximum=(1 << 31) - 1), "by key: the key's partition without it"),
            Parameter("at_offset", integer(minimum=0, maximum=INT64_MAX), "begin at this offset, or the next there is"),
            Parameter("at_ms", _TIME, "begin at the first record of this time or later"),
            Parameter("key", text(length_max=KEY_CHARS_MAX), "only records with this key"),
            _KEY_FORMAT,
            Parameter("direction", one_of("forward", "backward"), "backward: from the end, newest first"),
            Parameter("limit", integer(minimum=1, maximum=MESSAGES_MAX), "how many at most", MESSAGES_DEFAULT),
            _POSITION,
            *_SHOWN,
            _ISOLATION,
        ),
        errors=(404,),
    ),
    Operation(
        "message",
        "GET",
        "/topics/{topic}/partitions/{partition}/messages/{message_offset}",
        "One record, with more of its value.",
        "Message",
        (
            _TOPIC,
            _PARTITION,
            _in_path("message_offset", integer(minimum=0, maximum=INT64_MAX), "its offset"),
            *_SHOWN,
        ),
        errors=(404,),
    ),
    Operation(
        "erasure",
        "GET",
        "/topics/{topic}/erasure",
        "Every place that may hold a key, until when, and the run that removed it. Reads the whole topic.",
        "Erasure",
        (_TOPIC, Parameter("key", text(length_max=KEY_CHARS_MAX), "the key; an empty one without it", ""), _KEY_FORMAT),
        errors=(404,),
    ),
    Operation(
        "settings",
        "GET",
        "/settings",
        "Every setting with its value, its source and its doc.",
        "Settings",
        (_ONE_TOPIC,),
        errors=(404,),
    ),
    Operation("actions", "GET", "/actions", "Actions since the console was started.", "Actions"),
    Operation("token", "GET", "/token", "Whether the token given is the right one.", "Token", needs_token=True),
    _action(
        "compact",
        "Compact what is due now; goes on in the background, see /actions.",
        with_optional(
            record(
                "All topics without `topic`.",
                topic=nullable(_ACTION_TOPIC),
                partitions=_PARTITIONS,
                force=boolean("ignore the dirty ratio"),
                roll_active=boolean("close active segments first"),
                digest=_DIGEST,
            ),
            "topic",
            "partitions",
            "force",
            "roll_active",
            "digest",
        ),
    ),
    _action(
        "pause",
        "Keep a topic from being compacted.",
        with_optional(record(topic=_ACTION_TOPIC, digest=_DIGEST), "digest"),
    ),
    _action(
        "resume",
        "Let a paused topic be compacted again.",
        with_optional(record(topic=_ACTION_TOPIC, digest=_DIGEST), "digest"),
    ),
    _action(
        "retain",
        "Delete segments that retention gives up; goes on in the background, see /actions.",
        with_optional(
            record("All topics without `topic`.", topic=nullable(_ACTION_TOPIC), digest=_DIGEST), "topic", "digest"
        ),
    ),
)

assert {f"action_{name}" for name in ACTIONS} <= {each.name for each in OPERATIONS}

_ERRORS = {
    400: "The request is not valid.",
    401: "The token is missing or wrong.",
    403: "The request comes from another site, or the store is read-only.",
    404: "There is no such thing.",
    405: "Not this method.",
    409: "The store changed, the digest is used up or unknown, or the store is busy.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The Host header names another host.",
    422: "It cannot be read because it is damaged, or would be too much work for one request.",
    429: "Too much at once; try again.",
    431: "The head of the request is too large.",
    500: "The system failed.",
}
#: every request may end so
_ALWAYS = (400, 401, 403, 405, 413, 421, 422, 429, 431, 500)


def _content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": ref(name)}}


def _described(operation: Operation) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": _content(operation.answer)}}
    if operation.done is not None:
        answers["202"] = {"description": "Begun, or done.", "content": _content(operation.done)}
    for status in sorted({*_ALWAYS, *operation.errors}):
        answers[str(status)] = {"description": _ERRORS[status], "content": _content("Error")}
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.doc,
        "parameters": [each.as_openapi() for each in operation.parameters],
        "responses": answers,
    }
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    if operation.needs_token:
        found["security"] = [{"token": []}]
    return found


@functools.lru_cache(maxsize=1)
def openapi(version: str) -> Mapping[str, Any]:
    """The OpenAPI 3.1 document of this table."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(PREFIX + operation.path, {})[operation.method.lower()] = _described(operation)
    paths[f"{PREFIX}/openapi.json"] = {
        "get": {
            "operationId": "openapi",
            "summary": "This document.",
            "parameters": [],
            "responses": {
                "200": {"description": "OpenAPI 3.1.", "content": {"application/json": {"schema": {"type": "object"}}}}
            }
            | {str(each): {"description": _ERRORS[each], "content": _content("Error")} for each in _ALWAYS},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Duramen console",
            "version": version,
            "description": "What the console's page shows and does. Times are milliseconds since 1970, UTC.",
        },
        "paths": paths,
        "components": {
            "schemas": DOCUMENTS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
