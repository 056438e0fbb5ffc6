"""Does the wheel work where it is installed afresh? With a Python's oldest or newest packages that it allows.

A client in an environment of its own, without torch, reads a run of a server, which has an environment of its own, too,
or is an installed command. The client's digest must be that of the sample's order.

    .ci/installs.py oldest --client python3.10 --server .venv/bin/tokenloom
    .ci/installs.py newest --client python3.13 --server python3.13 [--wheel dist/tokenloom-0.1.0-py3-none-any.whl]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_DEADLINE_S = 60.0
#: Of the first 200 samples of examples/compose, which every client and server give.
DIGEST = "368423d72acedcf6823aba172c98770f"

READ = """
import json, sys
import google.protobuf, grpc, numpy
import tokenloom
from tokenloom import NumpyDataset
assert tokenloom.__version__ == sys.argv[2], tokenloom.__version__
with NumpyDataset(sys.argv[1], batch_size=4) as dataset:
    steps = [batch["input_ids"].shape for _, batch in zip(range(50), dataset)]
assert steps == [(4, 128)] * 50 and "torch" not in sys.modules
versions = [sys.version.split()[0], grpc.__version__, google.protobuf.__version__, numpy.__version__]
print(json.dumps([dataset.digest, *versions]))
"""

#: A byte-level tokeniser, with which a server says which engine it chooses.
TRAIN = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
tokenizer, bytes_of = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
tokenizer.pre_tokenizer = bytes_of(add_prefix_space=False)
alphabet = bytes_of.alphabet()
trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
tokenizer.train_from_iterator(["a line of text and another line"], trainer)
tokenizer.save("tokenizer.json")
"""


def oldest(extra: str) -> list[str]:
    """The lower bounds of what an environment asks for itself, as constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"][extra] if extra else []
    # The server's packages ask for a newer grpcio and protobuf than the client's.
    lines += [
        line
        for line in project["dependencies"]
        if not extra or not line.startswith(("grpcio", "protobuf"))
    ]
    bounds = (re.match(r"([\w.-]+)>=([\d.]+)", line) for line in lines)
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


def environment(folder: Path, python: str, wheel: Path, extra: str, packages: str) -> Path:
    """A new environment's folder of commands."""
    began = time.monotonic()
    subprocess.run([python, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(oldest(extra) if packages == "oldest" else []))
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "-c", constraints]
    name = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", *options, name], check=True)
    size = sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    print(
        f"{folder.name}: {packages}, {size / 1e6:.0f} MB, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return folder / "bin"


def names_its_engine(commands: Path, folder: Path) -> None:
    """A tokeniser of files is opened by both engines, in the versions that are there."""
    subprocess.run([commands / "python", "-c", TRAIN], cwd=folder, check=True)
    mixture = folder / "mixture.yaml"
    text = mixture.read_text(encoding="utf-8").replace(
        "tokenizer: bytes ", "tokenizer: tokenizer.json "
    )
    (folder / "words.yaml").write_text(text, encoding="utf-8")
    said = subprocess.check_output(
        [commands / "tokenloom", "validate", "words.yaml"], cwd=folder, text=True
    )
    assert "gigatoken" in said, said


def read(client: Path, server: Path, folder: Path, release: str) -> list[str]:
    """The digest that a client has after the first samples of a served run, and the versions of its packages."""
    options = ["--grpc=127.0.0.1:0", "--rest=127.0.0.1:0", "--ready-file=ready.json"]
    serving = subprocess.Popen([server, "serve", "mixture.yaml", *options], cwd=folder)
    try:
        deadline, ready = time.monotonic() + START_DEADLINE_S, folder / "ready.json"
        while not ready.exists():
            assert serving.poll() is None and time.monotonic() < deadline, (
                "the server did not start"
            )
            time.sleep(0.05)
        url = f"grpc://{json.loads(ready.read_text(encoding='utf-8'))['grpc']}/sample"
        found: list[str] = json.loads(
            subprocess.check_output([client / "python", "-c", READ, url, release], text=True)
        )
    finally:
        serving.terminate()
        serving.wait(START_DEADLINE_S)
    assert serving.returncode == 0, serving.returncode
    return found


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("packages", choices=("oldest", "newest"))
    options.add_argument("--client", required=True, help="a Python")
    options.add_argument(
        "--server", required=True, help="a Python, or the command of an installed server"
    )
    options.add_argument("--wheel", type=Path, help="one that is built; by default this tree's")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if (wheel := chosen.wheel) is None:
            build = [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--wheel-dir",
                folder,
                ROOT,
            ]
            # Older versions of pip have no such option, and pass over a variable that they do not know.
            locked = os.environ | {"PIP_BUILD_CONSTRAINT": str(ROOT / "requirements" / "build.txt")}
            subprocess.run(build, check=True, env=locked)
            (wheel,) = folder.glob("*.whl")
        release = wheel.name.split("-")[1]
        work = folder / "work"
        shutil.copytree(ROOT / "examples" / "compose", work)
        server = Path(chosen.server).absolute()
        if server.name != "tokenloom":
            commands = environment(
                folder / "server", chosen.server, wheel, "server", chosen.packages
            )
            names_its_engine(commands, work)
            server = commands / "tokenloom"
        client = environment(folder / "client", chosen.client, wheel, "", chosen.packages)
        digest, *versions = read(client, server, work, release)
    print(f"Python, grpcio, protobuf, numpy: {', '.join(versions)}: {digest}")
    assert digest == DIGEST, f"expected {DIGEST}"


if __name__ == "__main__":
    main()
