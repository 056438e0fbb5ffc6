"""From an address as people write it to that of gRPC."""

from __future__ import annotations

import os

from tokenloom_proto import rest
from tokenloom_proto.address import Address, ServerAddress, reached_at
from tokenloom_proto.credentials import NO_FILES, TlsFiles

from tokenloom.connection.options import ConnectionOptions
from tokenloom.errors import ServerUnavailable


def find_run(url: str, options: ConnectionOptions) -> Address:
    """The address of a run. Asks REST where that is whose address it is, or where a scheme or the run is missing.

    Raises ``ValueError`` for what is no address or leaves the run open, and what asking raises.
    """
    address = ServerAddress.parse(url)
    if address.is_grpc:
        return Address.parse(url)
    files = TlsFiles(options.tls_ca, options.tls_cert, options.tls_key).or_of(os.environ)
    run_address = Address(address.targets, address.run, address.is_tls(files != NO_FILES))
    base = f"http{'s' * run_address.tls}://{run_address.targets[0]}"
    token = options.credentials(run_address).token
    try:
        answer = rest.get(rest.opener(base, files), base + rest.ABOUT, token, ServerUnavailable)
    except ServerUnavailable:
        if address.scheme or not address.run:
            raise
        return run_address  # gRPC's, or that of a server that is away, for which a Join waits
    about = rest.About.parse(answer, "grpc_address", base)
    run = address.run or ", ".join(about.runs)
    if run not in about.runs:
        raise ValueError(
            f"{base} serves {', '.join(about.runs) or 'no run'}; name one of these: {base}/RUN"
        )
    return Address((reached_at(about.address, run_address.targets[0]),), run, run_address.tls)
