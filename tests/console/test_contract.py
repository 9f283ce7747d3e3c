"""The API against its own document: schemathesis asks whatever it can think of, and no answer may surprise it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from console.asking import TOKEN, Client, check
from duramen import __version__
from duramen.console.api import _ANSWERS
from duramen.console.contract import OPERATIONS, PREFIX, openapi

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)
SCHEMA = schemathesis.openapi.from_dict(dict(openapi(__version__)))
EXAMPLES = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def asked(shop_template: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """One console for all examples; actions really are done."""
    import shutil

    from duramen.console.opened import OpenConsole, Token

    path = tmp_path_factory.mktemp("asked") / "store"
    shutil.copytree(shop_template, path)
    with OpenConsole(str(path), token=Token(TOKEN, False)) as served:
        yield Client(served)


@SCHEMA.parametrize()
@EXAMPLES
def test_no_answer_is_outside_the_document(case: schemathesis.Case, asked: Client) -> None:
    # Now and then with a topic that is there: a random name finds none.
    if case.path_parameters and "topic" in case.path_parameters and random.random() < 0.5:
        case.path_parameters["topic"] = random.choice(["orders", "strange", "clicks", "empty"])
    response = case.call(
        base_url=asked.served.url.rstrip("/"), headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
    )
    # A request whose head is too large is refused before anybody looks at its parameters.
    checks = [each for each in CHECKS if each is not negative_data_rejection or response.status_code != 431]
    case.validate_response(response, checks=checks)


def test_the_document_is_served_and_every_path_has_an_answer(asked: Client) -> None:
    served = asked.raw("GET", f"{PREFIX}/openapi.json").json
    assert served == json.loads(json.dumps(openapi(__version__)))
    assert served["openapi"].startswith("3.1")
    questions = {each.name for each in OPERATIONS if each.method == "GET"} - {"token"}
    assert questions == set(_ANSWERS)
    assert all(each.needs_token for each in OPERATIONS if each.method != "GET")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_path_and_query_gets_a_clean_refusal_or_an_answer(asked: Client, path: bytes, query: bytes) -> None:
    target = f"{PREFIX}/topics/{quote(path)}/messages?{quote(query, safe='=&')}"
    found = asked.raw("GET", target)
    assert found.status in (200, 400, 404)
    if found.status != 200:
        check("Error", found.json)
