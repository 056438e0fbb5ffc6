"""What must hold between the fields of a run; each check raises ``ValueError`` with path, value and remedy."""

from __future__ import annotations

from tokenloom_server.config.batching import (
    ALL_COLUMNS,
    RUN_FIELDS,
    SOURCE_FIELDS,
    refuse_other_fields,
)
from tokenloom_server.config.node import NodeConfig, check_distinct, check_ends
from tokenloom_server.config.phase import check_ascending
from tokenloom_server.config.run_fields import RunFields
from tokenloom_server.config.source import SourceConfig


def check_run(run: RunFields) -> None:
    """All checks, in the order in which their faults are reported."""
    if run.batching is None:
        _check_without_batching(run)
    else:
        _check_with_batching(run)
    _check_phases(run)
    for mixture, path in run.mixtures():
        _check_mixture(mixture, path)
    if run.batching is None:
        _check_ids(run)
        _check_packing(run)
        _check_loss_masks(run)
    _check_streams(run, _holdouts(run))


def _check_without_batching(run: RunFields) -> None:
    if run.global_batch_size is not None:
        raise ValueError(
            "global_batch_size: is for batching; without it any batch size gives the same order, so each client says "
            "its own: leave it out"
        )
    for path, source in run.phase_sources():
        if source.spec.column == ALL_COLUMNS:
            raise ValueError(f"{path}.source: the column '*' is for batching; name one column")


def _check_with_batching(run: RunFields) -> None:
    if run.global_batch_size is None:
        raise ValueError("global_batch_size: is missing; with batching it is a part of the order")
    refuse_other_fields(run, RUN_FIELDS, "")
    for i, phase in enumerate(run.phases):
        if phase.sequence_length is not None:
            raise ValueError(
                f"phases.{i}.sequence_length: does not apply with batching; leave it out"
            )
    for path, source in run.phase_sources():
        _check_batched_source(source, path)


def _check_batched_source(source: SourceConfig, path: str) -> None:
    refuse_other_fields(source, SOURCE_FIELDS, f"{path}.")
    if source.shuffle == "shards":
        raise ValueError(
            f"{path}.shuffle: 'shards' does not apply with batching, where buckets go through all files; set "
            "shuffle: rows, or leave it out"
        )
    if not source.spec.scheme.reads_any_row:
        raise ValueError(
            f"{path}.source: {source.spec.scheme.name!r} files cannot be read row by row in any order, as batching "
            "does; convert them to parquet or arrow"
        )
    if source.spec.column != ALL_COLUMNS:
        raise ValueError(
            f"{path}.source: with batching the rows travel as they are, so the column is '*', but this is "
            f"{source.spec.column!r}; name columns in batching.columns"
        )


def _check_phases(run: RunFields) -> None:
    check_ascending(run.phases)
    lengths = {phase.sequence_length for phase in run.phases} - {None, run.sequence_length}
    if lengths and run.last_micro_step == "drop":
        raise ValueError(
            "phases: the sequence length changes, and micro-steps end where it does: an incomplete micro-step there "
            "would be lost with last_micro_step: drop; set last_micro_step: pad"
        )


def _check_mixture(mixture: NodeConfig, path: str) -> None:
    check_distinct(mixture, path)
    if isinstance(mixture.weight, list):
        raise ValueError(f"{path}.weight: found points, but the root has no siblings; leave it out")
    check_ends(mixture, path)


def _check_ids(run: RunFields) -> None:
    sources = [*run.named_sources(), *run.stream_sources()]
    lacks_end = run.end_of_text_id is None and any(run.adds_eot(source) for _, source in sources)
    if run.tokenizer is None and (run.vocab_size is None or lacks_end):
        raise ValueError(
            "tokenizer: expected a tokenizer.json, a folder with one, a name on the Hub, or 'bytes'; where every "
            "source holds ids, give vocab_size instead, and end_of_text_id unless add_eot is false"
        )
    for field in ("end_of_text_id", "begin_of_text_id", "pad_id"):
        value = getattr(run, field)
        if value is not None and run.vocab_size is not None and value >= run.vocab_size:
            raise ValueError(f"{field}: {value} is not below vocab_size {run.vocab_size}")
    for path, source in sources:
        if source.max_bad_rows is not None and not run.skips_bad_rows(source):
            raise ValueError(
                f"{path}.max_bad_rows: is for on_bad_row: skip, which neither source nor run says"
            )


def _check_packing(run: RunFields) -> None:
    pads = run.packing != "concat" or run.tail == "pad"
    for options, packing, applies in (
        (("tail",), "packing: concat", run.packing == "concat"),
        (
            ("pack_window_rows", "pack_window_tokens"),
            "packing: best_fit",
            run.packing == "best_fit",
        ),
        (("long_rows",), "packing: none", run.packing == "none"),
        (
            ("padding", "pad_id"),
            "samples that are padded (packing: best_fit or none, or tail: pad)",
            pads,
        ),
    ):
        for option in options:
            value = getattr(run, option)
            if not applies and value != type(run).model_fields[option].default:
                raise ValueError(
                    f"{option}: found {value!r}, but it is for {packing}; leave it out"
                )
    lengths = [run.sequence_length, *(phase.sequence_length or 0 for phase in run.phases)]
    if run.packing == "best_fit" and run.pack_window_tokens < max(lengths):
        raise ValueError(
            f"pack_window_tokens: {run.pack_window_tokens} do not fill a sample of {max(lengths)} tokens; give a "
            "multiple of that, or leave it out"
        )


def _check_loss_masks(run: RunFields) -> None:
    for path, source in (*run.named_sources(), *run.stream_sources()):
        if not source.has_loss_mask:
            continue
        masks = "template" if source.loss_mask is None else "loss_mask"
        if run.packing == "concat":
            raise ValueError(
                f"{path}.{masks}: is for packing: none or best_fit, where a row's tokens stay together, not 'concat'"
            )
        for field in ("fim", "template"):
            if field != masks and getattr(source, field) is not None:
                raise ValueError(
                    f"{path}.{masks}: says nothing of the tokens that {field} makes; leave one out"
                )


def _holdouts(run: RunFields) -> dict[str, float | None]:
    """By spec, the share of each source that is held out: the same one in every phase."""
    shares: dict[str, float | None] = {}
    for path, source in run.phase_sources():
        if shares.setdefault(source.source, source.holdout) != source.holdout:
            raise ValueError(
                f"{path}.holdout: found {source.holdout or 'none'}, but {source.source!r} has "
                f"{shares[source.source] or 'none'} elsewhere, so one part of the run would train on what another "
                "holds out: give both the same"
            )
    return shares


def _check_streams(run: RunFields, holdouts: dict[str, float | None]) -> None:
    for name, stream in run.streams.items():
        if run.batching is not None:
            raise ValueError(
                f"streams.{name}: does not apply with batching, whose streams are batches of rows; leave it out"
            )
        if stream.mixture is None and not any(holdouts.values()):
            raise ValueError(
                f"streams.{name}: has no mixture, and no source holds rows out for it; give it a mixture, or a "
                "source a holdout"
            )
    for mixture, path in run.stream_mixtures():
        _check_mixture(mixture, path)
    for path, source in run.stream_sources():
        if source.holdout is not None:
            raise ValueError(
                f"{path}.holdout: is for the sources that are trained on; leave it out"
            )
        if source.loss_mask is not None and not run.masks_loss:
            raise ValueError(
                f"{path}.loss_mask: no source that is trained on has one, so samples have no room for it; leave it out"
            )
