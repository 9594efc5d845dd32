# `make demo` and `make test` do all set-up in a local .venv on a fresh machine.
PYTHON ?= python3
# Bytecode is kept, also where the environment says otherwise: the tests start many processes that import everything.
export PYTHONDONTWRITEBYTECODE :=
# Bytecode is made of what is imported, not of all that is installed, which takes as long as the download.
INSTALL := install --quiet --no-compile --disable-pip-version-check
BIN := .venv/bin
STAMP := .venv/.installed

EXTRAS := .venv-extras/bin
EXTRAS_STAMP := .venv-extras/.installed
PEERS := laplace-torch curvlinops-for-pytorch asdfghjkl asdl backpack-for-pytorch ivon-opt linear-operator jaxtyping \
	wadler-lindig mpmath einops einconv opt-einsum unfoldNd bayesian-torch mapie
# The extra `ecosystem` without its dependencies, of which some would fetch CUDA, and what importing it needs besides.
ECOSYSTEM := transformers peft timm torchvision lightning datasets accelerate huggingface-hub tokenizers regex \
	lightning-utilities multiprocess dill xxhash psutil httpx2 httpcore2 truststore anyio sniffio h11 idna
# Tests of what the extras and the peers add; laplace-torch and the like are installed without their dependencies.
# `tests/test_complete.py` checks that each test that needs one of them is here.
WITH_EXTRAS := tests/ecosystem tests/peers tests/uses/export tests/uses/serving \
	tests/methods/mcmc/test_mcmc_parts.py::TestDiagnostics::test_against_arviz \
	tests/uses/compression/test_compression_compress.py::test_onnx_is_checked_in_onnxruntime \
	tests/uses/compression/test_compression_quantize.py::test_a_file_of_8_bits_gives_nearly_the_same_outputs \
	tests/uses/compression/test_compression_quantize.py::test_a_file_of_few_bits_holds_the_rounded_network \
	tests/uses/compression/test_compression_storage.py::test_a_file_loads_into_the_original_architecture \
	tests/uses/compression/test_compression_storage.py::test_int8 \
	tests/uses/compression/test_compression_shrink.py tests/uses/compression/test_compression_trials.py

.PHONY: docs fuzz demo test test-fast test-extras test-torch lint format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip $(INSTALL) -c constraints.txt torch
	$(BIN)/pip $(INSTALL) -c constraints.txt -e ".[dev]"
	touch $(STAMP)

# The environment of the extras sees the packages of .venv, torch above all, and adds its own.
$(EXTRAS_STAMP): $(STAMP)
	$(PYTHON) -m venv .venv-extras
	echo "$$PWD"/.venv/lib/python3*/site-packages > $$(echo .venv-extras/lib/python3*/site-packages)/base.pth
	$(EXTRAS)/pip $(INSTALL) -c constraints.txt -e ".[dev,export,samplers,serve]"
	$(EXTRAS)/pip $(INSTALL) -c constraints.txt --no-deps $(PEERS) $(ECOSYSTEM)
	touch $(EXTRAS_STAMP)

# The docs site needs neither torch nor this package: the API reference is read from the source.
DOCS := .venv-docs/bin
DOCS_STAMP := .venv-docs/.installed
$(DOCS_STAMP): pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(DOCS)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> .venv-docs/requirements.txt
	$(DOCS)/pip $(INSTALL) -r .venv-docs/requirements.txt
	touch $(DOCS_STAMP)

docs: $(DOCS_STAMP)  # into site/, which can be opened from disk; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict

demo: $(STAMP)
	$(BIN)/dubito demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

test-fast: $(STAMP)  # for the edit loop: everything that is not marked slow
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-extras: $(EXTRAS_STAMP)
	DUBITO_TEST_EXTRAS=1 OMP_NUM_THREADS=1 $(EXTRAS)/python -m pytest -n 2 $(WITH_EXTRAS)

# The core suite on another torch, in an environment of its own: make test-torch VERSION=2.6.0. The builds of the ordinary
# registry link to CUDA; stand-ins for its libraries are made, so that only torch itself is fetched (about 0.8 GB).
VERSION ?= 2.6.0
OTHER := .venv-torch-$(VERSION)
OTHER_TEST := LD_LIBRARY_PATH=$(OTHER)/stubs OMP_NUM_THREADS=1 PYTHONPATH=src $(OTHER)/bin/python -m pytest -n 2
test-torch: $(STAMP)
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip $(INSTALL) --no-deps torch==$(VERSION)
	$(BIN)/pip freeze --exclude-editable --exclude torch --exclude dubito > $(OTHER)/requirements.txt
	$(OTHER)/bin/pip $(INSTALL) --no-deps -r $(OTHER)/requirements.txt
	$(OTHER)/bin/python tests/cuda_stubs.py $(OTHER)/lib/python3*/site-packages/torch/lib $(OTHER)/stubs
	$(OTHER_TEST) -m "not slow"
	$(OTHER_TEST) tests/contracts/test_posterior_contract.py

# Long runs of the fuzzer, N cases of every target; started again, it goes on where it stopped (state in .fuzz).
N ?= 1000
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --cases $(N)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-extras .venv-docs .venv-torch-* site .mypy_cache .ruff_cache .pytest_cache
