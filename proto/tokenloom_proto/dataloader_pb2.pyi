from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IdType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ID_TYPE_UNSPECIFIED: _ClassVar[IdType]
    ID_TYPE_UINT8: _ClassVar[IdType]
    ID_TYPE_UINT16: _ClassVar[IdType]
    ID_TYPE_UINT32: _ClassVar[IdType]

class Labels(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LABELS_UNSPECIFIED: _ClassVar[Labels]
    LABELS_SAME: _ClassVar[Labels]
    LABELS_SHIFTED: _ClassVar[Labels]
ID_TYPE_UNSPECIFIED: IdType
ID_TYPE_UINT8: IdType
ID_TYPE_UINT16: IdType
ID_TYPE_UINT32: IdType
LABELS_UNSPECIFIED: Labels
LABELS_SAME: Labels
LABELS_SHIFTED: Labels

class JoinRequest(_message.Message):
    __slots__ = ("run", "stream", "rank", "world_size", "batch_size", "attempt", "nonce", "resume", "state_json", "takeover", "process", "peek", "fork", "batch_sizes", "accumulate", "samples", "release")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    STATE_JSON_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    run: str
    stream: str
    rank: int
    world_size: int
    batch_size: int
    attempt: str
    nonce: str
    resume: str
    state_json: bytes
    takeover: bool
    process: str
    peek: bool
    fork: bool
    batch_sizes: _containers.RepeatedCompositeFieldContainer[BatchSize]
    accumulate: int
    samples: int
    release: str
    def __init__(self, run: _Optional[str] = ..., stream: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., batch_size: _Optional[int] = ..., attempt: _Optional[str] = ..., nonce: _Optional[str] = ..., resume: _Optional[str] = ..., state_json: _Optional[bytes] = ..., takeover: bool = ..., process: _Optional[str] = ..., peek: bool = ..., fork: bool = ..., batch_sizes: _Optional[_Iterable[_Union[BatchSize, _Mapping]]] = ..., accumulate: _Optional[int] = ..., samples: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...

class BatchSize(_message.Message):
    __slots__ = ("total_tokens", "batch_size")
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    total_tokens: int
    batch_size: int
    def __init__(self, total_tokens: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("id", "spec", "alias")
    ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    id: int
    spec: str
    alias: str
    def __init__(self, id: _Optional[int] = ..., spec: _Optional[str] = ..., alias: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("run_uid", "generation", "start_index", "start_digest", "start_tokens", "sequence_length", "id_type", "labels", "vocab_size", "sources", "group_micro_steps", "snapshot_template", "base", "server_epoch", "sample_lengths", "pads_left", "loss_masks", "mask_boundaries", "global_batch_size", "batch_size", "batch_plans", "stream_samples", "skips", "release", "pad_id", "end_of_text_id")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ID_TYPE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    GROUP_MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PADS_LEFT_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASKS_FIELD_NUMBER: _ClassVar[int]
    MASK_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_PLANS_FIELD_NUMBER: _ClassVar[int]
    STREAM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PAD_ID_FIELD_NUMBER: _ClassVar[int]
    END_OF_TEXT_ID_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    generation: int
    start_index: int
    start_digest: str
    start_tokens: int
    sequence_length: int
    id_type: IdType
    labels: Labels
    vocab_size: int
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    group_micro_steps: int
    snapshot_template: bytes
    base: Base
    server_epoch: int
    sample_lengths: bool
    pads_left: bool
    loss_masks: bool
    mask_boundaries: bool
    global_batch_size: int
    batch_size: int
    batch_plans: _containers.RepeatedCompositeFieldContainer[BatchPlan]
    stream_samples: int
    skips: _containers.RepeatedScalarFieldContainer[str]
    release: str
    pad_id: int
    end_of_text_id: int
    def __init__(self, run_uid: _Optional[str] = ..., generation: _Optional[int] = ..., start_index: _Optional[int] = ..., start_digest: _Optional[str] = ..., start_tokens: _Optional[int] = ..., sequence_length: _Optional[int] = ..., id_type: _Optional[_Union[IdType, str]] = ..., labels: _Optional[_Union[Labels, str]] = ..., vocab_size: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., group_micro_steps: _Optional[int] = ..., snapshot_template: _Optional[bytes] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., server_epoch: _Optional[int] = ..., sample_lengths: bool = ..., pads_left: bool = ..., loss_masks: bool = ..., mask_boundaries: bool = ..., global_batch_size: _Optional[int] = ..., batch_size: _Optional[int] = ..., batch_plans: _Optional[_Iterable[_Union[BatchPlan, _Mapping]]] = ..., stream_samples: _Optional[int] = ..., skips: _Optional[_Iterable[str]] = ..., release: _Optional[str] = ..., pad_id: _Optional[int] = ..., end_of_text_id: _Optional[int] = ...) -> None: ...

class BatchPlan(_message.Message):
    __slots__ = ("begin_index", "batch_size", "group_micro_steps")
    BEGIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    begin_index: int
    batch_size: int
    group_micro_steps: int
    def __init__(self, begin_index: _Optional[int] = ..., batch_size: _Optional[int] = ..., group_micro_steps: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("name", "columns", "sample_bytes", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    sample_bytes: _containers.RepeatedScalarFieldContainer[int]
    source: str
    def __init__(self, name: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., sample_bytes: _Optional[_Iterable[int]] = ..., source: _Optional[str] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("open", "progress")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    open: StreamOpen
    progress: Progress
    def __init__(self, open: _Optional[_Union[StreamOpen, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class StreamOpen(_message.Message):
    __slots__ = ("run", "stream", "run_uid", "generation", "rank", "nonce", "received_through", "committed_through", "progress", "document_starts", "received_digest", "server_epoch", "peek", "attempt", "batch_size", "process", "samples", "world_size", "number")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_STARTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run: str
    stream: str
    run_uid: str
    generation: int
    rank: int
    nonce: str
    received_through: int
    committed_through: int
    progress: Progress
    document_starts: bool
    received_digest: str
    server_epoch: int
    peek: bool
    attempt: str
    batch_size: int
    process: str
    samples: int
    world_size: int
    number: int
    def __init__(self, run: _Optional[str] = ..., stream: _Optional[str] = ..., run_uid: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., nonce: _Optional[str] = ..., received_through: _Optional[int] = ..., committed_through: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., document_starts: bool = ..., received_digest: _Optional[str] = ..., server_epoch: _Optional[int] = ..., peek: bool = ..., attempt: _Optional[str] = ..., batch_size: _Optional[int] = ..., process: _Optional[str] = ..., samples: _Optional[int] = ..., world_size: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("consumed_through", "credit_micro_steps", "digest", "waited_s")
    CONSUMED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    consumed_through: int
    credit_micro_steps: int
    digest: str
    waited_s: float
    def __init__(self, consumed_through: _Optional[int] = ..., credit_micro_steps: _Optional[int] = ..., digest: _Optional[str] = ..., waited_s: _Optional[float] = ...) -> None: ...

class StreamResponse(_message.Message):
    __slots__ = ("batches", "heartbeat", "end_of_data", "committed_through", "server_epoch")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    END_OF_DATA_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    batches: Batches
    heartbeat: Heartbeat
    end_of_data: EndOfData
    committed_through: int
    server_epoch: int
    def __init__(self, batches: _Optional[_Union[Batches, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., end_of_data: _Optional[_Union[EndOfData, _Mapping]] = ..., committed_through: _Optional[int] = ..., server_epoch: _Optional[int] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("sample_index", "resume_state")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESUME_STATE_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    resume_state: bytes
    def __init__(self, sample_index: _Optional[int] = ..., resume_state: _Optional[bytes] = ...) -> None: ...

class MicroStep(_message.Message):
    __slots__ = ("end_index", "slice", "total_tokens", "digest", "tokens", "label_tokens", "real_tokens")
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    end_index: int
    slice: int
    total_tokens: int
    digest: str
    tokens: int
    label_tokens: int
    real_tokens: int
    def __init__(self, end_index: _Optional[int] = ..., slice: _Optional[int] = ..., total_tokens: _Optional[int] = ..., digest: _Optional[str] = ..., tokens: _Optional[int] = ..., label_tokens: _Optional[int] = ..., real_tokens: _Optional[int] = ...) -> None: ...

class SourceCounts(_message.Message):
    __slots__ = ("entries", "source_ids", "samples", "padding_tokens", "specs")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PADDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedScalarFieldContainer[int]
    source_ids: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    padding_tokens: _containers.RepeatedScalarFieldContainer[int]
    specs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entries: _Optional[_Iterable[int]] = ..., source_ids: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[int]] = ..., padding_tokens: _Optional[_Iterable[int]] = ..., specs: _Optional[_Iterable[str]] = ...) -> None: ...

class Batches(_message.Message):
    __slots__ = ("begin_index", "micro_steps", "ids", "source_ids", "document_counts", "document_starts", "base", "counts", "buckets")
    BEGIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_IDS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_STARTS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    begin_index: int
    micro_steps: _containers.RepeatedCompositeFieldContainer[MicroStep]
    ids: bytes
    source_ids: _containers.RepeatedScalarFieldContainer[int]
    document_counts: _containers.RepeatedScalarFieldContainer[int]
    document_starts: _containers.RepeatedScalarFieldContainer[int]
    base: Base
    counts: bytes
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    def __init__(self, begin_index: _Optional[int] = ..., micro_steps: _Optional[_Iterable[_Union[MicroStep, _Mapping]]] = ..., ids: _Optional[bytes] = ..., source_ids: _Optional[_Iterable[int]] = ..., document_counts: _Optional[_Iterable[int]] = ..., document_starts: _Optional[_Iterable[int]] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., counts: _Optional[bytes] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("waiting_for",)
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    def __init__(self, waiting_for: _Optional[str] = ...) -> None: ...

class EndOfData(_message.Message):
    __slots__ = ("end_index", "reason", "dropped_samples")
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    end_index: int
    reason: str
    dropped_samples: int
    def __init__(self, end_index: _Optional[int] = ..., reason: _Optional[str] = ..., dropped_samples: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("run", "stream", "sample_index", "save")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    run: str
    stream: str
    sample_index: int
    save: bool
    def __init__(self, run: _Optional[str] = ..., stream: _Optional[str] = ..., sample_index: _Optional[int] = ..., save: bool = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("snapshot_json", "id")
    SNAPSHOT_JSON_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_json: str
    id: str
    def __init__(self, snapshot_json: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("run", "stream", "snapshot_id", "sample_index", "snapshot_json", "skip_samples", "skip_tokens", "undo_skip")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_JSON_FIELD_NUMBER: _ClassVar[int]
    SKIP_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNDO_SKIP_FIELD_NUMBER: _ClassVar[int]
    run: str
    stream: str
    snapshot_id: str
    sample_index: int
    snapshot_json: str
    skip_samples: int
    skip_tokens: int
    undo_skip: bool
    def __init__(self, run: _Optional[str] = ..., stream: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., snapshot_json: _Optional[str] = ..., skip_samples: _Optional[int] = ..., skip_tokens: _Optional[int] = ..., undo_skip: bool = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("sample_index", "digest", "skips")
    class SkipsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    digest: str
    skips: _containers.ScalarMap[int, int]
    def __init__(self, sample_index: _Optional[int] = ..., digest: _Optional[str] = ..., skips: _Optional[_Mapping[int, int]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("stats_json",)
    STATS_JSON_FIELD_NUMBER: _ClassVar[int]
    stats_json: str
    def __init__(self, stats_json: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("run", "until_tokens")
    RUN_FIELD_NUMBER: _ClassVar[int]
    UNTIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    run: str
    until_tokens: int
    def __init__(self, run: _Optional[str] = ..., until_tokens: _Optional[int] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("plan_json",)
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    plan_json: str
    def __init__(self, plan_json: _Optional[str] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class TokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_json", "is_bytes")
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_BYTES_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    is_bytes: bool
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., is_bytes: bool = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "stream", "run_uid", "generation", "attempt", "sample_index", "total_tokens", "step", "sources", "loss", "learning_rate")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    run: str
    stream: str
    run_uid: str
    generation: int
    attempt: str
    sample_index: int
    total_tokens: int
    step: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceLoss]
    loss: float
    learning_rate: float
    def __init__(self, run: _Optional[str] = ..., stream: _Optional[str] = ..., run_uid: _Optional[str] = ..., generation: _Optional[int] = ..., attempt: _Optional[str] = ..., sample_index: _Optional[int] = ..., total_tokens: _Optional[int] = ..., step: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceLoss, _Mapping]]] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class SourceLoss(_message.Message):
    __slots__ = ("source_id", "loss", "tokens")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    source_id: int
    loss: float
    tokens: int
    def __init__(self, source_id: _Optional[int] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
