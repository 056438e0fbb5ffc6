"""The faults, each a context: it begins, the world goes on with it for a while, it is healed.

A fault lasts as long as its context is open; several can be open at once where they concern different things
(``resource``). Once all are healed, training must go on by itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from chaos.checker import skips_by_index
from chaos.corpus import write_mixture
from chaos.processes import ChaosServer, ServerError
from chaos.proxy import Direction, Proxy
from chaos.records import read_records
from chaos.world import BUSY_S, LIVENESS_S, RUN, World

#: A point that is not reached by then is not reached, seconds: what leads there goes on all the time.
POINT_S = 4.0

Context = Callable[[World, random.Random], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """``weight``: how often it is drawn. ``needs``: words of ``redis`` and ``standby``, or nothing."""

    name: str
    resource: str
    weight: float
    begin: Context
    needs: str = ""


FAULTS: list[Fault] = []
"""Every fault there is, in the order of this file."""


def fault(resource: str, weight: float, needs: str = "", **parameters: Any) -> Callable[..., Any]:
    """Adds a fault; its name is the function's, with the parameters' values behind it."""

    def add(function: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        name = "-".join(
            [function.__name__.strip("_").replace("_", "-"), *map(str, parameters.values())]
        )
        begin = contextmanager(function)
        FAULTS.append(
            Fault(
                name, resource, weight, lambda world, draw: begin(world, draw, **parameters), needs
            )
        )
        return function

    return add


def group_of(name: str) -> str:
    """What a fault is about, in few words: for tables."""
    if name.startswith(("at-", "takeover-whose")) or "stopped-before-a-commit" in name:
        return "a server at a named point"
    if name.startswith(("leader-", "ranks-cut-off")):
        return "from one server to the other"
    if name.startswith("server-"):
        return "a server killed, stopped, terminated"
    if name.startswith("redis-"):
        return "Redis killed, stopped, full, set back"
    if name.endswith(("-ledger", "-ranks")) or name.startswith(("answer-", "late-")):
        return "networks"
    return "ranks and jobs"


# The server


@fault("server", 4)
def server_killed(world: World, draw: random.Random) -> Iterator[None]:
    """kill -9, and it comes back at once or a little later."""
    server = draw.choice(world.servers)
    server.kill()
    yield
    world.pause(draw.choice((0, 0, 0.3, 1.0)))
    server.start()


@fault("server", 2)
def server_terminated(world: World, draw: random.Random) -> Iterator[None]:
    """SIGTERM: it commits what it can, and ends in order even where its ledger is away."""
    server = draw.choice(world.servers)
    world.wait(lambda: server.ready, "a server that can be told to end")
    status = server.terminate()
    assert status == 0, f"SIGTERM ended {server.folder.name} with {status}:\n{server.log[-3000:]}"
    yield
    server.start()


@fault("server", 2)
def server_stopped(world: World, draw: random.Random) -> Iterator[None]:
    """SIGSTOP for a while: the machine is there, and nothing answers."""
    server = draw.choice(world.servers)
    server.stop()
    yield
    world.pause(draw.uniform(0.1, 1.5))
    server.go_on()


@fault("server", 1)
def server_restarted_again_and_again(world: World, draw: random.Random) -> Iterator[None]:
    """Killed several times while it starts."""
    server = draw.choice(world.servers)
    for _ in range(draw.randint(2, 4)):
        server.kill()
        server.start()
        world.pause(draw.uniform(0.1, 0.9))
    yield
    server.kill()
    server.start()


# The server, at named points

_COMMIT_POINTS = ("commit-before", "commit-after")
_SNAPSHOT_POINTS = ("snapshot", "save_snapshot-before", "save_snapshot-after")
_RESTORE_POINTS = ("forward", "pin-before", "pin-after")
_JOIN_POINTS = ("open-before", "open-after", "claim_slot-before", "claim_slot-after", "forward")
_START_POINTS = ("acquire-before", "acquire-after")


def _leader(world: World) -> ChaosServer:
    """The server that serves the run, where nothing else is broken."""
    server = world.leader()
    assert server is not None, f"no server leads the run\n{world.tell()}"
    return server


def _await_point(world: World, server: ChaosServer, name: str, how: str) -> None:
    """Waits until the armed server fires. Where another fault keeps it from getting there, this one is missed."""
    if not world.becomes(lambda: server.fired, POINT_S) and server.disarm():
        world.missed.add(name)
        return
    # A process that stopped itself is not ended, and the orchestrator sees nothing.
    server.stopped = how == "SIGSTOP"


def _heal_point(world: World, draw: random.Random, server: ChaosServer) -> None:
    if server.stopped:
        world.pause(draw.uniform(0.1, 1.2))
        server.go_on()


def _at_commit(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    server = world.leader(POINT_S)
    if server is None:
        world.missed.add(f"at-commit-{point}-{how}")
        yield
        return
    server.arm(point, how, skip=draw.randint(0, 5))
    _await_point(world, server, f"at-commit-{point}-{how}", how)
    yield
    _heal_point(world, draw, server)


for _point in _COMMIT_POINTS:
    for _how in ("SIGKILL", "SIGSTOP"):
        fault("server", 1.5, point=_point, how=_how)(_at_commit)
for _point in ("commit-before", "commit-after", "renew-after"):
    fault("server", 0.7, point=_point, how="LOSE")(_at_commit)


def _at_snapshot(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    """A snapshot of a past sample is asked for, and made by going forward."""
    server, seen = world.leader(POINT_S), world.observer.look()
    if server is None or seen is None:
        world.missed.add(f"at-snapshot-{point}-{how}")
        yield
        return
    committed = seen["sample_index"]
    index = draw.randint(min(world.history_from, committed), committed)
    server.arm(point, how)
    call = _Call(server, f"/v1/runs/{RUN}/snapshots", {"sample_index": index})
    _await_point(world, server, f"at-snapshot-{point}-{how}", how)
    yield
    _heal_point(world, draw, server)

    def again() -> None:
        # Whatever is left of the first is not in the way.
        world.wait(lambda: call.over, "the answer to a snapshot", LIVENESS_S)
        # A job that was launched again from an earlier checkpoint may not have come as far.
        there = min(index, world.wait_observed()["sample_index"])
        world.note_snapshot(world.ask(f"/v1/runs/{RUN}/snapshots", {"sample_index": there}))

    world.afterwards.append(again)


for _point in _SNAPSHOT_POINTS:
    fault("server", 0.7, point=_point, how="SIGKILL")(_at_snapshot)
fault("server", 0.5, point="snapshot", how="SIGSTOP")(_at_snapshot)


def _at_start(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    """It dies a second time while it takes the run over."""
    server = draw.choice(world.servers)
    server.kill()
    server.arm(point, how)
    server.start()
    _await_point(world, server, f"at-start-{point}-{how}", how)
    yield
    _heal_point(world, draw, server)


for _point in _START_POINTS:
    fault("server", 0.7, point=_point, how="SIGKILL")(_at_start)


def _at_join(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    """A new attempt joins, and the server dies over it; its ranks ask again."""
    server = _leader(world)
    world.kill_job()
    server.arm(point, how)
    world.relaunch(draw)
    _await_point(world, server, f"at-join-{point}-{how}", how)
    yield
    _heal_point(world, draw, server)


for _point in _JOIN_POINTS:
    fault("all", 0.8, point=_point, how="SIGKILL")(_at_join)
fault("all", 0.8, point="open-after", how="SIGSTOP")(_at_join)
for _point in ("open-after", "claim_slot-after"):
    fault("all", 0.7, point=_point, how="LOSE")(_at_join)


@fault("all", 1.5)
def takeover_whose_answer_is_lost(world: World, draw: random.Random) -> Iterator[None]:
    """The ledger has a new generation, and the server does not know; the launch before it still trains."""
    old = world.job
    assert old is not None
    old.may_end_with.add("Fenced")
    server = _leader(world)
    server.arm("open-after", "LOSE")
    world.relaunch(draw, takeover=True)
    _await_point(world, server, "takeover-whose-answer-is-lost", "LOSE")
    yield
    world.zombies.append(old)


def _at_restore(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    """A restore over REST; the server dies in it, is asked again, and the next attempt begins there."""
    server = _leader(world)
    world.kill_job()
    committed = world.wait_observed()["sample_index"]
    index = draw.randint(min(max(world.history_from, committed - 500), committed), committed)
    server.arm(point, how)
    call = _Call(server, f"/v1/runs/{RUN}/restore", {"sample_index": index})
    _await_point(world, server, f"at-restore-{point}-{how}", how)
    yield
    _heal_point(world, draw, server)
    world.wait(lambda: call.over, "the answer to a restore", LIVENESS_S)
    world.ask(f"/v1/runs/{RUN}/restore", {"sample_index": index})
    world.launch(draw, start=index)


for _point in _RESTORE_POINTS:
    fault("all", 0.5, point=_point, how="SIGKILL")(_at_restore)
fault("all", 0.5, point="pin-after", how="LOSE")(_at_restore)


# Skips: a restore that passes over samples, over REST, as a user makes it


def _skip(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    """A restore to a checkpoint passes over what comes after it, while the job trains or after it was killed; where its
    answer is lost, it is asked for again, or not. The next attempt begins there."""
    server, path = _leader(world), f"/v1/runs/{RUN}/restore"
    trains = draw.random() < 0.5
    if not trains:
        world.kill_job()
    state, index = world.checkpoint(draw, oldest=draw.random() < 0.3)
    samples = draw.choice((1, 2, 7, 40, 150))
    # What the ledger lost, or a job that was launched again further back has not come to, can still be given to it.
    by_state = (
        index < world.history_from
        or draw.random() < 0.3
        or index > world.wait_observed()["sample_index"]
    )
    body = (
        {"snapshot": json.loads(state).get("tokenloom", state)}
        if by_state
        else {"sample_index": index}
    )
    body |= {"skip_samples": samples}
    if how:
        server.arm(point, how)
    call = _Call(server, path, body)
    if how:
        _await_point(world, server, f"skip-{point}-{how}", how)
    yield
    world.wait(lambda: call.over, "the answer to a restore", LIVENESS_S)
    if call.error is not None and call.error.status not in (0, 503):
        raise call.error
    answered = call.error is None
    if not answered and draw.random() < 0.5:
        world.ask(path, body)
        answered = True
    if trains:
        world.kill_job()
    _begin_at_skip(world, draw, state, index, samples, answered)


def _begin_at_skip(
    world: World, draw: random.Random, state: str, index: int, samples: int, answered: bool
) -> None:
    """The next attempt, with the checkpoint, or by the pin alone. Where no answer came, the server's stats say
    whether the run skips; the checker holds tensors to that."""
    after = [*world.skips, [index, samples]]
    opens = draw.choice(("", "", "open-before", "open-after"))
    server = _leader(world)
    if opens:
        server.arm(opens, "SIGKILL")
    alone = answered and draw.random() < 0.3
    # The next attempts may begin with that checkpoint, too.
    world.launch(draw, state="" if alone else state, start=index).state = state
    if opens:
        _await_point(world, server, f"skip-{opens}", "SIGKILL")
    world.wait_begun()
    stats = world.ask(f"/v1/runs/{RUN}/stats", method="GET")
    said = {int(at): count for at, count in stats["skips"].items()}
    expected = [skips_by_index(after), *([] if answered else [skips_by_index(world.skips)])]
    assert said in expected and stats["pin"] is None, (
        f"skips are {said}, pin {stats['pin']}; expected {expected}"
    )
    if said == expected[0]:
        world.note_skip(index, samples)


for _point, _how, _often in (
    ("", "", 2.0),
    ("forward", "SIGKILL", 0.4),
    ("pin-before", "SIGKILL", 0.6),
    ("pin-after", "SIGKILL", 0.6),
    ("pin-after", "LOSE", 0.6),
):
    fault("all", _often, point=_point, how=_how)(_skip)


@fault("all", 0.5)
def skip_refused_or_taken_back(world: World, draw: random.Random) -> Iterator[None]:
    """A skip beyond what was produced is refused, and one that is pinned is taken back: the job never notices."""
    path, job = f"/v1/runs/{RUN}/restore", world.job
    assert job is not None
    refused = _Call(
        _leader(world), path, {"sample_index": job.reach() + 1_000_000, "skip_samples": 7}
    )
    yield
    world.wait(lambda: refused.over, "the refusal of a skip", LIVENESS_S)
    status = refused.error.status if refused.error is not None else 200
    assert 400 <= status < 500, f"a skip beyond what was produced is answered with {status}"
    _, index = world.checkpoint(draw, oldest=False)
    if world.history_from <= index <= world.wait_observed()["sample_index"]:
        world.ask(path, {"sample_index": index, "skip_samples": 7})
        world.ask(path, method="DELETE")
    stats = world.ask(f"/v1/runs/{RUN}/stats", method="GET")
    assert stats["pin"] is None, f"{stats['pin']} is pinned, though it was taken back"


# Revisions, over REST, as a user makes them


def _revised(
    world: World, draw: random.Random, where: dict[str, int], name: str, point: str, how: str
) -> Generator[None, None, tuple[list[int], list[int]]]:
    """Sets a limit that is never reached, so that the checker knows the order after it; the sample indices of the
    revisions before, and of those that were made. Where the server dies in it, or its answer is lost, the revisions
    that there are then tell what became of it."""
    path = f"/v1/runs/{RUN}/mixture"
    known = [int(each["sample_index"]) for each in world.ask(path, method="GET")["revisions"]]
    server, change = _leader(world), {"child": "docs", "max_tokens": 10**12 + draw.randrange(10**9)}
    body = {
        "reason": "chaos",
        "set": [change],
        **{key: max(value, *known, 0) for key, value in where.items()},
    }
    if how:
        server.arm(point, how)
    call = _Call(server, path, body, "PATCH")
    if how:
        _await_point(world, server, name, how)
    yield
    world.wait(lambda: call.over, "the answer to a revision", LIVENESS_S)
    if call.error is not None and call.error.status not in (0, 503):
        raise call.error
    made = [
        int(each["sample_index"])
        for each in world.ask(path, method="GET")["revisions"][len(known) :]
    ]
    if not made:
        assert call.error is not None, "a revision was answered, and is not there"
        if not where:  # else production may have passed it by now
            made = [int(world.ask(path, body, "PATCH")["sample_index"])]
    return known, made


def _revised_ahead(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    """A change holds from a sample on that is still far away, while the job trains; so skips and restores come to lie
    before it. Some are taken back."""
    job = world.job
    assert job is not None
    where = {"sample_index": job.reach() + draw.randint(6_000, 30_000)}
    known, made = yield from _revised(
        world, draw, where, f"revised-ahead-{point}-{how}", point, how
    )
    if made and draw.random() < 0.4:
        world.ask(f"/v1/runs/{RUN}/mixture/revisions/{len(known) + 1}", method="DELETE")
        return
    world.changes += made
    job.changes = len(world.changes)  # it has come to none of them yet


for _point, _how, _often in (
    ("", "", 1.5),
    ("revise-after", "SIGKILL", 0.4),
    ("revise-before", "LOSE", 0.4),
):
    fault("all", _often, point=_point, how=_how)(_revised_ahead)


@fault("all", 0.8)
def forked(world: World, draw: random.Random) -> Iterator[None]:
    """Another run begins at a checkpoint of the job, which trains on; the checker holds its digest to the order."""
    server = _leader(world)
    state, index = world.checkpoint(draw, oldest=False)
    name = f"fork-{len([*world.folder.glob('fork-*')])}"
    folder = world.folder / name
    folder.mkdir()
    # In the corpus's folder, as the job's own.
    mixture = write_mixture(
        world.mixture.with_name(f"{world.folder.name}-{name}.yaml"), name, world.mixture_seed
    )
    world.ask("/v1/runs", {"file": str(mixture)})
    world.ask(f"/v1/runs/{name}/fork", {"snapshot": json.loads(state).get("tokenloom", state)})
    (folder / "stop").write_text(str(index + 40))
    world.train_apart(folder, f"grpc://127.0.0.1:{server.grpc_port}/{name}", name)
    yield
    world.wait(lambda: world.ranks.status(f"{name}/0") is not None, "the end of a fork", LIVENESS_S)
    records = read_records(folder / "rank-0.steps", 4)
    assert len(records) == 10, (folder / "rank-0.log").read_text(encoding="utf-8")[-3000:]
    last = records[-1]
    found = {
        "sample_index": int(last["end"]),
        "total_tokens": int(last["tokens"]),
        "digest": last["digest"].decode(),
    }
    # A checkpoint may be older than skips of the job after it.
    skips = world.ask(f"/v1/runs/{name}/stats", method="GET")["skips"]
    found["skips"] = sorted([int(at), count] for at, count in skips.items())
    revisions = world.ask(f"/v1/runs/{RUN}/mixture", method="GET")["revisions"]
    assert found["sample_index"] == index + 40, (
        f"a fork at sample {index} came to {found} in ten steps"
    )
    if not revisions:  # else the fork has other rules, and shares that begin anew
        world.note_snapshot(found)
    world.ask(f"/v1/runs/{name}", method="DELETE")


def _revised_standing(world: World, draw: random.Random, point: str, how: str) -> Iterator[None]:
    """Every rank was killed, or hangs, and is silent for longer than the liveness: a revision holds from where the run
    stands, and a checkpoint beyond that is none to go on from. It sets a limit that is never reached, so that the
    checker knows the order after it. Where the server dies in it, or its answer is lost, the revisions that there are
    then tell what became of it."""
    old = world.job
    assert old is not None
    hangs = draw.random() < 0.4
    if hangs:
        old.may_end_with.add("Fenced")
        world.signal(signal.SIGSTOP, old)
    else:
        world.kill_job()
    world.pause(BUSY_S + 1.0)
    known, made = yield from _revised(
        world, draw, {}, f"revised-standing-{point}-{how}", point, how
    )
    # A step that a rank got, and did not write down, may have been reported; a snapshot keeps a sample more. Revisions
    # hold in the order of their making.
    reach = max(old.reach() + old.step + 1, (old.start or 0) + 1, *known)
    # A rank that hangs keeps its connection: as far as its window goes it may come back.
    assert hangs or how or made[0] <= reach, (
        f"revisions at {made}, though the run stands at sample {reach} at most"
    )
    world.changes += made
    world.relaunch(draw)
    if hangs:
        world.zombies.append(old)


for _point, _how, _often in (
    ("", "", 1.2),
    ("revise-before", "SIGKILL", 0.6),
    ("revise-after", "SIGKILL", 0.6),
    ("revise-after", "LOSE", 0.6),
):
    fault("all", _often, point=_point, how=_how)(_revised_standing)


class _Call(threading.Thread):
    """A REST call that may be broken off."""

    def __init__(
        self, server: ChaosServer, path: str, body: dict[str, Any], method: str = "POST"
    ) -> None:
        super().__init__(name=f"{method} {path}", daemon=True)
        self._server, self._path, self._body, self._method = server, path, body, method
        self.error: ServerError | None = None
        self.start()

    @property
    def over(self) -> bool:
        return not self.is_alive()

    def run(self) -> None:
        try:
            self._server.call(self._method, self._path, self._body)
        except ServerError as error:
            self.error = error


# The ledger


@fault("ledger", 5, "redis")
def redis_killed(world: World, draw: random.Random) -> Iterator[None]:
    assert world.redis is not None
    world.redis.kill()
    yield
    world.pause(draw.choice((0, 0, 0.3, 1.0, 2.0)))
    world.redis.start()


@fault("ledger", 1, "redis")
def redis_terminated(world: World, draw: random.Random) -> Iterator[None]:
    assert world.redis is not None
    world.redis.stop()
    yield
    world.pause(draw.choice((0, 0.5)))
    world.redis.start()


@fault("ledger", 2, "redis")
def redis_stopped(world: World, draw: random.Random) -> Iterator[None]:
    """SIGSTOP: connections stay, answers do not come; what was asked meanwhile happens late."""
    assert world.redis is not None
    os.kill(world.redis.pid, signal.SIGSTOP)
    yield
    world.pause(draw.uniform(0.2, 2.5))
    os.kill(world.redis.pid, signal.SIGCONT)


@fault("ledger", 1, "redis")
def redis_full(world: World, draw: random.Random) -> Iterator[None]:
    """Out of memory: it answers, and refuses every write."""
    assert world.redis is not None
    _set_memory(world, 1)
    yield
    world.pause(draw.uniform(0.2, 1.5))
    _set_memory(world, 0)


@fault("all", 0.8, "redis", lost="everything")
@fault("all", 0.8, "redis", lost="commits")
def redis_back_without(world: World, draw: random.Random, lost: str) -> Iterator[None]:
    """It comes back empty, or as it was a while ago: the job must hear of it, and its checkpoint makes it right."""
    job = world.job
    assert job is not None and world.redis is not None
    earlier = None if lost == "everything" else world.redis.copy()
    world.recover()
    world.wait_states(1)
    job.may_end_with.add("LedgerRolledBack")
    world.redis.kill()
    world.redis.put_back(earlier)
    world.observer.note_loss()
    yield
    world.redis.start()
    world.wait_ended(job, "hearing of the ledger's loss")
    launch = world.relaunch(draw)
    if lost == "everything":
        assert launch.start is not None
        world.history_from = launch.start


def _set_memory(world: World, size_bytes: int) -> None:
    assert world.redis is not None
    with redis.Redis(port=world.redis.port) as client:
        client.config_set("maxmemory", size_bytes)


# Networks: between the servers and the ledger, and between the trainers and a server


def _link(world: World, draw: random.Random, where: str) -> Proxy:
    return draw.choice(world.ledger_links if where == "ledger" else world.links)


def _reset(world: World, draw: random.Random, where: str) -> Iterator[None]:
    _link(world, draw, where).reset()
    yield


def _delayed(world: World, draw: random.Random, where: str) -> Iterator[None]:
    link = _link(world, draw, where)
    link.delay(draw.choice((0.01, 0.05, 0.2)))
    yield
    world.pause(draw.uniform(0.2, 1.0))
    link.heal()


def _directions(draw: random.Random) -> tuple[Direction, ...]:
    choices: tuple[tuple[Direction, ...], ...] = (("up",), ("down",), ("up", "down"))
    return draw.choice(choices)


def _held(world: World, draw: random.Random, where: str) -> Iterator[None]:
    """A black hole, one way or both; behind it, all that was sent comes at once, however late."""
    link = _link(world, draw, where)
    link.hold(*_directions(draw))
    yield
    world.pause(draw.uniform(0.2, 2.5))
    link.heal()


def _swallowed(world: World, draw: random.Random, where: str) -> Iterator[None]:
    """A black hole, one way or both; what was sent into it is gone, and the connections are reset behind it."""
    link = _link(world, draw, where)
    link.swallow(*_directions(draw))
    yield
    world.pause(draw.uniform(0.2, 2.5))
    link.heal()


def _cut(world: World, draw: random.Random, where: str) -> Iterator[None]:
    """A connection ends in the midst of a message."""
    link = _link(world, draw, where)
    directions: tuple[Direction, ...] = ("up", "down")
    link.cut(draw.choice(directions), draw.choice((1, 7, 100, 1000, 5000)))
    yield
    if not world.becomes(lambda: link.cut_done, POINT_S):
        world.missed.add(f"cut-{where}")
        link.heal()


def _refused(world: World, draw: random.Random, where: str) -> Iterator[None]:
    """Nobody listens there for a while."""
    link = _link(world, draw, where)
    link.refuse()
    yield
    world.pause(draw.uniform(0.1, 1.5))
    link.heal()


for _where, _needs, _weight in (("ledger", "redis", 2.0), ("ranks", "", 1.5)):
    for _kind in (_reset, _delayed, _held, _swallowed, _cut, _refused):
        fault(f"link-{_where}", _weight, _needs, where=_where)(_kind)


def _leaders_link(world: World) -> Proxy:
    return world.ledger_links[world.servers.index(_leader(world))]


@fault("link-ledger", 4, "redis")
def answer_dropped(world: World, draw: random.Random) -> Iterator[None]:
    """The ledger did what it was asked for, mostly a commit, and its answer never comes: once, or twice in a row."""
    server = world.leader(POINT_S)
    if server is None:
        world.missed.add("answer-dropped")
        yield
        return
    link = world.ledger_links[world.servers.index(server)]
    for _ in range(draw.choice((1, 1, 2))):
        link.cut("down", 0)
        if not world.becomes(lambda: link.cut_done, POINT_S):
            world.missed.add("answer-dropped")
            link.heal()
    yield


@fault("all", 2, "redis")
def late_commit(world: World, draw: random.Random) -> Iterator[None]:
    """A commit that was given up and made again on another connection arrives when later ones were made."""
    link = _leaders_link(world)
    link.hold("up", new_ones=False)
    yield
    world.recover()
    _release_late(world, link)


@fault("all", 2, "redis")
def late_commit_of_an_older_launch(world: World, draw: random.Random) -> Iterator[None]:
    """The same, and it arrives when the job was launched again from a checkpoint before it."""
    link = _leaders_link(world)
    world.wait_states(3)
    link.hold("up", new_ones=False)
    world.pause(draw.uniform(0.05, 0.2))
    world.kill_job()
    yield
    world.relaunch(draw, oldest=True)
    world.wait_begun()
    _release_late(world, link)


def _release_late(world: World, link: Proxy) -> None:
    """Lets the late commit come while nobody trains, so that no commit of theirs hides what it did."""
    world.signal(signal.SIGSTOP)
    world.pause(0.3)
    link.heal()
    world.pause(0.2)
    world.signal(signal.SIGCONT)


# Trainers


@fault("ranks", 2)
def rank_stopped(world: World, draw: random.Random) -> Iterator[None]:
    """SIGSTOP of one rank: the others wait for it, and all go on."""
    job = world.job
    assert job is not None
    rank = draw.randrange(job.world_size)
    world.signal(signal.SIGSTOP, job, rank)
    yield
    world.pause(draw.uniform(0.1, 1.5))
    world.signal(signal.SIGCONT, job, rank)


@fault("ranks", 3)
def rank_killed(world: World, draw: random.Random) -> Iterator[None]:
    """kill -9 of one rank; the job is launched again from a checkpoint, with other numbers."""
    job = world.job
    assert job is not None
    world.signal(signal.SIGKILL, job, draw.randrange(job.world_size))
    world.pause(draw.uniform(0, 0.3))
    yield
    world.kill_job()
    world.relaunch(draw)


@fault("all", 0.4)
def rank_killed_and_nobody_sees_it(world: World, draw: random.Random) -> Iterator[None]:
    """The other ranks are told which one is missing, before their collectives would time out."""
    job = world.job
    assert job is not None
    gone = draw.randrange(job.world_size)
    job.may_end_with.add("RankStalled")
    world.signal(signal.SIGKILL, job, gone)
    yield
    world.wait_ended(job, f"hearing that rank {gone} is gone")
    world.relaunch(draw)


@fault("ranks", 2)
def job_killed(world: World, draw: random.Random) -> Iterator[None]:
    """kill -9 of all ranks, and a new launch: from a checkpoint, or from what the ledger has."""
    world.kill_job()
    yield
    if draw.random() < 0.3 and (world.observer.look() or {}).get("sample_index"):
        world.launch(draw, resume="latest", start=None)
    else:
        world.relaunch(draw)


@fault("ranks", 1.5)
def job_killed_while_it_joins(world: World, draw: random.Random) -> Iterator[None]:
    """The job is launched, killed within its Joins, and launched again."""
    world.kill_job()
    world.relaunch(draw)
    world.pause(draw.uniform(0.02, 0.3))
    world.kill_job()
    yield
    world.relaunch(draw)


@fault("ranks", 3)
def zombie(world: World, draw: random.Random) -> Iterator[None]:
    """The whole job hangs, another is launched in its place, and the first comes back: it must end ``Fenced``."""
    old = world.job
    assert old is not None
    world.signal(signal.SIGSTOP, old)
    old.may_end_with.add("Fenced")
    yield
    world.relaunch(draw)
    # It wakes once the new one trains; until then nothing says that it is over.
    world.zombies.append(old)


@fault("ranks", 1)
def job_taken_over(world: World, draw: random.Random) -> Iterator[None]:
    """Another launch takes the run over on purpose, while the first still trains."""
    old = world.job
    assert old is not None
    old.may_end_with.add("Fenced")
    yield
    world.relaunch(draw, takeover=True)
    world.zombies.append(old)


@fault("all", 0.6)
def second_launch_by_mistake(world: World, draw: random.Random) -> Iterator[None]:
    """Another launch comes while the job trains: it is refused, and the job never notices."""
    job = world.job
    assert job is not None
    second = world.relaunch(draw)
    second.may_end_with.add("RunBusy")
    world.job = job
    yield
    world.wait(
        lambda: world.ranks.status(second.names[0]) is not None, "the refusal of a second launch"
    )
    # The others ask for longer, in case that rank 0 is only cut off; its launcher ends them with it.
    world.signal(signal.SIGKILL, second)
    world.wait_ended(second, "the end of a second launch")


# All of it


@fault("all", 2)
def all_killed_and_started_in_any_order(world: World, draw: random.Random) -> Iterator[None]:
    """Power cut; then ledger, servers and trainers come back in any order."""
    world.kill_job()
    for server in world.servers:
        server.kill()
    starts: list[Callable[[], object]] = [
        *(server.start for server in world.servers),
        lambda: world.relaunch(draw),
    ]
    if world.redis is not None:
        world.redis.kill()
        starts.append(world.redis.start)
    yield
    draw.shuffle(starts)
    for start in starts:
        start()
        world.pause(draw.uniform(0, 0.8))


# Two servers


def _await_takeover(world: World, old: ChaosServer) -> None:
    """Until another server leads, and trains the job."""
    others = [server for server in world.servers if server is not old]
    waited_s = world.wait(
        lambda: any(server.leads() for server in others), "that a server that stood by took over"
    )
    world.takeover_s = waited_s + world.recover()


@fault("all", 2, "standby")
def leader_killed_for_good(world: World, draw: random.Random) -> Iterator[None]:
    """The one that stands by takes over once the lease lapsed; the ranks find it."""
    leader = _leader(world)
    leader.kill()
    yield
    _await_takeover(world, leader)
    leader.start()


@fault("all", 1, "standby")
def leader_terminated_for_good(world: World, draw: random.Random) -> Iterator[None]:
    """SIGTERM: it gives its lease back."""
    leader = _leader(world)
    leader.terminate()
    yield
    _await_takeover(world, leader)
    leader.start()


@fault("all", 0.7, "standby")
def leader_stopped_beyond_its_lease(world: World, draw: random.Random) -> Iterator[None]:
    """SIGSTOP; another takes over; it comes back, and believes for a moment that it leads."""
    leader = _leader(world)
    leader.stop()
    yield
    _await_takeover(world, leader)
    leader.go_on()
    world.pause(0.5)


@fault("all", 0.7, "standby")
def leader_stopped_before_a_commit_and_beyond_its_lease(
    world: World, draw: random.Random
) -> Iterator[None]:
    """The same in the midst of a commit, which then comes late and from an older epoch."""
    leader = _leader(world)
    leader.arm("commit-before", "SIGSTOP", skip=draw.randint(0, 5))
    _await_point(world, leader, "leader-stopped-before-a-commit-and-beyond-its-lease", "SIGSTOP")
    yield
    _await_takeover(world, leader)
    leader.go_on()
    world.pause(0.5)


@fault("all", 2, "standby redis")
def leader_cut_off_from_redis_beyond_its_lease(world: World, draw: random.Random) -> Iterator[None]:
    """It has all its ranks, and no ledger: it must let them go before the other one may serve them."""
    leader = _leader(world)
    link = world.ledger_links[world.servers.index(leader)]
    link.hold(*_directions(draw))
    yield
    _await_takeover(world, leader)
    link.heal()
    world.pause(0.5)


@fault("all", 2, "standby redis")
def leader_killed_and_redis_restarted_between(world: World, draw: random.Random) -> Iterator[None]:
    assert world.redis is not None
    leader = _leader(world)
    leader.kill()
    yield
    world.pause(draw.uniform(0, 2.5))
    world.redis.kill()
    world.pause(draw.choice((0, 1.0)))
    world.redis.start()
    _await_takeover(world, leader)
    leader.start()


@fault("all", 1.5, "standby")
def ranks_cut_off_from_the_leader(world: World, draw: random.Random) -> Iterator[None]:
    """Nobody reaches the server that leads: no rank goes on, none gives up, and all go on when it is back."""
    link = world.links[world.servers.index(_leader(world))]
    link.refuse()
    yield
    world.pause(draw.uniform(0.5, 3.0))
    link.heal()
