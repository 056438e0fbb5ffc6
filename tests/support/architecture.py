"""The rules of the architecture, each a function from the source tree to its faults, and the tables behind them.

A new module fails until it has its place in ``LAYERS``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from support.source_tree import CLIENT, PACKAGE_FOLDERS, PROTO, SERVER, TOOLS, Module, Tree

#: From the ground up. A package (or a module beside the packages) may import those of the rows before its own, and its
#: own modules; nothing points up, and neighbours in a row do not know each other.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    SERVER: (
        ("__init__", "errors"),
        ("core",),
        ("storage",),
        ("config", "ledger"),
        ("mixing", "sources"),
        ("catalog", "tokenizer"),
        ("packing",),
        ("workers",),
        ("order",),
        ("planning", "workers.cluster"),
        ("reports",),
        ("run",),
        ("replay",),
        ("api",),
    ),
    #: All of them may import what is ``PUBLIC`` of the server, which knows none of them.
    TOOLS: (
        ("__init__",),
        ("short_form", "survey"),
        ("ledger", "moving", "prepare", "reports", "scan"),
        ("checkpoint", "receipts", "remote", "trace"),
        ("servers", "verify"),
        ("peek",),
        ("export", "routes"),
        ("demo",),
        ("cli",),
        ("__main__",),
    ),
    CLIENT: (
        ("errors",),
        ("batch", "snapshot"),
        ("connection",),
        ("job_server",),
        ("datasets",),
        ("clock", "losses"),
        ("__init__",),
        # Users of what a trainer imports; nothing of the package knows them.
        ("integrations",),
    ),
    PROTO: (
        (
            "__init__",
            "address",
            "batch_schedule",
            "errors",
            "files",
            "process",
            "seal",
        ),
        ("credentials", "dataloader_pb2", "delivered", "threads", "versions"),
        ("dataloader_pb2_grpc", "resume"),
        ("rest",),
    ),
}

#: Stricter than the rows: all that these packages and modules may import of the server.
ONLY: dict[str, frozenset[str]] = {
    f"{SERVER}.errors": frozenset(),
    f"{SERVER}.core": frozenset({"core", "errors"}),
    f"{SERVER}.storage": frozenset({"storage", "core.measures", "errors"}),
    f"{SERVER}.config": frozenset({"config", "core", "errors", "storage"}),
    f"{SERVER}.ledger": frozenset({"ledger", "core", "errors"}),
    f"{SERVER}.run.slots": frozenset({"core"}),
    f"{SERVER}.run.generation": frozenset(
        {
            "core",
            "errors",
            "order.batch_plans",
            "order.steps",
            "run.sizing",
            "run.slots",
        }
    ),
}

#: What tools may import of the server: descriptions, readers and rules of packages that own no run, and of those that
#: do what answers questions. A run's own parts, the ledgers' stores and the engines of streams are not among it.
PUBLIC = tuple(
    f"{SERVER}.{name}"
    for name in (
        *("catalog", "config", "core", "errors", "order", "planning", "reports"),
        *("sources", "storage", "workers.cluster", "workers.transforms"),
        *("api.auth", "api.mixture_origin", "api.parent_death", "api.served_run", "api.server"),
        *("api.rest.models", "api.rest.resources.plan", "api.rest.routes", "api.tls", "api.tokens"),
        *("ledger.base", "ledger.commands", "ledger.open", "ledger.records", "ledger.refusals"),
        *("ledger.rules", "mixing.policies", "mixing.mixer", "mixing.policy"),
        *("packing.base", "packing.buckets", "packing.documents", "packing.samples"),
        *("packing.tokenized_rows", "packing.window", "run.evaluation_streams", "run.past"),
        *("run.revise", "run.sizing", "run.timeouts", "run.views"),
        *("tokenizer.engine", "tokenizer.files"),
    )
)

#: A process starts here. Whatever cannot be reached from one of these is dead.
ENTRY_POINTS = (
    f"{SERVER}.tokenizer.chat_renderer",  # called by its name, in processes of functions
    f"{CLIENT}.__init__",
    f"{TOOLS}.__main__",
    f"{TOOLS}.demo.trainer",
    f"{SERVER}.workers.cluster.readers.child",
)

#: What users import by themselves.
INTEGRATIONS = f"{CLIENT}.integrations"

#: Client and server in one process: the demonstration is a user of both.
USES_CLIENT_AND_TORCH = f"{TOOLS}.demo"
#: The server's part in a process that trains by itself: without a socket there is no wire to meet at. It is imported
#: where a ``LocalDataset`` asks for it, and nowhere else, so that a trainer needs nothing of the server's.
USES_SERVER = f"{CLIENT}.job_server"

#: What lies at the edge stays there: these names may be imported by the units beside them only.
EDGES: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (
        (
            "grpc",
            "grpc_health",
            "grpc_reflection",
            f"{PROTO}.dataloader_pb2",
            f"{PROTO}.dataloader_pb2_grpc",
        ),
        frozenset(
            {
                f"{SERVER}.api.grpc",
                f"{TOOLS}.peek",
                f"{TOOLS}.servers",
                f"{CLIENT}.connection",
                f"{PROTO}.dataloader_pb2_grpc",
                f"{PROTO}.resume",
                f"{CLIENT}.job_server",
            }
        ),
    ),
    (
        ("fastapi", "starlette", "uvicorn"),
        frozenset({f"{SERVER}.api.rest", f"{SERVER}.api.page", f"{TOOLS}.routes"}),
    ),
    (("redis", "sqlite3"), frozenset({f"{SERVER}.ledger"})),
    (("gigatoken", "awkward", "jinja2"), frozenset({f"{SERVER}.tokenizer"})),
    (("matplotlib",), frozenset({f"{TOOLS}.reports.picture"})),
    (("streaming", "litdata"), frozenset({f"{TOOLS}.moving"})),
    (("fsspec",), frozenset({f"{SERVER}.storage"})),
    (("typer",), frozenset({f"{TOOLS}.cli"})),
    (("ray",), frozenset({f"{SERVER}.workers.cluster", f"{TOOLS}.prepare.cluster"})),
    (
        ("torch",),  # without which all else of the client and of the server works
        frozenset(
            {
                *(
                    f"{CLIENT}.batch.{name}" for name in ("layout", "tensors")
                ),  # layout: types alone
                *(
                    f"{CLIENT}.connection.topology",
                    f"{CLIENT}.job_server",
                ),  # the process group, where one is
                *(f"{CLIENT}.datasets.{name}" for name in ("peer_line", "tensors", "training")),
                *(f"{CLIENT}.clock.lr_scheduler", f"{CLIENT}.losses", INTEGRATIONS),
                USES_CLIENT_AND_TORCH,
                # A trainer's checkpoint may be a file that only torch reads; where there is none, this says so.
                f"{TOOLS}.checkpoint",
            }
        ),
    ),
    (
        ("transformers", "trl", "accelerate", "lightning", "torchdata", "mlflow"),
        frozenset({INTEGRATIONS}),
    ),
)

#: A whole world of ranks, faults and restarts can be simulated in one process because these know no clock
#: and no other process, and the order is exact because none of them draws a random number of its own.
PURE = tuple(
    f"{SERVER}.{name}"
    for name in (
        *("core", "mixing", "packing", "ledger.commands", "ledger.rules"),
        *("order.batch_plans", "order.pipeline", "order.replay", "order.steps"),
        *("run.generation", "run.slots"),
        *(
            "run.active_generation",
            "run.head",
            "run.lease",
            "run.join_call",
            "run.sizing",
        ),
        *("run.views",),
        *(
            "tokenizer.chat_renderer",
            "tokenizer.choose",
            "tokenizer.definition",
            "tokenizer.documents",
        ),
        *(
            "tokenizer.engine",
            "tokenizer.engine_ids",
            "tokenizer.files",
        ),
    )
)
IMPURE = (
    *(
        "asyncio",
        "concurrent",
        "datetime",
        "multiprocessing",
        "queue",
        "select",
        "selectors",
        "signal",
        "socket",
    ),
    *(
        "subprocess",
        "threading",
        "time",
        "redis",
        "sqlite3",
        "random",
        "secrets",
        "uuid",
        "numpy.random",
    ),
)

#: A live run's lock and all that it guards belong to one object, whose parts lie in these modules. Others hold it, and
#: its present generation, under these names; they send commands and read views. Parts know each other under ``PARTS``.
COORDINATOR = tuple(
    f"{SERVER}.run.{name}"
    for name in (
        *(
            "active_generation",
            "attempts",
            "committer",
            "context",
            "coordinator",
            "head",
            "leadership",
            "lease",
        ),
        *(
            "pins",
            "present_generation",
            "producer",
            "sessions",
            "silent_ranks",
            "takeover",
            "timeline_changes",
        ),
    )
)
COORDINATED = frozenset({"coordinator", "_coordinator", "active"})
PARTS = frozenset(
    {
        *(
            "active",
            "context",
            "head",
            "lease",
            "pins",
            "present",
            "_attempts",
            "_claims",
            "_context",
            "_leadership",
        ),
        *(
            "_head",
            "_lease",
            "_overview",
            "_pins",
            "_present",
            "_silent_ranks",
            "generation",
            "slots",
        ),
    }
)

#: What may be imported of others, beside the standard library: the base dependencies and torch for a trainer, and those
#: of the server extra (starlette is FastAPI's own foundation, awkward what gigatoken takes its text in). The demo
#: trains, so the server's list has torch; ``EDGES`` keeps the rest of the server from it.
NEEDS = {
    PROTO: frozenset({"grpc", "google"}),
    CLIENT: frozenset(
        {
            *("grpc", "google", "numpy", "torch"),
            *("tqdm", "typing_extensions"),  # of the extra for bars; and for type checkers alone
            "ml_dtypes",  # for columns of bfloat16 as numpy arrays; JAX brings it
            # of integrations, for who has them
            *("transformers", "trl", "datasets", "accelerate", "lightning", "torchdata", "mlflow"),
        }
    ),
    SERVER: frozenset(
        {
            *("grpc", "grpc_health", "grpc_reflection", "google", "numpy"),
            *("matplotlib",),  # of the extra for pictures
            *("streaming", "litdata"),  # for who comes from one of them
            *(
                "awkward",
                "backports",
                "compression",
                "fastapi",
                "fsspec",
                "gigatoken",
                "jinja2",
                "prometheus_client",
                "pyarrow",
                "pydantic",
                "ray",
                "redis",
            ),
            *("rich", "starlette", "tokenizers", "torch", "typer", "uvicorn", "xxhash", "yaml"),
        }
    ),
}

#: Loading data with these can execute it.
BANNED_IMPORTS = (
    *(
        "pickle",
        "_pickle",
        "cPickle",
        "pickle5",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
    ),
    *("numpy.lib.format.read_array", "pandas.read_pickle"),
)
BANNED_CALLS = {
    **dict.fromkeys(("exec", "eval", "builtins.eval", "__import__"), "executes text"),
    **dict.fromkeys(
        ("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.load_all"),
        "is not safe",
    ),
    **dict.fromkeys(("os.system", "os.popen"), "starts a shell"),
    **dict.fromkeys(
        (
            *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
            *("send_object_list", "recv_object_list", "read_pickle", "to_pickle"),
        ),
        "pickles",
    ),
}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"}
#: What may be called while a module is imported: builders of constants. Anything in CapWords is one, but for these.
IMPORT_TIME_CALLS = frozenset(
    {
        *(
            "compile",
            "dtype",
            "field",
            "files",
            "frozenset",
            "getLogger",
            "joinpath",
            "model_rebuild",
            "namedtuple",
        ),
        *(
            "tuple",
            "dict",
            "sorted",
            "range",
            "len",
            "min",
            "max",
            "bytes",
            "int",
            "float",
            "str",
            "encode",
            "join",
        ),
        *("partial", "fromkeys", "version", "cast", "add_command", "add_typer"),
    }
)
IMPORT_TIME_BANNED = re.compile(
    r"(Lock|RLock|Thread|Event|Condition|Semaphore|Queue|Executor|Redis|Connection|Session|Client|FastAPI|Server)$"
)
MUTATORS = frozenset(
    {
        *(
            "add",
            "append",
            "appendleft",
            "clear",
            "discard",
            "extend",
            "insert",
            "pop",
            "popitem",
            "popleft",
        ),
        *("remove", "reverse", "setdefault", "sort", "update"),
    }
)


def _is(target: str, names: Iterable[str]) -> bool:
    """Whether an imported name is, or lies within, one of the names."""
    return any(target == name or target.startswith(f"{name}.") for name in names)


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression; what is not a name becomes an empty part."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def unplaced(tree: Tree) -> Iterator[str]:
    """Every module has a place in the tables, on one row."""
    for package, rows in LAYERS.items():
        places = [name for row in rows for name in row]
        assert len(places) == len(set(places)), f"a name of {package} stands in two rows"
        for module in tree.of(package):
            if module.unit not in places:
                yield f"{module.path}: {module.unit!r} has no place in LAYERS[{package!r}]; give it one"


def upward(tree: Tree) -> Iterator[str]:
    """Nothing points up, and neighbours do not know each other."""
    rank = {
        f"{p}.{name}": i for p, rows in LAYERS.items() for i, row in enumerate(rows) for name in row
    }
    for module in tree.modules.values():
        allowed = next((names for owner, names in ONLY.items() if _is(module.name, (owner,))), None)
        for target, line in module.imports:
            other = tree.resolve(target)
            if other is None or other.package != module.package:
                continue
            inside = other.unit == module.unit
            below = rank.get(other.qualified_unit, -1) < rank.get(
                module.qualified_unit, sys.maxsize
            )
            if not below and not inside:
                yield f"{module.at(line)}: {module.unit} imports {other.unit}, which is not below it"
            elif allowed is not None and not _is(
                other.name, [f"{module.package}.{name}" for name in allowed]
            ):
                yield f"{module.at(line)}: {module.unit} imports {other.unit}; it may import {sorted(allowed)} only"


def circles(tree: Tree) -> Iterator[str]:
    """No module needs itself by way of others, also within a package."""
    needs = {
        module.name: {
            o.name
            for target, _ in module.imports
            if (o := tree.resolve(target)) and o.name != module.name
        }
        for module in tree.modules.values()
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        circle = error.args[1]
        yield f"{tree.modules[min(circle)].path}: imports run in a circle: {' → '.join(reversed(circle))}"


def crossings(tree: Tree) -> Iterator[str]:
    """Client and server meet only in the wire contract, and the contract knows neither."""
    forbidden = {
        CLIENT: (SERVER, TOOLS),
        SERVER: (CLIENT, TOOLS),
        TOOLS: (CLIENT,),
        PROTO: (CLIENT, SERVER, TOOLS),
    }
    for module in tree.modules.values():
        for target, line in module.imports:
            if not _is(module.name, (USES_CLIENT_AND_TORCH, USES_SERVER)) and _is(
                target, forbidden[module.package]
            ):
                yield f"{module.at(line)}: {module.package} imports {target}; they meet only in {PROTO}"


def private(tree: Tree) -> Iterator[str]:
    """Tools use what the server says is public, and reach into no run."""
    for module in tree.of(TOOLS):
        for target, line in module.imports:
            other = tree.resolve(target)
            if other is not None and other.package == SERVER and not _is(other.name, PUBLIC):
                yield f"{module.at(line)}: {module.name} imports {other.name}, which is not in PUBLIC"


def undeclared(tree: Tree) -> Iterator[str]:
    """The client needs the base dependencies and nothing of the server's; the server what its extra names."""
    for module in tree.modules.values():
        known = (
            NEEDS[SERVER if module.package == TOOLS else module.package]
            | sys.stdlib_module_names
            | set(PACKAGE_FOLDERS)
        )
        for target, line in module.imports:
            top = target.partition(".")[0]
            if top not in known:
                yield f"{module.at(line)}: imports {top}, which is none of the dependencies of {module.package}"


def edges(tree: Tree) -> Iterator[str]:
    """Wire types stop at api/grpc and at the client's connection, HTTP at REST, databases at the ledger; torch is for
    what gives tensors."""
    for module in tree.modules.values():
        for names, owners in EDGES:
            for target, line in module.imports:
                if _is(target, names) and not _is(module.name, owners):
                    yield f"{module.at(line)}: imports {target}, which is for {', '.join(sorted(owners))} only"


def impure(tree: Tree) -> Iterator[str]:
    """No clock, no thread, no socket, no Redis and no chance where the order is decided."""
    for module in tree.of(SERVER):
        for target, line in module.imports:
            if _is(module.name, PURE) and _is(target, IMPURE):
                yield f"{module.at(line)}: {module.name} imports {target}; it is handed what it needs"


def code_in_data(tree: Tree) -> Iterator[str]:
    """Nothing on the wire, in a snapshot or in a data file can execute code."""
    for module in tree.everything:
        for target, line in module.imports:
            if _is(target, BANNED_IMPORTS) or target in BANNED_CALLS:
                yield f"{module.at(line)}: imports {target}, which can execute what it loads"
        safe = SAFE_LOADERS | _safe_loaders_of(module)
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Call):
                reason = _dangerous(node, safe)
                if reason:
                    yield f"{module.at(node.lineno)}: {reason}"


def _safe_loaders_of(module: Module) -> set[str]:
    """Classes of a module that derive from a safe YAML loader."""
    classes = [node for node in module.syntax.body if isinstance(node, ast.ClassDef)]
    return {
        c.name
        for c in classes
        if c.bases and all(_dotted(base) in SAFE_LOADERS for base in c.bases)
    }


def _dangerous(call: ast.Call, safe_loaders: set[str]) -> str | None:
    name = _dotted(call.func)
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}

    def is_constant(argument: str, value: object) -> bool:
        node = arguments.get(argument)
        return isinstance(node, ast.Constant) and node.value is value

    short = name.rpartition(".")[2]
    reason = BANNED_CALLS.get(name) or (
        BANNED_CALLS.get(short) if "." in name and short != "eval" else None
    )
    if reason:
        return f"{name} {reason}"
    if name == "torch.load" and not is_constant("weights_only", True):
        return "torch.load without weights_only=True unpickles"
    if "allow_pickle" in arguments and short != "save" and not is_constant("allow_pickle", False):
        return f"{name} with allow_pickle unpickles"
    if "shell" in arguments and not is_constant("shell", False):
        return f"{name} starts a shell"
    if name == "yaml.load":
        loader = arguments.get("Loader") or (call.args[1] if len(call.args) > 1 else None)
        if loader is None or _dotted(loader) not in safe_loaders:
            return "yaml.load without a safe Loader builds any object"
    return None


def dead(tree: Tree) -> Iterator[str]:
    """Every module can be reached from a place where a process starts."""
    waiting = [
        name for name in tree.modules if name in ENTRY_POINTS or name.startswith(INTEGRATIONS)
    ]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += _parents(name, tree)
        waiting += [
            module.name
            for target, _ in tree.modules[name].imports
            if (module := tree.resolve(target))
        ]
    for module in tree.modules.values():
        if module.name not in reached:
            yield f"{module.path}: nothing imports it; use it or remove it"


def _parents(name: str, tree: Tree) -> list[str]:
    """The ``__init__`` modules that run before a module does."""
    parts = name.split(".")
    inits = (".".join([*parts[:i], "__init__"]) for i in range(1, len(parts)))
    return [init for init in inits if init in tree.modules]


def import_time_work(tree: Tree) -> Iterator[str]:
    """An import defines things. It does no work, reads no environment, and leaves nothing that can change."""
    for module in tree.modules.values():
        if module.name.startswith(f"{PROTO}.dataloader_pb2"):
            continue  # generated
        constants = set()
        for statement in _import_time(module.syntax.body):
            yield from _works(module, statement)
            name = _mutable_global(statement)
            if name and not re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", name):
                yield f"{module.at(statement.lineno)}: {name} is a mutable global; name a constant in CAPITALS"
            elif name:
                constants.add(name)
        yield from _changes(module, constants)


def _import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run on import, class bodies included, function bodies and the main guard not."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
            continue
        if isinstance(statement, ast.ClassDef | ast.If | ast.Try | ast.With | ast.For | ast.While):
            yield from _import_time(statement.body + getattr(statement, "orelse", []))
            yield from _import_time([s for h in getattr(statement, "handlers", []) for s in h.body])
            if isinstance(statement, ast.With | ast.For | ast.While):
                yield statement
        else:
            yield statement


def _works(module: Module, statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.With | ast.For | ast.While):
        yield f"{module.at(statement.lineno)}: a {type(statement).__name__.lower()} statement runs on import"
        return
    for node in _outside_lambdas(statement):
        if isinstance(node, ast.Call):
            name = _dotted(node.func).rpartition(".")[2]
            builds = (
                name[:1].isupper()
                or (name[:1] == "_" and name[1:2].isupper())
                or name in IMPORT_TIME_CALLS
            )
            if not builds or IMPORT_TIME_BANNED.search(name):
                yield f"{module.at(node.lineno)}: {_dotted(node.func) or 'a call'}() runs on import"
        elif isinstance(node, ast.Attribute) and _dotted(node) == "os.environ":
            yield f"{module.at(node.lineno)}: the environment is read on import"


def _outside_lambdas(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield from _outside_lambdas(child)


def _mutable_global(statement: ast.stmt) -> str | None:
    """The name that a statement binds to something mutable."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name, value = statement.targets[0].id, statement.value
    elif (
        isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.value
    ):
        name, value = statement.target.id, statement.value
    else:
        return None
    built = isinstance(value, ast.Call) and _dotted(value.func) in {
        "dict",
        "list",
        "set",
        "deque",
        "defaultdict",
    }
    literal = isinstance(
        value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    )
    return name if built or literal else None


def _changes(module: Module, constants: set[str]) -> Iterator[str]:
    """Where a constant of the module is changed after all, or a global is rebound."""
    for node in ast.walk(module.syntax):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Global):
            yield f"{module.at(node.lineno)}: global {', '.join(node.names)}; give the state an owner"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
        ):
            changed = [node.func.value]
        elif isinstance(node, ast.Assign | ast.Delete):
            changed = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            changed = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
        for target in changed:
            if isinstance(target, ast.Name) and target.id in constants:
                yield f"{module.at(target.lineno)}: the constant {target.id} is changed"


def coordinated(tree: Tree) -> Iterator[str]:
    """Nobody but the parts of a run take its lock, and each part alone reads what it keeps to itself, and writes its
    fields."""
    for module in tree.of(SERVER, TOOLS):
        is_part = module.name in COORDINATOR
        for node in ast.walk(module.syntax):
            owners = PARTS if is_part else COORDINATED
            if isinstance(node, ast.Attribute) and (
                names := owners & {*_dotted(node.value).split(".")}
            ):
                owner, is_lock = min(names), node.attr == "lock" or node.attr.endswith("_lock")
                if node.attr.startswith("_") or (is_lock and not is_part):
                    yield f"{module.at(node.lineno)}: {owner}.{node.attr} is its own; send it a command"
                elif not isinstance(node.ctx, ast.Load):
                    yield f"{module.at(node.lineno)}: {node.attr} of {owner} is written; send it a command"


def watched_over(tree: Tree) -> Iterator[str]:
    """Each thread is one of ``tokenloom_proto.threads``, which gives it a name and a last line of defence."""
    for module in tree.modules.values():
        for node in ast.walk(module.syntax) if module.name != f"{PROTO}.threads" else ():
            made = (
                [node.func]
                if isinstance(node, ast.Call)
                else node.bases
                if isinstance(node, ast.ClassDef)
                else []
            )
            for name in filter(_THREADS.fullmatch, map(_dotted, made)):
                yield f"{module.at(node.lineno)}: {name} is a thread that nobody watches over; take Background or pool"


_THREADS = re.compile(r"(.*\.)?(Thread|Timer|ThreadPoolExecutor|start_new_thread)")


def thread_kinds(tree: Tree) -> set[str]:
    """The kinds of all threads: the texts that ``Background``, ``pool`` and classes of these are called with."""
    kinds = set()
    for module in tree.modules.values():
        calls = [node for node in ast.walk(module.syntax) if isinstance(node, ast.Call)]
        subclasses = [
            node
            for node in ast.walk(module.syntax)
            if isinstance(node, ast.ClassDef) and _is_thread(node)
        ]
        own = [each for node in subclasses for each in ast.walk(node) if isinstance(each, ast.Call)]
        made = [call for call in calls if _dotted(call.func) in _THREAD_MAKERS]
        made += [call for call in own if ast.unparse(call.func) == "super().__init__"]
        parts = [part for call in made for argument in call.args[:2] for part in ast.walk(argument)]
        kinds |= {
            part.value
            for part in parts
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
    return kinds


_THREAD_MAKERS = {"Background", "Loop", "Watcher", "pool"}


def _is_thread(node: ast.ClassDef) -> bool:
    return any(_dotted(base) in _THREAD_MAKERS for base in node.bases)


Rule = Callable[[Tree], Iterator[str]]
RULES: tuple[Rule, ...] = (
    *(unplaced, upward, circles, crossings, private, undeclared, edges, impure, code_in_data, dead),
    *(import_time_work, coordinated, watched_over),
)
