"""Which peers there are, and how each is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.peers.environments import OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A loader in one of its ways of use: the fastest that its documentation and our trials gave."""

    name: str
    #: Its row says what it spares itself, or what it does besides.
    note: str
    environment: str
    module: str
    variant: str = ""
    #: Corpora that it reads: ``ids`` (W1) and ``text`` (W2).
    reads: tuple[str, ...] = ("ids",)
    #: Under which name its prepared data are kept; "" where it reads Parquet.
    prepared: str = ""
    env: Mapping[str, str] = field(default_factory=dict, compare=False)
    #: It works ahead of its consumer without end, so that its start-up has to count.
    counts_from_start: bool = False


_OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
_BOTH = ("ids", "text")
_PREPACKED = "in-process, prepacked offline"

PEERS = (
    Peer(
        name="LocalDataset",
        note="Tokenloom in-process, packs during the run: makes int64 ids and labels",
        environment=OWN,
        module="local_dataset",
        variant="parquet",
        reads=_BOTH,
    ),
    Peer(
        name="LocalDataset, prepared",
        note="the same, ids of 16 bits in Arrow: prepared offline",
        environment=OWN,
        module="local_dataset",
        variant="arrow",
    ),
    Peer(
        name="torchdata",
        note="in-process, packs during the run: a hand-written numpy node under the weighted sampler",
        environment="huggingface",
        module="torchdata_nodes",
        reads=_BOTH,
    ),
    Peer(
        name="litdata",
        note=_PREPACKED,
        environment="litdata",
        module="litdata_tokens",
        prepared="litdata",
    ),
    Peer(
        name="hf-map",
        note=_PREPACKED,
        environment="huggingface",
        module="huggingface",
        variant="map",
        prepared="huggingface",
        env=_OFFLINE,
    ),
    Peer(
        name="grain-elastic",
        note=_PREPACKED,
        environment="grain",
        module="grain_iterators",
        variant="elastic",
        prepared="flat",
    ),
    Peer(
        name="tfdata",
        note="in-process, packs during the run, from TFRecords",
        environment="tensorflow",
        module="tensorflow_data",
        variant="local",
        reads=_BOTH,
        prepared="tfrecords",
        env=_TENSORFLOW,
    ),
    Peer(
        name="tfdata-service",
        note="over the network, packs during the run, from TFRecords",
        environment="tensorflow",
        module="tensorflow_data",
        variant="service",
        prepared="tfrecords",
        env=_TENSORFLOW,
    ),
    Peer(
        name="energon",
        note=_PREPACKED,
        environment="energon",
        module="megatron_energon",
        prepared="webdataset",
    ),
    Peer(
        name="mosaic",
        note=_PREPACKED,
        environment="mosaic",
        module="mosaic_streaming",
        prepared="mds",
    ),
    Peer(
        name="ray",
        note="tasks in worker processes, packs during the run, start-up counted",
        environment="ray",
        module="ray_data",
        reads=_BOTH,
        counts_from_start=True,
    ),
    Peer(
        name="grain-parquet",
        note="in-process, packs during the run",
        environment="grain",
        module="grain_iterators",
        variant="parquet",
        reads=_BOTH,
    ),
    Peer(
        name="hf-streaming",
        note="in-process, packs during the run: Arrow tables and numpy",
        environment="huggingface",
        module="huggingface",
        variant="streaming",
        reads=_BOTH,
        env=_OFFLINE,
    ),
)
BY_NAME = {peer.name: peer for peer in PEERS}
