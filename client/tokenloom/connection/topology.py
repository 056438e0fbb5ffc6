"""Which rank of how many this process is, and the attempt id that all ranks of one launch share.

An attempt id is used once: it is what keeps the ranks of a forgotten launch out of a new one. So it
must be fresh for each launch and equal on its ranks, and is never guessed from ids that may repeat
(torchrun's do), nor taken from a place where an earlier launch may have left it.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a build of torch may lack it
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

#: How often rank 0 looks whether another rank asks for the attempt id.
ASK_EVERY_S = 0.02
#: From here on, ids of steps are SLURM's own, such as that of a job's shell, in which no task runs.
_NO_STEPS = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """What only some launches have to say of themselves: how their ranks know each other, and what they replace."""

    process_group: ProcessGroup | None = None
    """The group of the data-parallel ranks, where it is not the default one: rank and world size are those in it."""
    attempt: str | None = None
    """An id that is new for each launch and the same on its ranks. Only for ranks that have neither a process group nor
    a SLURM step, through which they share one by themselves."""
    takeover: bool = False
    """End another launch that trains on the run now. Else that is refused (``RunBusy``) as long as each of its ranks is
    alive."""
    fork_from: Mapping[str, Any] | None = field(default=None, repr=False)
    """Another run's ``state_dict()``: this run, which must not have begun, begins there, under its own mixture. A state
    that is loaded comes first, so a script that is restarted from its checkpoint may leave it here."""


@dataclass(frozen=True, slots=True)
class Topology:
    """This process's slot, fixed when the dataset is made."""

    rank: int
    world_size: int
    attempt: str
    of_step: bool = False
    """The attempt is what the tasks of a SLURM step have in common, and goes on with a number: see ``joins``."""


#: Who only looks: takes no slot, so there is no attempt to share.
ALONE = Topology(rank=0, world_size=1, attempt="")


def resolve(
    run: str,
    *,
    stream: str,
    timeout_s: float,
    rank: int | None = None,
    world_size: int | None = None,
    launch: LaunchOptions = LaunchOptions(),  # it is frozen
    single: bool = False,
) -> Topology:
    """The slot of this process: from the arguments, else ``torch.distributed``, else the launcher.

    With a process group, ranks wait here for each other, at most ``timeout_s``: rank 0 gives all of them its id.
    ``single``: it is for one process, which need not know its place among the tasks of a SLURM job that it is none of.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"give both rank and world_size, or neither; got rank={rank}, world_size={world_size}"
        )
    members, attempt, process_group = f"of-{world_size}", launch.attempt, launch.process_group
    if rank is None or world_size is None:
        if _is_grouped():
            import torch.distributed as dist

            rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
            if process_group is not None and rank >= 0:
                members = "-".join(map(str, dist.get_process_group_ranks(process_group)))
        else:
            environ = dict(os.environ)
            if single and _step(environ) is None:
                environ.pop("SLURM_NTASKS", None)
            rank, world_size = _launched(environ)
    if rank < 0 or world_size < 1:
        raise ValueError(
            f"this process has rank {rank} of {world_size}, so it takes no part in the process group: "
            "only the processes of the data-parallel group make a dataset"
        )
    if rank >= world_size:
        raise ValueError(f"rank {rank} is not below world_size {world_size}: ranks count from 0")
    if attempt is None:
        return _sharing(run, stream, rank, world_size, members, timeout_s)
    if not attempt:
        raise ValueError(
            "attempt is empty: it must be an id that is new for each launch and equal on its ranks"
        )
    return Topology(rank, world_size, attempt)


def _step(environ: Mapping[str, str]) -> str | None:
    """The SLURM step of which this process is a task; None in a job's script or shell, and without SLURM."""
    step = environ.get("SLURM_STEP_ID", "")
    return step if step.isdecimal() and int(step) < _NO_STEPS else None


def _is_grouped() -> bool:
    """Whether this process is in a process group. Who has not imported torch is in none, so it is not imported here."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _launched(environ: Mapping[str, str]) -> tuple[int, int]:
    """Rank and world size from the variables of torchrun or SLURM; one rank alone without them."""
    for rank_name, world_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        rank, world_size = environ.get(rank_name), environ.get(world_name)
        if world_size is None:
            continue
        if not world_size.isdecimal() or not (rank or "0").isdecimal():
            raise ValueError(
                f"{rank_name}={rank!r} and {world_name}={world_size!r} must be integers"
            )
        in_shell = (
            rank_name == "SLURM_PROCID" and "SLURM_STEP_ID" in environ and _step(environ) is None
        )
        if (rank is None or in_shell) and int(world_size) > 1:
            lack = "this shell is none of these tasks" if in_shell else f"{rank_name} is not set"
            raise ValueError(
                f"{world_name} is {world_size} but {lack}, so this process does not know its rank: use srun, "
                f"set {rank_name}, call torch.distributed.init_process_group, or give rank= and world_size="
            )
        return int(rank or 0), int(world_size)
    if environ.get("RANK", "0") != "0":
        raise ValueError(
            f"RANK is {environ['RANK']!r} but WORLD_SIZE is not set, so this process does not know of how many: set "
            "WORLD_SIZE, call torch.distributed.init_process_group, or give rank= and world_size="
        )
    return 0, 1


def _sharing(
    run: str, stream: str, rank: int, world_size: int, members: str, timeout_s: float
) -> Topology:
    """The slot under an attempt that nobody gave."""
    if world_size == 1:
        return Topology(rank, world_size, uuid.uuid4().hex)
    if (store := default_store()) is not None:
        prefix = f"tokenloom/{run}/{stream}/{members}"
        return Topology(rank, world_size, _shared(store, prefix, rank, world_size, timeout_s))
    job, step = os.environ.get("SLURM_JOB_ID"), _step(os.environ)
    # Not under torchrun, which starts ranks again within a step; and its agents count restarts each for themselves.
    if job and step and "TORCHELASTIC_RUN_ID" not in os.environ:
        ids = "-".join(["slurm", job, step, os.environ.get("SLURM_RESTART_COUNT", "0"), stream])
        return Topology(rank, world_size, ids, of_step=True)
    raise ValueError(
        f"rank {rank} of {world_size} needs an attempt id that is new for each launch and equal on all its ranks. "
        "There are three ways: call torch.distributed.init_process_group before making the dataset (rank 0 shares "
        "an id through its store); start the ranks as a SLURM job step; or give LaunchOptions(attempt=…) on each rank. "
        "torchrun's variables alone do not do: its ids repeat."
    )


@cache
def joins(run: str, slot: Topology) -> Any:
    """How many datasets of this process have joined a run under what a SLURM step's tasks have in common: the number
    of the next one, on each rank. In memory that is shared with a DataLoader's worker, which may be who joins.

    They are counted as they join, not as they are made. So who asks for a number has had a place under all that are
    less, and each place is one process's: of two launches within one step, only one gets beyond the first number.
    """
    return RawValue("q", 0)


def default_store() -> Store | None:
    """What the processes of the default process group share; None where there is no group."""
    if not _is_grouped():
        return None
    # Private, but what torch itself and its elastic tools build upon; the public ways to share an id
    # are collectives, which would need a device here and an agreed order with the trainer's own.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _shared(store: Store, prefix: str, rank: int, world_size: int, timeout_s: float) -> str:
    """Rank 0 makes the id and hands it to each other rank that asks for it, until all have it.

    A store may be older than the launch: torchrun keeps one over its restarts. So nobody takes what lies there:
    each rank asks under a token of its own, and gets what was answered to that. Rank 0 answers whatever was asked
    last, an earlier life's questions included, and is done when every rank has said that it has this id.
    """
    deadline = time.monotonic() + timeout_s
    if rank:
        token = uuid.uuid4().hex
        store.set(f"{prefix}/asked-{rank}", token)
        answer = f"{prefix}/answer-{token}"
        try:
            store.wait([answer], datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ValueError(
                f"rank {rank} waited {timeout_s:g} s for rank 0 to make its dataset for the same run and stream "
                f"({prefix}), in vain: every rank of the group must make one, at the same time"
            ) from error
        attempt = str(store.get(answer).decode())
        store.set(f"{prefix}/{attempt}-{rank}", "taken")
        return attempt
    attempt = uuid.uuid4().hex
    answered: dict[int, bytes] = dict.fromkeys(range(1, world_size), b"")
    while answered:
        for other, known in list(answered.items()):
            question = value_of(store, f"{prefix}/asked-{other}")
            # Looked at in this order: after its confirmation a rank may ask for its next dataset.
            if value_of(store, f"{prefix}/{attempt}-{other}"):
                del answered[other]
            elif question != known:
                answered[other] = question
                store.set(f"{prefix}/answer-{question.decode()}", attempt)
        if answered and time.monotonic() > deadline:
            absent = ", ".join(map(str, list(answered)[:8])) + (", …" if len(answered) > 8 else "")
            raise ValueError(
                f"rank 0 waited {timeout_s:g} s for rank {absent} to make a dataset for the same run and stream "
                f"({prefix}), in vain: every rank of the group must make one, at the same time"
            )
        time.sleep(ASK_EVERY_S)
    return attempt


def value_of(store: Store, key: str) -> bytes:
    """What lies under a key, at once; empty where nothing does."""
    return bytes(store.compare_set(key, "", ""))
