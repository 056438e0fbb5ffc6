"""Where a SQLite ledger lies: file systems that several machines share are recognised, and refused.

The write-ahead log works within one machine alone, since its index is memory that all processes map
(sqlite.org/wal.html). Nor is there a safe mode for the others: every journal mode trusts the file
system's locks, which network file systems get wrong or leave out (sqlite.org/howtocorrupt.html,
section 2), and a lock that is not one lets two servers commit at once. What is given up is small: a
ledger on a node's own disk that is not there after a move is taken up from the trainer's state.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tokenloom_server.errors import LedgerUnsafe

#: Linux's table of mounts. Other systems have none, and are not looked at.
MOUNTS = Path("/proc/self/mountinfo")

#: As the kernel calls them: file systems whose files other machines, or the host of a virtual one, may open, too.
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "virtiofs"),
        *(
            "lustre",
            "gpfs",
            "beegfs",
            "fhgfs",
            "ceph",
            "glusterfs",
            "orangefs",
            "pvfs2",
            "panfs",
            "wekafs",
        ),
        *("gfs2", "ocfs2", "vboxsf", "vmhgfs", "prl_fs", "drvfs"),
    }
)
#: The root of a container that no administrator set up; all other programs that serve FUSE (sshfs, s3fs, gcsfuse,
#: rclone, …) may keep their files anywhere.
_LOCAL_FUSE = "fuse.fuse-overlayfs"


class Mount(NamedTuple):
    """What is mounted where: a folder, the file system's type, and what it is mounted from."""

    point: str
    kind: str
    device: str


def refuse_shared(path: Path) -> None:
    """Raises ``LedgerUnsafe``, with the remedy, for a file on a file system that several machines share."""
    try:
        table = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    mount = mount_of(path, table)
    if mount is not None and is_shared(mount.kind):
        raise LedgerUnsafe(
            f"The ledger {path} lies on a file system of type {mount.kind} ({mount.device}, mounted at {mount.point}), "
            "which other machines may share; SQLite is safe on a local disk only, since network file systems have no "
            "locks to trust. Name a file on a disk of this machine (--ledger sqlite:////var/lib/tokenloom/ledger.db; "
            "where a job moves, an empty ledger goes on from the trainer's checkpoint), or use redis://."
        )


def is_shared(kind: str) -> bool:
    """Whether other machines may have files of such a file system open."""
    return kind in _SHARED or kind == "fuse" or (kind.startswith("fuse.") and kind != _LOCAL_FUSE)


def mount_of(path: Path, table: str) -> Mount | None:
    """The mount that a path (its links followed) lies on, by a table in the form of ``/proc/self/mountinfo``."""
    resolved = path.resolve()
    mount_of_path: Mount | None = None
    for line in table.splitlines():
        # ID, parent, device number, root, mount point, options, any number of optional fields, "-", type, source, …
        mounted, _, file_system = line.partition(" - ")
        fields, (kind, device, *_) = mounted.split(" "), [*file_system.split(" "), "", ""]
        mount = Mount(_unescaped(fields[4]), kind, _unescaped(device))
        # Of two at one place the later one covers the earlier.
        inner = mount_of_path is None or len(mount.point) >= len(mount_of_path.point)
        if resolved.is_relative_to(mount.point) and inner:
            mount_of_path = mount
    return mount_of_path


def _unescaped(text: str) -> str:
    """Blanks and the like stand as octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
