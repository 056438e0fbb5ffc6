"""What readers did is counted from their answers, with a bound on what is named, logged and held."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.corpora import DOCS, order_of, write_corpus
from tokenloom_server.order.resources import RunResources
from tokenloom_server.workers.cluster.description import LoggedLines, describe
from tokenloom_server.workers.cluster.readers import link, worker
from tokenloom_server.workers.cluster.readers.rows import Answer, Part, Request, Work
from tokenloom_server.workers.cluster.readers.worker import read


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Some rows of a file, with what it took to read them."""
    order = order_of(write_corpus(tmp_path_factory.mktemp("corpus")))
    return read(
        order, Request("", order.record.specs.index(DOCS), [Part(0, 0, 9, (0, 0))]), "a-node"
    )


def test_answers_are_counted_by_node_and_source(answer: Answer) -> None:
    done, tokens = link.ReaderCounts(), answer.tokens
    for source in enumerate(("docs", "code")):
        done.asked(*source)
    for each in (answer, answer._replace(work=Work("another", 0.25)), answer):
        done.answered(0, each)
    stats = done.stats([("a-node", 2.0), ("a-node", 0.5), ("idle", 1.0)], [], "")
    assert answer.work.cpu_s > 0 and tokens > 0
    assert {(node.name, node.cpus, node.answers, node.tokens) for node in stats.nodes} == {
        ("a-node", 2.5, 2, 2 * tokens),
        ("another", 0, 1, tokens),
        ("idle", 1, 0, 0),
    }
    costs = {node.name: node.ns_per_token for node in stats.nodes}
    assert costs["a-node"] == pytest.approx(1e9 * answer.work.cpu_s / tokens, rel=0.01)
    assert costs["another"] == pytest.approx(0.25e9 / tokens, rel=0.01)
    assert [(each.alias, each.answers, each.tokens) for each in stats.sources] == [
        ("docs", 3, 3 * tokens),
        ("code", 0, 0),
    ]


def test_nodes_that_come_and_go_without_end_are_one_in_the_end(answer: Answer) -> None:
    done = link.ReaderCounts()
    done.asked(0, "docs")
    for i in range(2 * link.MOST_NODES):
        done.answered(0, answer._replace(work=Work(f"node-{i}", 0.1)))
    *_, last = nodes = done.stats([], [], "").nodes
    assert (len(nodes), last.name, last.answers) == (
        link.MOST_NODES + 1,
        "others",
        link.MOST_NODES,
    )


def test_of_many_lines_of_a_task_the_first_are_kept() -> None:
    log = logging.getLogger("tokenloom_server.test")
    with LoggedLines() as lines:
        for i in range(10_000):
            log.warning("line %d %s", i, "x" * 5000)
        logging.getLogger("another.library").warning("not shown")
    *first, last = lines.lines()
    assert [line.split()[:2] for _, line in first] == [["line", str(i)] for i in range(20)]
    assert max(len(line) for _, line in first) == 1000
    assert last == (logging.WARNING, "9,980 more lines were logged there")


def test_a_worker_closes_what_a_run_holds_once_it_holds_the_run_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, closed = describe(order_of(write_corpus(tmp_path))), []
    monkeypatch.setattr("ray.get", lambda reference: reference)
    monkeypatch.setattr(RunResources, "close", lambda self: closed.append(self.base_dir))
    for i in range(5):
        worker._order(
            worker.Described(f"run {i}", json.dumps(json.loads(text) | {"base_dir": f"/run-{i}"}))
        )
    assert closed == [Path("/run-0")]
    worker._order.cache_clear()
