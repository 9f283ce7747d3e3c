"""Credentials from files of profiles, as Amazon's tools write them."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path

import pytest

from bucket.servers import ACCESS_KEY, SECRET_KEY, Server
from logstore.errors import AccessDenied, InvalidConfig
from logstore.objects.profiles import profile_credentials, profile_region
from logstore.objects.remote import RemoteObjects


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "PROFILE", "REGION", "DEFAULT_REGION", "CONFIG_FILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = nobody\naws_secret_access_key = nothing%\n"
        f"[work]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile work]\nregion = us-east-1\n[profile role]\nrole_arn = arn:x\n"
    )
    return tmp_path


def test_a_profile_opens_a_bucket_and_is_in_no_pickle(versitygw: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """This server refuses other keys."""
    options = {"endpoint": versitygw.endpoint, "allow_http": "true"}
    url = versitygw.url(uuid.uuid4().hex)
    with pytest.raises(AccessDenied):
        RemoteObjects(url, options | {"region": "us-east-1"}).put("k", [b"1"])
    monkeypatch.setenv("AWS_PROFILE", "work")
    remote = RemoteObjects(url, options)
    remote.put("k", [b"1"])
    data = pickle.dumps(remote)
    assert SECRET_KEY.encode() not in data
    assert pickle.loads(data).get("k")[0] == b"1"


def test_options_and_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_credentials({"access_key_id": "x"}) is None
    assert profile_credentials({"AWS_ACCESS_KEY_ID": "x"}) is None
    assert profile_credentials({"skip_signature": "true"}) is None
    assert profile_credentials({"region": "x"}) is not None
    assert profile_region() == "eu-west-1"
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert profile_region() == "us-east-1"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_REGION", "x")
    assert profile_credentials({}) is None
    assert profile_region() is None


def test_new_keys_in_the_file_are_taken(home: Path) -> None:
    found = profile_credentials({})
    assert found is not None
    assert (found()["access_key_id"], found()["secret_access_key"]) == ("nobody", "nothing%")
    path = home / ".aws" / "credentials"
    path.write_text(path.read_text().replace("nobody", "somebody") + "aws_session_token = passing\n")
    assert found()["access_key_id"] == "somebody"
    assert "nothing" not in repr(vars(found))


@pytest.mark.parametrize("profile", ["role", "missing"])
def test_a_profile_without_keys_that_was_asked_for_says_what_to_do(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(InvalidConfig, match="export-credentials"):
        RemoteObjects("s3://bucket/x", {"region": "x"}).get("k")


def test_without_files_nothing_is_found_and_a_broken_one_is_told_without_its_lines(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".aws" / "credentials").write_text("aws_secret_access_key = hush\n")
    with pytest.raises(InvalidConfig, match="profiles") as caught:
        profile_credentials({})
    assert "hush" not in str(caught.value)
    monkeypatch.setenv("HOME", str(home / "nowhere"))
    assert profile_credentials({}) is None
    assert profile_region() is None
