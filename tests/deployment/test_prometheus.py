"""Boards and alerts with a real Prometheus, which scrapes a server while its ledger and the server itself go away."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import trustme
import yaml
from support.corpora import mixture, text_rows, write_jsonl
from support.ports import free_port
from support.redis_server import RedisServer
from support.server_process import ServerProcess
from support.trainer import World
from support.waiting import wait_for
from tokenloom import TokenloomError

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES, RULE_TESTS, CONFIG = (
    DEPLOY / "prometheus" / f"{name}.yml" for name in ("alerts", "alerts.test", "prometheus")
)
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
RUNBOOKS = DEPLOY.parent / "docs" / "alerts.md"
TOKEN, READ_TOKEN = "a-token-for-trainers-0123456789", "a-token-for-prometheus-0123456789"
SCRAPE_EVERY = "250ms"

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"),
    reason="the package prometheus is not installed",
)


def promtool(*arguments: object) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def alert_rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def test_promtool_accepts_the_example_and_every_alert_fires_where_it_should_and_nowhere_else() -> (
    None
):
    promtool("check", "config", "--syntax-only", CONFIG)
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULE_TESTS)
    cases = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    fires = {
        (case["alertname"], bool(case.get("exp_alerts")))
        for each in cases
        for case in each["alert_rule_test"]
    }
    assert fires == {(rule["alert"], fired) for rule in alert_rules() for fired in (False, True)}


def test_every_alert_says_what_to_do_about_it() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), re.MULTILINE)
    for rule in alert_rules():
        name, annotations = rule["alert"], rule["annotations"]
        assert annotations["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert name in headings
        assert annotations["summary"] and annotations["description"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}


class Query(NamedTuple):
    """What a board asks for."""

    where: str
    expression: str


def board_queries() -> Iterator[Query]:
    """Of panels, with the values of the variables in place."""
    for path in BOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Query(f"{path.name}: {panel['title']}", filled(target["expr"]))


def filled(expression: str) -> str:
    values = {"$run": "kept", "$instance": ".+", "$__rate_interval": "3s"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


class Prometheus:
    """A process with the configuration and the rules of ``deploy/``, in a hurry."""

    def __init__(self, folder: Path, target: str, authority: Path) -> None:
        folder.mkdir()
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": SCRAPE_EVERY, "evaluation_interval": SCRAPE_EVERY}
        (scrape,) = config["scrape_configs"]
        scrape["tls_config"]["ca_file"] = str(authority)
        (folder / "read-token").write_text(READ_TOKEN)
        scrape["authorization"]["credentials_file"] = str(folder / "read-token")
        scrape["static_configs"] = [{"targets": [target]}]
        shutil.copy(RULES, folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self._client = httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=120)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={address}", "--log.level=warn"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        wait_for(self._ready, "Prometheus")

    def _ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **query: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, f"{query}: {answer.text}"
        return answer.json()["data"]

    def query(self, expression: str) -> list[Any]:
        """The series that there are of it now."""
        found: list[Any] = self.get("query", query=expression)["result"]
        return found

    def alerts(self) -> dict[str, str]:
        """The state of each alert whose expression holds, by name."""
        return {
            alert["labels"]["alertname"]: alert["state"] for alert in self.get("alerts")["alerts"]
        }

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(240)


@pytest.fixture
def redis_ledger(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis").start()
    yield redis
    redis.kill()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """Of the server's certificate, which lies beside it."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    (tmp_path / "server.key").chmod(0o600)
    return tmp_path / "ca.pem"


@pytest.fixture
def server(tmp_path: Path, redis_ledger: RedisServer, authority: Path) -> Iterator[ServerProcess]:
    """Two runs: one whose bad rows are left out, and one that ends at its first."""
    rows = text_rows(4000, 3, 9)
    write_jsonl(tmp_path / "good.jsonl", rows)
    write_jsonl(tmp_path / "bad.jsonl", rows)
    lines = (tmp_path / "bad.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "bad.jsonl").write_text(
        "".join("{\n" if i % 20 == 15 else line for i, line in enumerate(lines))
    )
    children = [
        {"source": "jsonl:good.jsonl:text", "alias": "good", "epochs": 1000},
        {"source": "jsonl:bad.jsonl:text", "alias": "bad", "weight": 0.25},
    ]
    paths = []
    for run, more in (("kept", {"on_bad_row": "skip", "max_bad_rows": 10**9}), ("broken", {})):
        document = mixture(
            run=run,
            window_micro_steps=8,
            mixture={"policy": "least_consumed", "children": children},
        )
        paths.append(tmp_path / f"{run}.yaml")
        paths[-1].write_text(yaml.safe_dump(document | more))
    environment = {
        "TOKENLOOM_TOKEN": TOKEN,
        "TOKENLOOM_READ_TOKEN": READ_TOKEN,
        "TOKENLOOM_CACHE": str(tmp_path / "cache"),
    }
    ledger = f"{redis_ledger.url()}?socket_timeout=1"
    flags = [
        "--tls-cert",
        authority.with_name("server.pem"),
        "--tls-key",
        authority.with_name("server.key"),
    ]
    server = ServerProcess(
        tmp_path / "server", *paths, ledger=ledger, flags=flags, environment=environment
    ).start()
    yield server
    server.kill()


def world_of(server: ServerProcess, run: str, authority: Path, **options: Any) -> World:
    return World(
        server.url(run).replace("grpc://", "grpcs://"), token=TOKEN, tls_ca=authority, **options
    )


@pytest.fixture
def training(server: ServerProcess, authority: Path) -> Iterator[None]:
    """Two ranks of the run ``kept``, which report losses."""
    stop, errors = threading.Event(), []

    def train() -> None:
        try:
            with world_of(server, "kept", authority, world_size=2) as world:
                while not stop.wait(0.05):
                    world.steps(1)
                    rank = world.ranks[0]
                    position = {
                        "sample_index": rank.sample_index,
                        "total_tokens": rank.total_tokens,
                    }
                    rank.report(
                        {0: (2.5, 8), 1: (2.25, 8)},
                        **position,
                        step=1,
                        loss=2.4,
                        learning_rate=1e-3,
                    )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    yield
    stop.set()
    thread.join(240)
    assert errors == []


def test_under_faults_every_panel_has_data_and_the_alerts_that_should_fire_do(
    tmp_path: Path,
    server: ServerProcess,
    redis_ledger: RedisServer,
    authority: Path,
    training: None,
) -> None:
    prometheus = Prometheus(tmp_path / "prometheus", server.rest, authority)
    try:
        headers = {"authorization": f"Bearer {TOKEN}"}
        url = f"https://{server.rest}/v1/runs/kept/snapshots"
        saved = httpx.post(
            url, json={}, headers=headers, verify=False, trust_env=False, timeout=120
        )
        assert saved.is_success, saved.text
        with pytest.raises(TokenloomError), world_of(server, "broken", authority) as world:
            world.run()
        wait_for(firing(prometheus, "TokenloomFailed", "firing"), "the alert of a run that failed")
        wait_for(firing(prometheus, "TokenloomBadRows", "firing"), "the alert of bad rows")
        wait_for(
            firing(prometheus, "TokenloomSourceEnds", "pending"), "the alert of a source that ends"
        )

        redis_ledger.kill()
        wait_for(
            firing(prometheus, "TokenloomLedgerAway", "pending"),
            "the alert of a ledger that is away",
        )
        redis_ledger.start()
        wait_for(lambda: "TokenloomLedgerAway" not in prometheus.alerts(), "the ledger")

        server.kill()
        wait_for(firing(prometheus, "TokenloomNoLeader", "pending"), "the alert that nobody leads")
        server.start()
        wait_for(
            lambda: prometheus.query('tokenloom_reconnects_total{run="kept"} > 0'),
            "the ranks' streams",
        )
        wait_for(lambda: "TokenloomNoLeader" not in prometheus.alerts(), "a leader")
        with pytest.raises(TokenloomError), world_of(server, "unknown", authority) as world:
            world.join()
        for query in board_queries():
            # There are no readers here; ``test_looking`` has the names of what they count.
            wait_for(
                lambda query=query: (
                    prometheus.query(query.expression) or "tokenloom_reader_" in query.expression
                ),  # type: ignore[misc]
                f"data of {query}",
            )
        for rule in prometheus.get("rules")["groups"][0]["rules"]:
            assert rule["health"] == "ok", rule
        for path in BOARDS:
            board = json.loads(path.read_text(encoding="utf-8"))
            for mark in board["annotations"]["list"]:
                prometheus.query(filled(mark["expr"]))
            for variable in board["templating"]["list"][1:]:
                series, label = (
                    variable["definition"]
                    .removeprefix("label_values(")
                    .removesuffix(")")
                    .rsplit(", ", 1)
                )
                assert prometheus.get(f"label/{label}/values", **{"match[]": filled(series)}), (
                    variable
                )
    finally:
        prometheus.close()


def firing(prometheus: Prometheus, name: str, state: str) -> Callable[[], bool]:
    return lambda: prometheus.alerts().get(name) == state
