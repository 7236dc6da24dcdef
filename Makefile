# The front door. `make` alone lists the targets.

PYTHON ?= python3.11
RUNS ?= runs
REPORTS ?= reports
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Where torch's build for CPUs is: the one on PyPI brings several GB of CUDA packages.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# make study ... RETRY=1 runs failed runs again: from their last checkpoint, or deleting what they left
LAUNCH_FLAGS := $(if $(RETRY),--retry) $(if $(DRY_RUN),--dry-run)
# make study ... CLUSTER=slurm CLUSTER_OPTIONS="slurm_partition=gpu timeout_min=600"
LAUNCH_FLAGS += $(if $(CLUSTER),--cluster $(CLUSTER))
LAUNCH_FLAGS += $(addprefix --cluster-option ,$(CLUSTER_OPTIONS))
PRESET ?=
SOURCE ?= runs
OUT ?= reports/paper
# the folder of a study's records and report: base, base-paper; a study may be a file, too
PRESET_FLAG = $(if $(PRESET),--preset $(PRESET))
FOLDER = $(basename $(notdir $(STUDY)))$(if $(filter-out cpu,$(PRESET)),-$(PRESET))

.DEFAULT_GOAL := help
FIGURES := fig2 fig3 fig4 fig5 fig6 fig7 fig8 fig9 fig10 fig11
FIGURES += hts_fig4 hts_fig4_left hts_fig4_right hts_fig5a hts_fig5b
TABLES := table1 runtimes hts_table1 hts_table2 hts_table4 hts_table5
.PHONY: help setup quickstart study report reports $(FIGURES) $(TABLES) rlops lag certify replay test lint format bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9_ ]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/installed: requirements.lock requirements-torch.lock pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) is not installed (or say make PYTHON=...)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --require-hashes --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -r requirements-torch.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

setup: .venv/installed ## install everything into .venv, from the lock file

quickstart: .venv/installed ## train the quickstart study, and write reports/quickstart/
	@$(MAKE) --no-print-directory study STUDY=quickstart
	@$(MAKE) --no-print-directory report STUDY=quickstart

study: .venv/installed ## run a study: STUDY=quickstart [PRESET=cpu] [DRY_RUN=1] [RETRY=1] [CLUSTER=slurm] [RUNS=runs]
	$(BIN)/python -m experiments.launch $(STUDY) --runs-dir $(RUNS) $(LAUNCH_FLAGS) $(PRESET_FLAG)

report: .venv/installed ## write the report of a study: STUDY=quickstart [PRESET=cpu] [RUNS=runs]
	$(BIN)/python -m reports.build $(FOLDER) --runs $(RUNS)/$(FOLDER) --out $(REPORTS)/$(FOLDER)

reports: .venv/installed ## write the reports of all studies in runs/, and their index
	$(BIN)/python -m reports.index --runs $(RUNS) --out $(REPORTS)

# figures of the paper, from runs or from published data
$(FIGURES): .venv/installed
	$(BIN)/python -m reports.paper $@ --runs $(RUNS) --out $(OUT) $(PRESET_FLAG) --source $(SOURCE) $(if $(PUBLISHED),--published $(PUBLISHED))

fig3 : ## draw a figure of the paper (fig2 to fig11) [PRESET=cpu] [SOURCE=published PUBLISHED=path]

hts_fig4: ## draw a figure of HTS-RL's paper (hts_fig4, hts_fig4_left, hts_fig4_right, hts_fig5a, hts_fig5b) [PRESET=cpu]
table1: ## table 1 of the paper, from records: which policy made which data [PRESET=cpu]
runtimes: ## run times of the layouts in Cleanba's README, beside those it prints [PRESET=cpu] [SOURCE=published]
hts_table2: ## tables 1, 2, 4 and 5 of HTS-RL's paper (hts_table1, ...) [PRESET=cpu]
$(TABLES): .venv/installed
	$(BIN)/python -m reports.paper_tables $@ --runs $(RUNS) --out $(OUT) $(PRESET_FLAG) --source $(SOURCE)

rlops: .venv/installed ## fill openrlbenchmark's offline database with a study's runs, and say how to draw them: STUDY=quickstart
	$(BIN)/python -m reports.rlops $(RUNS)/$(FOLDER)

lag: .venv/installed ## say the policy lag of a run: RUN=runs/quickstart/...
	$(BIN)/python -m analysis lag $(RUN)

certify: .venv/installed ## certify that layouts give the same bits [ARGS=--quick]
	$(BIN)/python -m cleanba.certify $(ARGS)

replay: .venv/installed ## check a run's episodes by simulating its actions again: RUN=runs/quickstart/...
	$(BIN)/python -m cleanba.replay $(RUN)

test: .venv/installed lint ## run the linter and all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/installed ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: .venv/installed ## format the source
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed ## measure speed: trainers against this machine's ceilings, analysis against rliable
	$(BIN)/python -m experiments.benchmark --json $(RUNS)/benchmark.json
	$(BIN)/python -m experiments.benchmark_exactness --json $(RUNS)/benchmark_exactness.json
	$(BIN)/python -m experiments.benchmark_baselines --json $(RUNS)/benchmark_baselines.json
	$(BIN)/python -m experiments.benchmark_hts --json $(RUNS)/benchmark_hts.json
	$(BIN)/python -m experiments.benchmark_systems --json $(RUNS)/benchmark_systems.json
	$(BIN)/python -m experiments.benchmark_analysis bootstrap
	$(BIN)/python -m experiments.benchmark_analysis curves
	$(BIN)/python -m experiments.benchmark_analysis reading
	$(BIN)/python -m experiments.benchmark_report --json $(RUNS)/benchmark_report.json
