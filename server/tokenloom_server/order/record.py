"""What a run is: its config, the files it began with, its tokeniser. Frozen, and written once to the ledger.

A ``RunRecord`` is plain data; ``builder`` makes it, ``factory`` makes pipelines from it.
"""

from __future__ import annotations

import bz2
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from tokenloom_proto.seal import SNAPSHOT_FORMAT, SNAPSHOT_VERSION, canonical

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.order_fields import (
    fields_beside,
    order_digest,
    order_fields,
    weight_text,
)
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import ORDER_VERSION
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.errors import ConfigError, LedgerError
from tokenloom_server.mixing.mixer import node_shape
from tokenloom_server.order import state_document
from tokenloom_server.order.exclusions import NOTHING_EXCLUDED, Exclusions
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import Manifest
from tokenloom_server.tokenizer.choose import EngineRecord
from tokenloom_server.tokenizer.definition import (
    TokenizerDefinition,
    begin_of_text_id,
    end_of_text_id,
    id_dtype,
)
from tokenloom_server.tokenizer.engine_ids import EngineIds

FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class RunRecord:
    """A run under one config. A phase, a revision or a stream beside training has a record of its own.

    Raises ``ConfigError`` where the config does not fit the tokeniser or the beginning of the run.
    """

    config: RunConfig
    manifest: Manifest
    tokenizer: TokenizerDefinition | None
    """None where the mixture file names none: every source holds ids."""
    engine: EngineRecord | None
    """What encodes text; None where no source holds any."""
    has_loss_mask: bool
    """Whether samples have room for a loss mask, as when the run began."""
    engine_ids: EngineIds | None = None
    """What the engine gave when the run began; None for bytes."""
    substitute_engine: EngineRecord | None = None
    """What encodes text here in place of ``engine``, which is not installed; it gives the same ids."""
    excluded: Exclusions = NOTHING_EXCLUDED
    size_estimates: Mapping[int, TokenCurve] = field(default_factory=dict)
    """By source id, for those sources whose remaining size decides a policy's weights: measured once."""
    phase_estimates: Mapping[str, TokenCurve] = field(default_factory=dict)
    """By spec, for those of which that is so in a later phase alone."""
    earlier_file_counts: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By source id, how many files it had before more were appended."""
    stream: str = ""
    """The stream beside training whose own files these are; empty for training's files."""
    gives_held_out: bool = False
    """Whether sources that hold rows out give these, and not the others."""

    def __post_init__(self) -> None:
        config, _ = self.config, self.dtype
        if config.batching is None and config.pad_id >= self.vocab_size:
            raise ConfigError(
                f"pad_id: {config.pad_id} is not below the vocabulary size {self.vocab_size}"
            )
        if config.masks_loss and not self.has_loss_mask:
            raise ConfigError(
                "loss_mask: the run began without a source that has one, and its samples have no room for it; begin "
                "a new run"
            )
        # What is missing is an error now, and not with the first document.
        _ = self.end_of_text_id, self.begin_of_text_id
        for source in config.sources:
            _check_fim(source, self.vocab_size)
            if source.is_chat and (self.tokenizer is None or self.tokenizer.chat_template is None):
                raise ConfigError(
                    f"{source.name}: has template: chat, but no source that is trained on had it when the run began, "
                    "so the run has no chat template; leave it out, or begin a new run"
                )

    @property
    def name(self) -> str:
        return self.config.run

    @cached_property
    def specs(self) -> tuple[str, ...]:
        """The sources' specs, by source id."""
        return tuple(source.source for source in self.config.sources)

    @cached_property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """The files of each source, by source id."""
        return tuple(self.manifest.shards(spec) for spec in self.specs)

    @cached_property
    def shard_paths(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(shard.path for shard in shards) for shards in self.shards)

    @cached_property
    def vocab_size(self) -> int:
        """0 with ``batching``, where there are no ids."""
        config, definition = self.config, self.tokenizer
        if config.batching is not None:
            return 0
        if definition is None:
            assert config.vocab_size is not None
            return config.vocab_size
        if config.vocab_size is not None and config.vocab_size < definition.vocab_size:
            raise ConfigError(
                f"vocab_size: {config.vocab_size} is smaller than the tokeniser's {definition.vocab_size} (greatest id "
                "+ 1)"
            )
        return config.vocab_size or definition.vocab_size

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the ids of a sample as it is sent; bytes with ``batching``."""
        return id_dtype(self.vocab_size) if self.config.batching is None else np.dtype(np.uint8)

    @cached_property
    def end_of_text_id(self) -> int | None:
        """Ends each document; None where there is none."""
        return end_of_text(self.config, self.tokenizer)

    @cached_property
    def begin_of_text_id(self) -> int | None:
        """Begins each document where the config says so; None where there is none."""
        needed = any(self.config.adds_bos(source) for source in self.config.sources)
        return begin_of_text_id(self.tokenizer, self.config.begin_of_text_id, needed=needed)

    @cached_property
    def shape(self) -> state_document.Shape:
        """What states of the run look like."""
        config = self.config
        return state_document.Shape(
            specs=self.specs,
            shards=self.shard_paths,
            nodes={node.id: node_shape(config, node).child_ids for node in config.nodes},
            sample_tokens=config.sequence_length,
            names=tuple(source.alias for source in config.sources),
            shuffles=tuple(source.shuffle for source in config.sources),
            lanes=tuple(source.lanes for source in config.sources),
            mixture=tuple(_described(node) for node in config.nodes),
            best_fit=config.packing == "best_fit",
            in_batches=config.batching is not None,
        )

    @property
    def serving_engine(self) -> EngineRecord | None:
        """What encodes text here; None where no source holds any."""
        return self.substitute_engine or self.engine

    def to_json(self) -> str:
        """Canonical JSON: what a restarted server compares itself with."""
        fields = {
            "format": FORMAT,
            "order_version": ORDER_VERSION,
            **self._compared,
            "tokenizer": self.tokenizer_fields,
            **({"engine_ids": self.engine_ids._asdict()} if self.engine_ids is not None else {}),
            "vocab_size": self.vocab_size,
            "manifest": self.manifest.document(),
            **estimates_to_json(self.size_estimates),
            **estimates_to_json(self.phase_estimates, "phase_estimates"),
        }
        return canonical(fields)

    @property
    def _compared(self) -> dict[str, Any]:
        """What a mixture file is compared with."""
        return {"config": order_fields(self.config), "beside": fields_beside(self.config)}

    @property
    def tokenizer_fields(self) -> dict[str, str]:
        """The tokeniser as records and snapshots name it."""
        if self.engine is None:
            # A tokeniser encodes nothing here, but the end- and begin-of-text ids may be its own.
            digest = self.tokenizer.digest if self.tokenizer is not None else ""
            return {"digest": digest, "engine": "none", "version": ""}
        return {
            "digest": self.engine.digest,
            "engine": self.engine.engine,
            "version": self.engine.version,
        }

    def template(self, run_uid: str, stream: str, generation: int) -> dict[str, Any]:
        """What every snapshot of a generation says beside its position and state, of the record that the run began
        with."""
        return {
            **self._same_in_every_snapshot,
            "run_uid": run_uid,
            "stream": stream,
            "generation": generation,
        }

    @cached_property
    def _same_in_every_snapshot(self) -> dict[str, Any]:
        # Digests of the whole mixture and of every file's name: not to be made again for each snapshot.
        return {
            "format": SNAPSHOT_FORMAT,
            "version": SNAPSHOT_VERSION,
            "run": self.name,
            "seed": self.config.seed,
            "order_version": ORDER_VERSION,
            "config_digest": order_digest(self.config),
            # The same bytes on every machine, which those of zlib are not.
            "config": b64encode(bz2.compress(canonical(self._compared).encode())).decode(),
            "manifest_digest": self.manifest.digest,
            "tokenizer": self.tokenizer_fields,
            **({"engine_ids": self.engine_ids.digest} if self.engine_ids is not None else {}),
        }


def recorded_fields(record: str, run: str) -> dict[str, Any]:
    """Reads ``RunRecord.to_json``. Raises ``LedgerError`` for a record of another version."""
    fields: dict[str, Any] = json.loads(record)
    refuse_other_versions(fields, f"run {run!r}: its record")
    return fields


def refuse_other_versions(fields: Mapping[str, Any], what: str) -> None:
    """Raises ``LedgerError`` where a record is of another format or order version than this release's."""
    for name, ours in (("format", FORMAT), ("order_version", ORDER_VERSION)):
        if fields.get(name) != ours:
            raise LedgerError(
                f"{what} has {name} {fields.get(name)!r}, this release has {ours}: serve it with the Tokenloom release "
                "that began it, or begin a new run under another name (`run`)"
            )


def estimates_to_json(
    estimates: Mapping[int, TokenCurve] | Mapping[str, TokenCurve], name: str = "size_estimates"
) -> dict[str, dict[str, list[Any]]]:
    """As a field of a record or of a revision, where there are any: by source id as text, or by spec, the rows, and the
    tokens of 1,000 rows; then the rows, tokens and real tokens before each edge, where it has them."""
    by_source = {
        str(source): [
            one.epoch_rows, round(1000 * one.epoch_tokens / max(1, one.epoch_rows)), *filter(None, astuple(one))
        ]
        for source, one in estimates.items()
    }  # fmt: skip
    return {name: by_source} if by_source else {}


def estimates_from_json(fields: Mapping[str, Any]) -> dict[int, TokenCurve]:
    """Reads ``estimates_to_json`` out of a record or a revision."""
    return {int(source): one for source, one in estimates_by_name(fields.get("size_estimates", {}))}


def estimates_by_name(by_source: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, TokenCurve]]:
    """Of each source as ``estimates_to_json`` names it: by id as text, or by spec."""
    for source, (_, _, *edges) in by_source.items():
        yield source, TokenCurve(*map(tuple, edges))


def end_of_text(config: RunConfig, definition: TokenizerDefinition | None) -> int | None:
    """The id that ends documents; None where there is none. Raises ``ConfigError`` where one is needed."""
    needed = config.batching is None and any(config.adds_eot(source) for source in config.sources)
    return end_of_text_id(definition, config.end_of_text_id, needed=needed)


def _described(node: NodeConfig) -> dict[str, Any]:
    """A node for readers of a snapshot who have no mixture file."""
    alias = {} if node.alias is None else {"alias": node.alias}
    children = [
        [2 * child.id + isinstance(child, NodeConfig), weight_text(child.weight)]
        + ([] if child.presence == "live" else [child.presence])
        for child in node.children
    ]
    interpolate = {} if node.interpolate == "linear" else {"interpolate": node.interpolate}
    return {"id": node.id, "policy": node.policy, **alias, **interpolate, "children": children}


def _check_fim(source: SourceConfig, vocab_size: int) -> None:
    for name, value in (source.fim.ids.model_dump() if source.fim is not None else {}).items():
        if value >= vocab_size:
            raise ConfigError(
                f"{source.name}: fim.ids.{name}: {value} is outside the vocabulary (0 to {vocab_size - 1}); name an id "
                "that the tokeniser has for it, or raise vocab_size"
            )
