"""Objects on S3, Google Cloud Storage and Azure, through obstore: each call is one request (a large put is several).

The library is loaded and the connection opened by the first request, in the process that makes it. Its threads do not
survive a fork: a child of a process that made requests would hang, so it is refused. Credentials come from where the
cloud's own tools take them (environment, profile, role) or from `options`. Secrets among the options stay in this
process: they are in no pickle, no message and no log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from logstore.errors import (
    AccessDenied,
    CorruptState,
    DuramenError,
    InvalidConfig,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectStoreThrottled,
    ObjectStoreUnavailable,
    ObjectTruncated,
    PackageMissing,
    RequestConflict,
    UnknownBucket,
)
from logstore.forks import OBJECT_STORAGE
from logstore.limits import DEFAULT_LIMITS, MIB
from logstore.objects.objects import Bytes, Head, Version, check_key
from logstore.objects.profiles import profile_credentials, profile_region

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Store

_T = TypeVar("_T")

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
#: options of the connection, not of the cloud
_CLIENT_OPTIONS = ("allow_http", "connect_timeout", "timeout", "proxy_url", "root_certificate", "user_agent")
#: what may travel to other processes and stand in messages: nothing here is a secret
_PLAIN_OPTIONS = (
    *_CLIENT_OPTIONS,
    "account_name",
    "default_region",
    "endpoint",
    "endpoint_url",
    "region",
    "skip_signature",
    "unsigned_payload",
    "use_fabric_endpoint",
    "use_emulator",
    "virtual_hosted_style_request",
)
#: what is larger is asked for by ranges
GET_BYTES_MAX = DEFAULT_LIMITS.side_file_bytes
#: variables of the environment in which the library looks for an endpoint
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_PART_BYTES = 8 * MIB
_PARTS_AT_ONCE = 4
_REQUEST_S = 60

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
#: where the machine's role is asked for, as the last of all sources of credentials
_METADATA = re.compile(r"https?://(169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal)/")
#: a key that nobody has; some servers say 404 beside it
_UNKNOWN_KEY = ("InvalidAccessKeyId", "XAdminUserNotFound", "XAdminNoSuchUser")
#: an answer with no bytes at all for a range behind the object's end, as Azurite gives
_TOO_SHORT = re.compile(r"Wanted range starting at \d+, but object was only \d+ bytes long")
#: a request that never left
_NOT_SENT = re.compile(r"ConnectError|ConnectionRefused|dns error|tcp connect error")


class RemoteObjects:
    """Implements `Objects` below `url`, such as `s3://bucket/prefix`."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.url = _checked(url)
        self._options = dict(options or {})
        #: secrets that stayed in the process this one came from
        self._withheld: tuple[str, ...] = ()
        self._opened: ObjectStore | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __getstate__(self) -> dict[str, object]:
        plain = plain_options(self._options)
        return {"url": self.url, "options": plain, "withheld": tuple(sorted({*self._options} - {*plain}))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.url, self._options, self._withheld = state["url"], state["options"], state["withheld"]
        self._opened = None

    def create(self, key: str, data: bytes) -> Version:
        return self._write("create", key, lambda store: _put(store, key, data, mode="create"))

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        # A version of None would be compared, so it is left out.
        mode = {"e_tag": seen.e_tag} | ({} if seen.version is None else {"version": seen.version})
        return self._write("replace", key, lambda store: _put(store, key, data, mode=mode))

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        def request(store: ObjectStore) -> Version:
            first, rest = _first_part(parts)
            if rest is None:
                return _put(store, key, first, use_multipart=False)
            return _put(store, key, rest, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

        return self._write("put", key, request)

    def get(self, key: str) -> tuple[bytes, Version]:
        def request(store: ObjectStore) -> tuple[bytes, Version]:
            import obstore

            result = obstore.get(store, key)
            size = result.meta["size"]
            if size > GET_BYTES_MAX:
                raise CorruptState(
                    f"an object of {size} bytes; what is read at once has {GET_BYTES_MAX} at most",
                    file=f"{self.url}/{key}",
                )
            return bytes(result.bytes()), Version(result.meta["e_tag"], result.meta["version"])

        return self._read("get", key, request)

    def head(self, key: str) -> Head:
        def request(store: ObjectStore) -> Head:
            import obstore

            return _head(obstore.head(store, key), key)

        return self._read("head", key, request)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        asked = [span for span in spans if span[0] < span[1]]

        def request(store: ObjectStore) -> list[Bytes]:
            import obstore

            starts, ends = [begin for begin, _ in asked], [end for _, end in asked]
            found = iter(obstore.get_ranges(store, key, starts=starts, ends=ends) if asked else ())
            return [memoryview(next(found)) if begin < end else b"" for begin, end in spans]

        answers = self._read("ranges", key, request)
        for (begin, end), answer in zip(spans, answers, strict=True):
            if len(answer) != end - begin:
                raise ObjectTruncated(
                    f"the object ends at byte {begin + len(answer)}; bytes {begin} to {end} were asked for", file=key
                )
        return answers

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)

        def remove(store: ObjectStore, some: Sequence[str]) -> None:
            import obstore

            try:
                obstore.delete(store, list(some))
            except FileNotFoundError as error:
                if len(some) > 1:
                    for key in some:  # GCS and Azure stop at the first one that is gone
                        remove(store, [key])
                elif _code(str(error)) == "NoSuchBucket":
                    raise

        if keys:
            self._ask("delete", keys[0], lambda store: remove(store, keys), writes=True)

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        check_key(prefix)

        def begin(store: ObjectStore) -> Iterator[Sequence[Any]]:
            import obstore

            return iter(obstore.list(store, prefix=prefix, offset=after or None))

        pages = self._ask("list", prefix, begin, writes=False)
        while True:
            page = self._ask("list", prefix, lambda _: next(pages, None), writes=False)
            if page is None:
                return
            # Without an order there is no going on behind a key.
            heads = (_head(meta, meta["path"]) for meta in page)
            # Azure knows no key to begin behind.
            yield from sorted((head for head in heads if head.key > after), key=lambda head: head.key)

    @property
    def has_proxy(self) -> bool:
        return any(name.lower().endswith("proxy_url") for name in {**self._options, **os.environ})

    def signed_put(self, key: str, valid: timedelta) -> str:
        """A URL by which anybody may put that object: a secret."""

        def sign(store: ObjectStore) -> str:
            import obstore

            return obstore.sign(cast("S3Store", store), "PUT", key, valid)

        return self._ask("sign", check_key(key), sign, writes=False)

    def _write(self, action: str, key: str, request: Callable[[ObjectStore], Version]) -> Version:
        return self._ask(action, check_key(key), request, writes=True)

    def _read(self, action: str, key: str, request: Callable[[ObjectStore], _T]) -> _T:
        return self._ask(action, check_key(key), request, writes=False)

    def _ask(self, action: str, key: str, request: Callable[[ObjectStore], _T], *, writes: bool) -> _T:
        OBJECT_STORAGE.enter()
        if self._opened is None:
            self._opened = self._open()
        from obstore.exceptions import BaseError

        try:
            return request(self._opened)
        except (BaseError, FileNotFoundError) as error:
            # Not chained: the library's error has headers and addresses with tokens in its details.
            raise self._translated(error, action, key, writes=writes) from None

    def _open(self) -> ObjectStore:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise PackageMissing(
                f"{self.url} is object storage, and the package obstore is not installed",
                hint="Run: pip install 'duramen[s3]'",
            ) from None
        _check_endpoint(self._options)
        client: dict[str, Any] = {"timeout": timedelta(seconds=_REQUEST_S)}
        client |= {name: value for name, value in self._options.items() if name in _CLIENT_OPTIONS}
        # Client options of the environment count only where none are given.
        for name in ("allow_http", "proxy_url"):
            given = os.environ.get(f"AWS_{name.upper()}")
            if given and name not in client:
                client[name] = given
        if "allow_http" in client:
            client["allow_http"] = str(client["allow_http"]).lower() == "true"
        config: Any = {name: value for name, value in self._options.items() if name not in _CLIENT_OPTIONS}
        more: dict[str, Any] = {}
        if self.url.startswith("s3"):
            more["credential_provider"] = profile_credentials(self._options)
            region = None if {"region", "aws_region"} & {name.lower() for name in config} else profile_region()
            config |= {} if region is None else {"region": region}
        try:
            # Retries are ours: the library's own would hide whether an earlier attempt was applied.
            return from_url(self.url, config=config, client_options=client, retry_config={"max_retries": 0}, **more)  # type: ignore[call-overload,no-any-return]
        except (BaseError, ValueError) as error:
            said = _plain(str(error), self._options)
            hint = "Look at the URL and the storage options; names are those of obstore, such as region and endpoint"
            if "Account must be specified" in said:
                hint = "Name the account: the storage option account_name, or AZURE_STORAGE_ACCOUNT_NAME"
            raise InvalidConfig(f"{self.url} cannot be opened: {said}", hint=hint) from None

    def _translated(self, error: Exception, action: str, key: str, *, writes: bool) -> DuramenError:
        text = str(error)
        found = _STATUS.search(text)
        status, code = int(found[1]) if found else None, _code(text)
        kind = type(error).__name__
        kind = "no connection" if kind == "GenericError" and _NOT_SENT.search(text) else kind
        said = f"{status or kind}{' ' + code if code else ''}"
        place = f"{self.url}/{key}"
        if _METADATA.search(text) and (status is None or 400 <= status < 429):
            return AccessDenied(
                f"{action} was not sent: no credentials were found",
                hint=f"Give them by the environment ({self._variable()}), the machine's role or storage options",
            )
        if "HTTP error: builder error" in text:
            return InvalidConfig(
                f"{action} was not sent: the endpoint is plain HTTP",
                hint="Set the storage option allow_http=true (or AWS_ALLOW_HTTP) if that is meant",
            )
        if code in _UNKNOWN_KEY:
            return AccessDenied(f"{action} was refused ({said})", file=place, hint=self._rights_hint())
        if code in ("NoSuchBucket", "ContainerNotFound") or "redirect without LOCATION" in text:
            return UnknownBucket(f"there is no bucket for {self.url} ({said})", hint="Look at its name and the region")
        if status == 409:
            return RequestConflict(f"{action} met another write ({said})", file=place)
        if kind == "AlreadyExistsError":
            return ObjectExists("an object is already there", file=place)
        if action == "replace" and (status in (404, 412) or kind in ("PreconditionError", "FileNotFoundError")):
            return ObjectChanged("the object is not the one that was seen", file=place)
        if status == 404 or isinstance(error, FileNotFoundError):
            return ObjectMissing("no such object", file=place)
        if status == 416 or _TOO_SHORT.search(text):
            return ObjectTruncated("the object ends before the bytes that were asked for", file=place)
        if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError") or _is_expired(code):
            return AccessDenied(f"{action} was refused ({said})", file=place, hint=self._rights_hint())
        if status == 429 or code in ("SlowDown", "TooManyRequests", "ServerBusy"):
            return ObjectStoreThrottled(f"{action}: too many requests ({said})", file=place, may_be_applied=writes)
        if status is not None and 400 <= status < 500 and status != 408:
            return InvalidConfig(f"{action} was refused as it is ({said})", file=place, hint="Look at the options")
        sent = writes and not _NOT_SENT.search(text)
        return ObjectStoreUnavailable(
            f"{action} was not answered ({said})",
            file=place,
            may_be_applied=sent,
            hint="It may have been applied" if sent else None,
        )

    def _variable(self) -> str:
        """Where the cloud's own tools look for credentials first."""
        names = {"s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
        return names.get(self.url[:2], "AZURE_STORAGE_ACCOUNT_KEY")

    def _rights_hint(self) -> str:
        if self._withheld:
            return (
                f"The storage options {', '.join(self._withheld)} are secrets and are not sent to other processes: "
                "give executors credentials by their environment or their role"
            )
        return "Look at the credentials (environment, role or storage options), their rights and their expiry"


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in SCHEMES or not parts.netloc or parts.query or parts.fragment or "@" in url:
        raise InvalidConfig(
            "the URL of a store is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, without "
            "credentials or parameters",
            hint="Give credentials, region, endpoint and account by the environment or as storage options",
        )
    return parts.scheme + url[len(parts.scheme) :].rstrip("/")


def _check_endpoint(options: Mapping[str, str]) -> None:
    """The library ends the process's thread over an address that is none. Raises InvalidConfig."""
    given = {**{name: os.environ.get(name, "") for name in _ENDPOINTS}, **options}
    for name, value in given.items():
        if "endpoint" in name.lower() and "://" not in str(value) and value and not _is_flag(value):
            raise InvalidConfig(
                f"{name} is {value!r}, which is no URL", hint="An endpoint is http://HOST:PORT or https://HOST"
            )


def _is_flag(value: str) -> bool:
    return str(value).lower() in ("true", "false")


def plain_options(options: Mapping[str, str]) -> dict[str, str]:
    """Those that are no secrets."""
    return {name: value for name, value in options.items() if _is_plain(name)}


def _is_plain(name: str) -> bool:
    return re.sub(r"^(aws|google|azure|azure_storage)_", "", name.lower()) in _PLAIN_OPTIONS


def _plain(text: str, options: Mapping[str, str]) -> str:
    """The first line of `text`, with nothing in it that could be a secret."""
    line = re.sub(r"\?\S*", "", text.splitlines()[0] if text else "")
    for name, value in options.items():
        if not _is_plain(name) and value:
            line = line.replace(str(value), "…")
    return line[:300]


def _code(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


def _is_expired(code: str) -> bool:
    return code in ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestTimeTooSkewed")


def _put(store: ObjectStore, key: str, data: Any, **how: Any) -> Version:
    import obstore

    result = obstore.put(store, key, data, **how)
    return Version(result["e_tag"], result["version"])


def _head(meta: Any, key: str) -> Head:
    modified_ms = round(meta["last_modified"].timestamp() * 1000)
    return Head(key, meta["size"], modified_ms, Version(meta["e_tag"], meta["version"]))


def _first_part(parts: Iterable[Bytes]) -> tuple[bytes, Iterator[Bytes] | None]:
    """All of it when it fits one request, else how to go through it."""
    held: list[Bytes] = []
    size = 0
    rest = iter(parts)
    for part in rest:
        held.append(part)
        size += len(part)
        if size > _PART_BYTES:
            return b"", _again(held, rest)
    return b"".join(held), None


def _again(held: list[Bytes], rest: Iterator[Bytes]) -> Iterator[Bytes]:
    yield from held
    held.clear()
    yield from rest
