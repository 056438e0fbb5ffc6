"""What another data loader had read of an epoch, as a file of flags and the lines of a mixture file that name it."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenloom_proto.files import read_file
from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import ConfigError
from tokenloom_server.storage import pointers

from tokenloom_tools.moving import litdata, mosaic

#: By the name of a library: asks it, how to install it, and the first release of which nobody has looked at the parts
#: that are asked and not public.
LIBRARIES = {
    "mosaic": (mosaic.seen_samples, "mosaicml-streaming", "0.14"),
    "litdata": (litdata.seen_samples, "litdata", "0.3"),
}


def write_seen(
    library: str, state: Path, spec: Spec, arguments: dict[str, Any], output: Path
) -> str:
    """Writes the flags of the rows that were read, and gives the source for a mixture file. ``arguments``: of the job's
    dataset. Raises ``ConfigError``, also where the library refuses the state or is not here."""
    seen_samples, package, known_before = LIBRARIES[library]
    if fault := pointers.fault_at(state):
        raise ConfigError(f"{str(state)!r} {fault}")
    try:
        installed = version(package)
        if _numbers(installed) >= _numbers(known_before):
            raise ConfigError(
                f"{library} is asked by parts of it that are not public, and those of {package} {installed} were not "
                f"looked at: pip install '{package}<{known_before}'"
            )
        fields = json.loads(read_file(state))
        flags = np.asarray(seen_samples(fields, Path(spec.location), arguments), np.int8)
        np.save(output, flags > 0)
        digest = hashlib.sha256(output.read_bytes()).hexdigest()
    except ImportError as error:
        raise ConfigError(
            f"{library} is asked for its own order, and cannot be imported ({error}): run this where the job ran, or "
            f"pip install '{package}<{known_before}'"
        ) from None
    except KeyError as error:
        raise ConfigError(
            f"{str(state)!r}: the state has no {error}; expected what {library} saves"
        ) from None
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"{library} does not resume from {str(state)!r}: {type(error).__name__}: {error}"
        ) from None
    left, read, dropped = (int(count) for count in np.bincount(flags, minlength=3))
    drops = (
        f"# {dropped:,} are in no batch of this epoch: {library} drops them itself\n"
        if dropped
        else ""
    )
    return (
        f"# {read:,} of {len(flags):,} samples of the epoch were read, and {left:,} are left\n{drops}"
        f"- source: {json.dumps(str(spec))}\n"
        f"  seen: {{file: {json.dumps(str(output))}, sha256: {digest}}}"
    )


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:2]]
