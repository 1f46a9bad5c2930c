# Everything runs in a virtual environment of its own, .venv; PYTHON picks the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-oldest coverage style quality docs clean

# On Linux without a GPU the CPU build of torch comes first: a plain `torch` may bring gigabytes of CUDA.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi > /dev/null; then \
		$(BIN)/python -m pip install --quiet torch==2.13.0; fi
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/python examples/dinov2_small.py .cache/dinov2-small
	$(BIN)/python examples/finetune_image_classification.py \
		--model_name_or_path .cache/dinov2-small --dataset_name digits --image_size 56 \
		--methods linear lora vpt-deep pro-vpt --num_prompts 10 --num_train_epochs 8 \
		--per_device_train_batch_size 8 --per_device_eval_batch_size 128 --seed 0 --output_dir outputs/demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2

test-all: .venv/installed
	$(BIN)/python -m pytest -m "slow or not slow"

# The suite with the oldest releases that pyproject.toml allows, in an environment that git and ruff do not see.
.venv-oldest/installed: pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	echo '*' > .venv-oldest/.gitignore
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --requirement tests/oldest.txt
	.venv-oldest/bin/python -m pip install --quiet --constraint tests/oldest.txt --editable ".[test]"
	touch $@

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -n 2

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
	rm -rf .venv .venv-oldest site outputs .cache build dist *.egg-info
