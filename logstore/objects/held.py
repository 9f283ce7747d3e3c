"""A conditional PUT whose body is held back halfway, so that others can write between its headers and its end.

obstore sends a body at once. This one goes out over a signed URL and a connection of its own, to S3 and what speaks S3.
Only the probe makes such requests. The URL is a secret while it is valid; it is in no error.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Callable, Mapping
from datetime import timedelta
from urllib.parse import urlsplit

from logstore.errors import DuramenError
from logstore.objects.remote import RemoteObjects

_VALID = timedelta(minutes=2)
_TIMEOUT_S = 10


def put_held(
    objects: RemoteObjects, key: str, condition: Mapping[str, str], body: bytes, meanwhile: Callable[[], None]
) -> bool | None:
    """Whether the server took it, written around a call of `meanwhile`. None where it cannot be sent this way."""
    if not objects.url.startswith("s3") or objects.has_proxy:
        return None
    try:
        url = urlsplit(objects.signed_put(key, _VALID))
        if not url.hostname or urllib.request.getproxies().get(url.scheme):
            return None
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname, url.port, timeout=_TIMEOUT_S)
        try:
            connection.putrequest("PUT", f"{url.path}?{url.query}")
            for name, value in {**condition, "Content-Length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders(body[: len(body) // 2])
            meanwhile()
            connection.send(body[len(body) // 2 :])
            status = connection.getresponse().status
        finally:
            connection.close()
    except (DuramenError, OSError, http.client.HTTPException):
        return None
    # Else it was refused for something that is no condition, such as a signature of this kind.
    return 200 <= status < 300 if status < 400 or status in (409, 412) else None
