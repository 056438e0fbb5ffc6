"""The Kubernetes manifests: what kustomize makes of them is checked part by part, and its commands are run here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from support.catalog import CATALOG
from support.ports import free_port
from support.redis_server import RedisServer
from support.server_process import MAIN, server_forks
from support.waiting import wait_for
from tokenloom import ConnectionOptions, RemoteDataset
from tokenloom_server.config import mixture_file as config
from tokenloom_tools.cli.app import app
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
#: What kustomize makes of each folder, by ``make kubernetes``.
RENDERED = {
    path.stem: path for path in sorted((Path(__file__).parent / "kubernetes").glob("*.yaml"))
}
#: Of Kubernetes, the oldest release whose maintenance has not ended for long.
SCHEMAS = "1.31"
TOKEN = "a-token-for-kubernetes-0123456789"
DEADLINE_S = 240.0
SERVERS = ("tokenloom", "tokenloom-standby")

Object = dict[str, Any]


def assert_keys_stand_once(node: yaml.Node) -> None:
    """As the API server asks; a YAML reader lets the last one win."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice: {keys}"
        for _, value in node.value:
            assert_keys_stand_once(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            assert_keys_stand_once(value)


@pytest.fixture(scope="module", params=[name for name in RENDERED if name != "trainer"])
def objects(request: pytest.FixtureRequest) -> dict[tuple[str, str], Object]:
    """By kind and name: a server as it is rendered, with the trainer."""
    found = [
        item
        for name in (request.param, "trainer")
        for item in yaml.safe_load_all(RENDERED[name].read_text())
    ]
    named = {(item["kind"], item["metadata"]["name"]): item for item in found}
    assert len(named) == len(found), "two objects of one kind and name"
    return named


def pods(objects: dict[tuple[str, str], Object]) -> dict[str, Object]:
    """Templates of pods, by the name of what makes them."""
    return {
        name: item["spec"]["template"]
        for (_, name), item in objects.items()
        if "template" in item.get("spec", {})
    }


def container(pod: Object) -> Object:
    (found,) = pod["spec"]["containers"]
    return dict(found)


def server_volumes(objects: dict[tuple[str, str], Object]) -> list[Object]:
    return list(pods(objects)["tokenloom"]["spec"]["volumes"])


def environment(of: Object) -> dict[str, Object]:
    return {entry["name"]: entry for entry in of.get("env", [])}


# --- What the parts say of each other ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RENDERED)
def test_what_is_rendered_is_what_kustomize_makes(name: str) -> None:
    (folder,) = [
        path.parent
        for path in FOLDER.rglob("kustomization.yaml")
        if path.parent.name == name and "components" not in path.parts
    ]
    for path in folder.glob("*.yaml"):
        for document in yaml.compose_all(path.read_text(encoding="utf-8"), yaml.SafeLoader):
            assert_keys_stand_once(document)
    if (kubectl := shutil.which("kubectl")) is not None:
        done = subprocess.run(
            [kubectl, "kustomize", folder], capture_output=True, text=True, timeout=240
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert RENDERED[name].read_text(encoding="utf-8") == done.stdout, "make kubernetes"


def test_every_object_is_as_its_schema_says(objects: dict[tuple[str, str], Object]) -> None:
    for (kind, name), item in objects.items():
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        if kind == "ServiceMonitor":  # Prometheus's operator brings it, with its schema
            (endpoint,) = item["spec"]["endpoints"]
            assert endpoint["authorization"] == {
                "credentials": {"name": "tokenloom", "key": "read-token"}
            }
            # The server listens with TLS or without it, and is scraped so.
            (tls,) = [
                volume["secret"] for volume in server_volumes(objects) if volume["name"] == "tls"
            ] or [None]
            ca = {"secret": {"name": tls and tls["secretName"], "key": "ca.crt"}}
            asked = (
                {"scheme": "https", "tlsConfig": {"ca": ca, "serverName": "tokenloom"}}
                if tls
                else {}
            )
            assert {
                key: endpoint[key] for key in ("scheme", "tlsConfig") if key in endpoint
            } == asked
            services = [each for (of, _), each in objects.items() if of == "Service"]
            chosen = [
                each
                for each in services
                if item["spec"]["selector"]["matchLabels"].items()
                <= each["metadata"]["labels"].items()
            ]
            assert chosen
            assert all(
                endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}
                for each in chosen
            )
        else:
            kubernetes_validate.validate(item, SCHEMAS, strict=True)


def test_selectors_find_the_pods_that_they_are_for(objects: dict[tuple[str, str], Object]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(objects).values()]

    def found(selector: Object) -> int:
        return sum(selector.items() <= label.items() for label in labels)

    for (kind, name), item in objects.items():
        spec = item.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"], name
        elif kind == "Service":
            assert found(spec["selector"]) == 1, name
        elif kind == "NetworkPolicy":
            assert found(spec["podSelector"]["matchLabels"]) >= 1, name
            # Prometheus is of another namespace, and not of this file.
            own = [
                source
                for rule in spec["ingress"]
                for source in rule["from"]
                if "namespaceSelector" not in source
            ]
            assert all(found(source["podSelector"]["matchLabels"]) >= 1 for source in own), name
        elif kind == "PodDisruptionBudget":
            assert found(spec["selector"]["matchLabels"]) == len(
                pods(objects).keys() & {*SERVERS}
            ), name


def test_every_port_that_is_named_is_one_of_the_pods(
    objects: dict[tuple[str, str], Object],
) -> None:
    ports = {
        str(pod["metadata"]["labels"]["app"]): {
            port["name"]: port["containerPort"] for port in container(pod)["ports"]
        }
        for pod in pods(objects).values()
    }
    assert ports == {
        "tokenloom": {"grpc": 50051, "rest": 8080, "health": 8081},
        **({"tokenloom-redis": {"redis": 6379}} if "tokenloom-redis" in pods(objects) else {}),
        "trainer": {"master": 29500},
    }
    for (kind, name), item in objects.items():
        if kind == "Service":
            own = ports[item["spec"]["selector"]["app"]]
            assert all(port["port"] == own[port["targetPort"]] for port in item["spec"]["ports"]), (
                name
            )
        elif kind == "NetworkPolicy":
            own = ports[item["spec"]["podSelector"]["matchLabels"]["app"]]
            assert {
                port["port"] for rule in item["spec"]["ingress"] for port in rule["ports"]
            } <= own.keys(), name
    for pod in pods(objects).values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in (asked := container(pod).get(probe, {})):
                assert asked["httpGet"]["port"] in {
                    port["name"] for port in container(pod)["ports"]
                }


def test_every_volume_is_declared_mounted_and_there(objects: dict[tuple[str, str], Object]) -> None:
    for name, pod in pods(objects).items():
        declared = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        templates = (
            objects.get(("StatefulSet", name), {}).get("spec", {}).get("volumeClaimTemplates", [])
        )
        declared |= {claim["metadata"]["name"]: {} for claim in templates}
        mounted = {mount["name"]: mount for mount in container(pod)["volumeMounts"]}
        assert declared.keys() == mounted.keys(), name
        for volume in declared.values():
            if "configMap" in volume:
                data = objects["ConfigMap", volume["configMap"]["name"]]["data"]
                assert mounted[volume["name"]].get("subPath", next(iter(data))) in data
            if "persistentVolumeClaim" in volume:
                assert (
                    "PersistentVolumeClaim",
                    volume["persistentVolumeClaim"]["claimName"],
                ) in objects


def test_the_token_comes_from_a_secret_that_is_not_in_the_file(
    objects: dict[tuple[str, str], Object],
) -> None:
    server = environment(container(pods(objects)["tokenloom"]))
    assert server["TOKENLOOM_READ_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "tokenloom",
        "key": "read-token",
    }
    secret = {"valueFrom": {"secretKeyRef": {"name": "tokenloom", "key": "token"}}}
    for name in ("tokenloom", "trainer"):
        assert environment(container(pods(objects)[name]))["TOKENLOOM_TOKEN"] == {
            "name": "TOKENLOOM_TOKEN",
            **secret,
        }
    for file in (
        FOLDER / "base" / "kustomization.yaml",
        ROOT / "docs" / "integrations" / "kubernetes.md",
    ):
        text = file.read_text(encoding="utf-8")
        assert "kubectl create secret generic tokenloom --from-literal=token=" in text
        assert "--from-literal=read-token=" in text
    assert not any(kind == "Secret" for kind, _ in objects)


def test_prometheus_may_scrape_with_the_token_for_reading_and_reaches_nothing_else(
    objects: dict[tuple[str, str], Object], tmp_path: Path
) -> None:
    rules = objects["NetworkPolicy", "tokenloom"]["spec"]["ingress"]
    (scraping,) = [
        rule for rule in rules if any("namespaceSelector" in source for source in rule["from"])
    ]
    assert scraping["ports"] == [{"port": "rest"}]
    page = (ROOT / "docs" / "integrations" / "kubernetes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n  (scrape_configs:.*?)```", page, re.DOTALL)
    example = example.replace("\n  ", "\n")
    (token_file,) = re.findall(r"credentials_file: ([^\s}]+)", example)
    (tmp_path / "read-token").write_text("a-token-for-reading-0123456789", encoding="utf-8")
    config = tmp_path / "prometheus.yml"
    config.write_text(example.replace(token_file, str(tmp_path / "read-token")), encoding="utf-8")
    (job,) = yaml.safe_load(example)["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["tokenloom.default.svc:8080"]}]
    if (promtool := shutil.which("promtool")) is not None:
        checked = subprocess.run(
            [promtool, "check", "config", config], capture_output=True, text=True, timeout=240
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_pod_is_restricted_and_runs_with_as_little_as_it_needs(
    objects: dict[tuple[str, str], Object],
) -> None:
    """All that the Pod Security Standard "restricted" asks, and more."""
    for name in pods(objects):
        pod, own = pods(objects)[name], container(pods(objects)[name])
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys()
        kinds = {kind for volume in pod["spec"].get("volumes", []) for kind in volume} - {"name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        assert not any("hostPort" in port for port in own["ports"])
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert own["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= own["resources"]["requests"].keys()
        assert "memory" in own["resources"]["limits"]
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    user = pods(objects)["tokenloom"]["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in dockerfile


def test_the_trainers_ranks_and_names_fit(objects: dict[tuple[str, str], Object]) -> None:
    job = objects["Job", "trainer"]["spec"]
    variables = environment(container(job["template"]))
    service = objects["Service", job["template"]["spec"]["subdomain"]]["spec"]

    assert job["completionMode"] == "Indexed"
    assert str(job["completions"]) == str(job["parallelism"]) == variables["WORLD_SIZE"]["value"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables["RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == index
    assert variables["MASTER_ADDR"]["value"] == "trainer-0.trainer"
    assert variables["MASTER_PORT"]["value"] == str(service["ports"][0]["port"])
    # Names are there before ranks are ready, which they are when they have met.
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    url = next(
        argument
        for argument in container(job["template"])["command"]
        if argument.startswith("grpc://")
    )
    host, port, run = re.fullmatch(r"grpc://(\S+):(\d+)/(\S+)", url).groups()  # type: ignore[union-attr]
    assert ("Service", host) in objects
    assert int(port) in {entry["port"] for entry in objects["Service", host]["spec"]["ports"]}
    assert variables["TOKENLOOM_PLAINTEXT_HOSTS"]["value"] == host
    assert run == yaml.safe_load(objects["ConfigMap", "tokenloom"]["data"]["mixture.yaml"])["run"]


def test_the_trainers_image_has_what_its_job_runs_and_is_shown_no_more(
    objects: dict[tuple[str, str], Object],
) -> None:
    job = pods(objects)["trainer"]
    text = (FOLDER / "trainer" / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        source
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    }
    ignored = (
        (FOLDER / "trainer" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    )
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    (command,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    assert (
        json.loads(command)[:2]
        == container(job)["command"][:2]
        == ["python", "/app/examples/ddp.py"]
    )
    assert re.findall(r"^(?:WORKDIR|USER) (.*)$", text, re.MULTILINE) == ["/app", "10001:10001"]
    assert job["spec"]["securityContext"]["runAsUser"] == 10001
    page = (ROOT / "docs" / "integrations" / "kubernetes.md").read_text(encoding="utf-8")
    build = f"docker build -t {container(job)['image']} -f deploy/kubernetes/trainer/Dockerfile ."
    assert build in page and build in text


# --- What they run -----------------------------------------------------------------------------------------------


def test_a_standby_is_the_same_server_with_the_same_secrets(
    objects: dict[tuple[str, str], Object],
) -> None:
    first, *others = [container(pods(objects)[name]) for name in SERVERS if name in pods(objects)]
    assert get_command(app).commands["serve"].make_context("serve", first["args"][1:])  # type: ignore[attr-defined]
    assert others in ([], [first])
    assert ("--standby" in first["args"]) == bool(others)
    ledger = environment(first)["TOKENLOOM_LEDGER"]
    if "tokenloom-redis" not in pods(objects):
        expected: Object = {
            "valueFrom": {"secretKeyRef": {"name": "tokenloom-ledger", "key": "ledger"}}
        }
        assert ledger == {"name": "TOKENLOOM_LEDGER", **expected}
        assert {"--tls-cert=/tls/tls.crt", "--tls-key=/tls/tls.key"} <= set(first["args"])


@pytest.mark.parametrize("objects", ["base"], indirect=True)
def test_what_it_starts_serves_and_its_probes_say_so(
    objects: dict[tuple[str, str], Object], tmp_path: Path
) -> None:
    server, redis = (
        container(pods(objects)["tokenloom"]),
        container(pods(objects)["tokenloom-redis"]),
    )
    folder = tmp_path / "config"
    folder.mkdir()
    mixture = objects["ConfigMap", "tokenloom"]["data"]["mixture.yaml"]
    (folder / "mixture.yaml").write_text(mixture, encoding="utf-8")
    (folder / "data").mkdir()
    for name, text in objects["ConfigMap", "tokenloom-data"]["data"].items():
        (folder / "data" / name).write_text(text, encoding="utf-8")
        assert text == (ROOT / "examples" / "compose" / "data" / name).read_text(encoding="utf-8")
    assert config.load(folder / "mixture.yaml", CATALOG).run == "sample"

    program, *arguments = redis["args"]
    assert program == "redis-server"
    ledger = RedisServer(tmp_path, arguments).start()

    health_port = free_port()

    def here(argument: str) -> str:
        argument = argument.replace("--health=0.0.0.0:8081", f"--health=127.0.0.1:{health_port}")
        argument = argument.replace("/config/", f"{folder}/").replace("/index", f"{tmp_path}/index")
        return re.sub(r"0\.0\.0\.0:\d+$", "127.0.0.1:0", argument)

    ready, log = tmp_path / "ready.json", tmp_path / "log"
    url = environment(server)["TOKENLOOM_LEDGER"]["value"].replace(
        "tokenloom-redis:6379", f"127.0.0.1:{ledger.port}"
    )
    roots = environment(server)["TOKENLOOM_DATA_ROOTS"]["value"].replace("/config", str(folder))
    process = server_forks().fork(
        MAIN,
        [*map(here, server["args"]), f"--ready-file={ready}"],
        output=log,
        folder=tmp_path,
        environment={
            "TOKENLOOM_TOKEN": TOKEN,
            "TOKENLOOM_DATA_ROOTS": roots,
            "TOKENLOOM_LEDGER": url,
        },
    )

    def status(probe: str) -> int:
        assert server[probe]["httpGet"]["port"] == "health"
        url = f"http://127.0.0.1:{health_port}{server[probe]['httpGet']['path']}"
        return httpx.get(url, trust_env=False).status_code

    try:
        wait_for(ready.exists, "a ready server", DEADLINE_S)
        addresses = json.loads(ready.read_text(encoding="utf-8"))
        with RemoteDataset(
            f"grpc://{addresses['grpc']}/sample", 4, connection=ConnectionOptions(token=TOKEN)
        ) as dataset:
            assert next(iter(dataset))["input_ids"].shape == (4, 128)
        # What they say while Redis is away: tests/api/test_readiness.py.
        assert {status(probe) for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
            200
        }
        assert server["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    finally:
        process.kill()
        ledger.kill()
