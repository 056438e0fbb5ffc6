"""What another process needs to read a run's sources as its server does: plain text, which cannot execute; and what it
compares and says there."""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tokenloom_server.catalog import open_catalog
from tokenloom_server.config.run import RunConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.resources import RunResources
from tokenloom_server.sources.manifest import Manifest, SourceFiles, verify
from tokenloom_server.tokenizer.choose import EngineRecord
from tokenloom_server.tokenizer.definition import find_tokenizer

#: What of the lines that a task logs comes to the server's log.
LINES, LINE_CHARACTERS = 20, 1000

_AS_THEY_ARE = ("has_loss_mask", "stream", "gives_held_out")


def describe(order: PipelineFactory) -> str:
    """A record and the place of its files. What is excluded, and what was measured, is the server's own business."""
    record = order.record
    engine = record.serving_engine
    # Not the canonical form, which has no infinity, as epochs may be.
    return json.dumps(
        {
            "tokenloom": version("tokenloom"),
            "base_dir": str(order.resources.base_dir),
            "config": record.config.model_dump(mode="json", exclude_defaults=True),
            "transforms": sorted(record.config.catalog.transforms),
            "manifest": record.manifest.document(),
            "tokenizer": record.tokenizer.digest if record.tokenizer is not None else None,
            "has_chats": record.tokenizer is not None
            and record.tokenizer.chat_template is not None,
            "engine": engine and asdict(engine),
            **{name: getattr(record, name) for name in _AS_THEY_ARE},
        }
    )


def rebuild(text: str, index_dir: Path | None = None) -> PipelineFactory:
    """What ``describe`` described, in a process of another machine, where the versions and the tokeniser are compared.
    ``index_dir``: as in ``RunResources``.

    Raises ``ConfigError``, ``SourceError`` and ``TokenizerError``; ``named_by_node`` says on which machine.
    """
    fields = json.loads(text)
    if fields["tokenloom"] != version("tokenloom"):
        raise ConfigError(
            f"has Tokenloom {version('tokenloom')}, and who asks it has {fields['tokenloom']}: install that one there"
        )
    base_dir, manifest = Path(fields["base_dir"]), Manifest.from_document(fields["manifest"])
    catalog = open_catalog(list(manifest.plugins), fields["transforms"])
    config = RunConfig.model_validate(fields["config"], context=catalog)
    definition = None
    if config.tokenizer is not None:
        definition = find_tokenizer(config.tokenizer, base_dir, chat=fields["has_chats"])
        if definition.digest != fields["tokenizer"]:
            raise ConfigError(
                f"tokenizer {config.tokenizer!r} has the digest {definition.digest} there, and "
                f"{fields['tokenizer']} where it was asked for: put the same files there"
            )
    record = RunRecord(
        config=config,
        manifest=manifest,
        tokenizer=definition,
        engine=fields["engine"] and EngineRecord(**fields["engine"]),
        **{name: fields[name] for name in _AS_THEY_ARE},
    )
    resources = RunResources(base_dir, index_dir, encoders=1)
    resources.with_code(manifest, config.sources)
    return PipelineFactory(record, resources)


def named_by_node(error: Exception) -> str:
    """What an error says, with the name of this machine before it: whoever reads it is at another one."""
    return f"{platform.node()}: {error}"


def verify_file(order: PipelineFactory, source_id: int, shard: int) -> None:
    """Compares a file with what the record says of it, before its first row is read. Raises ``SourceChanged``."""
    record = order.record
    source = record.config.sources[source_id]
    files = SourceFiles(source.source, (record.shards[source_id][shard],))
    verify(
        Manifest((files,), record.manifest.plugins),
        order.resources.base_dir,
        record.config.catalog.sources,
    )


class LoggedLines(logging.Handler):
    """What Tokenloom logs within the block: the first lines, and how many more there were."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(lambda record: record.name.startswith("tokenloom_"))
        self._lines: list[tuple[int, str]] = []
        self._more = 0

    def __enter__(self) -> LoggedLines:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < LINES:
            self._lines.append((record.levelno, record.getMessage()[:LINE_CHARACTERS]))
        else:
            self._more += 1

    def lines(self) -> list[tuple[int, str]]:
        """Levels and lines."""
        more = (logging.WARNING, f"{self._more:,} more lines were logged there")
        return [*self._lines, more] if self._more else self._lines
