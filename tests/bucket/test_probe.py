"""The probe lets sound endpoints pass and refuses those that lose writes."""

from __future__ import annotations

import uuid

import pytest

from bucket.faulty import Fault, FaultyObjects
from bucket.proxy import proxy_of
from bucket.servers import Conditions, Server, chosen, small_server
from logstore.errors import ObjectStoreUnavailable, UnsuitableObjectStore
from logstore.objects import probe as probing
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.probe import probe_objects
from logstore.objects.remote import RemoteObjects


def probe(server: Server) -> None:
    probe_objects(RemoteObjects(server.url(uuid.uuid4().hex), server.options))


@pytest.mark.parametrize("server", chosen("ministack", "versitygw"))
def test_a_sound_server_passes_every_time(server: str, request: pytest.FixtureRequest) -> None:
    for _ in range(3):
        probe(request.getfixturevalue(server))


def test_it_takes_few_requests_and_leaves_nothing() -> None:
    memory = MemoryObjects()
    counted = CountedObjects(memory)
    probe_objects(counted)
    assert sum(counted.requests.values()) <= 80
    assert [*memory.list("probe")] == []


def test_a_small_server_with_sound_conditions_passes() -> None:
    """Else the ones below could be refused for anything."""
    with small_server(Conditions()) as server:
        probe(server)


@pytest.mark.parametrize(
    ("conditions", "fault"),
    [
        (Conditions(ignores=("If-None-Match",)), "ignores If-None-Match"),
        (Conditions(ignores=("If-Match",)), "replaces an object that is not there|ignores If-Match"),
        (Conditions(ignores=("If-Match", "If-None-Match")), "replaces|ignores"),
        (Conditions(gap_s=0.02), "of 2 conditional writes"),
        (Conditions(gap_s=0.001), "of 2 conditional writes"),
    ],
)
def test_an_endpoint_whose_conditions_do_not_hold_is_refused(conditions: Conditions, fault: str) -> None:
    with small_server(conditions) as server, pytest.raises(UnsuitableObjectStore, match=fault):
        probe(server)


def test_a_server_that_looks_before_it_has_the_object_is_refused_without_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_race", lambda *_: None)
    with small_server(Conditions(looks_early=True)) as server:
        for _ in range(10):
            with pytest.raises(UnsuitableObjectStore, match="before it has all of the object"):
                probe(server)


def test_a_write_that_cannot_be_held_back_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature of this kind is refused, and nothing listens where the URL leads."""
    with small_server(Conditions(refuses_signed_urls=True)) as server:
        probe(server)
        monkeypatch.setattr(RemoteObjects, "signed_put", lambda *_: "http://127.0.0.1:1/key?signed")
        probe(server)


def test_it_takes_few_requests_of_a_server(versitygw: Server) -> None:
    """Writes that are held back are among them."""
    with proxy_of(versitygw) as proxy:
        probe(proxy.server)
        assert any("X-Amz-Signature" in path for _, path in proxy.seen)
        assert len(proxy.seen) <= 80


def test_an_endpoint_that_returns_old_objects_is_refused() -> None:
    class Stale(MemoryObjects):
        def get(self, key: str):  # type: ignore[no-untyped-def]
            self.__dict__.setdefault("first", {}).setdefault(key, super().get(key))
            return self.__dict__["first"][key]

    with pytest.raises(UnsuitableObjectStore):
        probe_objects(Stale())


def test_an_error_of_the_network_refuses_nobody() -> None:
    with pytest.raises(ObjectStoreUnavailable):
        probe_objects(FaultyObjects(MemoryObjects(), {3: Fault.BEFORE}))
