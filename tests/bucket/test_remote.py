"""The adapter of real object storage: forks, pickles, secrets, and what each answer of a server means."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucket.servers import ACCESS_KEY, SECRET_KEY, Server
from logstore import errors
from logstore.errors import DuramenError
from logstore.objects import remote as remote_module
from logstore.objects.objects import Version
from logstore.objects.opening import open_objects
from logstore.objects.remote import RemoteObjects
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def remote(ministack: Server) -> RemoteObjects:
    return RemoteObjects(ministack.url(uuid.uuid4().hex), ministack.options)


def test_a_pickle_has_the_address_and_no_secret(remote: RemoteObjects) -> None:
    remote.put("k", [b"1"])
    data = pickle.dumps(remote)
    assert SECRET_KEY.encode() not in data
    assert ACCESS_KEY.encode() not in data
    assert SECRET_KEY not in repr(remote)
    again = pickle.loads(data)
    assert again.url == remote.url


def test_a_task_takes_credentials_of_its_own_environment(
    remote: RemoteObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("k", [b"1"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert pickle.loads(pickle.dumps(remote)).get("k")[0] == b"1"


def _get_in_child(remote: RemoteObjects, answers: multiprocessing.Queue[str]) -> None:
    try:
        remote.get("k")
        answers.put("an answer")
    except errors.ForkedProcess as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_where_it_would_hang(remote: RemoteObjects) -> None:
    remote.put("k", [b"1"])
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_get_in_child, args=(remote, answers))
    child.start()
    try:
        said = answers.get(timeout=100)
    finally:
        child.kill()
        child.join()
    assert "forked" in said


def test_a_child_forked_before_the_first_request_works(ministack: Server) -> None:
    script = """
import os, sys
from logstore.objects import remote as remote_module
from logstore.objects.remote import RemoteObjects
remote = RemoteObjects(sys.argv[1], eval(sys.argv[2]))
child = os.fork()
remote.put(f"from-{'parent' if child else 'child'}", [b"1"])
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    url = ministack.url(uuid.uuid4().hex)
    done = subprocess.run(
        [sys.executable, "-c", script, url, repr(ministack.options)],
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = RemoteObjects(url + "/", ministack.options)
    assert (found.head("from-parent").size_bytes, found.head("from-child").size_bytes) == (1, 1)


def test_importing_loads_no_library() -> None:
    script = "import sys, logstore.objects.opening as r; r.open_objects('s3://b/p'); print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(errors.PackageMissing, match=r"duramen\[s3\]"):
        open_objects("s3://bucket/prefix").get("k")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/data/store",
        "file:///x",
        "http://host/x",
        "s3://",
        "s3://key:secret@bucket/x",
        "az://a/c?sig=secret",
        "s3:///x",
    ],
)
def test_other_urls_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(errors.InvalidConfig) as caught:
        open_objects(url)
    assert "secret" not in str(caught.value)


def test_an_option_nobody_knows_is_named(ministack: Server) -> None:
    with pytest.raises(errors.InvalidConfig, match="cannot be opened") as caught:
        RemoteObjects(ministack.url("x"), {"acces_key": "hush-hush"}).get("k")
    assert "hush-hush" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_no_missing_object(ministack: Server) -> None:
    """Else an empty manifest would be read where the bucket's name is wrong."""
    remote = RemoteObjects("s3://no-such-bucket/x", ministack.options)
    with pytest.raises(errors.UnknownBucket):
        remote.get("k")
    with pytest.raises(errors.UnknownBucket):
        remote.put("k", [b""])
    with pytest.raises(errors.UnknownBucket):
        [*remote.list("k")]


def test_nobody_listens(ministack: Server) -> None:
    remote = RemoteObjects("s3://bucket/x", ministack.options | {"endpoint": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(errors.ObjectStoreUnavailable) as caught:
        remote.create("k", b"")
    assert not caught.value.may_be_applied


# --- answers -------------------------------------------------------------------------------------------------------


class Answers(http.server.BaseHTTPRequestHandler):
    """Gives the answer that is set: a status and a code; a status of 0 is a connection that ends."""

    protocol_version = "HTTP/1.1"
    status, code = 200, ""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.status:
            self.close_connection = True
            self.connection.shutdown(2)
            return
        body = f"<Error><Code>{self.code}</Code><Message>for {SECRET_KEY}</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def answering() -> Iterator[RemoteObjects]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    options = Server(f"http://127.0.0.1:{server.server_address[1]}").options
    yield RemoteObjects("s3://bucket/x", options)
    server.shutdown()
    thread.join()
    server.server_close()


MEANINGS = [
    (0, "", "ObjectStoreUnavailable", "ObjectStoreUnavailable", "ObjectStoreUnavailable"),
    (301, "PermanentRedirect", "UnknownBucket", "UnknownBucket", "UnknownBucket"),
    (400, "ExpiredToken", "AccessDenied", "AccessDenied", "AccessDenied"),
    (400, "InvalidRequest", "InvalidConfig", "InvalidConfig", "InvalidConfig"),
    (401, "", "AccessDenied", "AccessDenied", "AccessDenied"),
    (403, "AccessDenied", "AccessDenied", "AccessDenied", "AccessDenied"),
    (403, "SignatureDoesNotMatch", "AccessDenied", "AccessDenied", "AccessDenied"),
    (404, "XAdminUserNotFound", "AccessDenied", "AccessDenied", "AccessDenied"),
    (404, "NoSuchBucket", "UnknownBucket", "UnknownBucket", "UnknownBucket"),
    (404, "NoSuchKey", "ObjectMissing", "ObjectChanged", "ObjectMissing"),
    (409, "ConditionalRequestConflict", "RequestConflict", "RequestConflict", "RequestConflict"),
    (412, "PreconditionFailed", "ObjectExists", "ObjectChanged", "InvalidConfig"),
    (429, "TooManyRequests", "ObjectStoreThrottled", "ObjectStoreThrottled", "ObjectStoreThrottled"),
    (500, "InternalError", "ObjectStoreUnavailable", "ObjectStoreUnavailable", "ObjectStoreUnavailable"),
    (503, "SlowDown", "ObjectStoreThrottled", "ObjectStoreThrottled", "ObjectStoreThrottled"),
    (503, "ServiceUnavailable", "ObjectStoreUnavailable", "ObjectStoreUnavailable", "ObjectStoreUnavailable"),
]


@pytest.mark.parametrize(("status", "code", "create", "replace", "get"), MEANINGS)
def test_what_an_answer_means(
    answering: RemoteObjects, status: int, code: str, create: str, replace: str, get: str
) -> None:
    Answers.status, Answers.code = status, code
    said: list[DuramenError] = []
    for call in (
        lambda: answering.create("k", b"1"),
        lambda: answering.replace("k", b"1", Version('"1"')),
        lambda: answering.get("k"),
    ):
        with pytest.raises(DuramenError) as caught:
            call()
        said.append(caught.value)
        assert SECRET_KEY not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    assert [type(each).__name__ for each in said] == [create, replace, get]
    for write in said[:2]:
        if isinstance(write, errors.ObjectStoreUnavailable | errors.ObjectStoreThrottled):
            assert write.may_be_applied
    assert not getattr(said[2], "may_be_applied", False)


def test_secrets_that_stayed_behind_are_named_when_they_are_missed(answering: RemoteObjects) -> None:
    Answers.status, Answers.code = 403, "AccessDenied"
    os.environ.pop("AWS_ACCESS_KEY_ID", None)
    elsewhere = pickle.loads(pickle.dumps(answering))
    elsewhere._options |= {"access_key_id": "x", "secret_access_key": "y"}
    with pytest.raises(errors.AccessDenied, match=r"secret_access_key.*executors"):
        elsewhere.get("k")


def test_that_there_are_no_credentials_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    told = (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 2s - "
        "HTTP error: error sending request"
    )
    objects = RemoteObjects("s3://bucket/prefix")
    assert isinstance(objects._translated(OSError(told), "get", "k", writes=False), errors.AccessDenied)
    busy = OSError(told.replace("HTTP error: error sending request", "status code: 503"))
    assert isinstance(objects._translated(busy, "get", "k", writes=False), errors.ObjectStoreUnavailable)


def test_an_endpoint_in_plain_http_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    options = {"endpoint": "http://127.0.0.1:1", "region": "x", "access_key_id": "a", "secret_access_key": "b"}
    with pytest.raises(errors.InvalidConfig, match="plain HTTP"):
        RemoteObjects("s3://bucket/prefix", options).get("k")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(errors.ObjectStoreUnavailable):
        RemoteObjects("s3://bucket/prefix", options).get("k")


def test_an_object_that_is_far_too_large_is_not_read(ministack: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(ministack.url(uuid.uuid4().hex), ministack.options)
    objects.put("k", [bytes(101)])
    assert len(objects.get("k")[0]) == 101
    monkeypatch.setattr(remote_module, "GET_BYTES_MAX", 100)
    with pytest.raises(errors.CorruptState, match="101 bytes"):
        objects.get("k")
    assert len(objects.ranges("k", [(0, 101)])[0]) == 101
