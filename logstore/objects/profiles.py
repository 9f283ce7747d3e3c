"""Credentials of a profile in `~/.aws/credentials` or `~/.aws/config`, as Amazon's own tools read them.

Only keys that stand there are taken. What a profile says of roles, single sign-on or commands needs those tools:
`aws configure export-credentials --format env` gives what the environment takes.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from logstore.errors import InvalidConfig

#: the file is read again after this long: other tools write new keys into it before the old ones expire
_READ_AGAIN = timedelta(minutes=5)
_NAMES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "token",
}


class ProfileCredentials:
    """Called by the library whenever it needs credentials. Has no secret in it: it knows where they stand."""

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def __call__(self) -> dict[str, Any]:
        keys = {ours: _section(self._profile).get(theirs) for theirs, ours in _NAMES.items()}
        found = {name: value for name, value in keys.items() if value}
        return found | {"expires_at": datetime.now(timezone.utc) + _READ_AGAIN}


def profile_credentials(options: Mapping[str, str]) -> ProfileCredentials | None:
    """None where options or the environment have credentials, or no profile has any. Raises InvalidConfig for a
    profile that was asked for by AWS_PROFILE and has no keys.
    """
    given = {name.lower().removeprefix("aws_") for name in options}
    if given & {"access_key_id", "skip_signature"} or os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    asked = os.environ.get("AWS_PROFILE")
    section = _section(asked or "default")
    if section.get("aws_access_key_id") and section.get("aws_secret_access_key"):
        return ProfileCredentials(asked or "default")
    if asked is None:
        return None
    raise InvalidConfig(
        f"the profile {asked!r} of AWS_PROFILE has no access key",
        hint="A profile with a role or single sign-on: run `aws configure export-credentials --format env`, and give "
        "the environment what it prints",
    )


def profile_region() -> str | None:
    """The region of the profile, where the environment has none."""
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        return None
    return _section(os.environ.get("AWS_PROFILE") or "default").get("region")


def _section(profile: str) -> dict[str, str]:
    """What both files say of a profile; of keys in both, the credentials file is right."""
    found: dict[str, str] = {}
    config = profile if profile == "default" else f"profile {profile}"
    for variable, name, section in (
        ("AWS_CONFIG_FILE", "config", config),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile),
    ):
        path = Path(os.environ.get(variable) or Path.home() / ".aws" / name).expanduser()
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(path.read_text())
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except (configparser.Error, UnicodeDecodeError) as error:
            # Not what the parser says: it repeats the line.
            raise InvalidConfig(f"{path} cannot be read as a file of profiles ({type(error).__name__})") from None
        if parser.has_section(section):
            found.update(parser.items(section))
    return found
