# Every word a developer or CI says. `make help` lists them; `make check` is what CI runs.
# Builds and downloads live in one cache outside the checkout, so a clean clone starts warm.
SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

export STOKER_CACHE     ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stoker
export CARGO_TARGET_DIR ?= $(STOKER_CACHE)/target
# What the compiler keeps from one build of a crate to the next makes the first build a fifth longer, and now and then it breaks on it.
export CARGO_INCREMENTAL ?= 0
export SKIP_LOG         ?= $(STOKER_CACHE)/skipped.log
TEST_LOG    ?= $(STOKER_CACHE)/test.log
CARGO_BIN   := $(STOKER_CACHE)/tools/bin
CARGO_DENY  := $(CARGO_BIN)/cargo-deny
CARGO_MUTANTS := $(CARGO_BIN)/cargo-mutants
DEMO_DIR    ?= $(STOKER_CACHE)/demo
# NAME and words of `stoker-bench checkpoint`.
MEMORY_MODELS := qwen2.5-0.5b tinyllama-1.1b tinyllama-1.1b:--dtype:f32 tinyllama-1.1b:--quantization:int4 tinyllama-1.1b:--quantization:fp8-stored
GPU_MEMORY_MODELS := qwen2.5-0.5b tinyllama-1.1b:--dtype:f32 qwen3-1.7b llama-3.1-8b llama-3.1-8b:--quantization:int4 llama-3.1-8b:--quantization:fp8-stored
KREW_DIR    ?= $(STOKER_CACHE)/krew
KREW_URL    ?= https://releases.example/stoker
RELEASE     := $(CARGO_TARGET_DIR)/release
# Builds programs of a release. Without -p cargo chooses features for the whole workspace, whichever programs are named: what one word has built
# another one finds. With fewer packages it chooses others, and builds most dependencies again.
release      = cargo build --release $(addprefix --bin ,$(1))
DEMO_ARGS   := --dir $(DEMO_DIR) --agent $(RELEASE)/stoker-agent --operator $(RELEASE)/stoker-operator --gateway $(RELEASE)/stoker-gateway --source $(CURDIR)

help: ## List these words
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: kube ## Start a control plane, a node, operator and gateway here; apply examples/chat.yaml; stream an answer
	@$(call release,stoker-agent stoker-operator stoker-gateway stoker-cluster kubectl-stoker)
	$(RELEASE)/stoker-cluster demo $(DEMO_ARGS)

demo-load: kube ## On the demo's cluster: a step of load; replicas follow and come back, each decision explained
	@$(call release,stoker-agent stoker-operator stoker-gateway stoker-cluster kubectl-stoker stoker-load)
	$(RELEASE)/stoker-cluster demo-load $(DEMO_ARGS) --load $(RELEASE)/stoker-load

demo-gpu: kube ## On a machine with GPUs: pods that have them are served, scaled, rolled, made to fail and deleted (MODEL=DIR: a large one too)
	@command -v nvidia-smi >/dev/null || { echo "skipped: demo-gpu: no NVIDIA driver on this machine"; exit 0; }
	$(call release,stoker-agent stoker-operator stoker-gateway stoker-cluster kubectl-stoker stoker-load)
	cargo build --release -p stoker-gpu-fault
	$(RELEASE)/stoker-cluster demo-gpu $(DEMO_ARGS) --load $(RELEASE)/stoker-load --fault $(RELEASE)/libstoker_gpu_fault.so $(if $(MODEL),--model $(MODEL))

demo-gpu-carry: ## The same packed for another machine (55 MB): unpack it there and run ./demo-gpu.sh
	@tools/cluster/carry.sh $(STOKER_CACHE)/demo-gpu.tar.xz

demo-down: ## Stop the demo and remove everything it made
	@if [ -x $(RELEASE)/stoker-cluster ]; then $(RELEASE)/stoker-cluster down --dir $(DEMO_DIR); else echo "no demo was built here"; fi

# Programs of tests know the checkout that they were built in, and cargo takes those of another one for fresh if they are newer.
checkout:
	@mkdir -p $(CARGO_TARGET_DIR)
	[ "$$(cat $(CARGO_TARGET_DIR)/checkout 2>/dev/null)" != "$(CURDIR)" ] || exit 0
	find . -name '*.rs' -not -path './target/*' -exec touch -c {} +
	echo "$(CURDIR)" > $(CARGO_TARGET_DIR)/checkout

# Help texts of agent and gateway have commands for a shell, which are no examples for rustdoc.
# Without -p cargo takes the whole workspace, whatever is built of it: with fewer packages it would choose other features, and build twice.
test: suite ## Tests of everything, in eight minutes on two cores once built: pure, real API server, real agent process, official clients

test-all: SUITE_WORDS := all
test-all: kueue suite ## The same and the few dozen that take longest, five minutes more

suite: checkout kube helm registry prometheus
	@rm -f $(SKIP_LOG)
	cargo build --workspace --all-targets --message-format json-render-diagnostics > $(TEST_LOG).programs
	failed=0; $(CARGO_TARGET_DIR)/debug/stoker-suite $(SUITE_WORDS) $(TEST_LOG).programs $(TEST_LOG) || failed=$$?
	cargo test --workspace --doc --exclude stoker-agent --exclude stoker-gateway 2>&1 | tee -a $(TEST_LOG) || failed=$$?
	tools/slowest.sh $(TEST_LOG)
	tools/skipped.sh $(SKIP_LOG)
	tools/failed.sh $(TEST_LOG)
	exit $$failed

check: fmt clippy generate-check test-all isa-check chart-check docs-check deny ## Everything CI runs

isa-check: checkout ## The CPU back end on the instruction sets that `make test` leaves out, 64-bit Arm under qemu too: kernels, goldens
	@tools/isa.sh

e2e: ## The same on a real kubelet + containerd node with images and Helm (root)
	@tools/e2e/run.sh

faults: checkout kube ## Operator and API server under scripted faults, STOKER_FAULT_SEEDS=200 seeds of each (an hour); docs/faults.md
	@cargo build --bins
	STOKER_FAULT_SEEDS=$${STOKER_FAULT_SEEDS:-200} cargo test --test system fault_suite:: -- --test-threads 1 --nocapture

rolls: checkout kube ## STOKER_ROLLS=1000 rolls, scale-downs, evictions and node drains on real agents that stream (an hour); docs/faults.md
	@cargo build --bins
	STOKER_ROLLS=$${STOKER_ROLLS:-1000} cargo test --test system operator_rolls:: -- --nocapture

abuse: checkout ## A real agent among clients at their worst, CONNECTIONS=10000 of them for MINUTES=30; docs/faults.md
	@cargo build --bins
	ulimit -n "$$(ulimit -Hn)"
	export STOKER_ABUSE_MINUTES=$${MINUTES:-30} STOKER_ABUSE_CONNECTIONS=$${CONNECTIONS:-10000}
	cargo test --test system agent_abuse:: -- --nocapture

resumes: checkout ## Replicas die, freeze and are drained under streams of every kind for MINUTES=30, in the order of SEED=7; each answer is compared; docs/gateway.md
	@cargo build --bins
	export STOKER_RESUME_MINUTES=$${MINUTES:-30} STOKER_RESUME_CLIENTS=$${CLIENTS:-12} STOKER_RESUME_SEED=$${SEED:-7}
	cargo test --test system gateway_resume:: -- --nocapture

measuring: checkout ## lm-eval, GuideLLM and aiperf, unchanged, against an agent here (their packages: several GB); docs/clients.md
	@cargo build --bins
	tests/tools/check_measuring_clients.py $(CARGO_TARGET_DIR)/debug/stoker-agent $(STOKER_CACHE)/measuring-clients

fuzz: ## Parsers of the gateway before INPUTS=10000000 changed requests, bodies and streams each (minutes); docs/faults.md
	@STOKER_FUZZ_INPUTS=$${INPUTS:-10000000} cargo test --release -p stoker-gateway --test fuzz -- --nocapture

pages-check: checkout kube binaries ## Pages in a real browser (Debian's chromium); PICTURES=docs/pages also writes their pictures there
	@STOKER_PICTURES=$(abspath $(PICTURES)) cargo test --test system pages_

explore: ## Every state that rollout, drain and scaling can reach, faults included (half an hour, 4 GB); docs/faults.md
	@$(call release,stoker-explore)
	$(RELEASE)/stoker-explore

bench: kube ## Measure engine, agent and operator; append figures to docs/benchmarks/results and render the tables
	@$(call release,stoker-agent stoker-operator stoker-bench bench-agent bench-operator bench-scaling stand-in-agent render-benchmarks)
	$(RELEASE)/stoker-bench run --peers llama.cpp,transformers --out docs/benchmarks/results/cpu.jsonl
	$(RELEASE)/bench-agent --out docs/benchmarks/results/agent.jsonl
	$(RELEASE)/bench-operator --out docs/benchmarks/results/control_plane.jsonl
	$(RELEASE)/bench-scaling --out docs/benchmarks/results/scaling.jsonl
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-fetch: ## 4 GiB from a hub on loopback into memory, beside curl (12 GB of memory); prints GB/s
	@$(call release,stoker-agent bench-fetch)
	$(RELEASE)/bench-fetch

bench-memory: ## What an agent holds at its peak on CPUs beside what kubectl stoker plan says, five models and formats (5 GB of disk, 6 GB of memory); append figures, render
	@$(call release,stoker-agent kubectl-stoker stoker-bench bench-memory render-benchmarks)
	$(RELEASE)/bench-memory --out docs/benchmarks/results/agent.jsonl $(foreach model,$(MEMORY_MODELS),$$($(RELEASE)/stoker-bench checkpoint $(subst :, ,$(model))))
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-memory-gpu: ## The same on the first GPU, which is of the kind GPU=H200 (40 GB of disk); append figures, render
	@$(call release,stoker-agent kubectl-stoker stoker-bench bench-memory render-benchmarks)
	$(RELEASE)/bench-memory --gpu $(or $(GPU),H200) --out docs/benchmarks/results/agent.jsonl $(foreach model,$(GPU_MEMORY_MODELS),$$($(RELEASE)/stoker-bench checkpoint $(subst :, ,$(model))))
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-rollouts: kube ## Changes of a fleet on a real API server under streams: time, dip, streams cut (6 minutes); append figures, render
	@$(call release,stoker-operator bench-rollouts stand-in-agent render-benchmarks)
	$(RELEASE)/bench-rollouts --out docs/benchmarks/results/control_plane.jsonl
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-fleet: kube ## 1,000 deployments of 10 replicas that are not there, 50 pages open, in a network namespace (a quarter of an hour, 8 GB); append figures, render
	@$(call release,stoker-operator bench-fleet stand-in-agent render-benchmarks)
	unshare --net --map-root-user bash -c 'ip link set lo up && exec $(RELEASE)/bench-fleet --out docs/benchmarks/results/control_plane.jsonl'
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-steady: kube ## Constant load at three rates on real agents, MINUTES=30 each on an idle machine, with a roll in the middle; append figures, render
	@$(call release,stoker-agent stoker-operator stoker-load bench-scaling stand-in-agent render-benchmarks)
	$(RELEASE)/bench-scaling --steady --minutes $${MINUTES:-30} --out docs/benchmarks/results/scaling.jsonl
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-routes: ## Where requests go: our rule beside others' on simulated replicas, and the time of a choice; append figures, render
	@$(call release,stoker-routes render-benchmarks)
	$(RELEASE)/stoker-routes --out docs/benchmarks/results/routing.jsonl
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-gateway: ## What a gateway costs: time added to requests, processor time, memory of STREAMS=9900 silent streams; before replicas that compute nothing; append figures, render
	@$(call release,stoker-gateway stoker-routes bench-gateway render-benchmarks)
	# A stream takes two files of each program; many machines allow 20,000.
	ulimit -n "$$(ulimit -Hn)"
	$(RELEASE)/bench-gateway --streams $${STREAMS:-9900} --out docs/benchmarks/results/gateway.jsonl
	$(RELEASE)/stoker-routes --time-only --out docs/benchmarks/results/gateway.jsonl
	$(RELEASE)/render-benchmarks docs/benchmarks

bench-gateway-live: ## What clients of real replicas see through a gateway: a replica killed or frozen under 200 streams, a greedy tenant, shared prompts beside others' rules; append figures, render
	@$(call release,stoker-agent stoker-gateway bench-gateway-live render-benchmarks)
	$(RELEASE)/bench-gateway-live --out docs/benchmarks/results/gateway.jsonl
	$(RELEASE)/render-benchmarks docs/benchmarks

check-gpu: ## All that only a machine with a GPU can check: kernels, engine beside transformers, memory and race checkers
	@tools/bench/gpu-check.sh

bench-gpu: ## Measure the engine on this machine's GPU, beside vLLM where installed (VSITE, VSITE_ARCHIVE); render the tables
	@command -v nvidia-smi >/dev/null || { echo "skipped: bench-gpu: no NVIDIA driver on this machine"; exit 0; }
	FULL=1 OUT=$(STOKER_CACHE)/bench/gpu tools/bench/gpu.sh
	cat $(STOKER_CACHE)/bench/gpu/gpu.jsonl >> docs/benchmarks/results/gpu.jsonl
	$(call release,render-benchmarks)
	$(RELEASE)/render-benchmarks docs/benchmarks

fmt: ## Formatting, as rustfmt wants it
	@cargo fmt --all --check

clippy: ## Lints, warnings denied
	@cargo clippy --workspace --all-targets -- -D warnings

generate: ## Write the CRDs into the chart from the Rust types
	@cargo run -q --bin crdgen charts/stoker/crds

generate-check: ## The committed CRDs equal the generated ones
	@made=$$(mktemp -d); trap 'rm -r "$$made"' EXIT
	cargo run -q --bin crdgen "$$made"
	diff -u charts/stoker/crds "$$made" || { echo "a CRD in the chart is stale: run 'make generate' and commit"; exit 1; }

chart-check: kube helm ## The chart lints, renders, and the API server accepts it
	@charts/check.sh

docs-check: ## Links in the docs lead somewhere; tables equal their figures
	@cargo run -q --bin docs-check -- .

deny: $(CARGO_DENY) ## Licences, duplicates and sources of dependencies
	@$(CARGO_DENY) --all-features check bans licenses sources

mutants: $(CARGO_MUTANTS) ## Which changes to the scaling decision no test would notice (an hour)
	@$(CARGO_MUTANTS) mutants -p stoker-scaling $(foreach file,decide demand recent_peaks regret,-f scaling/src/$(file).rs) -j1 \
	  --no-shuffle --timeout 60 -o $(STOKER_CACHE) -- --lib --test decisions --test periods

kube: ## Build the Kubernetes binaries once into the cache
	@tools/kube/build.sh etcd kube-apiserver kube-controller-manager kube-scheduler kubectl

helm: ## Build Helm once into the cache
	@tools/kube/build.sh helm

krew: ## What krew installs the plugin from, into KREW_DIR, for archives at KREW_URL; krew tries it, where there is Go
	@$(call release,kubectl-stoker)
	@tools/krew.sh $(RELEASE)/kubectl-stoker $(KREW_URL) $(KREW_DIR)
	@tools/krew.sh --check $(KREW_DIR)

kueue: ## Build Kueue, whose queues a test's fleet lives in, once into the cache
	@tools/kube/build.sh kueue || echo "no Kueue: its test says so"

registry: ## Build the registry that tests fetch from once into the cache
	@tools/kube/build.sh registry

prometheus: ## Fetch Prometheus once into the cache
	@tools/prometheus.sh || echo "no Prometheus: its tests say so"

binaries: checkout ## The programs that tests start
	@cargo build --bins

$(CARGO_MUTANTS):
	@cargo install cargo-mutants --version 26.0.0 --locked --root $(STOKER_CACHE)/tools

$(CARGO_DENY):
	@cargo install cargo-deny --version 0.20.2 --locked --root $(STOKER_CACHE)/tools

.PHONY: help checkout measuring isa-check demo demo-load demo-gpu demo-gpu-carry demo-down test test-all suite check e2e faults rolls abuse explore bench bench-fetch bench-memory bench-memory-gpu bench-rollouts bench-fleet bench-gateway bench-routes bench-steady check-gpu bench-gpu fmt clippy generate generate-check chart-check docs-check deny mutants kube helm kueue registry prometheus binaries resumes pages-check bench-gateway-live fuzz
