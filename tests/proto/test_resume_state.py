"""What a client reads of a resume state: the sources that samples behind it may be of."""

from __future__ import annotations

from pathlib import Path

from support.corpora import order_of, write_corpus, write_parquet
from tokenloom_proto.resume import NamedSource, sources_of
from tokenloom_proto.seal import canonical
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.order.revision_content import revise
from tokenloom_server.order.timeline import Timeline

EXTRA = "parquet:data/extra.parquet:ids"


def test_a_source_is_known_as_soon_as_the_revision_that_brings_it_is_made(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_parquet(tmp_path / "data/extra.parquet", [[1, 2, 3] * 9] * 20)
    timeline = Timeline(order_of(tmp_path))
    change = {
        "reason": "why",
        "add": [{"child": {"source": EXTRA, "alias": "extra"}, "to": "rest"}],
    }
    content = revise(timeline, MixtureChange.model_validate(change), 20)
    revision = StoredRevision(
        number=1, sample_index=20, made_at=0.0, author="", reason="why", content=canonical(content)
    )
    timeline = timeline.with_revisions([revision])
    pipeline = timeline.pipeline(timeline.initial())
    specs = [source.source for source in timeline.first.config.sources]
    for index in (0, 19, 20, 30):
        pipeline.advance(index - pipeline.sample_index)
        found = sources_of(timeline.encode(pipeline.state()))
        assert sorted(found) == list(range(5))
        assert [found[i].spec for i in range(4)] == specs
        assert found[4] == NamedSource(EXTRA, "extra")
        assert (found[0].alias, found[3].alias) == ("code", specs[3])
