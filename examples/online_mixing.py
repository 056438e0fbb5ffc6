"""Weights that follow the losses: Online Data Mixing as a process of its own beside the training.

    tokenloom serve mixture.yaml
    torchrun --nproc-per-node 2 examples/source_losses.py grpc://127.0.0.1:50051/RUN
    python examples/online_mixing.py http://127.0.0.1:8080 --run RUN --every 10M

The method is that of Alon Albalak, Liangming Pan, Colin Raffel and William Yang Wang, "Efficient Online Data Mixing For
Language Model Pre-Training", 2023, arXiv:2312.02406: sources are the arms of a bandit (EXP3; Auer, Cesa-Bianchi, Freund
and Schapire, 2002), and what an arm gives is the loss of its source, as a measure of what is left to learn there. In
turn t = 1, 2, …, of K sources, source i has the share

    π_t(i) = (1 − K ε_t) exp(ε_(t−1) R_i) / Σ_j exp(ε_(t−1) R_j) + ε_t,    ε_t = min(1/K, √(ln K / (K t))),  ε_0 = 1/K

and its loss L_i, measured in that turn, becomes its reward as a moving average, weighted by how rarely it is drawn:

    R_i ← α R_i + (1 − α) L_i / π_t(i),    R_i = 0 at first.

So every source keeps at least the share ε_t, which falls as the estimates become better.

What is this example's own: a turn is ``--every`` tokens under one mixture, not one step. It begins where the revision
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenloom_server.core.amounts import parse_amount
from tokenloom_server.reports.stats import MixtureInfo, RunLosses
from tokenloom_server.tools.remote import Remote

AUTHOR = "examples/online_mixing.py"


@dataclass(frozen=True)
class Turn:
    """A turn of the bandit: of which run, its number, what it knows, and from where on its shares hold."""

    number: int
    rewards: dict[str, float]
    shares: dict[str, float]
    sample_index: int
    total_tokens: int
    run_uid: str = ""


def exploration(turn: int, sources: int) -> float:
    """The least share that a source has in a turn: ε_t."""
    return min(1 / sources, math.sqrt(math.log(sources) / (sources * turn))) if turn else 1 / sources


def distribution(rewards: Mapping[str, float], turn: int) -> dict[str, float]:
    """Each source's share in a turn: π_t."""
    now, before = exploration(turn, len(rewards)), exploration(turn - 1, len(rewards))
    greatest = max(rewards.values())  # so that no exponential overflows
    powers = {source: math.exp(before * (reward - greatest)) for source, reward in rewards.items()}
    rest = (1 - len(rewards) * now) / sum(powers.values())
    return {source: rest * power + now for source, power in powers.items()}


def rewarded(turn: Turn, losses: Mapping[str, float], smoothing: float) -> dict[str, float]:
    """The rewards after a turn in which these losses were measured. A source that had no sample keeps its own."""
    return turn.rewards | {
        source: smoothing * turn.rewards[source] + (1 - smoothing) * loss / turn.shares[source]
        for source, loss in losses.items()
    }


def measured(curve: RunLosses, turn: Turn, tokens: int) -> dict[str, float] | None:
    """Each source's mean loss in a turn; None while it has not had so many tokens."""
    if not curve.total_tokens or curve.total_tokens[-1] < turn.total_tokens + tokens:
        return None
    own = [point for point, index in enumerate(curve.sample_index) if index > turn.sample_index]
    losses = {}
    for source in curve.sources:
        parts = [(source.losses[point] or 0.0, source.tokens[point]) for point in own]
        count = sum(n for _, n in parts)
        if count and source.alias in turn.shares:
            losses[source.alias] = sum(loss * n for loss, n in parts) / count
    return losses


def first_turn(remote: Remote, run: str) -> Turn:
    """The mixture as it is, from now on."""
    (stats,) = remote.stats(run)
    names = _children(remote.mixture(run))
    shares = {
        source.alias: source.target_share for source in stats.sources if source.alias in names and source.target_share
    }
    return Turn(1, dict.fromkeys(shares, 0.0), shares, stats.sample_index, stats.total_tokens, stats.run_uid)


def next_turn(remote: Remote, run: str, turn: Turn, losses: Mapping[str, float], smoothing: float) -> Turn:
    """Rewards the sources, and makes the revision that the next turn is."""
    rewards = rewarded(turn, losses, smoothing)
    shares = distribution(rewards, turn.number + 1)
    loss_texts = ", ".join(f"{source} {loss:.4f}" for source, loss in losses.items())
    revision = remote.revise(
        run,
        {
            "author": AUTHOR,
            "reason": f"online data mixing, turn {turn.number + 1}; losses of turn {turn.number}: {loss_texts}"[:2000],
            "set": [{"child": source, "weight": round(share, 6)} for source, share in shares.items()],
        },
    )
    return replace(
        turn,
        number=turn.number + 1,
        rewards=rewards,
        shares=shares,
        sample_index=revision.sample_index,
        total_tokens=revision.total_tokens,
    )


def _children(mixture: MixtureInfo) -> set[str]:
    children = mixture.mixture["children"]
    nested = [child for child in children if "children" in child]
    if nested or len(children) < 2:
        raise SystemExit(
            f"run {mixture.run!r} has {len(nested)} nodes among its {len(children)} children: this example weighs two "
            "or more sources that all lie below the root"
        )
    return {child.get("alias") or child["source"] for child in children} - set(mixture.paused)


def main(options: argparse.Namespace) -> None:
    """Turn after turn, until the data end or so many were made."""
    tokens = parse_amount(options.every, "--every")
    remote = Remote(options.url, os.environ, control=True)
    if options.state.exists():
        turn = Turn(**json.loads(options.state.read_text(encoding="utf-8")))
        if turn.run_uid != (uid := remote.stats(options.run)[0].run_uid):
            raise SystemExit(
                f"{options.state} is of the run with uid {turn.run_uid}, and {options.run!r} has {uid}: delete it, or "
                "name another file with --state"
            )
    else:
        turn = first_turn(remote, options.run)
    while turn.number < options.turns:
        losses = measured(remote.losses(options.run), turn, tokens)
        if losses is None:
            if remote.stats(options.run)[0].ended:
                break
            time.sleep(options.poll)
            continue
        turn = next_turn(remote, options.run, turn, losses, options.smoothing)
        part = options.state.with_suffix(".part")
        part.write_text(json.dumps(asdict(turn)), encoding="utf-8")
        part.replace(options.state)
        share_texts = ", ".join(f"{source} {share:.2%}" for source, share in turn.shares.items())
        print(f"turn {turn.number} from sample {turn.sample_index} on: {share_texts}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="REST address of the server, as it printed it")
    parser.add_argument("--run", required=True)
    parser.add_argument("--every", default="10M", help="tokens of a turn: 500K, 10M, 1B")
    parser.add_argument("--turns", type=int, default=1000, help="turns to make at most, the present mixture counted")
    parser.add_argument("--smoothing", type=float, default=0.9, help="α: what a reward keeps of the turn before")
    parser.add_argument("--poll", type=float, default=5.0, help="seconds between two looks at the losses")
    parser.add_argument(
        "--state", type=Path, default=Path("online_mixing.json"), help="file to go on from, where it is there"
    )
    main(parser.parse_args())
