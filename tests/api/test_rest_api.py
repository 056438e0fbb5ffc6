"""REST over a real uvicorn on loopback."""

from __future__ import annotations

import csv
import io
import json
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.hostile import TEXTS, is_shown_as_it_is
from support.memory_service import MemoryService, run_event, run_history, run_plan
from support.page import RUN
from support.waiting import wait_for
from tokenloom_proto.seal import unseal
from tokenloom_server import errors
from tokenloom_server.api.page import page_files
from tokenloom_server.api.rest.guard import MAX_BODY_BYTES
from tokenloom_server.api.rest.problems import HTTP_ERRORS, SECURITY_HEADERS
from tokenloom_server.api.rest.routes import MAX_PLANS
from tokenloom_server.api.rest.server import RestServer
from tokenloom_tools.cli.serve import tool_routes

JSON = {"content-type": "application/json"}


def serve_rest(service: MemoryService, host: str = "127.0.0.1", port: int = 0) -> RestServer:
    server = RestServer(host, port, routes=tool_routes)
    server.start(service)
    return server


@pytest.fixture(scope="module")
def client(shared: tuple[MemoryService, RestServer]) -> Iterator[httpx.Client]:
    # Plain HTTP; to read certificates would be most of a test's time.
    with httpx.Client(base_url=shared[1].url, verify=False, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def http(client: httpx.Client, service: MemoryService) -> httpx.Client:
    return client


def problem(answer: httpx.Response, status: int, error: str) -> str:
    """Checks an error's shape and gives its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error", "message"}
    assert body["error"] == error
    assert body["message"]
    assert "Traceback" not in answer.text
    assert "File " not in answer.text
    return str(body["message"])


# Runs and snapshots


def test_runs_are_listed_with_what_a_newcomer_needs_to_connect(http: httpx.Client) -> None:
    assert http.get("/v1/runs").json() == {
        "runs": [RUN],
        "broken": [],
        "version": version("tokenloom"),
        "grpc_address": "127.0.0.1:50051",
    }


def test_stats_are_the_services_figures(http: httpx.Client, service: MemoryService) -> None:
    answer = http.get(f"/v1/runs/{RUN}/stats")
    assert answer.status_code == 200
    assert answer.json() == service.runs[RUN].model_dump(mode="json")


def test_a_plan_goes_to_the_end_or_as_far_as_it_is_asked_to(http: httpx.Client) -> None:
    whole = http.get(f"/v1/runs/{RUN}/plan")
    assert whole.status_code == 200
    assert whole.json() == run_plan(RUN).model_dump(mode="json")
    for text, tokens in (("10B", 10**10), ("1.5t", 15 * 10**11), ("2_500_000", 2_500_000)):
        assert (
            http.get(f"/v1/runs/{RUN}/plan", params={"tokens": text}).json()["until_tokens"]
            == tokens
        )
    for text, part in (
        ("ten", "such as 500M"),
        ("0", "from 1"),
        ("1", "the run has 2097152 already"),
    ):
        refused = problem(
            http.get(f"/v1/runs/{RUN}/plan", params={"tokens": text}), 422, "ConfigError"
        )
        assert "tokens: " in refused
        assert part in refused
    problem(http.get(f"/v1/runs/{RUN}/plan", params={"tokens": "1" * 33}), 422, "InvalidRequest")
    problem(http.get("/v1/runs/other/plan"), 404, "NotFound")


def test_a_change_is_planned_and_not_made(http: httpx.Client, service: MemoryService) -> None:
    url, change = f"/v1/runs/{RUN}/plan", {"set": [{"child": "code", "weight": None}]}
    planned = http.post(url, json=change, params={"tokens": "1B"}).json()
    assert planned["revision"]["changes"] == ["code: changed"]
    assert planned["plan"]["until_tokens"] == 10**9
    assert not service.revisions[RUN]
    # What would open files of the server takes a PATCH, and so the token for control.
    for opens in ("add", "append_files", "mixture", "exclude"):
        assert opens in problem(http.post(url, json={opens: []}), 422, "InvalidRequest")
    problem(http.post("/v1/runs/other/plan", json=change), 404, "NotFound")


def test_a_sample_of_a_source_comes_by_its_number_or_at_random(http: httpx.Client) -> None:
    url = f"/v1/runs/{RUN}/samples"
    by_number = http.get(url, params={"source": "prose", "number": "4", "text": "true"}).json()
    assert (by_number["source"], by_number["sample"], len(by_number["ids"])) == ("prose", 8, 512)
    assert http.get(url, params={"source": "prose"}).json()["ids"] is None
    assert "it has ['code', 'prose']" in problem(
        http.get(url, params={"source": "web"}), 404, "NotFound"
    )
    assert "source" in problem(http.get(url), 422, "InvalidRequest")


def test_more_plans_than_a_server_makes_at_once_are_refused_and_others_answered(
    http: httpx.Client, server: RestServer, service: MemoryService
) -> None:
    service.gate = threading.Event()
    url = f"{server.url}v1/runs/{RUN}/plan"
    with ThreadPoolExecutor(MAX_PLANS) as pool:
        try:
            asked = [
                pool.submit(httpx.get, url, trust_env=False, timeout=60) for _ in range(MAX_PLANS)
            ]
            wait_for(lambda: service.calls >= MAX_PLANS, "as many plans")
            for route in ("plan", "plan.svg"):
                assert "ask again" in problem(
                    http.get(f"/v1/runs/{RUN}/{route}"), 409, "LimitExceeded"
                )
            assert http.get("/v1/runs").status_code == 200
        finally:
            service.gate.set()
    assert [answer.result().status_code for answer in asked] == [200] * MAX_PLANS
    assert http.get(url).status_code == 200


def test_a_plan_is_a_picture_too(http: httpx.Client) -> None:
    answer = http.get(f"/v1/runs/{RUN}/plan.svg", params={"tokens": "10B"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/svg+xml"
    assert "up to 10.0B tokens" in answer.text
    # Its colours are styles within it, which pages are not allowed; scripts are not, either.
    policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    assert answer.headers.get_list("content-security-policy") == [policy]
    problem(http.get("/v1/runs/other/plan.svg"), 404, "NotFound")


def test_a_receipt_is_of_the_index_that_is_asked_for_or_of_the_committed_one(
    http: httpx.Client,
) -> None:
    assert http.get(f"/v1/runs/{RUN}/receipt").json()["sample_index"] == 4096
    assert http.get(f"/v1/runs/{RUN}/receipt?sample_index=12").json()["digest"] == f"{12:032x}"
    for index, status in (
        (4097, 416),
        (-1, 422),
        (2**53, 422),
        ("NaN", 422),
        ("1.5", 422),
        ("", 422),
    ):
        answer = http.get(f"/v1/runs/{RUN}/receipt?sample_index={index}")
        problem(answer, status, {416: "BeyondHorizon", 422: "InvalidRequest"}[status])
    assert http.get("/v1/runs/other/receipt").status_code == 404


def test_a_report_is_the_services(http: httpx.Client, service: MemoryService) -> None:
    assert http.get(f"/v1/runs/{RUN}/report").json() == service.report(RUN).model_dump()


def test_a_snapshot_is_saved_listed_and_read_back_byte_for_byte(
    http: httpx.Client, service: MemoryService
) -> None:
    saved = http.post(f"/v1/runs/{RUN}/snapshots", json={"sample_index": 4100})
    assert saved.status_code == 201
    assert saved.json() == {
        "id": "s0-4100",
        "sample_index": 4100,
        "digest": f"{4100:032x}",
        "total_tokens": 4100 * 512,
    }
    listed = http.get(f"/v1/runs/{RUN}/snapshots").json()
    assert [(entry["id"], entry["sample_index"]) for entry in listed] == [("s0-4100", 4100)]
    text = http.get(f"/v1/runs/{RUN}/snapshots/s0-4100")
    assert text.headers["content-type"] == "application/json"
    assert text.content == service.saved[RUN]["s0-4100"].encode()
    assert unseal(text.content)["sample_index"] == 4100


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b'{"sample_index": null}'])
def test_a_snapshot_without_an_index_is_at_the_committed_one(
    http: httpx.Client, body: bytes
) -> None:
    answer = http.post(f"/v1/runs/{RUN}/snapshots", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["sample_index"]) == (201, 4096)


def test_a_restore_takes_each_of_its_three_forms(
    http: httpx.Client, service: MemoryService
) -> None:
    saved = http.post(f"/v1/runs/{RUN}/snapshots", json={"sample_index": 12}).json()
    for body in (
        {"snapshot_id": saved["id"]},
        {"sample_index": 12, "snapshot": None},
        {"snapshot": service.saved[RUN][saved["id"]]},
    ):
        service.restored.clear()
        answer = http.post(f"/v1/runs/{RUN}/restore", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"sample_index": 12, "digest": f"{12:032x}", "skips": None}
        assert service.restored[RUN].sample_index == 12
    for change, skips in (
        ({"skip_samples": 5}, {"12": 5}),
        ({"skip_tokens": 1025}, {"12": 3}),
        ({"undo_skip": True}, {}),
    ):
        answer = http.post(f"/v1/runs/{RUN}/restore", json={"sample_index": 12} | change)
        assert answer.json()["skips"] == skips
    assert http.delete(f"/v1/runs/{RUN}/restore", headers=JSON).json() == answer.json()
    problem(http.delete(f"/v1/runs/{RUN}/restore", headers=JSON), 404, "NotFound")
    for body in (
        {},
        {"snapshot_id": "a", "sample_index": 1},
        {"snapshot_id": None, "sample_index": None},
    ):
        problem(http.post(f"/v1/runs/{RUN}/restore", json=body), 422, "ConfigError")


def test_a_trace_passes_what_is_asked_for_and_answers_what_the_service_says(
    http: httpx.Client, service: MemoryService
) -> None:
    answer = http.get(f"/v1/runs/{RUN}/samples/4100?generation=3&text=true")
    assert answer.status_code == 200, answer.text
    assert answer.json() == service.trace_sample(RUN, 4100, 3, True).model_dump(mode="json")
    assert (answer.json()["status"], answer.json()["documents"][0]["row"]) == ("produced", 4100)
    plain = http.get(f"/v1/runs/{RUN}/samples/4100").json()
    assert (plain["ids"], plain["documents"][0]["text"]) == (None, None)
    unknown = http.get(
        f"/v1/runs/{RUN}/samples/4100", params={"stream": "validation", "generation": 3}
    )
    assert "has none; leave it out" in problem(unknown, 422, "ConfigError")
    step = http.get(f"/v1/runs/{RUN}/micro-steps/7?rank=1")
    assert step.json() == service.trace_micro_step(RUN, 7, 1, None, False).model_dump(mode="json")
    assert len(http.get(f"/v1/runs/{RUN}/micro-steps/7").json()["ranks"]) == 2
    assert "4160 are produced" in problem(
        http.get(f"/v1/runs/{RUN}/samples/4160"), 416, "BeyondHorizon"
    )
    problem(http.get(f"/v1/runs/{RUN}/samples/1?generation=4"), 404, "NotFound")
    problem(http.get(f"/v1/runs/{RUN}/micro-steps/1?rank=2"), 422, "ConfigError")
    for path in (
        "samples/-1",
        "samples/x",
        "micro-steps/1?rank=-1",
        "micro-steps/1?text=perhaps",
        "samples/1?generation=9e99",
    ):
        problem(http.get(f"/v1/runs/{RUN}/{path}"), 422, "InvalidRequest")


# Errors


def all_errors(root: type[errors.TokenloomError]) -> list[type[errors.TokenloomError]]:
    return [root, *(found for child in root.__subclasses__() for found in all_errors(child))]


@pytest.mark.parametrize(
    "error", all_errors(errors.TokenloomError), ids=lambda error: error.__name__
)
def test_every_error_leaves_with_its_status_and_name(
    http: httpx.Client, service: MemoryService, error: type[errors.TokenloomError]
) -> None:
    service.fault = error("what was found, and what to do")
    answer = http.get(f"/v1/runs/{RUN}/stats")
    assert problem(answer, error.http_status, error.__name__) == "what was found, and what to do"


def test_a_fault_of_our_own_says_nothing_but_is_logged(
    http: httpx.Client, service: MemoryService, caplog: pytest.LogCaptureFixture
) -> None:
    service.fault = ZeroDivisionError("a secret of the server")
    answer = http.get(f"/v1/runs/{RUN}/stats")
    assert "secret" not in problem(answer, 500, "InternalError")
    assert answer.headers["x-content-type-options"] == "nosniff"
    wait_for(lambda: "a secret of the server" in caplog.text, "the line in the log")


def test_what_does_not_exist_is_404_in_the_same_shape(http: httpx.Client) -> None:
    assert RUN in problem(http.get("/v1/runs/other/stats"), 404, "NotFound")
    problem(http.get(f"/v1/runs/{RUN}/snapshots/absent"), 404, "NotFound")
    for path in (
        "/v1/run",
        "/v1/runs/",
        "/docs",
        "/redoc",
        "/page/",
        "/page/../rest_api.py",
        "/page/%2e%2e/errors.py",
    ):
        assert "/openapi.json" in problem(http.get(path), 404, "NotFound")


def test_another_method_is_405_and_names_the_right_one(http: httpx.Client) -> None:
    assert "GET" in problem(
        http.delete(f"/v1/runs/{RUN}/stats", headers=JSON), 405, "MethodNotAllowed"
    )
    assert "POST" in problem(http.get(f"/v1/runs/{RUN}/restore"), 405, "MethodNotAllowed")


@pytest.mark.parametrize(
    "value",
    ['"5"', "5.0", "true", "-1", "9007199254740992", "1e3", "[]", "{}", "1.5", "9" * 4000, "-0.0"],
)
def test_a_sample_index_is_a_whole_number_in_range_and_nothing_else(
    http: httpx.Client, value: str
) -> None:
    for path in ("snapshots", "restore"):
        answer = http.post(
            f"/v1/runs/{RUN}/{path}", content=f'{{"sample_index": {value}}}', headers=JSON
        )
        message = problem(answer, 422, "InvalidRequest")
        assert message.startswith("body.sample_index: found ")
        assert "; expected " in message


def test_the_greatest_sample_index_reaches_the_service(http: httpx.Client) -> None:
    answer = http.post(f"/v1/runs/{RUN}/snapshots", json={"sample_index": 2**53 - 1})
    assert "beyond the horizon" in problem(answer, 416, "BeyondHorizon")


def test_an_unknown_query_parameter_is_refused_with_those_that_are_known(
    http: httpx.Client,
) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        url = path.format(run=RUN, index=1, micro_step=1, number=1, snapshot_id="s0-1")
        for method, operation in operations.items():
            answer = http.request(method, url, params={"toknes": "5"}, headers=JSON)
            message = problem(answer, 422, "InvalidRequest")
            known = [
                each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"
            ]
            assert 'the unknown parameter "toknes"' in message
            assert (", ".join(known) or "takes none") in message
    plan = http.get(f"/v1/runs/{RUN}/plan", params={"toknes": "5"})
    assert problem(plan, 422, "InvalidRequest").endswith("did you mean tokens?")


#: What a spreadsheet would work out where somebody opens it.
FORMULA = "=1+1"


def test_history_and_events_are_the_same_as_csv_and_refuse_what_is_no_time(
    http: httpx.Client, service: MemoryService
) -> None:
    service.histories[RUN] = run_history(RUN, points=2, code=[-1, 2], web=[None, 4])
    service.happened[RUN] = [
        run_event(),
        run_event(1, kind="audit", text='set "a",\nthen b', author=FORMULA),
    ]

    def table(path: str) -> list[dict[str, str]]:
        answer = http.get(path, params={"format": "csv"})
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        return [*csv.DictReader(io.StringIO(answer.text, newline=""))]

    def written(value: object) -> str:
        return "" if value is None else f"'{value}" if value == FORMULA else str(value)

    history = http.get(f"/v1/runs/{RUN}/history").json()
    columns = {
        name: values
        for name, values in history.items()
        if isinstance(values, list) and name != "sources"
    }
    for source in history["sources"]:
        columns |= {
            f"{name}[{source['alias']}]": of for name, of in source.items() if isinstance(of, list)
        }
    lines = [
        {name: written(values[place]) for name, values in columns.items()} for place in range(2)
    ]
    assert table(f"/v1/runs/{RUN}/history") == lines
    events = http.get(f"/v1/runs/{RUN}/events").json()["events"]
    assert table(f"/v1/runs/{RUN}/events") == [
        {name: written(of) for name, of in one.items()} for one in events
    ]
    assert len(http.get(f"/v1/runs/{RUN}/events", params={"kind": ["audit"]}).json()["events"]) == 1

    for params, said in (
        ({"from": "yesterday"}, "from is 'yesterday'; expected Unix seconds, or ISO 8601"),
        ({"to": "nan"}, "to is 'nan'; expected"),
        ({"from": "2026-01-02", "to": "2026-01-01T00:00:00Z"}, "swap them"),
    ):
        for path in ("history", "events"):
            assert said in problem(
                http.get(f"/v1/runs/{RUN}/{path}", params=params), 422, "ConfigError"
            )
    for params in ({"points": "2001"}, {"points": "1"}, {"format": "xml"}):
        problem(http.get(f"/v1/runs/{RUN}/history", params=params), 422, "InvalidRequest")
    problem(http.get(f"/v1/runs/{RUN}/events", params={"kind": "party"}), 422, "InvalidRequest")


def test_an_unknown_field_is_named(http: httpx.Client) -> None:
    answer = http.post(f"/v1/runs/{RUN}/snapshots", json={"sample_idx": 1})
    assert problem(answer, 422, "InvalidRequest").startswith(
        "body.sample_idx: found a field that is not known"
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"sample_index": NaN}',
        b'{"sample_index": Infinity}',
        b'{"sample_index": -Infinity}',
        b'{"sample_index": 1e999}',
        b'{"sample_index": 1, "sample_index": 2}',
        b'{"sample_index": ' + b"9" * 5000 + b"}",
        b'{"sample_index": 1',
        b"\xff\xfe\xfd",
        b"\x00",
        b"[" * 100_000,
        b"sample_index=1",
        b" ",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_not_strict_json_is_refused(
    http: httpx.Client, service: MemoryService, body: bytes
) -> None:
    for path in ("snapshots", "restore"):
        answer = http.post(f"/v1/runs/{RUN}/{path}", content=body, headers=JSON)
        assert problem(answer, 422, "InvalidRequest").startswith(
            "body: not the JSON that is expected"
        )
    assert service.calls == 0


# Poison, generated from the list of routes: a new one cannot be forgotten.

POISON_TEXTS = [
    "..",
    "%2e%2e%2f%2e%2e",
    "%00",
    "a%0d%0aX-Injected:1",
    "%ff",
    "x" * 5000,
    "NaN",
    "%F0%9F%92%A3",
    "'--",
    "-",
]
POISON_VALUES = [
    None,
    True,
    -1,
    2**53,
    10**400,
    1.5,
    "",
    "5",
    "\x00",
    "\ud800",
    "x" * 300_000,
    [],
    [[]],
    {},
    {"$ref": "#"},
    "{}",
    '{"sample_index":NaN}',
]


def operations(http: httpx.Client) -> list[tuple[str, str, dict[str, Any]]]:
    paths = http.get("/openapi.json").json()["paths"]
    return [
        (path, method, operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]


def poison_requests(http: httpx.Client) -> Iterator[tuple[str, str, bytes | None, set[int]]]:
    """(method, URL, body, statuses that the route documents): poison in each path parameter and body field."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    good = {"run": RUN, "snapshot_id": "s0", "index": "1", "micro_step": "1", "number": "1"}
    for path, method, operation in operations(http):
        documented = {int(status) for status in operation["responses"]}
        body = b"{}" if method in ("post", "patch", "delete") else None
        for parameter in operation.get("parameters", []):
            name = parameter["name"]
            assert parameter["in"] in ("path", "query"), (
                "poison for parameters of this kind is missing here"
            )
            for text in POISON_TEXTS:
                if parameter["in"] == "query":
                    yield method, f"{path.format(**good)}?{name}={text}", body, documented
                    continue
                yield method, path.replace(f"{{{name}}}", text).format(**good), body, documented
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            models = [
                option["$ref"] for option in (schema, *schema.get("anyOf", [])) if "$ref" in option
            ]
            fields = [
                name for model in models for name in schemas[model.rpartition("/")[2]]["properties"]
            ]
            assert fields
            for value in POISON_VALUES:
                for content in (value, *({name: value} for name in fields)):
                    yield method, path.format(**good), json.dumps(content).encode(), documented


def test_poison_is_refused_on_every_route(http: httpx.Client, service: MemoryService) -> None:
    tried = 0
    for method, url, body, documented in poison_requests(http):
        answer = http.request(method, url, content=body, headers=JSON if body is not None else None)
        request = (method, url[:80], (body or b"")[:80], answer.text)
        # A path with dots may be another route's, without this method.
        assert answer.status_code in documented | {404, 405}, request
        assert answer.status_code < 500, request
        assert "x-injected" not in answer.headers
        if answer.status_code >= 400:
            problem(answer, answer.status_code, answer.json()["error"])
        tried += 1
    assert tried > 100
    assert set(service.restored) <= {RUN}


def test_every_post_route_refuses_what_the_guard_refuses(
    http: httpx.Client, service: MemoryService
) -> None:
    writes = [
        (method, path.format(run=RUN, number=1))
        for path, method, _ in operations(http)
        if method != "get"
    ]
    assert len(writes) == 10
    for each in writes:
        plain = {"content-type": "text/plain"}
        problem(http.request(*each), 415, "ContentTypeRequired")
        problem(http.request(*each, data={"sample_index": "1"}), 415, "ContentTypeRequired")
        problem(http.request(*each, content="{}", headers=plain), 415, "ContentTypeRequired")
        problem(
            http.request(*each, content=b"[" + b" " * MAX_BODY_BYTES, headers=JSON),
            413,
            "BodyTooLarge",
        )
        problem(
            http.request(*each, json={}, headers={"origin": "http://evil.example"}),
            403,
            "OriginRefused",
        )
        problem(
            http.request(*each, json={}, headers={"host": "evil.example:80"}), 421, "HostRefused"
        )
    assert service.calls == 0


def test_the_content_type_error_says_that_it_is_needed_without_a_body_too(
    http: httpx.Client,
) -> None:
    message = problem(http.post(f"/v1/runs/{RUN}/snapshots"), 415, "ContentTypeRequired")
    assert "also where it has no body" in message
    assert "application/json" in message


# Size


def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_not(http: httpx.Client) -> None:
    fits = b'{"sample_index": 1}'.ljust(MAX_BODY_BYTES)
    assert http.post(f"/v1/runs/{RUN}/snapshots", content=fits, headers=JSON).status_code == 201
    problem(
        http.post(f"/v1/runs/{RUN}/snapshots", content=fits + b" ", headers=JSON),
        413,
        "BodyTooLarge",
    )


def test_a_chunked_body_over_the_limit_is_refused(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(48):
            yield b" " * 2**20

    problem(
        http.post(f"/v1/runs/{RUN}/snapshots", content=chunks(), headers=JSON), 413, "BodyTooLarge"
    )


def test_a_sender_of_48_megabytes_reads_the_answer_not_a_reset(http: httpx.Client) -> None:
    body = b" " * 48_000_000
    problem(http.post(f"/v1/runs/{RUN}/restore", content=body, headers=JSON), 413, "BodyTooLarge")
    assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(("length", "status"), [(48_000_000, b"413"), (10, b"408")])
def test_a_body_that_is_too_large_is_not_waited_for_and_one_that_never_ends_is_given_up(
    server: RestServer, monkeypatch: pytest.MonkeyPatch, length: int, status: bytes
) -> None:
    monkeypatch.setattr(
        "tokenloom_server.api.rest.guard.BODY_TIMEOUT_S", 0.1 if status == b"408" else 60.0
    )
    head = f"POST /v1/runs/{RUN}/restore HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n{{".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)


# Who asks


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost:8080",
        "[::1]:8080",
        "10.1.2.3",
        "server:8080",
        "a.localhost",
        "LOOM.example:1",
    ],
)
def test_names_that_no_stranger_can_own_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/runs", headers={"host": host}).status_code == 200
    same = {"host": host, "origin": f"http://{host}"}
    assert http.post(f"/v1/runs/{RUN}/snapshots", json={}, headers=same).status_code == 201


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "evil@x.y",
        "[::1",
        "x.y:z",
    ],
)
def test_a_rebound_dns_name_is_refused_for_reading_too(http: httpx.Client, host: str) -> None:
    for path in ("/", "/v1/runs", "/metrics", "/openapi.json"):
        message = problem(http.get(path, headers={"host": host}), 421, "HostRefused")
        assert "localhost" in message
    rebound = {"host": host, "origin": f"http://{host}"}
    assert http.post(f"/v1/runs/{RUN}/snapshots", json={}, headers=rebound).status_code == 421


@pytest.mark.parametrize(
    "origin", ["null", "http://127.0.0.1", "http://evil.example", "https://localhost:1", "http://["]
)
def test_a_page_of_another_origin_is_refused(
    http: httpx.Client, service: MemoryService, origin: str
) -> None:
    problem(
        http.post(f"/v1/runs/{RUN}/restore", json={"sample_index": 1}, headers={"origin": origin}),
        403,
        "OriginRefused",
    )
    problem(http.get(f"/v1/runs/{RUN}/stats", headers={"origin": origin}), 403, "OriginRefused")
    assert not service.restored


def test_no_answer_lets_other_origins_read(http: httpx.Client) -> None:
    answer = http.options(
        "/v1/runs",
        headers={"origin": "http://evil.example", "access-control-request-method": "POST"},
    )
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_answer_carries_the_security_headers(http: httpx.Client) -> None:
    for path in ("/", "/page/page.js", "/v1/runs", "/healthz", "/metrics", "/nowhere"):
        headers = http.get(path).headers
        for name, value in SECURITY_HEADERS.items():
            assert headers[name] == value
        assert "server" not in headers


# Health, metrics, OpenAPI, page


def test_alive_and_ready_are_two_questions(http: httpx.Client, service: MemoryService) -> None:
    assert http.get("/readyz").json() == {"status": "ready"}
    service.reason = "the ledger at redis://host cannot be reached"
    answer = http.get("/readyz")
    assert problem(answer, 503, "NotReady") == service.reason
    assert answer.headers["retry-after"]
    assert http.get("/healthz").json() == {
        "status": "alive",
        "version": version("tokenloom"),
        "server": service.identity,
    }


def test_alive_is_answered_while_every_worker_waits(
    http: httpx.Client, server: RestServer, service: MemoryService
) -> None:
    service.gate = threading.Event()
    with ThreadPoolExecutor(45) as pool:
        try:
            for _ in range(45):
                pool.submit(
                    httpx.get, f"{server.url}v1/runs/{RUN}/stats", trust_env=False, timeout=60
                )
            wait_for(lambda: service.calls == 40, "a call on every worker thread")
            assert http.get("/healthz").status_code == 200
        finally:
            service.gate.set()


def test_metrics_are_what_prometheus_reads(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert families["tokenloom_sample_index"].samples[0].value == 4096
    open_metrics = http.get(
        "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_openapi_documents_every_route_its_errors_and_an_example(http: httpx.Client) -> None:
    for path, method, operation in operations(http):
        assert operation["summary"], path
        failures = {status: r for status, r in operation["responses"].items() if int(status) >= 400}
        assert {"403", "421"} <= set(failures), path
        for response in failures.values():
            assert response["description"]
            assert response["content"]["application/json"]["schema"] == {
                "$ref": "#/components/schemas/ErrorBody"
            }
        if operation.get("parameters"):
            assert {"404", "422", "503"} <= set(failures), path
        if method == "post":
            assert {"413", "415", "416"} <= set(failures)
            assert operation["requestBody"]["content"]["application/json"]["examples"]
    models = http.get("/openapi.json").json()["components"]["schemas"]
    assert "HTTPValidationError" not in models
    assert models["SourceStats"]["properties"]["rows"]["description"] == "Rows taken to their end."


def test_each_http_status_has_one_name() -> None:
    assert len(set(HTTP_ERRORS.values())) == len(HTTP_ERRORS)


def test_the_page_is_served_from_the_package_and_points_nowhere_else(http: httpx.Client) -> None:
    for url, _, media_type in page_files():
        answer = http.get(url)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == media_type
        assert answer.content
        assert http.head(url).status_code == 200


# The server itself


def test_a_port_in_use_is_refused_with_the_address_and_the_remedy(server: RestServer) -> None:
    host, _, port = server.address.rpartition(":")
    with pytest.raises(errors.ConfigError) as caught:
        serve_rest(MemoryService(), host, int(port))
    assert server.address in str(caught.value)
    assert "in use" in str(caught.value)
    assert "--rest HOST:PORT" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "port"), [("no-such-host.invalid", 0), ("203.0.113.7", 0), ("127.0.0.1", 65536)]
)
def test_an_address_that_cannot_be_had_is_a_config_error(host: str, port: int) -> None:
    with pytest.raises(
        errors.ConfigError, match=f"--rest {host}:{port}: this address cannot be had"
    ):
        serve_rest(MemoryService(), host, port)


def test_a_stopped_server_frees_its_port_and_leaves_signals_and_threads_alone() -> None:
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    before = set(threading.enumerate())
    server = serve_rest(MemoryService(), "localhost")
    host, _, port = server.address.rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    with httpx.Client(base_url=f"http://{server.address}", trust_env=False, timeout=60) as client:
        assert client.get("/healthz").status_code == 200  # a connection that stays open
        assert server.stop(timeout=20)
    assert server.stop()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "rest"]
    serve_rest(MemoryService(), host, int(port)).stop()


def test_an_address_is_held_before_it_answers_and_who_comes_early_waits() -> None:
    server = RestServer("127.0.0.1", 0)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            httpx.get(f"http://{server.address}/healthz", trust_env=False, timeout=60)
        )
    )
    asking.start()
    with pytest.raises(errors.ConfigError, match="in use"):
        serve_rest(MemoryService(), "127.0.0.1", int(server.address.rpartition(":")[2]))
    server.start(MemoryService())
    asking.join(20)
    assert [answer.status_code for answer in answers] == [200]
    assert server.stop()


@pytest.mark.parametrize("started", [False, True])
def test_a_server_that_nobody_asked_stops_at_once_and_frees_its_port(started: bool) -> None:
    server = RestServer("127.0.0.1", 0)
    if started:
        server.start(MemoryService())
    assert server.stop()
    assert RestServer("127.0.0.1", int(server.address.rpartition(":")[2])).stop()


def test_a_stop_is_bounded_also_while_a_request_hangs(caplog: pytest.LogCaptureFixture) -> None:
    service = MemoryService(gate=threading.Event())
    assert service.gate is not None
    server = serve_rest(service)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.get, f"{server.url}v1/runs/x/stats", trust_env=False, timeout=60)
        wait_for(lambda: service.calls, "the call")
        with caplog.at_level(logging.WARNING):
            assert not server.stop(timeout=0.5)
        assert "was still running" in caplog.text
        service.gate.set()
        assert asked.exception() or asked.result()


def test_ipv6_addresses_are_written_with_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = serve_rest(MemoryService(), "::1")
    except errors.ConfigError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    try:
        assert server.address.startswith("[::1]:")
        assert (
            httpx.get(f"http://{server.address}/healthz", trust_env=False, timeout=60).status_code
            == 200
        )
    finally:
        server.stop()


@pytest.mark.parametrize("field", ["reason", "author"])
def test_a_revision_with_control_characters_is_refused_in_an_answer_that_shows_them(
    http: httpx.Client, field: str
) -> None:
    for text in TEXTS:
        body = json.dumps({"reason": "why", field: text})
        answer = http.patch(f"/v1/runs/{RUN}/mixture", content=body, headers=JSON)
        assert answer.status_code == 422, text
        message = answer.json()["message"]
        assert (
            message.startswith(f"body.{field}: found ") and "without control characters" in message
        )
        assert is_shown_as_it_is(message)
