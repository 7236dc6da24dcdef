# `make` without a target lists the targets.

PYTHON ?= python3.11
RUNS ?= runs
SITE ?= site
RESULTS ?= results
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# An idle worker takes over half of the other's remaining tests: one test takes milliseconds, another minutes.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# Index with torch's CPU build; the build on PyPI brings several GB of CUDA packages.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# cpu, or cuda for NVIDIA GPUs
DEVICE ?= cpu
$(if $(filter cpu cuda,$(DEVICE)),,$(error DEVICE is cpu or cuda, not $(DEVICE)))
# A variable as one word of the shell, whatever is in it; and each of its words as one.
quoted = '$(subst ','\'',$(1))'
each_quoted = $(foreach word,$(1),$(call quoted,$(word)))
need = $(if $($(1)),,$(error $(1) is missing: make $@ $(1)=$(2)))
# make study ... RETRY=1 runs failed runs again: from their last checkpoint, or after deleting their records
LAUNCH_FLAGS := $(if $(RETRY),--retry) $(if $(DRY_RUN),--dry-run)
# make study ... CLUSTER=slurm CLUSTER_OPTIONS="slurm_partition=gpu timeout_min=600"
LAUNCH_FLAGS += $(if $(CLUSTER),--cluster $(call quoted,$(CLUSTER)))
LAUNCH_FLAGS += $(foreach option,$(CLUSTER_OPTIONS),--cluster-option $(call quoted,$(option)))
PRESET ?=
DIST ?= dist
CHECKPOINTS ?= some
SEGMENTS ?= 5
SOURCE ?= runs
OUT ?= $(SITE)/paper
# folder of a study's records and page: base, base-paper; STUDY may also be the path of a file
PRESET_FLAG = $(if $(PRESET),--preset $(call quoted,$(PRESET)))
FOLDER = $(basename $(notdir $(STUDY)))$(if $(filter-out cpu,$(PRESET)),-$(PRESET))

.DEFAULT_GOAL := help
FIGURES := fig2 fig3 fig4 fig5 fig6 fig7 fig8 fig9 fig10 fig11
FIGURES += hts_fig4 hts_fig4_left hts_fig4_right hts_fig5a hts_fig5b
TABLES := table1 runtimes hts_table1 hts_table2 hts_table4 hts_table5 masking_table2 guidance_table1
.PHONY: help setup quickstart study report videos reports site publish-results publish audit $(FIGURES) $(TABLES) rlops lag certify check-bits replay check test soak lint format bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9_ -]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/installed: requirements.lock requirements-torch.lock requirements-compiler.lock pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) is not installed (or use make PYTHON=...)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --require-hashes --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -r requirements-torch.lock
	@command -v $${CXX:-c++} > /dev/null || { echo "no C++ compiler: installing Zig's from PyPI, for the kernels of --portable"; $(PIP) --require-hashes -r requirements-compiler.lock; }
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# --force-reinstall: pip takes torch's CPU build for the version asked for.
.venv/installed-cuda: requirements-cuda.lock .venv/installed
	$(PIP) --require-hashes --no-deps --force-reinstall -r requirements-cuda.lock
	@touch $@

# --no-deps: the game's package requires a gym of 2021; the game itself needs nothing of it.
.venv/installed-microrts: requirements-microrts.lock .venv/installed
	$(PIP) --require-hashes --no-deps -r requirements-microrts.lock
	@command -v java > /dev/null || echo "no Java: µRTS needs it (Debian: apt install default-jre-headless)"
	@touch $@

setup: .venv/installed $(if $(filter cuda,$(DEVICE)),.venv/installed-cuda) $(if $(MICRORTS),.venv/installed-microrts) ## install everything into .venv, from the lock files [DEVICE=cuda] [MICRORTS=1]

quickstart: .venv/installed ## train the quickstart study, and write its page to site/quickstart/
	@$(MAKE) --no-print-directory study STUDY=quickstart
	@$(MAKE) --no-print-directory report STUDY=quickstart

study: .venv/installed ## run a study: STUDY=quickstart [PRESET=cpu] [DRY_RUN=1] [RETRY=1] [CLUSTER=slurm] [RUNS=runs]
	$(call need,STUDY,quickstart)$(BIN)/python -m experiments.launch $(call quoted,$(STUDY)) --runs-dir $(call quoted,$(RUNS)) $(LAUNCH_FLAGS) $(PRESET_FLAG)

report: .venv/installed ## write the page of a study to site/: STUDY=quickstart [PRESET=cpu] [RUNS=runs]
	$(call need,STUDY,quickstart)$(BIN)/python -m reports.build $(call quoted,$(FOLDER)) --runs $(call quoted,$(RUNS)/$(FOLDER)) --out $(call quoted,$(SITE)/$(FOLDER))
	@$(BIN)/python -m reports.index --no-build --out $(call quoted,$(SITE))

videos: .venv/installed ## record a game of each system's trained network, for the page: STUDY=quickstart [PRESET=cpu] [RUNS=runs]
	$(call need,STUDY,quickstart)$(BIN)/python -m experiments.videos $(call quoted,$(FOLDER)) --runs $(call quoted,$(RUNS)/$(FOLDER))

reports: .venv/installed ## write the pages of all studies in runs/ to site/, and their index
	$(BIN)/python -m reports.index --runs $(call quoted,$(RUNS)) --out $(call quoted,$(SITE))

site: .venv/installed ## write all pages and the documentation to site/, for any static host [REPOSITORY=https://...]
	$(BIN)/python -m reports.site --runs $(call quoted,$(RUNS)) --results $(call quoted,$(RESULTS)) --out $(call quoted,$(SITE)) --repository $(call quoted,$(REPOSITORY))

publish-results: publish ## write the archive of a study, and its page to results/, to be committed: STUDY=quickstart [PRESET=cpu] and what publish takes
	$(call need,STUDY,quickstart)$(BIN)/python -m reports.publish $(call quoted,$(FOLDER)) --runs $(call quoted,$(RUNS)/$(FOLDER)) --site $(call quoted,$(SITE)) --archives $(call quoted,$(DIST)) --out $(call quoted,$(RESULTS))

publish: .venv/installed ## write the records of a study to dist/, for anybody to audit: STUDY=quickstart [CHECKPOINTS=none|some|all] [AUTHORS="A; B"] [LICENSE=CC-BY-4.0] [OVERWRITE=1]
	$(call need,STUDY,quickstart)$(BIN)/python -m reports.archive $(call quoted,$(FOLDER)) --runs $(call quoted,$(RUNS)/$(FOLDER)) --out $(call quoted,$(DIST)) --checkpoints $(call quoted,$(CHECKPOINTS)) --authors $(call quoted,$(AUTHORS)) --license $(call quoted,$(LICENSE)) $(if $(OVERWRITE),--overwrite)

audit: .venv/installed ## verify what make publish wrote: ARCHIVE=dist/quickstart.zip [SEGMENTS=5] [SEED=...] [RUNS_MATCHING=...] [MODULE=...] [RESUME=1]
	$(call need,ARCHIVE,dist/quickstart.zip)$(BIN)/python -m reports.audit $(call quoted,$(ARCHIVE)) --segments $(call quoted,$(SEGMENTS)) $(if $(SEED),--seed $(call quoted,$(SEED))) --runs-matching $(call quoted,$(RUNS_MATCHING)) $(if $(MODULE),--module $(call quoted,$(MODULE))) $(if $(RESUME),--resume) --out $(call quoted,$(SITE)/audits)

# figures of the papers, from runs or from published data
$(FIGURES): .venv/installed
	$(BIN)/python -m reports.paper $@ $(if $(STUDY),--study $(call quoted,$(STUDY))) --runs $(call quoted,$(RUNS)) --out $(call quoted,$(OUT)) $(PRESET_FLAG) --source $(call quoted,$(SOURCE)) $(if $(PUBLISHED),--published $(call quoted,$(PUBLISHED)))

fig3 : ## draw a figure of the paper (fig2 to fig11) [STUDY=my.toml] [PRESET=cpu] [RUNS=runs] [SOURCE=published PUBLISHED=path]

hts_fig4: ## draw a figure of HTS-RL's paper (hts_fig4, hts_fig4_left, hts_fig4_right, hts_fig5a, hts_fig5b) [PRESET=cpu]
table1: ## table 1 of the paper, from records: which policy collected which data [PRESET=cpu]
runtimes: ## run times of the layouts in Cleanba's README, beside the README's own [PRESET=cpu] [SOURCE=published]
hts_table2: ## tables 1, 2, 4 and 5 of HTS-RL's paper (hts_table1, ...) [PRESET=cpu]
guidance_table1: ## table 1 of the paper on action guidance, with the paper's values
masking_table2: ## table 2 of the paper on invalid action masking, with the paper's values
$(TABLES): .venv/installed
	$(BIN)/python -m reports.paper_tables $@ --runs $(call quoted,$(RUNS)) --out $(call quoted,$(OUT)) $(PRESET_FLAG) --source $(call quoted,$(SOURCE))

rlops: .venv/installed ## fill openrlbenchmark's offline database with a study's runs, and print the command that draws them: STUDY=quickstart
	$(call need,STUDY,quickstart)$(BIN)/python -m reports.rlops $(call quoted,$(RUNS)/$(FOLDER)) --out $(call quoted,$(SITE)/$(FOLDER)/rlops)

lag: .venv/installed ## print the policy lag of a run: RUN=runs/quickstart/...
	$(call need,RUN,runs/quickstart/...)$(BIN)/python -m analysis lag $(call quoted,$(RUN))

certify: .venv/installed ## certify that layouts are bit-identical; writes site/certificates/ [ARGS=--quick]
	$(BIN)/python -m cleanba.audit.certify $(call each_quoted,$(ARGS))

check-bits: .venv/installed ## does this machine compute the bits that others computed? about a minute
	$(BIN)/python -m cleanba.audit.check_bits $(call each_quoted,$(ARGS))

replay: .venv/installed ## verify a run's episodes by re-simulating its actions: RUN=runs/quickstart/... [ARGS="--segments 5"]
	$(call need,RUN,runs/quickstart/...)$(BIN)/python -m cleanba.audit.replay $(call quoted,$(RUN)) $(call each_quoted,$(ARGS))

check: .venv/installed lint ## linter, and the tests that train nothing and start no Ray or browser
	$(PYTEST) -m "not slow and not soak"

test: .venv/installed lint ## linter, and all tests but the soak tests
	$(PYTEST) -m "not soak"

soak: .venv/installed ## random kills, repeated runs, learning
	$(PYTEST) -m soak

lint: .venv/installed ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: .venv/installed ## format the source
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed ## measure speed of trainers, baselines, analysis and reports [ARGS="trainers systems"]
	$(BIN)/python -m experiments.benchmarks $(call each_quoted,$(ARGS)) --json $(call quoted,$(RUNS)/benchmarks.json)
