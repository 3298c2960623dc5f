# make lab     set up once, then open JupyterLab on the course
# make test    set up once, then what proves that this machine computes right, and each notebook's claim: five minutes on two cores
# make prove   all other tests: attacks, planted faults, mutants, browsers, other processors' rounding
# make flakes  the tests of several ranks 50 times, and how many were green: 2 hours; less: make flakes RUNS=5
# make isa     the numeric tests and the notebooks' claims as other processors round: hours
# make isa-quick what decides an exercise's verdict, as one other processor rounds and as `auto` chooses on others: minutes
# make docs    build the site into docs/_build/html
# make pictures renew the picture of each notebook's main figure; on a quiet machine
# make ledger  measure how far off the memory ledger is, into data/measured and docs/ledger.md
# make upgrade renew constraints.txt
# make clean   remove the environment and what was built
#
# Needs Python 3.11 or newer, with venv, and nothing else: make PYTHON=/path/to/python3.12 lab

PYTHON ?= python3
TORCH  := 2.13.0
VENV   := .venv
PY     := $(VENV)/bin/python
# Named after what it stands for: other dependencies or another folder are another set-up.
READY  := $(VENV)/ready-$(shell { cat pyproject.toml constraints.txt; echo "$(CURDIR)"; } | cksum | tr ' ' -)
SOUND  := $(PY) -c "from importlib.util import find_spec as f; exit(not all(map(f, ('pip', 'lpkit', 'torch', 'jupyterlab'))))"
PIP    := $(PY) -m pip --disable-pip-version-check --no-input install
LOG    := build/setup.log
EVERY  := 15
# Measured with Python 3.11 on Linux (x86), PyTorch for CPUs: sizes of 216 wheels, du, and user and system time of `make setup`.
DISK   := 3.2 GB on the disk
SIZE   := 0.8 GB to download (more if PyTorch comes with CUDA), $(DISK), 2 minutes of processor time
# Of pip's log: the wheels that it has, and whether it installs them already.
PROGRESS = awk '/^ *(Downloading|Using cached|Processing) / && !/metadata/ { n++; size = substr($$(NF-1), 2); unit = $$NF; \
	        gb += unit ~ /^GB/ ? size : unit ~ /^MB/ ? size / 1e3 : unit ~ /^kB/ ? size / 1e6 : 0 } /^Installing collected/ { installs = 1 } \
	    END { printf installs ? "  installing %d packages, which takes a minute or two\n" : "  %d packages of about $(PACKAGES), %.1f GB\n", n, gb }' $(LOG)
PACKAGES := 216
# One sentence, the end of the log, and where the rest is.
FAILED = { if grep -q 'No space left on device' $(LOG); then echo "The disk is full: $(VENV) takes $(DISK). Free some space, and run make again."; \
	    elif grep -qE 'NewConnectionError|NameResolution|Connection refused|unreachable|Read timed out|Temporary failure|ProxyError' $(LOG); then \
	        echo "pip could not reach its package index. Check the network (behind a proxy: HTTPS_PROXY), and run make again."; \
	    else echo "pip could not install the packages of the project."; fi; \
	    echo "The end of $(LOG):"; tail -n 5 $(LOG) | cut -c1-300 | sed 's/^/    /'; } >&2

.PHONY: help lab test prove flakes isa isa-quick docs pictures ledger upgrade clean setup install
.NOTPARALLEL:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

lab: setup
	@$(PY) -m lpkit lab

PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test: setup
	$(PY) -m ruff check .
	$(PY) -m tests.smoke_copies
	$(PYTEST) -m "not prove" --nbval-lax --nbval-current-env --nbval-cell-timeout=600 build/smoke tests

# A verdict about somebody's right answer must not hang on this machine's processor.
prove: setup
	$(PYTEST) -m prove tests
	$(PY) -m tests.isa --quick

# What was not green is in build/flakes. Beside other work more shows.
RUNS := 50
flakes: setup
	@rm -rf build/flakes; mkdir -p build/flakes; for run in $$(seq $(RUNS)); do \
	    OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 -m dist $$(grep -rl mark.dist tests --include='test_*.py') >build/flakes/$$run 2>&1 \
	        && rm build/flakes/$$run; done; ls build/flakes; echo "$$(ls build/flakes | wc -l) of $(RUNS) runs failed"; \
	    ! [ "$$(ls build/flakes)" ]

# Whether an answer hangs on one processor's rounding: hours. Less: $(PY) -m tests.isa --only TEXT
isa: setup
	$(PY) -m tests.isa

isa-quick: setup
	$(PY) -m tests.isa --quick

docs: setup
	$(PY) docs/build.py

pictures: setup
	$(PY) docs/make_pictures.py

ledger: setup
	$(PY) -m lpkit bench ledger --out data/measured
	mkdir -p build && $(PY) -m tests.bench.ledger > build/ledger.md
	mv build/ledger.md docs/ledger.md

setup:
	@test -f "$(READY)" && $(SOUND) 2>/dev/null || $(MAKE) --no-print-directory install

# A set-up that was once complete is updated in place; anything else (none, interrupted, broken) starts from nothing.
# The distribution was named lpkit before; its command must not stay beside the new one's.
install:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "lpkit needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | tail -1); name another: make PYTHON=/path/to/python3.12 lab" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@mkdir -p $(dir $(LOG)); if ls $(VENV)/ready-* >/dev/null 2>&1 && $(SOUND) 2>/dev/null; then rm -f $(VENV)/ready-*; \
	        echo "Updating $(VENV): its list of packages has changed. Log: $(LOG)"; \
        $(PY) -m pip uninstall --quiet --yes lpkit >$(LOG) 2>&1; \
	    else echo "Setting up $(VENV), once: $(SIZE). Log: $(LOG)"; \
	        rm -rf $(VENV); $(PYTHON) -m venv $(VENV) >$(LOG) 2>&1 || { $(FAILED); exit 2; }; fi
	@(while sleep $(EVERY) >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do $(PROGRESS); done) & \
	    $(PIP) --quiet --upgrade pip >>$(LOG) 2>&1 && $(PIP) --progress-bar off -c constraints.txt -e '.[dev]' >>$(LOG) 2>&1; \
	    code=$$?; kill $$! 2>/dev/null; [ $$code = 0 ] || { $(FAILED); exit 2; }
	@touch "$(READY)"
	@echo "$(VENV) is ready."

# The accelerator libraries are torch's own affair: it names their exact versions, and only where it needs them.
upgrade:
	rm -rf build/upgrade && $(PYTHON) -m venv build/upgrade
	build/upgrade/bin/python -m pip install --quiet --upgrade pip
	build/upgrade/bin/python -m pip install -e '.[dev,submitit,ray]' torch==$(TORCH)
	{ echo "# Every package of the project, at the version it is tested with. Renew: make upgrade."; \
	  build/upgrade/bin/python -m pip freeze --exclude low-precision-kit --exclude-editable \
	    | sed -e 's/+[a-z0-9.]*$$//' -e 's/^triton==.*/&; sys_platform == "linux"/' \
	    | grep -vE '^(cuda-|nvidia-(cu|nc|nv))'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) build docs/_build docs/executed
