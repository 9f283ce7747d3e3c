"""Who may ask: the Host header, the Origin, and the token. Pure rules.

A web page of another site can make a browser send requests to loopback. It cannot choose the Host header, so a name
that is not ours means that its name was made to point here (DNS rebinding); and its requests carry its Origin.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

_TOKEN_CHARS_MAX = 4096


def host_of(header: str) -> str | None:
    """The name in a Host header, without its port; None when it is none."""
    try:
        parts = urlsplit(f"//{header}")
        found, _ = parts.hostname, parts.port  # a port that is none raises
    except ValueError:
        return None
    return None if not found or parts.path or parts.query or parts.fragment or "@" in header else found


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


def is_our_host(header: str | None, names: Collection[str]) -> bool:
    """An address, localhost, or a name that was given: an attacker's name is none of them."""
    found = host_of(header or "")
    return found is not None and (found == "localhost" or is_address(found) or found in names)


def is_our_origin(origin: str | None, fetch_site: str | None, host: str) -> bool:
    """No Origin (no browser, or a plain navigation), or the one that the page itself has."""
    if fetch_site not in (None, "same-origin", "none"):
        return False
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def is_token(given: str | None, token: str) -> bool:
    """Whether an Authorization header carries the token; takes as long whatever it carries."""
    kind, _, found = (given or "").partition(" ")
    found = found.strip()
    same = hmac.compare_digest(_hashed(found[:_TOKEN_CHARS_MAX]), _hashed(token))
    return same and kind.lower() == "bearer" and bool(token)


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
