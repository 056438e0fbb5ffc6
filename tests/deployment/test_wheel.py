"""The built wheel, in environments that have only what it asks for.

A process that is started without site packages sees the wheel and exactly the distributions that a set of
requirements brings in. They are linked from this environment, since torch is slow to install.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.prepared import write_tokenizer
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.order import builder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "tokenloom": "client",
    "tokenloom_server": "server",
    "tokenloom_tools": "server",
    "tokenloom_proto": "proto",
}
#: Those that need the server's extra.
SERVERS = ("tokenloom_server", "tokenloom_tools")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=110)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    options = [
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        "--quiet",
        "--target",
        str(folder),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=110
    )
    return folder


@pytest.fixture(scope="session")
def client_environment(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Search path of ``pip install 'tokenloom[torch]'``: a trainer's."""
    return _environment(
        installed,
        _requirements(installed) + _requirements(installed, "torch"),
        tmp_path_factory.mktemp("client"),
    )


@pytest.fixture(scope="session")
def server_environment(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Search path of the server's image, whose extras are those that its packages are locked for."""
    (image,) = re.findall(
        r"^compile image (.*)$", (ROOT / ".ci" / "lock").read_text(encoding="utf-8"), re.MULTILINE
    )
    extras = re.findall(r"--extra (\S+)", image)
    assert extras[0] == "server"
    requirements = _requirements(installed) + _requirements(installed, *extras)
    return _environment(installed, requirements, tmp_path_factory.mktemp("server"))


def _requirements(installed: Path, *extras: str) -> list[Requirement]:
    """What the wheel asks for here: its base dependencies, or those of extras alone."""
    (info,) = installed.glob("tokenloom-*.dist-info")
    found: dict[str, Requirement] = {}
    for line in Distribution.at(info).requires or ():
        need = Requirement(line)
        of_extra = need.marker is not None and "extra" in str(need.marker)
        if of_extra != bool(extras) or (
            need.marker and not any(need.marker.evaluate({"extra": e}) for e in extras or [""])
        ):
            continue
        for own in _requirements(installed, *need.extras) if need.name == "tokenloom" else [need]:
            own.marker = None
            found[own.name] = own
    return list(found.values())


def _environment(installed: Path, requirements: Iterable[Requirement], links: Path) -> list[str]:
    for found in _closure(requirements).values():
        for top in _top_level(found):
            (links / top).symlink_to(Path(str(found.locate_file(top))))
    return [str(installed), str(links)]


def _closure(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """The installed distributions that requirements name, and those that these need in their turn."""
    found: dict[str, Distribution] = {}
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if not wanted or (name in found and not requirement.extras):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # of an optional kind that this platform's builds go without
        needs = [Requirement(line) for line in found[name].requires or ()]
        waiting += [(need, extra) for need in needs for extra in ("", *requirement.extras)]
    return found


def _top_level(found: Distribution) -> set[str]:
    """The entries of site-packages that a distribution owns."""
    return {file.parts[0] for file in found.files or ()} - {"..", "__pycache__", "bin"}


def _run(path: Sequence[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python that sees its standard library and ``path``; -I leaves the user's environment out, too."""
    prelude = f"import sys; sys.path[:0] = {list(path)!r}; sys.argv = ['tokenloom', *{list(arguments)!r}]\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", prelude + code],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=path[0],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )


def _entry_point(installed: Path) -> str:
    """Code that does what the installed command does."""
    (info,) = installed.glob("tokenloom-*.dist-info")
    (entry,) = Distribution.at(info).entry_points.select(group="console_scripts", name="tokenloom")
    return f"from {entry.module} import {entry.attr}; sys.exit({entry.attr}())"


def _import_names(requirements: Iterable[Requirement]) -> set[str]:
    """What the distributions of requirements are imported as."""
    names = {Path(top).name for r in requirements for top in _top_level(distribution(r.name))}
    return {name.removesuffix(".py") for name in names if "." not in name.removesuffix(".py")}


def _content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_all_files_of_the_three_packages_and_the_licence_and_no_others(
    wheel: Path,
) -> None:
    in_tree = {
        path.relative_to(ROOT / folder).as_posix()
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    examples = subprocess.run(
        ["git", "ls-files", "examples"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    in_tree |= {f"tokenloom_tools/{path}" for path in examples.stdout.split()}

    names = _content(wheel)

    assert {name for name in names if ".dist-info/" not in name} == in_tree
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_base_dependencies_are_the_clients_alone(installed: Path) -> None:
    assert {requirement.name for requirement in _requirements(installed)} == {
        *("grpcio", "protobuf", "numpy")
    }


def test_the_server_extra_names_nothing_that_is_not_used(installed: Path) -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for package in SERVERS
        for path in (installed / package).rglob("*.py")
    )
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))

    # uvicorn's own parser: named for its lower bound (SECURITY.md).
    extra = [need for need in _requirements(installed, "server") if need.name != "h11"]

    assert len(extra) > 10
    assert [r.name for r in extra if not _import_names([r]) & imported] == []


def test_the_client_imports_where_only_the_base_dependencies_are(
    installed: Path, client_environment: list[str]
) -> None:
    servers = _import_names(_requirements(installed, "server"))
    assert {"fastapi", "pyarrow", "pydantic", "redis", "typer", "yaml"} <= servers
    code = (
        "import importlib.util, json\n"
        "import tokenloom\n"
        "from tokenloom import LocalDataset, RemoteDataset, TokenLRScheduler\n"
        f"found = [name for name in {sorted(servers)!r} if importlib.util.find_spec(name)]\n"
        "said = []\n"
        "for kind in (RemoteDataset, LocalDataset):\n"
        "    try: kind('mixture.yaml', 4)\n"
        "    except ModuleNotFoundError as error: said.append(str(error))\n"
        "print(json.dumps([tokenloom.__file__, found, said, 'tokenloom_server' in sys.modules]))"
    )

    result = _run(client_environment, code)

    assert result.returncode == 0, result.stderr
    path, found, said, has_server = json.loads(result.stdout)
    assert ["pip install 'tokenloom[server]'" in text for text in said] == [True, True]
    assert Path(path).parent.parent == installed
    assert set(found) <= {"fsspec", "jinja2"}  # which torch brings
    assert not has_server


def test_the_client_imports_without_torch_and_little_else(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = _requirements(installed)
    environment = _environment(installed, base, tmp_path_factory.mktemp("base"))
    every = _import_names(base + _requirements(installed, "server", "torch"))
    code = (
        "import json, tokenloom\n"
        f"imported = {{name.partition('.')[0] for name in sys.modules}} & set({sorted(every)!r})\n"
        "try: tokenloom.RemoteDataset\n"
        "except ModuleNotFoundError as error: print(json.dumps([sorted(imported), str(error)]))"
    )

    result = _run(environment, code)

    assert result.returncode == 0, result.stderr
    imported, says = json.loads(result.stdout)
    assert imported == ["google", "grpc", "numpy"]
    assert "pip install 'tokenloom[torch]'" in says


def test_the_command_names_the_extra_that_it_misses(
    installed: Path, client_environment: list[str]
) -> None:
    result = _run(client_environment, _entry_point(installed), "serve", "mixture.yaml")

    assert result.returncode != 0
    assert "pip install 'tokenloom[server]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_every_server_module_imports_without_torch(
    installed: Path, server_environment: list[str]
) -> None:
    names = [
        ".".join(path.relative_to(installed).with_suffix("").parts).removesuffix(".__init__")
        for package in SERVERS
        for path in (installed / package).rglob("*.py")
        if not {"demo", "examples"} & {*path.relative_to(installed).parts}
        and path.name != "__main__.py"
    ]
    code = (
        "import importlib, importlib.util\n"
        f"for name in {sorted(names)!r}: importlib.import_module(name)\n"
        "print(importlib.util.find_spec('torch'), 'tokenloom' in sys.modules)"
    )

    result = _run(server_environment, code)

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["None", "False"]


#: Of what a requirement names, the parts that an environment has not: what trains, and what only tests use.
NOT_THE_SERVERS = {
    "torch",
    "transformers",
    "datasets",
    "lightning",
    "trl",
    "accelerate",
    "jax",
    "playwright",
    "pandas",
}


@pytest.mark.parametrize(("extra", "most_bytes"), [("", 110e6), ("server", 400e6)])
def test_an_environment_is_light(extra: str, most_bytes: float, installed: Path) -> None:
    requirements = _requirements(installed) + (_requirements(installed, extra) if extra else [])

    found = _closure(requirements)

    assert found.keys() & NOT_THE_SERVERS == set()
    assert [name for name in found if name.startswith(("nvidia", "triton"))] == []
    assert sum(file.size or 0 for one in found.values() for file in one.files or ()) < most_bytes


#: What a server has imported of its own requirements once it serves: what is not here is imported where it is needed.
SERVES = {
    *(
        "google",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "numpy",
        "pyarrow",
        "pydantic",
        "typer",
        "xxhash",
        "yaml",
    ),
}
#: Prints at its end what it has imported; a server that has come so far is asked to end.
_SERVE = (
    "serve",
    "mixture.yaml",
    "--grpc=127.0.0.1:0",
    "--rest=127.0.0.1:0",
    "--ready-file=ready.json",
)
_REPORT = """
import atexit, json, os, signal, threading, time
def stop():
    while not os.path.exists("ready.json"): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
os.chdir(sys.argv.pop())
if "serve" in sys.argv: threading.Thread(target=stop, daemon=True).start()
atexit.register(lambda: print(json.dumps([*{name.partition(".")[0] for name in sys.modules}])))
"""


@pytest.mark.parametrize(
    ("command", "expected"), [("--help", {"rich", "typer"}), ("serve", SERVES)]
)
def test_a_command_imports_what_it_needs_and_no_more(
    command: str, expected: set[str], installed: Path, server_environment: list[str], tmp_path: Path
) -> None:
    _write_mixture(tmp_path, "bytes")
    arguments = _SERVE if command == "serve" else (command,)

    result = _run(server_environment, _REPORT + _entry_point(installed), *arguments, str(tmp_path))

    assert result.returncode == 0, result.stderr
    assert command == "serve" or all(
        each in result.stdout for each in ("serve", "validate", "plan", "demo")
    )
    imported = set(json.loads(result.stdout.splitlines()[-1]))
    assert (
        imported & _import_names(_requirements(installed) + _requirements(installed, "server"))
        == expected
    )


def test_a_server_without_the_fast_tokeniser_goes_on_with_a_run_that_began_with_it(
    installed: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    needs = _requirements(installed) + _requirements(installed, "server")
    without = [need for need in needs if need.name != "gigatoken"]
    assert len(without) == len(needs) - 1
    write_tokenizer(tmp_path / "tokenizer.json", ["a line and another line"])
    mixture = config.load(_write_mixture(tmp_path, "tokenizer.json"), open_catalog())
    record = builder.create(mixture, tmp_path, None).record
    assert record.engine is not None
    assert record.engine.engine == "gigatoken"
    with closing(SqliteLedger(tmp_path / "tokenloom.db")) as ledger:
        ledger.create_run("a", "train", "0" * 32, record.to_json())

    environment = _environment(installed, without, tmp_path_factory.mktemp("slow"))
    (tmp_path / "new.yaml").write_text(
        (tmp_path / "mixture.yaml").read_text().replace("run: a", "run: b")
    )
    arguments = (*_SERVE, "new.yaml", "--ledger=sqlite:///tokenloom.db", str(tmp_path))
    result = _run(environment, _REPORT + _entry_point(installed), *arguments)

    assert result.returncode == 0, result.stderr
    says = rf"a: tokeniser engine tokenizers .*: the run began with gigatoken {record.engine.version}; .*the same ids"
    assert re.search(
        rf"{says} for 22 probes and 100 rows; .*pip install 'tokenloom\[fast\]'", result.stderr
    )
    says = r"b: tokeniser engine tokenizers .*: the fast engine, gigatoken, is not installed; "
    says += r"so tokenizers .* is used: "
    assert re.search(rf"{says}it makes .*pip install 'tokenloom\[fast\]'", result.stderr)


def _write_mixture(folder: Path, tokenizer: str) -> Path:
    (folder / "lines.txt").write_text("a line\n" * 100, encoding="utf-8")
    path = folder / "mixture.yaml"
    path.write_text(
        f"{{run: a, seed: 1, tokenizer: {tokenizer}, sequence_length: 8, mixture: "
        "{policy: least_consumed, children: [{source: 'txt:lines.txt:text'}]}}"
    )
    return path


def test_the_demonstration_says_that_it_needs_torch(
    installed: Path, server_environment: list[str]
) -> None:
    result = _run(server_environment, _entry_point(installed), "demo", "--folder", "never-made")

    assert result.returncode == 2
    assert "pip install 'tokenloom[server,torch]'" in result.stderr
