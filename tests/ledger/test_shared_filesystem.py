"""Where a SQLite ledger may lie: the mount of its folder, by the table that Linux has."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from tokenloom_server.errors import LedgerUnsafe
from tokenloom_server.ledger import sqlite_file
from tokenloom_server.ledger.open import open_ledger
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.ledger.sqlite_file import Mount, is_shared, mount_of

#: As a cluster's node has them.
TABLE = r"""
22 27 0:21 / /proc rw,nosuid shared:12 - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,discard
31 27 0:44 / /home rw,relatime shared:7 master:3 propagate_from:2 - nfs4 filer.example.org:/vol/home rw,vers=4.2,hard
32 31 0:45 / /home/ann/local\040disk rw - xfs /dev/nvme1n1 rw
33 27 0:46 / /scratch rw - lustre 10.0.0.1@o2ib:/work rw,flock
34 27 0:47 /volumes/7 /data rw - fuse.gcsfuse bucket rw,user_id=0
35 27 0:48 / /mnt/auto rw - autofs systemd-1 rw,fd=29
36 35 0:49 / /mnt/auto rw - cifs //filer/share rw,vers=3.1.1
37 27 0:50 / /homework rw - tmpfs tmpfs rw
""".strip()


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/srv/ledger.db", Mount("/", "ext4", "/dev/nvme0n1p2")),
        ("/home/ann/ledger.db", Mount("/home", "nfs4", "filer.example.org:/vol/home")),
        (
            "/home/ann/local disk/deep/ledger.db",
            Mount("/home/ann/local disk", "xfs", "/dev/nvme1n1"),
        ),
        ("/homework/ledger.db", Mount("/homework", "tmpfs", "tmpfs")),
        ("/scratch/ledger.db", Mount("/scratch", "lustre", "10.0.0.1@o2ib:/work")),
        ("/scratch/../srv/ledger.db", Mount("/", "ext4", "/dev/nvme0n1p2")),
        ("/data/run/ledger.db", Mount("/data", "fuse.gcsfuse", "bucket")),
        ("/mnt/auto/ledger.db", Mount("/mnt/auto", "cifs", "//filer/share")),
    ],
)
def test_the_mount_of_a_path_is_the_last_one_at_its_nearest_folder(path: str, mount: Mount) -> None:
    assert mount_of(Path(path), TABLE) == mount


def test_a_link_is_followed_to_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "ledger.db").symlink_to(tmp_path / "far" / "ledger.db")
    table = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:9 / {tmp_path.resolve()}/far rw - nfs filer:/far rw"
    found = mount_of(tmp_path / "ledger.db", table)
    assert found.kind == "nfs"


@pytest.mark.parametrize(
    "kind",
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
        "afs",
        "glusterfs",
        "fuse",
        "virtiofs",
    ]
    + [
        f"fuse.{program}"
        for program in ("sshfs", "s3fs", "gcsfuse", "glusterfs", "juicefs", "one-of-tomorrow")
    ],
)
def test_a_file_system_that_machines_share_is_known(kind: str) -> None:
    assert is_shared(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "overlay",
        "tmpfs",
        "fuseblk",
        "fuse.fuse-overlayfs",
        "apfs",
    ],
)
def test_a_disk_of_this_machine_is_known(kind: str) -> None:
    assert not is_shared(kind)


def test_a_ledger_on_a_network_file_system_is_refused_with_the_remedy_before_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    far.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(
        f"27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:9 / {far.resolve()} rw - nfs4 filer:/far rw\n"
    )
    monkeypatch.setattr(sqlite_file, "MOUNTS", table)
    with pytest.raises(LedgerUnsafe) as refused:
        SqliteLedger(far / "ledger.db")
    for part in (
        f"{far / 'ledger.db'}",
        "type nfs4",
        "filer:/far",
        str(far),
        "sqlite:////",
        "checkpoint",
        "redis://",
    ):
        assert part in str(refused.value)
    assert list(far.iterdir()) == []
    SqliteLedger(tmp_path / "ledger.db").close()


@pytest.mark.skipif(sys.platform != "linux", reason="the table of mounts is Linux's")
def test_the_table_of_this_machine_has_the_folder_of_this_test(tmp_path: Path) -> None:
    found = mount_of(tmp_path, sqlite_file.MOUNTS.read_text(encoding="utf-8"))
    assert tmp_path.resolve().is_relative_to(found.point)
    assert found.kind
    assert found.point == "/" or Path(found.point).is_mount()


def test_a_ledger_that_nobody_named_is_where_it_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    for folder in (far, near, tmp_path / "temporary"):
        folder.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(
        f"27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:9 / {far.resolve()} rw - nfs4 filer:/far rw\n"
    )
    monkeypatch.setattr(sqlite_file, "MOUNTS", table)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    open_ledger("auto", near).close()
    assert [path.name for path in near.iterdir()] == ["tokenloom.db"]
    for _ in range(2):  # the next launch on this machine finds it again
        open_ledger("auto", far).close()
    assert list(far.iterdir()) == []
    (folder,) = (tmp_path / "temporary").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    (ledger,) = folder.iterdir()
    assert str(ledger) in caplog.text
    assert "type nfs4" in caplog.text

    ledger.unlink()
    folder.rmdir()
    folder.symlink_to(near)
    with pytest.raises(LedgerUnsafe, match="not this user's own"):
        open_ledger("auto", far)
