# Two commands on a fresh Debian 12 with Rust: `make demo` and `make test`. `make help` lists all.

.PHONY: help docs deps build demo test lint test-long test-launchers test-hostile test-tensorboard test-dcp bench gpu-check clean

TEXT ?=
STEPS ?= 60
OUT := out

PACKAGES := llvm-22-dev libmlir-22-dev mlir-22-tools libpolly-22-dev clang-22 libclang-22-dev lld-22 libzstd-dev zlib1g-dev libxml2-dev libz3-dev
# pip fetches the assembler that checks GPU kernels.
PACKAGES += $(if $(shell python3 -m pip --version 2>/dev/null),,python3-pip)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)$$/\1\t\2/p' Makefile | sort | while IFS="$$(printf '\t')" read -r t w; do printf '  make %-18s%s\n' "$$t" "$$w"; done

# Installs what is missing, as root or with sudo.
deps:  ## installs what is missing of LLVM, as root or with sudo
	@missing=$$(for p in $(PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	  echo "installing: "$$missing; \
	  sudo=$$([ $$(id -u) = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	fi
	@command -v cargo >/dev/null || { echo "Rust is missing: see https://rustup.rs"; exit 1; }

build: deps  ## mcc and all else of the workspace, optimised: target/release/mcc
	cargo build --release --workspace --quiet

# Makes a tokenizer and a data set of the text in TEXT=file, by default the licence texts that every Debian system
# carries, compiles a small GPT-2 for 4 ranks (tensor x pipeline parallelism) and trains it on shuffled samples; a
# twentieth of the text is held out. A rank is killed on the way: the run goes on from its last checkpoint, and ends
# with a report.
demo: build  ## trains a small GPT-2 on 4 ranks, kills one on the way, writes a report (TEXT=your.txt STEPS=200)
	@rm -rf $(OUT)/texts $(OUT)/checkpoints $(OUT)/log; mkdir -p $(OUT)/texts
	@if [ -n "$(TEXT)" ]; then cp -- "$(TEXT)" $(OUT)/corpus.txt; else cat /usr/share/common-licenses/* > $(OUT)/corpus.txt; fi
	@split -C 16k -d -a 6 --additional-suffix .txt $(OUT)/corpus.txt $(OUT)/texts/
	target/release/mcc data train-tokenizer $(OUT)/texts/*.txt --tokens 512 -o $(OUT)/tokenizer
	target/release/mcc data tokenize $(OUT)/texts/*.txt --tokenizer $(OUT)/tokenizer --append-eod --force -o $(OUT)/corpus
	target/release/mcc compile models/gpt2.mdl --tp 2 --pp 2 --micro-batch-size 4 --global-batch-size 16 \
	  -D vocab=512 -D hidden=128 -D heads=4 -D layers=4 -D seq=128 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 10 --lr-decay-iters $(STEPS) -o $(OUT)/gpt2.mcc
	target/release/mcc run $(OUT)/gpt2.mcc --data-path $(OUT)/corpus --split 95,5,0 --steps $(STEPS) --eval-interval 20 --eval-iters 1 \
	  --log-dir $(OUT)/log --save $(OUT)/checkpoints --save-interval 20 --keep 2 --restarts 1 & run=$$!; \
	until [ -e $(OUT)/checkpoints/step-20 ] || ! kill -0 $$run 2>/dev/null; do sleep 0.05; done; \
	echo "(kill -9 of a rank)"; kill -KILL $$(cut -d ' ' -f 1 /proc/$$run/task/$$run/children); wait $$run
	target/release/mcc checkpoint ls $(OUT)/checkpoints
	target/release/mcc report $(OUT)/log
	@echo
	@echo "The artifact is $(OUT)/gpt2.mcc, its dumps are in $(OUT)/gpt2.mcc/dumps, weights and states in $(OUT)/checkpoints,"
	@echo "and how it went is on the page $(OUT)/log/report.html."
	@echo "Next: target/release/mcc dump $(OUT)/gpt2.mcc --level local        # what each rank computes, with every collective and its reason"
	@echo "      make demo TEXT=your.txt STEPS=200                        # your own text"
	@echo "      target/release/mcc compile models/llama.mdl --tp 4 --sp --help"

# Everything that must hold. Optimised a little even in tests: interpreted kernels are slow otherwise. What tests
# start is built with them: by itself it has other features of its dependencies, and would be built twice.
test: deps  ## everything that must hold
	cargo build --workspace --all-targets --quiet
	cargo test --workspace --quiet --no-fail-fast
	python3 -m unittest bench.test_report

# Formatting, and what clippy warns of.
lint: deps  ## formatting, and what clippy warns of
	cargo fmt --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings

# Ten thousand random models on random meshes, as many mutants of programs, of artifacts and of weights, the models of models/ on every mesh of up to 8 ranks, and the
# reference cases on many of these, natively: the whole of what `test` samples. In pieces of which each ends with a verdict and can be run by itself
# (`make test-long-random`); PART=2/5 runs the second fifth of each. Optimised: hours on two cores (docs/sharding.md).
PART ?= 1/1
LONG := test-long-random test-long-mutants test-long-faults test-long-meshes test-long-forged test-long-native test-long-pairs test-long-endings test-long-kernels test-long-fuzz
part = $$(( $(1) * ($(word 1,$(subst /, ,$(PART))) - 1) / $(word 2,$(subst /, ,$(PART))) ))
share = $$(( ($(1) + $(word 2,$(subst /, ,$(PART))) - 1) / $(word 2,$(subst /, ,$(PART))) ))
long := cargo test --release --quiet --package

.PHONY: $(LONG)
test-long: $(LONG)  ## hours of random models, mutants, faults and fuzzing, in pieces (PART=2/5): make -pn | grep ^test-long-
	@echo "test-long: all of $(LONG) passed (part $(PART))"

test-long-random: deps
	DIFFERENTIAL_FIRST=$(call part,10000) DIFFERENTIAL_COUNT=$(call share,10000) $(long) passes --test differential -- --nocapture random::
	SCORES_FIRST=$(call part,2000) SCORES_COUNT=$(call share,2000) $(long) passes --test differential -- scores::random_programs

test-long-mutants: deps
	MUTANTS_FIRST=$(call part,10000) MUTANTS=$(call share,10000) $(long) passes --test differential -- --nocapture programs:: parts:: parts_rows:: mutations:: events:: alone::
	VERIFIER_SEED=$(call part,10000) VERIFIER_MUTANTS=$(call share,400000) $(long) passes --test verifiers -- search::

# All mistakes that are kept in the compiler's source beside the right lines (ir/src/faults.rs), each on jobs until one shows what becomes of it: whether
# a verifier refuses it; those of the code generator on kernels, until the check of a compile refuses one. FAULT=zero.piece tries those whose names begin so;
# FAULTS_EVERYWHERE=1 goes on through all jobs and kernels (docs/proofs.md).
FAULTS_EVERYWHERE ?= 0
faults = FAULTS_EVERYWHERE=$(FAULTS_EVERYWHERE) FAULTS_FIRST=$(call part,440) FAULTS=$(call share,440) $(long)
test-long-faults: deps
	$(faults) passes --test differential -- --nocapture faults::
	$(faults) codegen --lib -- --nocapture check::faults::

test-long-meshes: deps
	MESHES_FIRST=$(call part,13406) MESHES=$(call share,13406) $(long) passes --test differential -- --nocapture everywhere::

test-long-forged: deps
	FORGED_FIRST=$(call part,10000) FORGED=$(call share,10000) $(long) passes --test forged -- --nocapture
	IMPORTS=all $(long) convert --test cases -- no_value_of_a_field

test-long-native: deps
	cargo build --release --workspace --quiet
	NATIVE_FIRST=$(call part,10000) NATIVE_MESHES=$(call share,500) $(long) mcc --test end_to_end -- --nocapture meshes_of_eight_ranks
	NATIVE_FIRST=$(call part,1000) NATIVE_TRIPLES=$(call share,100) $(long) mcc --test end_to_end -- --nocapture triples::random_models
	$(long) mcc --test end_to_end -- --ignored
	CASES=all $(long) mcc --test end_to_end -- cases::
	$(long) planner -- --ignored

# Two hundred pairs of plans: what one saves the other loads and saves again.
test-long-pairs: deps
	cargo build --release --workspace --quiet
	PAIRS_FIRST=$(call part,200) PAIRS=$(call share,200) $(long) mcc --test end_to_end -- --nocapture pairs::

# Two hundred runs each that a signal ends at any instant, that are killed and go on, a third of them while they save, whose reader leaves, and whose disk gets full.
test-long-endings: deps
	cargo build --release --workspace --quiet
	ENDINGS_FIRST=$(call part,200) ENDINGS=$(call share,200) $(long) mcc --test end_to_end -- --nocapture endings::

# Six hundred random kernels of each family, on CPUs and emulated GPUs; programs of scores on both generations of
# these; the GPU kernels of all models, disassembled.
test-long-kernels: deps
	KERNELS_FIRST=$(call part,600) KERNELS=$(call share,600) $(long) codegen --lib -- random_ any_program_of_scores
	KERNELS=1 $(long) codegen --lib -- need_every agree products_sum
	KERNELS=all $(long) mcc --test end_to_end -- gpu::kernels_of_the_models

# Searches for inputs that break what reads bytes from outside (fuzz/src/lib.rs), FUZZ_SECONDS for each of FUZZ_TARGETS, with libFuzzer on a stable compiler:
# counters of coverage are a pass of LLVM's. What breaks something is left in out/fuzz/found; once mended, it belongs into fuzz/corpus.
FUZZ_SECONDS ?= 30
FUZZ_TARGETS ?= texts levels job weights dcp data hello message frames
FUZZ_FLAGS := -Cpasses=sancov-module $(addprefix -Cllvm-args=-sanitizer-coverage-,level=4 inline-8bit-counters pc-table trace-compares) -Cdebug-assertions -Coverflow-checks
FUZZ := target/fuzz/x86_64-unknown-linux-gnu/release/fuzz
test-long-fuzz: PACKAGES += g++
test-long-fuzz: deps
	RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --release --quiet -p fuzz --features libfuzzer --target x86_64-unknown-linux-gnu --target-dir target/fuzz
	@mkdir -p $(OUT)/fuzz/found && rm -rf $(OUT)/fuzz/seeds && FUZZ_SEEDS=$(OUT)/fuzz/seeds $(FUZZ) 2>/dev/null
	@for t in $(FUZZ_TARGETS); do \
	  mkdir -p $(OUT)/fuzz/corpus/$$t && echo "fuzz: $$t for $(FUZZ_SECONDS) s" && \
	  FUZZ_TARGET=$$t $(FUZZ) $(OUT)/fuzz/corpus/$$t $(OUT)/fuzz/seeds/$$t $$(ls -d fuzz/corpus/$$t 2>/dev/null) -max_total_time=$(FUZZ_SECONDS) \
	    -max_len=4096 -timeout=60 -rss_limit_mb=2048 -artifact_prefix=$(OUT)/fuzz/found/$$t- >$(OUT)/fuzz/$$t.log 2>&1 || { tail -30 $(OUT)/fuzz/$$t.log; exit 1; }; \
	  tail -1 $(OUT)/fuzz/$$t.log; \
	done

# `mcc run` under torchrun (of the benchmark's PyTorch, or on the PATH), Slurm, Open MPI and MPICH, on two machines
# made of Linux's namespaces, of which one dies; programs exchange by mcc's own means, and by both MPIs, for each of
# which there is an mcc-rank: as root, ten minutes.
test-launchers: PACKAGES += slurmd slurmctld slurm-client munge openmpi-bin libopenmpi-dev mpich libmpich-dev openssh-server iproute2
test-launchers: build  ## worlds under torchrun, Slurm, Open MPI and MPICH on two machines of namespaces; as root
	@mkdir -p $(OUT)/launchers
	@for mpi in openmpi mpich; do \
	  MPICC=mpicc.$$mpi cargo build --release --quiet -p runtime --features mpi --target-dir target/mpi && \
	  cp target/mpi/release/mcc-rank $(OUT)/launchers/mcc-rank.$$mpi && \
	  cargo clean --release --quiet -p mpi-sys --target-dir target/mpi || exit 1; \
	done
	@PATH="$$PATH:$(abspath $(VENV))/bin" tests/launchers.sh target/release/mcc $(OUT)/launchers

# Whether TensorBoard reads what `mcc run --tensorboard-dir` writes: half a minute, and a download of 30 MB the
# first time.
test-tensorboard: PACKAGES += python3-venv
test-tensorboard: build  ## TensorBoard reads what a run writes
	@test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --no-deps -r bench/requirements/tensorboard.txt
	@$(VENV)/bin/python tests/watched.py target/release/mcc $(OUT)/watched

# 10,000 hostile connections to a run on two such machines: as root, two minutes.
test-hostile: PACKAGES += iproute2
test-hostile: build  ## 10,000 hostile connections to a run; as root
	@attacker=$$(cargo test --release --package runtime --test processes --no-run 2>&1 | sed -n 's/^ *Executable .*(\(.*\))$$/\1/p'); \
	tests/hostile.sh target/release/mcc $$attacker $(OUT)/hostile

# mcc beside PyTorch and JAX on this machine's CPU (docs/benchmarks/README.md): about an hour, or some minutes with BENCH=--quick. A peer that cannot be
# installed is named in the report.
BENCH ?=
VENV := $(OUT)/bench/venv
.PHONY: venv
venv:
	@test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-deps -r bench/requirements/report.txt

bench: PACKAGES += python3-venv g++
bench: build venv  ## mcc beside PyTorch and JAX, about an hour (BENCH=--quick: minutes)
	cargo build --release --quiet -p codegen --example kernel_server
	@for peer in torch jax; do $(VENV)/bin/pip install --quiet --no-deps -r bench/requirements/$$peer.txt || echo "$$peer could not be installed"; done
	$(VENV)/bin/python -m bench $(BENCH)

# PyTorch loads the checkpoints that mcc writes for it (torch.distributed.checkpoint), and mcc those of PyTorch:
# two minutes, after PyTorch is installed.
test-dcp: PACKAGES += python3-venv
test-dcp: build venv  ## PyTorch reads mcc's checkpoints, and mcc PyTorch's
	$(VENV)/bin/pip install --quiet --no-deps -r bench/requirements/torch.txt
	$(VENV)/bin/python tests/dcp.py target/release/mcc $(OUT)/dcp

# For whoever has an NVIDIA GPU: kernels, steps and exchanges against their definitions, the emulator and the CPU, then times, against PyTorch where that is
# installed. Writes out/gpu-check/gpu-check.{json,md}. Without a GPU: make gpu-check GPU_CHECK='--device emulated'
GPU_CHECK ?=
gpu-check: build  ## checks and times kernels, steps and exchanges on a GPU (GPU_CHECK='--device emulated' without one)
	target/release/mcc gpu-check --output $(OUT)/gpu-check $(GPU_CHECK)

# All documents as one folder of pages that need no network, with the sources that they link to: mdBook takes links to
# `.md` for pages of the book, which those out of it are not. Building mdBook takes some minutes, once.
MDBOOK := target/tools/bin/mdbook
docs:  ## all documents as one book: out/book/docs/index.html
	@test -x $(MDBOOK) || cargo install --quiet --locked --root target/tools mdbook@0.5.4
	@rm -rf $(OUT)/book && mkdir -p $(OUT)/book
	$(MDBOOK) build --dest-dir $(abspath $(OUT)/book/docs)
	@git ls-files -z ':!docs' ':!tests/cases' ':!fuzz' | xargs -0 cp --parents -t $(OUT)/book
	@cp --parents tests/cases/README.md -t $(OUT)/book
	@cd $(OUT)/book/docs && sed -i -E 's#href="\.\./([^"]*)\.html#href="../\1.md#g' *.html && \
	sed -i -E 's#href="(\.\./\.\./models/[^"]*)\.html#href="\1.mdl#g' guides/*.html && \
	sed -i -E 's#href="(\.\./\.\./[^"]*)\.html#href="\1.md#g' benchmarks/*.html guides/*.html && \
	sed -i -E 's#href="(benchmarks/)?README\.html#href="\1index.html#g' *.html benchmarks/*.html
	@echo "the book is $(OUT)/book/docs/index.html"

clean:  ## removes what was built
	cargo clean
	rm -rf $(OUT)
