"""Reported losses on a real server: shown everywhere, fenced like all else, and of no effect on the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import World
from support.waiting import wait_for
from tokenloom_proto import dataloader_pb2 as wire

RUN = "reported"


def request(world: World, index: int, **fields: Any) -> wire.ReportRequest:
    document: dict[str, Any] = {
        "run": RUN,
        "run_uid": json.loads(world.ranks[0].state_dict()["tokenloom"])["run_uid"],
        "generation": world.ranks[0].generation,
        "attempt": world.ranks[0]._request.topology.attempt,
        "sample_index": index,
        "total_tokens": 16 * index,
        "step": index // 4,
        "sources": [
            wire.SourceLoss(source_id=0, loss=2.0, tokens=30),
            wire.SourceLoss(source_id=2, loss=4.0, tokens=10),
        ],
        "loss": 2.5,
        "learning_rate": 0.125,
    }
    return wire.ReportRequest(**(document | fields))


def refusal(rpc: Rpc, asked: wire.ReportRequest) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as refused:
        rpc.stub.Report(asked, timeout=120)
    error = refused.value
    return dict(error.trailing_metadata())["tokenloom-error"], error.details()


def test_losses_are_shown_and_move_nothing(
    corpus: Corpus,
    start_server: StartServer,
    rpc: Callable[[ServerProcess], Rpc],
    tokenloom: CommandLine,
) -> None:
    server = start_server(corpus.mixture(RUN))
    calls = rpc(server)
    path = f"/v1/runs/{RUN}"
    nobody = wire.ReportRequest(run=RUN, run_uid="x", generation=1)
    assert (
        refusal(calls, nobody)[0] == "LedgerRolledBack"
    )  # of a generation that the ledger never had
    assert refusal(calls, wire.ReportRequest(run="other"))[0] == "NotFound"
    with World(server.url(RUN), 2, 2) as world:
        world.steps(3)
        wait_for(
            lambda: server.get(f"{path}/stats")["sample_index"] == 12,
            "the commit of three micro-steps",
        )
        before = server.get(f"{path}/stats")
        assert before["reported"] is None
        assert server.get(f"{path}/losses")["sample_index"] == []
        assert " loss " not in tokenloom("stats", server.rest_url).output

        calls.stub.Report(request(world, 4), timeout=120)
        calls.stub.Report(request(world, 4), timeout=120)  # its answer was lost
        third = [wire.SourceLoss(source_id=0, loss=1.0, tokens=10)]
        calls.stub.Report(request(world, 8, sources=third, loss=1.0), timeout=120)

        stats = server.get(f"{path}/stats")
        code, prose, docs, _ = stats["sources"]
        # Smoothed: what came before counts nine tenths.
        assert code["loss"] == pytest.approx((0.9 * 60 + 10) / (0.9 * 30 + 10))
        assert (code["last_loss"], prose["loss"], docs["loss"], docs["last_loss"]) == (
            1.0,
            None,
            4.0,
            4.0,
        )
        reported = stats["reported"]
        assert {
            name: reported[name] for name in ("sample_index", "total_tokens", "step", "loss")
        } == {
            "sample_index": 8,
            "total_tokens": 128,
            "step": 2,
            "loss": 1.0,
        }
        curve = server.get(f"{path}/losses")
        assert (curve["sample_index"], curve["stride"], curve["loss"]) == ([4, 8], 1, [2.5, 1.0])
        assert curve["learning_rate"] == [0.125, 0.125]
        assert [(each["alias"], each["losses"], each["tokens"]) for each in curve["sources"]] == [
            ("code", [2.0, 1.0], [30, 10]),
            ("docs", [4.0, None], [10, 0]),
        ]
        metrics = server.request("GET", "/metrics").text
        assert f'tokenloom_source_loss{{run="{RUN}",source="docs",stream="train"}} 4.0' in metrics
        assert f'tokenloom_loss{{run="{RUN}",stream="train"}} 1.0' in metrics
        shown = tokenloom("stats", server.rest_url).output
        assert " loss " in shown
        assert "4.0000" in shown
        assert "step 2, sample 8, loss 1.0000, learning rate 1.25e-01" in shown
        for name in ("sample_index", "total_tokens", "digest", "revision"):
            assert stats[name] == before[name]

        # Nothing that cannot be gets in.
        name, details = refusal(calls, request(world, 12, loss=math.nan))
        assert (name, "loss is nan" in details) == ("ConfigError", True)
        twice = [wire.SourceLoss(source_id=1, loss=1.0, tokens=1)] * 2
        name, details = refusal(calls, request(world, 12, sources=twice))
        assert (name, "source_id 1 is reported twice" in details) == ("ConfigError", True)
        many = [wire.SourceLoss(source_id=1, loss=1.0, tokens=1)] * 100_000
        assert refusal(calls, request(world, 12, sources=many))[0] == "LimitExceeded"
        assert refusal(calls, request(world, 12, attempt="another"))[0] == "Fenced"
        assert server.get(f"{path}/losses") == curve
        old = request(world, 12)
        state = world.ranks[0].state_dict()

    # Another launch, from sample 12: the old one's reports are refused, its own are taken.
    with World(server.url(RUN), 1, 2, state=state) as world:
        world.steps(1)
        name, details = refusal(calls, old)
        assert (name, "is over: generation 2" in details) == ("Fenced", True)
        # It says that it stands before the end: what came from there on was rewound.
        calls.stub.Report(request(world, 6, loss=9.0), timeout=120)
        assert server.get(f"{path}/losses")["sample_index"] == [4, 6]
        # A server that comes back has no curve, and takes what is reported from then on.
        server.kill()
        server.start()
        world.steps(1)
        assert server.get(f"{path}/losses")["sample_index"] == []
        rpc(server).stub.Report(request(world, 16), timeout=120)
        assert server.get(f"{path}/losses")["sample_index"] == [16]
        samples = world.run().receipt.sequence(12)
    assert len(samples) > 20
