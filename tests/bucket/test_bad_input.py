"""What a writer is told when keys, buckets or servers are not as they should be: typed, true, and without a secret."""

from __future__ import annotations

import pickle
import time
import traceback
import uuid
from collections.abc import Iterator

import pytest

from bucket.proxy import Proxy, proxy_of
from bucket.servers import SECRET_KEY, Conditions, Server, small_server
from logstore import errors
from logstore.bucket.store import BucketStore
from logstore.commit.apps import AppBatch
from logstore.errors import DuramenError
from logstore.objects import opening
from logstore.objects.opening import open_objects
from logstore.objects.retrying import Patience
from logstore.records.record import Record

TOKEN = "a-session-token-nobody-may-see"
LOG = "_delta_log"


@pytest.fixture(autouse=True)
def nothing_secret_is_printed_or_logged(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    caplog.set_level("DEBUG")
    yield
    told = "".join(capfd.readouterr()) + caplog.text
    assert SECRET_KEY not in told
    assert TOKEN not in told


@pytest.fixture
def proxy(ministack: Server) -> Iterator[Proxy]:
    with proxy_of(ministack) as proxy:
        yield proxy


@pytest.fixture
def url(ministack: Server) -> str:
    """A store with a topic and one batch."""
    url = ministack.url(uuid.uuid4().hex)
    store = BucketStore(url, create=True, storage_options=ministack.options)
    store.create_topic("orders")
    store.append("orders", [Record(b"k", b"0")], app=AppBatch("app", 0, "query"))
    return url


def through(proxy: Proxy, url: str, *, deadline_s: float = 1.0) -> BucketStore:
    """With little patience, and a token in each request."""
    options = proxy.server.options | {"token": TOKEN}
    objects = open_objects(url, options, Patience(deadline_s=deadline_s, first_wait_s=0.02, wait_s_max=0.1))
    return BucketStore(url, objects=objects)


def append(store: BucketStore, batch: int = 1) -> bool:
    """Whether it was there already."""
    return store.append("orders", [Record(b"k", b"%d" % batch)], app=AppBatch("app", batch, "query")).replayed


def values(url: str, server: Server) -> list[bytes | None]:
    store = BucketStore(url, storage_options=server.options)
    return [record.value for record in store.reader("orders", 0).records(0)]


def check_no_secret(error: BaseException) -> None:
    told = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
    assert SECRET_KEY not in told
    assert TOKEN not in told
    kept = pickle.dumps(error)
    assert TOKEN.encode() not in kept
    assert SECRET_KEY.encode() not in kept


def test_credentials_that_expire_anywhere_in_a_batch(proxy: Proxy, url: str, ministack: Server) -> None:
    """Every request from the n-th on is refused. What is said of the batch is true, and it can come again."""
    said: dict[str, int] = {}
    says_no = 0
    batch, number = 1, 0
    while True:
        store = through(proxy, url)
        store.ledger.refresh()
        begun = len(proxy.seen)
        proxy.judge = lambda n, *_, first=begun + number: (400, "ExpiredToken") if n >= first else None  # type: ignore[misc]
        try:
            append(store, batch)
        except (errors.AccessDenied, errors.CommitUnknown) as error:
            check_no_secret(error)
            word = "unknown" if isinstance(error, errors.CommitUnknown) else "no"
            says_no += "The batch is not committed" in str(error)
        else:
            word = "yes"
        proxy.judge = lambda *_: None
        there = values(url, ministack)[-1] == b"%d" % batch
        assert word == "unknown" or there == (word == "yes"), (number, word)
        said[word] = said.get(word, 0) + 1
        assert append(through(proxy, url), batch) == there
        assert values(url, ministack) == [b"%d" % n for n in range(batch + 1)]
        if word == "yes":
            break
        batch, number = batch + 1, number + 1
    assert said["no"] >= 3, said
    assert says_no


def test_an_answer_that_is_lost_and_then_a_key_that_is_refused(proxy: Proxy, url: str, ministack: Server) -> None:
    store = through(proxy, url)
    begun = len(proxy.seen)

    def judge(number: int, method: str, path: str) -> tuple[int, str] | None:
        sent = [at for at, (m, p) in enumerate(proxy.seen) if at >= begun and m == "PUT" and LOG in p]
        if not sent or number < sent[0]:
            return None
        return (500, "InternalError") if number == sent[0] else (403, "ExpiredToken")

    proxy.judge = judge
    with pytest.raises(errors.CommitUnknown, match="may be committed") as caught:
        append(store)
    check_no_secret(caught.value)
    proxy.judge = lambda *_: None
    assert not append(through(proxy, url))
    assert values(url, ministack) == [b"0", b"1"]


def test_a_server_that_throttles_for_longer_than_anybody_waits(proxy: Proxy, url: str, ministack: Server) -> None:
    store = through(proxy, url)
    proxy.judge = lambda n, method, path: (503, "SlowDown") if method == "PUT" and "/data/" in path else None
    began = time.monotonic()
    with pytest.raises(errors.ObjectStoreThrottled, match="too many requests") as caught:
        append(store)
    assert time.monotonic() - began < 60
    check_no_secret(caught.value)
    proxy.judge = lambda n, method, path: (503, "SlowDown") if method == "PUT" and LOG in path else None
    with pytest.raises(errors.CommitUnknown) as unknown:
        append(store)
    check_no_secret(unknown.value)
    assert values(url, ministack) == [b"0"]
    proxy.judge = lambda *_: None
    assert not append(through(proxy, url))


def test_a_server_that_throttles_for_a_while_is_waited_for(proxy: Proxy, url: str, ministack: Server) -> None:
    store = through(proxy, url, deadline_s=30)
    ends = time.monotonic() + 1
    proxy.judge = lambda n, *_: (503, "SlowDown") if time.monotonic() < ends else None
    assert not append(store)
    assert values(url, ministack) == [b"0", b"1"]


@pytest.mark.parametrize(
    "wrong", [{"access_key_id": "nobody"}, {"secret_access_key": "wrong-hush"}, {"region": "eu-nowhere-9"}], ids=str
)
def test_a_key_or_a_region_that_is_wrong(versitygw: Server, wrong: dict[str, str]) -> None:
    with pytest.raises((errors.AccessDenied, errors.UnknownBucket, errors.InvalidConfig)) as caught:
        BucketStore(versitygw.url("x"), storage_options=versitygw.options | wrong)
    assert caught.value.hint
    check_no_secret(caught.value)
    assert "hush" not in str(caught.value)


def test_a_bucket_that_is_not_there_and_one_without_a_store(versitygw: Server) -> None:
    with pytest.raises(errors.UnknownBucket):
        BucketStore("s3://nobody-has-this/x", storage_options=versitygw.options)
    with pytest.raises(errors.NotAStore, match="create"):
        BucketStore(versitygw.url(uuid.uuid4().hex), storage_options=versitygw.options)


def test_an_endpoint_that_ignores_conditions_gets_no_store() -> None:
    """By the way that users come: nothing is written there but the probe."""
    conditions = Conditions(ignores=("If-None-Match",))
    with small_server(conditions) as server:
        opening._memory.clear()
        with pytest.raises(errors.UnsuitableObjectStore, match="If-None-Match"):
            BucketStore(server.url("x"), create=True, storage_options=server.options)
        assert not [path for path in conditions.stored if "probe" not in path]


def test_rights_to_read_alone(proxy: Proxy, url: str) -> None:
    """Everything but writing works; a writer is told before it encodes."""
    proxy.judge = lambda n, method, path: (403, "AccessDenied") if method in ("PUT", "POST", "DELETE") else None
    store = through(proxy, url)
    state = [row for batch in store.restore("orders") for row in batch.to_pylist()]
    assert [row["value"] for row in state] == [b"0"]
    with pytest.raises(errors.AccessDenied) as caught:
        append(store)
    check_no_secret(caught.value)
    with pytest.raises(DuramenError):
        store.create_topic("other")
