# The commands of this repository; `make` alone lists them.
# Everything runs from .venv, which `make setup` builds; each target below calls it, and a second call costs nothing.

PYTHON  ?= python3
SEEDS   ?= 1000
INPUTS  ?= 100000
MINUTES ?= 10
KILLS ?= 200
# More than the two processors that continuous integration has: tests of daemons wait for much of their time.
JOBS    ?= 3

BIN   := .venv/bin
STAMP := .venv/.up-to-date
DOCS_STAMP := .venv/.docs-up-to-date
EXAMPLES_STAMP := .venv/.examples-up-to-date
# One thread per process: the tests run many processes on few cores.
ONE_THREAD := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1
# What is freed is filled with rubbish, so that a kernel that reads on from there shows; small blocks too, which a
# thread's cache would keep as they are.
RUBBISH := MALLOC_PERTURB_=165 GLIBC_TUNABLES=glibc.malloc.tcache_count=0
# pytest-timeout asks Python to end a test, which one that hangs in C cannot be asked. Its process is ended, where its
# threads are is printed, and the others end the files that they have: no process is begun in its place, in which that
# test would hang again. Later than any timeout that a test of `make test` sets.
HANGS := -o faulthandler_timeout=430 -o faulthandler_exit_on_timeout=true --max-worker-restart 0
# Some environments ask Python to keep no byte code, and hundreds of daemons would each compile all sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup warmup test test-system test-long lint format proto metrics gcctl commands pictures docs docs-serve demo soak \
	soak-faults soak-kills simulate simulate-coverage mutants fuzz install-systemd clean distclean
# setup has to come first also under -j
.NOTPARALLEL:

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r t d; do printf '  make %-17s %s\n' "$$t" "$$d"; done

setup: $(STAMP) ## build .venv (again only when pyproject.toml or constraints.txt changed)
	@:

$(STAMP): pyproject.toml constraints.txt
	@PYTHON=$(PYTHON) tools/setup.sh
	@touch $@

warmup: $(STAMP)
	@$(ONE_THREAD) $(BIN)/gcserver warmup

test: warmup ## the fast tests: no root, no system packages
	@$(ONE_THREAD) $(RUBBISH) $(BIN)/python -m pytest -q -m "not system and not soak and not long" $(HANGS) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-system: warmup ## the tests that need root or system packages (installs those as root, says which)
	@tools/system_packages.sh
	@$(ONE_THREAD) $(RUBBISH) PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -m pytest -q -m "system and not soak and not long" -o testpaths=tests/system -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: warmup $(EXAMPLES_STAMP) ## what takes minutes or gigabytes, and trial runs of benchmarks
	@tools/system_packages.sh long
	@$(ONE_THREAD) $(RUBBISH) PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -m pytest -q -m long $(ARGS)

lint: $(STAMP) ## style, types, layering, generated code
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check --output-format concise .
	@$(BIN)/mypy
	@out=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out"; exit 1; }; echo "$$out" | tail -n 1
	@$(BIN)/python -m tools.gen_proto --check
	@$(BIN)/python -m tools.gen_metrics_page --check
	@$(BIN)/python -m tools.gen_grafana --check
	@$(BIN)/python -m tools.gen_gcctl_page --check
	@$(BIN)/python -m tools.gen_commands_page --check
	@$(BIN)/python -m tools.draw_concepts --check

format: $(STAMP) ## rewrite the sources as the linter wants them
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format .

proto: $(STAMP) ## regenerate the code of proto/admin.proto
	@$(BIN)/python -m tools.gen_proto

metrics: $(STAMP) ## rewrite the tables of docs/metrics.md and the Grafana dashboard
	@$(BIN)/python -m tools.gen_metrics_page
	@$(BIN)/python -m tools.gen_grafana

gcctl: $(STAMP) ## rewrite the lists of docs/gcctl.md and docs/gcctl.schema.json
	@$(BIN)/python -m tools.gen_gcctl_page

commands: $(STAMP) ## rewrite docs/commands.md from the parsers of gcserver and gcrun
	@$(BIN)/python -m tools.gen_commands_page

pictures: $(STAMP) ## redraw the pictures of docs/concepts.md
	@$(BIN)/python -m tools.draw_concepts

# What the site is made with is not for daemons, training or tests: it comes when somebody makes the site.
$(DOCS_STAMP): pyproject.toml constraints.txt | $(STAMP)
	@echo "setup: installing gradcomm[docs] into .venv"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[docs]' >.venv/docs.log 2>&1 \
		|| { tail -n 40 .venv/docs.log >&2; exit 1; }
	@touch $@

# Lightning, transformers, Ray and others are heavy; only examples that show gradcomm within them need them.
$(EXAMPLES_STAMP): pyproject.toml constraints.txt | $(STAMP)
	@echo "setup: installing gradcomm[examples] into .venv (a few hundred megabytes)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[examples]' >.venv/examples.log 2>&1 \
		|| { tail -n 40 .venv/examples.log >&2; exit 1; }
	@touch $@

# The warning is of what mkdocs 2 will be; pyproject.toml holds it below that.
docs: $(DOCS_STAMP) ## the documents as a site in out/site; a broken link or anchor is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "wrote out/site/index.html"

docs-serve: $(DOCS_STAMP) ## the site at http://127.0.0.1:8000, made again when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --no-strict

demo: warmup ## train over two daemons and slow links, beside gloo
	@$(BIN)/python -m examples.demo $(ARGS)

soak: warmup ## load with every aggregate checked (MINUTES=10)
	@$(ONE_THREAD) $(BIN)/python -m tests.soak.throughput --minutes $(MINUTES) $(ARGS)

soak-faults: warmup ## four nodes under real faults, and a report of it (MINUTES=10)
	@$(ONE_THREAD) PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -m tests.soak.faults --minutes $(MINUTES) $(ARGS)

soak-kills: warmup ## kill -9 at random instants, weights compared, codec by codec (KILLS=200)
	@$(ONE_THREAD) $(BIN)/python -m tests.soak.kills --kills $(KILLS) $(ARGS)

simulate: $(STAMP) ## seeded worlds against the guarantees, on all cores (SEEDS=1000)
	@$(ONE_THREAD) $(BIN)/python -m tests.simulation.run --seeds $(SEEDS) $(ARGS)

simulate-coverage: $(STAMP) ## branches of the core that seeded worlds reach; fails under 95 % (SEEDS=1000)
	@$(ONE_THREAD) $(BIN)/python -m tests.simulation.reach --seeds $(SEEDS) $(ARGS)

mutants: $(STAMP) ## plant faults in the core, each of which some test must notice
	@$(ONE_THREAD) $(BIN)/python -m tests.simulation.mutate $(ARGS)

fuzz: warmup ## hostile inputs to all that reads what others wrote (INPUTS=100000)
	@$(ONE_THREAD) $(RUBBISH) $(BIN)/python -m tests.fuzz --inputs $(INPUTS) $(ARGS)

# What a package would put under /usr; an administrator's own place is /usr/local.
DESTDIR  ?=
PREFIX   ?= /usr/local
GCSERVER ?= /opt/gradcomm/bin/gcserver
LIB := $(DESTDIR)$(PREFIX)/lib

install-systemd: ## the systemd unit (DESTDIR= PREFIX=/usr/local GCSERVER=/opt/gradcomm/bin/gcserver)
	@install -d $(LIB)/systemd/system $(LIB)/sysusers.d $(LIB)/tmpfiles.d
	@sed 's|^ExecStart=[^ ]*|ExecStart=$(GCSERVER)|' deploy/systemd/gradcomm@.service >$(LIB)/systemd/system/gradcomm@.service
	@install -m 644 deploy/systemd/sysusers.conf $(LIB)/sysusers.d/gradcomm.conf
	@install -m 644 deploy/systemd/tmpfiles.conf $(LIB)/tmpfiles.d/gradcomm.conf

clean: ## remove what builds and tests leave behind, but not .venv
	@rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	@rm -rf .venv
