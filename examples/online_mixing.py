"""Weights that follow the losses: Online Data Mixing as a process of its own beside the training.

    tokenloom serve mixture.yaml
    torchrun --nproc-per-node 2 examples/source_losses.py grpc://127.0.0.1:50051/RUN
    python examples/online_mixing.py http://127.0.0.1:8080 --run RUN --every 10M

The method is that of Alon Albalak, Liangming Pan, Colin Raffel and William Yang Wang, "Efficient Online Data Mixing For
Language Model Pre-Training", 2023, arXiv:2312.02406: sources are the arms of a bandit (EXP3; Auer, Cesa-Bianchi, Freund
and Schapire, 2002), and what an arm gives is the loss of its source, as a measure of what is left to learn there. In
turn t = 1, 2, …, of K sources, source i, whose own weight in the mixture is the share w_i, has the share

    π_t(i) = (1 − K ε_t) w_i exp(ε_(t−1) R_i) / Σ_j w_j exp(ε_(t−1) R_j) + K ε_t w_i
    ε_t = min(1/K, √(ln K / (K t))),  ε_0 = 1/K

and its loss L_i, measured in that turn, becomes its reward as a moving average, weighted by how rarely it is drawn:

    R_i ← α R_i + (1 − α) L_i / π_t(i),    R_i = 0 at first.

So every source keeps at least the part K ε_t of its own weight, which falls as the estimates become better.

What is this example's own: the mixture's weights, which the paper has all equal, 1/K; then the formula is the paper's.
And a turn is ``--every`` tokens under one mixture, not one step. It begins where the revision
that makes it holds, which is a little after the present, so that a loss is divided by the share it was measured under.
The first turn is the mixture as it is. Every turn is a revision of the run, with its reason and author: in the ledger
before production passes it, shown by ``tokenloom mixture show``, and applied again at its sample where training resumes
from a checkpoint. A run has at most 1,000 of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

AUTHOR = "examples/online_mixing.py"


@dataclass(frozen=True)
class Turn:
    """A turn of the bandit: of which run, its number, what it knows, and from where on its shares hold."""

    number: int
    rewards: dict[str, float]
    weights: dict[str, float]
    shares: dict[str, float]
    sample_index: int
    total_tokens: int
    run_uid: str = ""


class Run:
    """A run of a server, over REST. The token, if it wants one, is ``TOKENLOOM_TOKEN`` of the environment."""

    def __init__(self, url: str, run: str) -> None:
        self._base = f"{url.rstrip('/')}/v1/runs/{urllib.parse.quote(run, safe='')}"
        self._headers = {"content-type": "application/json"}
        if token := os.environ.get("TOKENLOOM_TOKEN"):
            self._headers["authorization"] = f"Bearer {token}"

    def ask(self, what: str, change: Mapping[str, object] | None = None) -> Any:
        """``stats``, ``losses`` or ``mixture``; with a change, the revision that it became."""
        body = None if change is None else json.dumps(change).encode()
        method = "GET" if change is None else "PATCH"
        request = urllib.request.Request(f"{self._base}/{what}", body, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{request.full_url}: {json.load(error)['message']}") from None


def exploration(turn: int, sources: int) -> float:
    """The least share that a source has in a turn: ε_t."""
    return (
        min(1 / sources, math.sqrt(math.log(sources) / (sources * turn))) if turn else 1 / sources
    )


def distribution(
    weights: Mapping[str, float], rewards: Mapping[str, float], turn: int
) -> dict[str, float]:
    """Each source's share in a turn: π_t. ``weights`` are shares: their sum is 1."""
    explored, before = (
        len(rewards) * exploration(turn, len(rewards)),
        exploration(turn - 1, len(rewards)),
    )
    greatest = max(rewards.values())  # so that no exponential overflows
    powers = {
        source: weights[source] * math.exp(before * (reward - greatest))
        for source, reward in rewards.items()
    }
    rest = (1 - explored) / sum(powers.values())
    return {source: rest * power + explored * weights[source] for source, power in powers.items()}


def rewarded(turn: Turn, losses: Mapping[str, float], smoothing: float) -> dict[str, float]:
    """The rewards after a turn in which these losses were measured. A source that had no sample keeps its own."""
    return turn.rewards | {
        source: smoothing * turn.rewards[source] + (1 - smoothing) * loss / turn.shares[source]
        for source, loss in losses.items()
    }


def measured(curve: Mapping[str, Any], turn: Turn, tokens: int) -> dict[str, float] | None:
    """Each source's mean loss in a turn; None while it has not had so many tokens. ``curve``: as ``losses`` has it."""
    if not curve["total_tokens"] or curve["total_tokens"][-1] < turn.total_tokens + tokens:
        return None
    own = [point for point, index in enumerate(curve["sample_index"]) if index > turn.sample_index]
    losses = {}
    for source in curve["sources"]:
        parts = [(source["losses"][point] or 0.0, source["tokens"][point]) for point in own]
        count = sum(n for _, n in parts)
        if count and source["alias"] in turn.shares:
            losses[source["alias"]] = sum(loss * n for loss, n in parts) / count
    return losses


def first_turn(run: Run) -> Turn:
    """The mixture as it is, from now on."""
    stats, weights = run.ask("stats"), own_weights(run.ask("mixture"))
    where = stats["sample_index"], stats["total_tokens"], stats["run_uid"]
    return Turn(1, dict.fromkeys(weights, 0.0), weights, weights, *where)


def next_turn(run: Run, turn: Turn, losses: Mapping[str, float], smoothing: float) -> Turn:
    """Rewards the sources, and makes the revision that the next turn is."""
    rewards = rewarded(turn, losses, smoothing)
    shares = distribution(turn.weights, rewards, turn.number + 1)
    loss_texts = ", ".join(f"{source} {loss:.4f}" for source, loss in losses.items())
    revision = run.ask(
        "mixture",
        {
            "author": AUTHOR,
            "reason": f"online data mixing, turn {turn.number + 1}; losses of turn {turn.number}: {loss_texts}"[
                :2000
            ],
            "set": [
                {"child": source, "weight": round(share, 6)} for source, share in shares.items()
            ],
        },
    )
    return replace(
        turn,
        number=turn.number + 1,
        rewards=rewards,
        shares=shares,
        sample_index=revision["sample_index"],
        total_tokens=revision["total_tokens"],
    )


def own_weights(mixture: Mapping[str, Any]) -> dict[str, float]:
    """The weights in force, as shares, of the sources that are not paused."""
    children = mixture["mixture"]["children"]
    weights = {
        child.get("alias") or child.get("source"): child.get("weight", 1.0) for child in children
    }
    if len(children) < 2 or not all(
        isinstance(weight, (int, float)) and source for source, weight in weights.items()
    ):
        raise SystemExit(
            f"run {mixture['run']!r} does not have two or more sources with plain weights, all right below the root, "
            "which is what this example weighs"
        )
    playing = {
        source: weight for source, weight in weights.items() if source not in mixture["paused"]
    }
    return {source: weight / sum(playing.values()) for source, weight in playing.items() if weight}


def amount(text: str) -> int:
    """500K, 10M, 1B as a number."""
    return round(float(text.rstrip("KMB")) * {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 1))


def main(options: argparse.Namespace) -> None:
    """Turn after turn, until the data end or so many were made."""
    run = Run(options.url, options.run)
    if options.state.exists():
        turn = Turn(**json.loads(options.state.read_text(encoding="utf-8")))
        if turn.run_uid != (uid := run.ask("stats")["run_uid"]):
            raise SystemExit(
                f"{options.state} is of the run with uid {turn.run_uid}, and {options.run!r} has {uid}: delete it, or "
                "name another file with --state"
            )
    else:
        turn = first_turn(run)
    while turn.number < options.turns:
        losses = measured(run.ask("losses"), turn, options.every)
        if losses is None:
            if run.ask("stats")["ended"]:
                break
            time.sleep(options.poll)
            continue
        turn = next_turn(run, turn, losses, options.smoothing)
        part = options.state.with_suffix(".part")
        part.write_text(json.dumps(asdict(turn)), encoding="utf-8")
        part.replace(options.state)
        share_texts = ", ".join(f"{source} {share:.2%}" for source, share in turn.shares.items())
        print(f"turn {turn.number} from sample {turn.sample_index} on: {share_texts}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="REST address of the server, as it printed it")
    parser.add_argument("--run", required=True)
    parser.add_argument(
        "--every", type=amount, default="10M", help="tokens of a turn: 500K, 10M, 1B"
    )
    parser.add_argument(
        "--turns", type=int, default=1000, help="turns to make at most, the present mixture counted"
    )
    parser.add_argument(
        "--smoothing", type=float, default=0.9, help="α: what a reward keeps of the turn before"
    )
    parser.add_argument(
        "--poll", type=float, default=5.0, help="seconds between two looks at the losses"
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=Path("online_mixing.json"),
        help="file to go on from, where it is there",
    )
    main(parser.parse_args())
