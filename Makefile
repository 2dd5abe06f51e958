# Both commands set everything up by themselves on a fresh machine.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin
READY  := $(VENV)/.ready

export KERAS_BACKEND := torch

# Keras's own tests import tensorflow and jax, so they have an environment of their own, where KerasHub
# is, too; it asks for tensorflow-text, which its models don't need. Accelerate and Lightning are for
# the pages of the documentation that compare with them.
KERAS_VENV  := .venv-keras
KERAS_READY := $(KERAS_VENV)/.ready

.PHONY: demo docs test test-all bench audit conformance lint keras-tests format clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/torchrun --nproc-per-node 2 examples/demo.py

# The documentation as a site that needs no server: build/site/index.html.
docs: $(READY)
	$(RUN)/python docs/build.py

# Two files of tests at a time: each spends much of its time waiting for processes to start.
test: lint keras-tests
	$(RUN)/python -m pytest -n 2 --dist loadfile --durations 25

# Also what takes long: every optimizer, data and callback with jit_compile=True on 1, 2 and 4 ranks.
test-all: lint keras-tests
	$(RUN)/python -m pytest -m ""

# Steps against rivals on two CPU ranks; wants a quiet machine, and takes ten minutes.
bench: $(READY) $(KERAS_READY)
	$(RUN)/python benchmarks/cpu.py

# Every function of keras.ops and every layer with every layout of its inputs, eager and captured:
# about an hour, and it goes on where it stopped.
audit: $(READY)
	$(RUN)/python audit/run.py

# All of keras.applications and KerasHub against one device, and Keras's own tests under a live mesh
# of two ranks: several hours, and the latter goes on where it stopped.
conformance: $(KERAS_READY)
	$(KERAS_VENV)/bin/python -m pytest -m "" tests/test_applications.py tests/test_hub.py
	$(KERAS_VENV)/bin/python conformance/live_mesh.py

keras-tests: $(KERAS_READY)
	$(KERAS_VENV)/bin/python conformance/keras_own.py
	$(KERAS_VENV)/bin/python -m pytest tests/test_data.py tests/test_callbacks.py \
		-k "grain or pandas or tf_data or tensorboard or orbax"
	$(KERAS_VENV)/bin/python -m pytest tests/test_saving.py -k other_backends
	$(KERAS_VENV)/bin/python -m pytest tests/test_hub.py tests/test_recipe_hub.py
	$(KERAS_VENV)/bin/python -m pytest tests/test_site.py -k "lora or accelerate or lightning"
	$(KERAS_VENV)/bin/python conformance/live_mesh.py --again --kind data --kind model \
		layers/core/dense_test.py

lint: $(READY)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(READY)
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# The constraints pin torch to a CPU build that is small to install.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

$(KERAS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERAS_VENV)
	$(KERAS_VENV)/bin/pip install --quiet --constraint constraints.txt --editable . \
		pytest pytest-xdist tensorflow-cpu tensorboard jax grain pandas \
		regex tokenizers sentencepiece kagglehub orbax-checkpoint \
		huggingface_hub safetensors psutil pyyaml tqdm
	$(KERAS_VENV)/bin/pip install --quiet --no-deps keras-hub==0.32.0 \
		accelerate lightning lightning-utilities torchmetrics
	touch $@

clean:
	rm -rf $(VENV) $(KERAS_VENV) build .pytest_cache .ruff_cache .mypy_cache
