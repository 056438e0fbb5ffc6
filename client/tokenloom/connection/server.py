"""Where a run is served, for the datasets that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from tokenloom_proto.address import Address
from tokenloom_proto.credentials import Credentials

if TYPE_CHECKING:
    from typing_extensions import Self


class RunServer:
    """The server of a run, which runs elsewhere. One that the job started for itself is a subclass."""

    #: Whether the job itself runs it, so that it ends with the datasets that use it.
    in_job: ClassVar[bool] = False

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.address = address
        self.credentials = credentials
        self._users = 0

    def share(self) -> Self:
        """Counts one more dataset that uses it; the dataset is to ``release`` it."""
        self._users += 1
        return self

    def release(self) -> None:
        """One of its datasets is closed. The last one ends what was started for them."""
        self._users -= 1
        if not self._users:
            self.close()

    def watch(self, fail: Callable[[BaseException], None]) -> None:
        """Has ``fail`` called where the server ended for good. One that runs elsewhere may always come back."""

    def close(self) -> None:
        """Ends what this process has started. Further calls do nothing."""
