"""``python -m tests.conformance.adapter``: Tokenloom's own client, as the conformance program asks it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from tokenloom import ConnectionOptions, LaunchOptions, NumpyDataset
from tokenloom_proto.errors import TokenloomError


class Adapter:
    """One rank; its methods are what can be asked."""

    def __init__(self) -> None:
        self._dataset: NumpyDataset | None = None
        self._batches: Iterator[Any] = iter(())

    def join(
        self, *, address: str, run: str, state: str | None, token: str | None, **options: Any
    ) -> dict[str, Any]:
        self.close()
        connection = ConnectionOptions(token=token, connect_timeout_s=10, reconnect_timeout_s=30)
        names = {each.name for each in fields(LaunchOptions)} & options.keys()
        launch = LaunchOptions(**{name: options.pop(name) for name in names})
        self._dataset = NumpyDataset(
            f"grpc://{address}/{run}", **options, launch=launch, connection=connection
        )
        if state is not None:
            self._dataset.load_state_dict({"tokenloom": state})
        self._batches = iter(self._dataset)
        return {"start_index": self._dataset.sample_index}

    def next(self) -> dict[str, Any]:
        assert self._dataset is not None
        for batch in self._batches:
            columns = {
                name: batch[name].tolist()
                for name in ("input_ids", "labels", "source_ids", "sample_ids")
            }
            numbers = {name: batch[name] for name in ("sample_index", "total_tokens")}
            return {**columns, **numbers, "digest": self._dataset.digest}
        return {"end": True}

    def state(self) -> dict[str, Any]:
        assert self._dataset is not None
        return {"state": self._dataset.state_dict()["tokenloom"]}

    def close(self) -> dict[str, Any]:
        if self._dataset is not None:
            self._dataset.close()
        self._dataset = None
        return {}


def answer(adapter: Adapter, line: str) -> dict[str, Any]:
    """To one line of the conformance program."""
    request = json.loads(line)
    try:
        answered: dict[str, Any] = getattr(adapter, request.pop("do"))(**request)
        return answered
    except TokenloomError as error:
        return {"error": error.name, "message": str(error)}


def main(adapter: Adapter) -> None:
    """Answers until standard input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(adapter, line)), flush=True)
    adapter.close()


if __name__ == "__main__":
    main(Adapter())
