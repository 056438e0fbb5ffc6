"""The streams of a run beside training: what each is made of, and its order.

A stream with a mixture of its own reads files of its own, frozen in a record of its own when a server first sees it.
One without gives what training's sources hold out, of the files that the run began with: in training's tree, with its
weights and source ids, each source once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.order_fields import mixture_order_fields
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core.state import ORDER_VERSION
from tokenloom_server.errors import ConfigError, NotFound
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.mixing.policy import policy_of
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.record import FORMAT, refuse_other_versions
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.manifest import Manifest


class EvaluationStreams:
    """The streams of one run. Immutable."""

    def __init__(
        self, first: PipelineFactory, config: RunConfig, manifests: Mapping[str, Manifest]
    ) -> None:
        """``first`` is the order that the run began with, ``config`` the mixture file's; ``manifests``: the files of
        each stream that has a mixture of its own."""
        self._first = first
        self._config = config
        self._manifests = manifests
        self.names = tuple(sorted({*config.streams, *first.config.stream_names}))

    @classmethod
    def of(cls, first: PipelineFactory, config: RunConfig, ledger: Ledger) -> EvaluationStreams:
        """Reads the records of streams that the ledger has, and makes those of others.

        Raises ``ConfigError`` for a stream that is not what its record says, ``SourceChanged`` for one of its files,
        ``SourceError`` where there is none, and the ledger's errors.
        """
        manifests = {}
        for name, stream in sorted(config.streams.items()):
            if stream.mixture is None:
                continue
            stored = ledger.read_run(config.run, name)
            if stored is None:
                files = builder.stream_files(first.resources, name, stream.mixture)
                record = _record(config, stream.mixture, files)
                stored = ledger.create_run(config.run, name, uuid.uuid4().hex, record)
            manifests[name] = _frozen(config, name, stream.mixture, stored.record)
            builder.verify_files(first, manifests[name])
            first.resources.with_code(manifests[name], RunConfig.sources_of(stream.mixture))
        return cls(first, config, manifests)

    @classmethod
    def checked(cls, first: PipelineFactory, config: RunConfig) -> EvaluationStreams:
        """The streams of a run that is not served: opens each that has files of its own, and makes its first sample.
        Raises what ``of`` and ``order`` do."""
        own = {
            name: stream.mixture
            for name, stream in sorted(config.streams.items())
            if stream.mixture is not None
        }
        streams = cls(
            first,
            config,
            {
                name: builder.stream_files(first.resources, name, mixture)
                for name, mixture in own.items()
            },
        )
        for name in own:
            factory = streams.factory(name)
            factory.pipeline(factory.initial()).advance(1)
        return streams

    def check(self, name: str) -> None:
        """Raises ``NotFound`` where there is no such stream, naming those that there are."""
        stream = name.partition("/")[0]
        if stream not in self.names:
            known = ", ".join(map(repr, (TRAIN, *self.names)))
            raise NotFound(f"run {self._config.run!r} has no stream {stream!r}; it has {known}")

    def described(self, name: str) -> str:
        """What a stream is made of, for people."""
        manifest = self._manifests.get(name)
        if manifest is not None:
            return ", ".join(
                f"{source.spec} ({len(source.shards)} files)" for source in manifest.sources
            )
        held = [
            source for _, source in self._first.config.named_sources() if source.holdout is not None
        ]
        return ", ".join(f"{source.holdout:g} of {source.name}" for source in held)

    def factory(self, name: str) -> PipelineFactory:
        """What makes the samples of a stream, or of one of its sources: ``validation``, or ``validation/ALIAS``.

        Raises ``NotFound``, naming what there is, and what opening its files raises.
        """
        self.check(name)
        stream, _, alias = name.partition("/")
        manifest = self._manifests.get(stream)
        if manifest is not None:
            mixture = self._config.streams[stream].mixture
            assert mixture is not None, "only a stream with a mixture has files of its own"
            config = _with_mixture(self._config, mixture.model_dump())
            sources = {source.id for source in config.sources}
        else:
            # Its last config has all sources, under their ids; revisions are training's alone.
            config = Timeline(self._first).segments[-1].config
            sources = {source.id for source in config.sources if source.holdout is not None}
        if alias:
            own = [config.sources[i] for i in sorted(sources)]
            chosen = {source.id for source in own if alias in (source.alias, source.source)}
            if not chosen:
                names = ", ".join(repr(source.name) for source in own)
                raise NotFound(
                    f"stream {stream!r} of run {self._config.run!r} has no source {alias!r}; it has {names}"
                )
            sources = chosen
        root = _once(config.mixture, sources, frozen=manifest is not None)
        return builder.aside(self._first, _with_mixture(config, root), manifest, name)


def _once(node: NodeConfig, sources: set[int], *, frozen: bool) -> dict[str, Any]:
    """A tree in which only these sources take part. Unless it was written for the stream (``frozen``), each of them
    gives all that it has, once, and the shares do not follow from how far the run is."""
    by_progress = not frozen and policy_of(node).follows_progress
    children = []
    for child in node.children:
        if isinstance(child, NodeConfig):
            fields = _once(child, sources, frozen=frozen)
        else:
            fields = child.model_dump() | {"presence": "live" if child.id in sources else "dropped"}
            if not frozen:
                fields |= {"epochs": 1.0, "max_tokens": None, "on_exhausted": None, "lanes": 1}
        if by_progress:
            fields["weight"] = 1.0
        children.append(fields)
    presence = "live" if any(child["presence"] == "live" for child in children) else "dropped"
    fields = node.model_dump(exclude={"children"}) | {"presence": presence, "children": children}
    if not frozen:
        fields |= {"epochs": 1.0, "max_tokens": None, "on_exhausted": "drop"}
    if by_progress:
        fields |= {"policy": "least_consumed", "interpolate": "linear"}
    return fields


def _with_mixture(config: RunConfig, mixture: dict[str, Any]) -> RunConfig:
    document = config.model_dump(exclude={"phases", "streams"}) | {"mixture": mixture}
    return RunConfig.model_validate(document, context=config.catalog)


def _record(config: RunConfig, mixture: NodeConfig, manifest: Manifest) -> str:
    return canonical(
        {
            "format": FORMAT,
            "order_version": ORDER_VERSION,
            "mixture": mixture_order_fields(mixture, config),
            "manifest": manifest.document(),
        }
    )


def _frozen(config: RunConfig, name: str, mixture: NodeConfig, record: str) -> Manifest:
    stored = json.loads(record)
    refuse_other_versions(stored, f"run {config.run!r}: the record of stream {name!r}")
    if stored["mixture"] != json.loads(canonical(mixture_order_fields(mixture, config))):
        raise ConfigError(
            f"streams.{name}: its mixture is not the one that it began with, and its samples would be others; put it "
            f"back, or give the new one a name of its own. It began with {canonical(stored['mixture'])}"
        )
    return Manifest.from_document(stored["manifest"])
