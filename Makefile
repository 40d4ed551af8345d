# make setup | demo | test | lint | bench | bench-gpu: each sets up what it needs; the second time is quick.
PYTHON := .venv/bin/python
STAMP := .venv/.installed

.PHONY: setup test lint format demo bench bench-gpu

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml scripts/setup.sh
	bash scripts/setup.sh
	touch $(STAMP)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(STAMP)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

demo: $(STAMP)
	bash scripts/demo.sh

bench: $(STAMP)
	$(PYTHON) -m megatron_paradyse bench --all --save

bench-gpu: $(STAMP)
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) -m megatron_paradyse bench gpu_ring gpu_dropout strategies gpu_limits --save --time-limit 36000
