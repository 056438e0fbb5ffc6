"""``python -m tests.conformance.broken FAULT``: clients that break the contract, each in one way; no check is worth
anything that they pass."""

from __future__ import annotations

import sys
from typing import Any

from tokenloom_proto.errors import Fenced

from tests.conformance.adapter import Adapter, main


class LabelsAsInputs(Adapter):
    def next(self) -> dict[str, Any]:
        batch = super().next()
        return batch | {"labels": batch["input_ids"]}


class StateWithSpaces(Adapter):
    def state(self) -> dict[str, Any]:
        return {"state": super().state()["state"].replace(":", ": ")}


class LosesABatch(Adapter):
    taken = 0

    def next(self) -> dict[str, Any]:
        self.taken += 1
        if self.taken == 4:
            super().next()
        return super().next()


class EndsWhereFenced(Adapter):
    def next(self) -> dict[str, Any]:
        try:
            return super().next()
        except Fenced:
            return {"end": True}


class WithoutToken(Adapter):
    def join(self, **options: Any) -> dict[str, Any]:
        return super().join(**options | {"token": None})


class Dies(Adapter):
    def next(self) -> dict[str, Any]:
        sys.exit(3)


FAULTS = {kind.__name__: kind for kind in Adapter.__subclasses__()}

if __name__ == "__main__":
    main(FAULTS[sys.argv[1]]())
