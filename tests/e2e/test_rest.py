"""REST and gRPC beside the streams, of one server with two runs: snapshots, restore, figures, health."""

from __future__ import annotations

import json
from collections.abc import Callable

import grpc
import pytest
from conftest import SPECS, Corpus, Rpc, StartServer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World, rolling_digest
from tokenloom_proto import dataloader_pb2 as wire

RUNS = ("first", "second", "counted")


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    mixtures = [corpus.mixture(run) for run in RUNS]
    return serve(*mixtures)


def test_one_server_serves_two_runs_whose_counters_are_their_own(
    server: ServerProcess, sequence: list[Sample]
) -> None:
    assert server.get("/v1/runs")["runs"] == sorted(RUNS)
    with World(server.url("first"), 2, 1) as first, World(server.url("second"), 1, 3) as second:
        for _ in range(4):
            first.steps(1)
            second.steps(2)
        assert first.receipt.sequence() == sequence[:8]
        assert second.receipt.sequence() == sequence[:24]
    assert server.get("/v1/runs/first/stats")["sample_index"] == 8
    assert server.get("/v1/runs/second/stats")["sample_index"] == 24


def test_figures_equal_a_recount_over_rest_and_grpc_and_on_the_command_line(
    server: ServerProcess,
    corpus: Corpus,
    rpc: Callable[[ServerProcess], Rpc],
    tokenloom: CommandLine,
) -> None:
    with World(server.url("counted"), 3, 4) as world:
        samples = world.steps(6).receipt.sequence()
        connected = server.get("/v1/runs/counted/stats")
        assert [rank["connected"] for rank in connected["ranks"]] == [True] * 3
        assert (connected["world_size"], connected["batch_size"], connected["generation"]) == (
            3,
            4,
            1,
        )
    figures = server.get("/v1/runs/counted/stats")
    assert figures["sample_index"] == len(samples) == 72
    assert figures["digest"] == world.digest == rolling_digest(samples)
    assert figures["total_tokens"] == sum(corpus.tokens(samples).values())
    for source, spec in zip(figures["sources"], SPECS, strict=True):
        assert source["spec"] == spec
        assert source["tokens"] == corpus.tokens(samples)[spec]
        assert source["rows"] == corpus.rows(samples)[spec]
        assert source["actual_share"] == pytest.approx(source["tokens"] / figures["total_tokens"])
    by_rpc = json.loads(
        rpc(server).stub.Stats(wire.StatsRequest(run="counted"), timeout=120).stats_json
    )
    assert by_rpc["sources"] == figures["sources"]
    shown = tokenloom("stats", f"{server.rest_url}/counted")
    assert shown.status == 0
    assert f"counted: sample 72, {figures['total_tokens']:,} tokens committed" in shown.output
    lines = tokenloom("stats", server.rest, "--json").output.splitlines()
    assert [json.loads(line)["run"] for line in lines] == sorted(RUNS)
    metrics = [
        line
        for line in server.request("GET", "/metrics").text.splitlines()
        if 'run="counted"' in line
    ]
    for alias, spec in zip(("code", "prose", "docs", SPECS[3]), SPECS, strict=True):
        found = [
            line
            for line in metrics
            if line.startswith("tokenloom_source_tokens_total{") and f'"{alias}"' in line
        ]
        assert [float(line.split()[-1]) for line in found] == [corpus.tokens(samples)[spec]]


def test_health_readiness_and_reflection_answer(server: ServerProcess) -> None:
    assert server.get("/healthz")["status"] == "alive"
    assert server.get("/readyz") == {"status": "ready"}
    assert "Tokenloom" in server.request("GET", "/").text
    assert "/v1/runs/{run}/restore" in server.get("/openapi.json")["paths"]
    with grpc.insecure_channel(
        server.grpc, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tokenloom.v2.DataLoader"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=120)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (found,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            asked, timeout=120
        )
        names = {service.name for service in found.list_services_response.service}
        assert {"tokenloom.v2.DataLoader", "grpc.health.v1.Health"} <= names
