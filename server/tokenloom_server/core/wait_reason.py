"""What a run may wait for."""

from __future__ import annotations

from typing import Literal

#: ``ranks``: samples are ready, and training sets the pace. ``rows``: they are being read and tokenised, and a rank has
#: nothing left. ``readers``: those of ``serve --readers``.
WaitReason = Literal["ranks", "storage", "readers", "ledger", "lease", "rows"]
