# Two commands for a fresh machine: `make serve` and `make test`. Needs Python >= 3.11, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
CACHE := .cache
MODEL := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
MINILM := $(CACHE)/all-MiniLM-L6-v2/model.safetensors
ARTIFACT := $(CACHE)/SmolLM2-135M-Instruct
comma := ,
PORT ?= 8000
EXTRAS := dev,gguf$(if $(shell command -v nvidia-smi),$(comma)gpu)


.PHONY: serve test check bench clean

serve: $(ARTIFACT)/manifest.json
	@$(RUN)/ostinato serve $(ARTIFACT) --server.served-name smollm2 --server.port $(PORT)

test: $(VENV)/installed $(MODEL) $(MINILM)
	@PATH="$(CURDIR)/$(RUN):$$PATH" sh scripts/test

check: $(VENV)/installed
	@PATH="$(CURDIR)/$(RUN):$$PATH" sh scripts/check

bench: $(VENV)/installed $(MODEL)
	@PATH="$(CURDIR)/$(RUN):$$PATH" sh scripts/bench

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "ostinato needs Python 3.11 or newer, this is %d.%d; set PYTHON=python3.12" % v[:2])'
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing torch and the other packages into $(VENV); this takes some minutes'
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# compile-model finds out by itself whether anything that matters changed; this spares it the asking.
$(ARTIFACT)/manifest.json: $(MODEL) $(wildcard graph/*.py passes/*.py ops/* runtime/*.py)
	@$(RUN)/compile-model $(MODEL) -o $(ARTIFACT)
	@touch $@

$(MODEL): | $(VENV)/installed
	@$(RUN)/python -m ostinato.tools.fetch_demo $(CACHE)

$(MINILM): | $(VENV)/installed
	@$(RUN)/python -m ostinato.tools.fetch_demo $(CACHE) minilm

clean:
	rm -rf $(VENV) $(CACHE)
