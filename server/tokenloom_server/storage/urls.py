"""Locations that are URLs: which are, which may be named, and how they are shown."""

from __future__ import annotations

import re

from tokenloom_server.errors import ConfigError

#: What is not storage of its own, but a view of another one or of this machine's files.
_INDIRECT = frozenset(
    {
        *(
            "file",
            "local",
            "dir",
            "filecache",
            "blockcache",
            "simplecache",
            "cached",
            "reference",
            "zip",
            "tar",
        ),
        *("libarchive", "data", "root", "generic"),
    }
)
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/\s@'\"]*)@")
_AT_COMMIT = re.compile(r"^(hf://datasets/[^/@]+(?:/[^/@]+)?)@[^/]*")
_QUERY = re.compile(r"\?[A-Za-z0-9_.%-]+=[^\s'\"]*")


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def protocol(url: str) -> str:
    """``s3`` of ``s3://bucket/key``."""
    return url.partition("://")[0]


def root(url: str) -> str:
    """``s3://bucket`` of ``s3://bucket/key``: what a connection is made to."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def before_wildcards(pattern: str) -> str:
    """The part of a pattern before the first ``*``, ``?`` or ``[``."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0]


def refuse_unsafe(what: str, url: str) -> None:
    """Raises ``ConfigError`` for a URL that carries a secret, or is not what it seems; ``what`` begins its message.

    Specs stand in mixture files, manifests, logs and snapshots: a password or a signature in one would, too.
    """
    shown = repr(redacted(url))
    scheme = protocol(url)
    user = _USER_INFO.match(url)
    if user is not None and (":" in user["user"] or scheme in ("http", "https")):
        raise ConfigError(
            f"{what}: the URL {shown} carries a user's name and password; leave them out, and give them to the server "
            "by the environment"
        )
    if _QUERY.search(url):
        raise ConfigError(
            f"{what}: the URL {shown} carries a query, such as a signed URL has; name the object itself, and give "
            "credentials to the server by the environment"
        )
    if "::" in url or scheme in _INDIRECT:
        raise ConfigError(
            f"{what}: {shown} is a view of other storage; name the object where it lies, and a local file by its path"
        )
    if any(part in (".", "..") for part in url.lower().replace("%2e", ".").split("/")):
        raise ConfigError(f"{what}: {shown} has a part '.' or '..'; name the place itself")


def redacted(text: str) -> str:
    """A text without the passwords and queries of the URLs in it."""
    return _QUERY.sub("?…", _USER_INFO.sub(lambda found: f"{found['scheme']}…@", text))


def lies_below(url: str, folder: str) -> bool:
    """Whether a URL is a folder's, or that of something below it. A repository on the Hub is one at every commit."""
    folder = folder.rstrip("/")
    url = _AT_COMMIT.sub(r"\1", url)
    return url == folder or url.startswith(folder + "/")
