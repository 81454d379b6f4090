# Everything that a person or the CI does with this project. `make` lists it.

PYTHON ?= python3
RECIPE ?= digits
TEST_WORKERS ?= 2

VENV := .venv/bin
UV := .uv/bin/uv
READY := .venv/.ready
READY_XLA := .xla/.ready
XLA_COMPILES_FAST := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
AUDIT := .audit/.ready
DOCS := .docs/.ready
COMPILE_REQUIREMENTS := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade)

AUDITED := development runtime neuron serving reaper xla uv audit docs
SBOMS := runtime neuron serving reaper

.DEFAULT_GOAL := help
.PHONY: help setup run ui test test-long test-gpu bench bench-gpu check lint compile deploy-pipeline undeploy-pipeline docs lock clean
export SET OUT RECIPE POOL SEARCH

# A variable of another name is ignored by make: `recipe=grocery` would run digits.
LOWER = a% b% c% d% e% f% g% h% i% j% k% l% m% n% o% p% q% r% s% t% u% v% w% x% y% z%
$(foreach name,$(filter $(LOWER),$(.VARIABLES)),$(if $(findstring command line,$(origin $(name))),$(error \
	$(name)=$($(name)): variables are in capitals: $(shell printf %s '$(name)' | tr a-z A-Z)=$($(name)))))

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make the environment in .venv alone

run: $(READY)  ## run the pipeline here [RECIPE=digits SET="key=value ..." OUT=dir SEARCH="key=log(1e-4,1e-2)" PROCESSES=2 POOL=name NODES=1 FRESH=1 QUIET=1 DEBUG=1]
	@$(VENV)/python -m $(if $(POOL)$(NODES),components.pool_run --pool "$$POOL",trainer run) "$$RECIPE" --overrides "$$SET" --output "$$OUT" \
		$(if $(SEARCH),--search "$$SEARCH") $(if $(NODES),--nodes $(NODES)) $(if $(PROCESSES),--processes $(PROCESSES)) $(if $(FRESH),--fresh) $(if $(QUIET),--quiet) $(if $(DEBUG),--debug)

.PHONY: plan
plan: $(READY)  ## hours, dollars, disk and memory of each stage, and whether it can work [RECIPE=model-case IMAGES=11e6 BYTES=200e3 POOL=gpu-a100 NODES=4 PROCESSES=8 PREPARE_POOL= PREPARE_NODES= SET=]
	@$(VENV)/python -m components.planning "$$RECIPE" --images "$(IMAGES)" $(if $(BYTES),--bytes "$(BYTES)") --pool "$$POOL" $(if $(NODES),--nodes $(NODES)) \
		$(if $(PROCESSES),--processes $(PROCESSES)) $(if $(PREPARE_POOL),--prepare-pool $(PREPARE_POOL)) $(if $(PREPARE_NODES),--prepare-nodes $(PREPARE_NODES)) \
		$(if $(SET),--set $(SET))

.PHONY: search
search: SEARCH := $(or $(SEARCH),auto)
search: run  ## the same with a search for better settings before the distillation [SEARCH="distill.drop_path=uniform(0,0.2)" and as run]

.PHONY: check-pages
check-pages: $(READY)  ## look at a run's pages in Chromium, with axe-core from npm [OUT=runs/latest]
	@npm install --silent --no-save --prefix .axe axe-core@4.10.3
	@PYTHONPATH=. $(VENV)/python tests/local/check_pages.py "$(or $(OUT),runs/latest)"

ui: $(READY)  ## serve MLflow's pages on what was tracked [OUT=dir of a run that had one PORT=5000]
	@$(VENV)/python -m trainer ui $(if $(PORT),--port $(PORT)) $(if $(OUT),--store "sqlite:///$(abspath $(OUT)/..)/mlflow.db")

# Where an environment forbids Python to write bytecode, each of the hundreds of processes that tests start would compile all modules.
TEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/python -m pytest
ALL_TESTS := --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not long"

test: $(READY)  ## run the tests [ARGS="tests/unit -k losses"]
	$(TEST) $(or $(ARGS),$(ALL_TESTS))

.PHONY: coverage
coverage: $(READY)  ## run the same tests, print the lines that none of them runs, and fail where too many are left
	$(TEST) $(or $(ARGS),$(ALL_TESTS)) --cov --cov-report=term

test-long: $(READY)  ## run the tests that take a minute or more each and `make test` leaves out
	$(TEST) -m long

test-gpu: $(READY)  ## run the tests that need a CUDA device
	$(VENV)/python -m pytest -m gpu

.PHONY: test-xla
test-xla: $(READY_XLA)  ## run the tests of PyTorch/XLA, on its CPU device and in an environment of its own, .xla [ARGS="tests/xla -k resume"]
	PJRT_DEVICE=CPU XLA_FLAGS="$(XLA_COMPILES_FAST)" PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .xla/bin/python -m pytest \
		$(or $(ARGS),tests/xla \
		--numprocesses $(TEST_WORKERS) --dist loadfile --cov --cov-config=tests/xla/coverage.toml --cov-report=term)

.PHONY: test-faults soak
FAULTS = @OMP_NUM_THREADS=1 $(VENV)/python -m tests.faults.soak $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only "$(ONLY)")

test-faults: $(READY)  ## strike jobs with every fault once and check what becomes of them, about 10 minutes [SEED=7 ONLY=regex]
	$(FAULTS)

soak: $(READY)  ## strike jobs with faults drawn by chance for so long, and print a table [MINUTES=60 SEED=7 ONLY=regex]
	$(FAULTS) --minutes $(or $(MINUTES),60)

.PHONY: fuzz
fuzz: $(READY)  ## throw changed inputs at all that reads what others have made; findings go to runs/.fuzz [MINUTES=5 SEED=0 TARGET="image"]
	@OMP_NUM_THREADS=1 $(VENV)/python -m tests.hostile.fuzz --minutes $(or $(MINUTES),5) --seed $(or $(SEED),0) \
		$(if $(TARGET),--target "$(TARGET)")

bench: $(READY)  ## print the tables of tests/benchmarks, for an idle machine [PHOTOS=folder instead of made-up photos]
	@$(VENV)/python tests/benchmarks/bench_recorder.py
	@$(VENV)/python tests/benchmarks/bench_checkpoints.py
	@$(VENV)/python tests/benchmarks/bench_forecast.py
	@$(VENV)/python tests/benchmarks/bench_windows.py
	@$(VENV)/python tests/benchmarks/bench_tune.py --small
	@$(VENV)/python tests/benchmarks/bench_kernels.py
	@$(VENV)/python -m trainer run digits --output runs/bench-serving && \
		$(VENV)/python tests/benchmarks/bench_serving.py runs/bench-serving --force
	@$(VENV)/python tests/benchmarks/bench_curation.py $(if $(PHOTOS),--photos "$(PHOTOS)")
	@$(VENV)/python tests/benchmarks/bench_data.py $(if $(PHOTOS),--photos "$(PHOTOS)")
	@$(VENV)/python tests/benchmarks/bench_distillation.py $(if $(PHOTOS),--photos "$(PHOTOS)")

bench-gpu: $(READY)  ## what a GPU reaches, and what holds it back, in nine minutes
	@$(VENV)/python tests/benchmarks/bench_gpu.py

check: $(READY)  ## lint, types, layers, generated files; writes nothing
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports --no-cache
	$(VENV)/python -m pipelines.compile --check
	$(VENV)/python docs/generate.py --check
	$(VENV)/yamllint --strict .
	$(VENV)/shellcheck --external-sources --source-path=SCRIPTDIR .ci/run manifests/*.sh manifests/*/*.sh
	$(VENV)/hadolint manifests/images/Dockerfile manifests/images/Dockerfile.*

lint: $(READY)  ## mend what can be mended: order of imports, format
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

compile: $(READY)  ## write pipelines/compiled/distillation.yaml
	$(VENV)/python -m pipelines.compile

deploy-pipeline: $(READY)  ## upload the pipeline to Kubeflow and run it [KFP_HOST=url NAMESPACE=name IMAGE=name RUN=1 WAIT=1 FRESH=1 CRON="0 3 * * *" RECIPE= SET= SEARCH= POOL= NODES= PROCESSES= PREPARE_POOL= PREPARE_NODES= EXPERIMENT=]
	@$(VENV)/python -m pipelines.deploy --image "$$IMAGE" --cron "$$CRON" $(if $(RUN),--run) $(if $(WAIT),--wait) \
		$(if $(FRESH),--fresh) $(if $(SEARCH),--search "$$SEARCH") --recipe "$$RECIPE" --set "$$SET" --experiment "$$EXPERIMENT" --pool "$$POOL" \
		$(if $(NODES),--nodes $(NODES)) $(if $(PROCESSES),--processes $(PROCESSES)) \
		$(if $(PREPARE_POOL),--prepare-pool $(PREPARE_POOL)) $(if $(PREPARE_NODES),--prepare-nodes $(PREPARE_NODES))

.PHONY: neuron-warm-up
neuron-warm-up: $(READY)  ## compile beforehand on a pool what a recipe's trainings need [POOL=neuron-trn1 RECIPE=digits SET= NODES=1 PROCESSES= DATASET=uri of a prepared one]
	@$(VENV)/python -m pipelines.precompile --pool "$(or $(POOL),neuron-trn1)" --recipe "$$RECIPE" --set "$$SET" \
		$(if $(NODES),--nodes $(NODES)) $(if $(PROCESSES),--processes $(PROCESSES)) $(if $(DATASET),--dataset "$(DATASET)")

undeploy-pipeline: $(READY)  ## remove from Kubeflow what deploy-pipeline put there [IMAGE=name:tag KFP_HOST=url NAMESPACE=name VERSION=name ALL=1]
	@$(VENV)/python -m pipelines.undeploy --image "$$IMAGE" $(if $(VERSION),--version "$$VERSION") $(if $(ALL),--all)

.PHONY: predict-photos
predict-photos: $(READY)  ## predict a bucket of photos on a cluster, into Parquet files [PHOTOS=uri OUTPUT=uri RECIPE=digits MODEL=models:/vit-student-digits@champion POOL=cpu NODES=4 WAIT=1 FORCE=1 KFP_HOST= NAMESPACE= IMAGE=]
	@$(VENV)/python -m pipelines.predict_photos --photos "$(PHOTOS)" --output "$(OUTPUT)" --recipe "$$RECIPE" $(if $(MODEL),--model "$(MODEL)") \
		--image "$$IMAGE" $(if $(POOL),--pool "$(POOL)") $(if $(NODES),--nodes $(NODES)) $(if $(WAIT),--wait) $(if $(FORCE),--force)

.PHONY: deploy-student undeploy-student
STUDENT = --recipe "$$RECIPE" $(if $(MODEL),--model "$(MODEL)") $(if $(ALIAS),--alias "$(ALIAS)") $(if $(NAME),--name "$(NAME)") $(if $(KSERVE),--kserve) \
	$(if $(NAMESPACE),--namespace "$(NAMESPACE)") $(if $(CONTEXT),--context "$(CONTEXT)")

deploy-student: $(READY)  ## serve a registered student on a cluster [RECIPE=digits ALIAS=champion MODEL=vit-student-digits|uri REPLICAS=2 KSERVE=1 NAME= NAMESPACE= CONTEXT= IMAGE= SERVE="--log -" DRY_RUN=1 FORCE=1]
	@$(VENV)/python -m pipelines.deploy_student $(STUDENT) --image "$$IMAGE" $(if $(REPLICAS),--replicas $(REPLICAS)) \
		$(if $(SERVE),--serve="$(SERVE)") $(if $(DRY_RUN),--dry-run) $(if $(FORCE),--force)

undeploy-student: $(READY)  ## take an alias's pods away again [RECIPE=digits ALIAS=champion KSERVE=1 NAME= NAMESPACE= CONTEXT=]
	@$(VENV)/python -m pipelines.deploy_student $(STUDENT) --remove

docs: $(READY)  ## write docs/cli.md, configuration.md, rules.md and stages.md
	$(VENV)/python docs/generate.py

.PHONY: docs-site docs-serve
docs-site: $(DOCS)  ## write the documentation as a site to site/, and fail at a broken link
	@$(PYTHON) docs/site.py .docs/pages && .docs/bin/zensical build --clean --strict

docs-serve: $(DOCS)  ## show that site at http://localhost:8000
	@$(PYTHON) docs/site.py .docs/pages && .docs/bin/zensical serve

lock: $(UV)  ## pin the requirements after a change of pyproject.toml [UPGRADE=1 takes newer versions]
	$(COMPILE_REQUIREMENTS) pyproject.toml --extra kubeflow --extra weights --extra export --extra openvino --extra serve --extra heic --extra transformers --extra search --group dev --output-file requirements/development.txt
	$(COMPILE_REQUIREMENTS) pyproject.toml --extra kubeflow --extra weights --extra export --extra openvino --constraint requirements/development.txt --output-file requirements/runtime.txt
	$(COMPILE_REQUIREMENTS) pyproject.toml --extra kubeflow --override requirements/neuron-overrides.txt --output-file requirements/neuron.txt
	cp requirements/development.txt requirements/xla.txt  # its versions are kept wherever the overrides let them
	$(COMPILE_REQUIREMENTS) pyproject.toml --group xla --override requirements/xla-overrides.txt --output-file requirements/xla.txt
	$(COMPILE_REQUIREMENTS) --group serving --constraint requirements/development.txt --output-file requirements/serving.txt
	$(COMPILE_REQUIREMENTS) --group reaper --constraint requirements/development.txt --output-file requirements/reaper.txt
	echo uv | $(COMPILE_REQUIREMENTS) - --output-file requirements/uv.txt
	$(COMPILE_REQUIREMENTS) --group audit --output-file requirements/audit.txt
	$(COMPILE_REQUIREMENTS) --group docs --output-file requirements/docs.txt

.PHONY: audit sbom
audit: $(AUDIT)  ## look for known vulnerabilities in all locked packages [IGNORE="ID ID"]; asks PyPI
	@failed=0; for lock in $(AUDITED); do echo "requirements/$$lock.txt"; \
		.audit/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off \
		$(addprefix --ignore-vuln ,$(IGNORE)) --requirement "requirements/$$lock.txt" || failed=1; done; exit $$failed

sbom: $(AUDIT)  ## write sbom/*.json: the Python packages of the images with their hashes (CycloneDX)
	@mkdir -p sbom; for lock in $(SBOMS); do \
		PYTHONWARNINGS=ignore .audit/bin/cyclonedx-py requirements "requirements/$$lock.txt" --pyproject pyproject.toml --mc-type application \
		--output-reproducible --output-format JSON --output-file "sbom/$$lock.json" || exit 1; echo "sbom/$$lock.json"; done

.PHONY: release
release: IMAGES ?= cpu gpu serving
release: $(READY) sbom  ## build the wheel, the source archive and their bills of materials into dist/, and the images [IMAGES="cpu gpu serving"]
	@rm -rf dist && $(VENV)/python -m hatchling build --directory dist && cp sbom/*.json dist/
	@for target in $(IMAGES); do $(MAKE) --no-print-directory image TARGET=$$target || exit 1; done

.PHONY: image manifests kind-up kind-load test-kind kind-down
IMAGE_NAME = $(or $(IMAGE),$(shell $(VENV)/python -c \
	'from components.launch import IMAGE; print(IMAGE$(if $(filter neuron serving reaper,$(TARGET)),.replace(":", "-$(TARGET):")))'))

image: $(READY)  ## build and check an image: of tasks and jobs, the server, or the reaper [TARGET=cpu|gpu|neuron|serving|reaper IMAGE=name:tag]
	@manifests/images/build.sh "$(or $(TARGET),cpu)" "$(IMAGE_NAME)"

manifests: $(READY)  ## print what an overlay would apply [OVERLAY=kind|eks]
	@$(VENV)/kubectl kustomize manifests/overlays/$(or $(OVERLAY),kind)

kind-up: $(READY)  ## make a cluster on this machine: kind, KFP, training operator, MLflow
	@manifests/kind/up.sh

kind-load: $(READY)  ## put the image into that cluster [TARGET=cpu|gpu|neuron|serving IMAGE=name:tag]
	@manifests/kind/load.sh "$(IMAGE_NAME)"

test-kind: CONTEXT ?= kind-vit-distillation
test-kind: $(READY)  ## run the tests that need a cluster [CONTEXT=kubeconfig's EPOCHS=1000 of a student]; if one fails, its logs go to runs/.cluster-logs
	@TRAINER_TEST_CLUSTER="$(CONTEXT)" TRAINER_IMAGE="$(IMAGE_NAME)" $(if $(EPOCHS),TRAINER_TEST_EPOCHS=$(EPOCHS)) $(VENV)/python -m pytest -m cluster tests/cluster \
		--numprocesses 2 --dist loadfile || { CONTEXT="$(CONTEXT)" manifests/logs.sh runs/.cluster-logs; exit 1; }

.PHONY: soak-cluster
soak-cluster: CONTEXT ?= kind-vit-distillation
soak-cluster: $(READY)  ## train on a cluster while faults drawn by chance strike, and print a table [MINUTES=30 SEED=7 EVERY=5 EPOCHS=2000 CONTEXT=kubeconfig's]
	@TRAINER_IMAGE="$(IMAGE_NAME)" $(VENV)/python -m tests.cluster.soak --context "$(CONTEXT)" $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(SEED),--seed $(SEED)) $(if $(EVERY),--every $(EVERY)) $(if $(EPOCHS),--epochs $(EPOCHS))

kind-down:  ## remove that cluster
	@manifests/kind/down.sh

clean:  ## remove what was made here, except for runs
	rm -rf .venv .xla .uv .axe .audit .docs .cache site sbom dist .coverage* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(UV): requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "$(PYTHON) is Python %d.%d, but 3.11, 3.12 or 3.13 is needed; name one: make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv --clear .uv
	.uv/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r requirements/uv.txt
	@touch $@

$(AUDIT): requirements/audit.txt
$(DOCS): requirements/docs.txt

$(AUDIT) $(DOCS): $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) $(@D)
	$(UV) pip sync --quiet --require-hashes --python $(@D)/bin/python $(filter requirements/%,$^)
	@touch $@

$(READY): requirements/development.txt
$(READY_XLA): requirements/xla.txt

# Bytecode is compiled here because an environment may forbid to write it later, and imports then take seconds each time.
$(READY) $(READY_XLA): $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) $(@D)
	$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(@D)/bin/python $(filter requirements/%,$^)
	@$(@D)/bin/python -c 'import pathlib, site; pathlib.Path(site.getsitepackages()[0], "project.pth").write_text("$(CURDIR)\n")'
	@touch $@
