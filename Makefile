# Two commands for a newcomer: make demo, make test. Everything else is for developers.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# A tenth of what is installed is ever imported: Python compiles that itself, and keeps it whatever the shell says.
PIP_OPTIONS := install --quiet --disable-pip-version-check --no-compile
# What is installed is what was tested: every package at the version of requirements/, those that build others too.
LOCK := requirements/tests.txt
INSTALL := $(BIN)/python -m pip $(PIP_OPTIONS) -c $(LOCK) --build-constraint requirements/build.txt
unexport PYTHONDONTWRITEBYTECODE
PROTOC := $(VENV)/protoc/bin/python
PROTO_OUT ?= proto
JOBS ?= 3

.PHONY: install demo test test-all newest lock chaos compose-test check docs docs-serve proto format bench bench-peers capabilities goldens kubernetes tables screenshots recording house release-check clean

install: $(VENV)/.installed

# What a server needs, and torch to train with. It comes first and alone: pinned, so that no other package's range can
# pull a CUDA build in.
$(VENV)/.demo: pyproject.toml constraints.txt $(LOCK)
	@echo "making the environment in $(VENV); once, this takes a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip $(PIP_OPTIONS) -c constraints.txt --upgrade pip
	@$(INSTALL) torch
	@$(INSTALL) -e '.[server,torch]'
	@touch $@

# The same environment, with what the tests and the checks use beside.
$(VENV)/.installed: pyproject.toml constraints.txt $(LOCK) requirements/no-deps.txt requirements/mlflow.txt
	@$(MAKE) --no-print-directory $(VENV)/.demo
	@echo "adding what the tests need to $(VENV); once, this takes a few minutes"
	@$(INSTALL) -e '.[server,torch,dev,docs]'
	@$(INSTALL) --no-deps -r requirements/no-deps.txt
	@$(MAKE) --no-print-directory $(VENV)/mlflow/.installed
	@touch $@

# mlflow-skinny excludes a package as the image has it. It finds that one in an environment of its own, all else in the
# one around it.
$(VENV)/mlflow/.installed: requirements/mlflow.txt
	@$(PYTHON) -m venv --clear --without-pip $(VENV)/mlflow
	@$(BIN)/python -m pip --python $(VENV)/mlflow/bin/python $(PIP_OPTIONS) --no-deps -r requirements/mlflow.txt
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(VENV)/mlflow/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/around.pth
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/tokenloom demo

# Most tests wait for processes, so there are more workers than two cores would keep busy.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=40
test: install
	$(PYTEST)

# With those that are slow and rarely informative, in an order drawn anew: SEED=… is what an earlier run printed.
test-all: install
	$(PYTEST) -p randomly $(if $(SEED),--randomly-seed=$(SEED)) -m 'not readers'

# What will break tomorrow: the newest of every package, in environments under .cache/newest, against what meets other
# people's files and classes. It prints what differs from the lock, and what fails.
newest:
	$(PYTHON) .ci/newest.py $(ONLY)

# Every package of every environment, to the last one it brings; UPGRADE=1 takes the newest of each.
UV := $(VENV)/uv/bin/uv
$(UV): requirements/release.txt
	@$(PYTHON) -m venv $(VENV)/uv
	@$(VENV)/uv/bin/python -m pip $(PIP_OPTIONS) "$$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' requirements/release.txt)"
	@touch $@

lock: $(UV)
	UV=$(abspath $(UV)) .ci/lock $(if $(UPGRADE),--upgrade)

# SEED=… replays; FAULTS=50, WORLD=standby and ONLY=late-commit make it short.
chaos: install
	PYTHONPATH=tests $(BIN)/python -m chaos $(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) \
		$(if $(WORLD),--world $(WORLD)) $(if $(ONLY),--only $(ONLY)) $(if $(FIGURES),--figures $(FIGURES))

# The image and the Compose file in a real engine; SHORT=1 has the kills alone.
compose-test: install
	PYTHONPATH=tests $(BIN)/python -m compose $(if $(SHORT),--short)

check: install $(PROTOC)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -m exhaustive tests/test_house.py
	$(BIN)/mypy --python-version 3.10 -p tokenloom -p tokenloom_proto & client=$$!; $(BIN)/mypy && wait $$client
	@rm -rf $(VENV)/proto-check && mkdir -p $(VENV)/proto-check
	@$(MAKE) --no-print-directory proto PROTO_OUT=$(VENV)/proto-check
	@for f in $(VENV)/proto-check/tokenloom_proto/*; do \
		cmp "$$f" "proto/tokenloom_proto/$$(basename $$f)" || { echo "generated code is stale: run 'make proto' and commit"; exit 1; }; \
	done

# The documentation as a site, in site/; a link or an anchor that leads nowhere, a page outside of the index, or an address
# that a reader without a network would miss is an error. The theme's notice about its successor is in mkdocs.yml.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: install
	$(MKDOCS) build --strict

docs-serve: install
	$(MKDOCS) serve

# Generated code asks for at least the protobuf of the tool that made it. This is the oldest of those whose code every
# protobuf from 4.25 on takes, so that a training image keeps the packages that it has; it needs some of its own.
$(PROTOC): requirements/protoc.txt
	@$(PYTHON) -m venv $(dir $(PROTOC))..
	@$(PROTOC) -m pip $(PIP_OPTIONS) -r requirements/protoc.txt
	@touch $@

proto: $(PROTOC)
	$(PROTOC) -m grpc_tools.protoc -Itokenloom_proto=proto/tokenloom/v2 \
		--python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) tokenloom_proto/dataloader.proto

# What Tokenloom can do, a line each, from the code.
capabilities: install
	$(BIN)/python -m tests.support.capabilities

# What Tokenloom writes and shows, to the letter. Look at the difference, and say in the commit why it is one.
goldens: install
	PYTHONPATH=tests $(BIN)/python -m support.goldens

# What deploy/kubernetes gives, which the tests look at also where there is no kubectl.
KUBERNETES := base overlays/standby overlays/external-redis trainer
kubernetes:
	for each in $(KUBERNETES); do kubectl kustomize deploy/kubernetes/$$each > tests/deployment/kubernetes/$$(basename $$each).yaml; done

# The tables of the docs that come from the code.
tables: install
	$(BIN)/python -m tests.support.doc_tables

# The size of the code, and the ceilings that it may not rise above; LOWER=1 lowers these to what is there now.
house: install
	PYTHONPATH=tests $(BIN)/python -m support.house $(if $(LOWER),--lower)

# The pictures of the page in the docs, from a real server and a run that has lived; needs Chromium.
screenshots: install
	PYTHONPATH=tests $(BIN)/python -m support.lived_run

# The recording of a demonstration in the docs: two frames a second, shown within half a minute.
RECORDER := $(VENV)/recorder/bin/termtosvg
$(RECORDER): requirements/recorder.txt
	@$(PYTHON) -m venv $(VENV)/recorder
	@$(VENV)/recorder/bin/python -m pip $(PIP_OPTIONS) -r requirements/recorder.txt
	@touch $@

recording: $(VENV)/.demo $(RECORDER)
	cd $$(mktemp -d) && PATH="$(abspath $(BIN)):$$PATH" script -qec "stty rows 34 cols 100; $(abspath $(RECORDER)) \
		$(CURDIR)/docs/img/demo.svg -c 'tokenloom demo' -g 100x34 -m 500 -M 500 -D 20000 -t xterm" /dev/null >/dev/null
	sed -i 's/animation-duration: [0-9]*ms/animation-duration: 30s/' docs/img/demo.svg

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks

# The other loaders go into environments of their own under .cache, about 10 GB; the first call takes half an hour.
bench-peers: install
	$(BIN)/python -m benchmarks.peers

# All that a release does but the upload, from a clean clone. TAG=v0.1.0 is taken for the tag, OUT=dist keeps what is built,
# TESTS=no leaves make test-all out.
release-check:
	@$(PYTHON) .ci/release.py $(if $(TAG),--tag "$(TAG)") $(if $(OUT),--out "$(OUT)") $(if $(TESTS),--without-tests)

clean:
	rm -rf $(VENV) .cache site tokenloom-demo
