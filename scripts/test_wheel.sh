#!/usr/bin/env bash
# The wheels in empty environments, without this checkout: what the README promises works there, and what is broken is red;
# tpcompile-reader (packaging/reader) reads what a job has left in an environment without torch.
#
#   scripts/test_wheel.sh
#
# PYTHON, TPCOMPILE_TORCH   as in scripts/venv.sh. Needs the network, and 2 GB in TMPDIR until it ends.
set -euo pipefail

# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
require_cxx

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || fail_environment "cannot make a venv; is the venv module installed?"
python="$folder/venv/bin/python"
install=("$python" -m pip install --quiet --no-compile)
"${install[@]}" "${TPCOMPILE_TORCH:-$DEFAULT_TORCH}"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" "$ROOT"
# tpcompile itself takes newer versions of torch than were tested: here pip must not choose one.
"$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$folder/constraints.txt"
"${install[@]}" --constraint "$folder/constraints.txt" "$folder"/wheels/tpcompile-*.whl pytest

"${PYTHON:-python3}" -m venv "$folder/reader"
"$folder/reader/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" "$ROOT/packaging/reader"
"$folder/reader/bin/python" -m pip install --quiet --no-compile "$folder"/wheels/tpcompile_reader-*.whl

mkdir "$folder/mine"
cp "$ROOT/tests/wheel/captured.py" "$folder/mine/"
cp "$ROOT/tests/wheel/on_ranks.py" "$folder/mine/test_on_ranks.py"
cp -r "$ROOT/tests/data/jobs/torch-2.13.0" "$folder/mine/jobs"
cd "$folder/mine"
unset PYTHONPATH
export PATH="$folder/venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONSAFEPATH=1

# A command, the exit code that it must end with, and a text that it must print.
expect() {
  local code="$1" text="$2" ended=0
  shift 2
  timeout -s KILL 300 "$@" >"$folder/printed" 2>&1 || ended=$?
  if [ "$ended" != "$code" ] || ! grep -q -- "$text" "$folder/printed"; then
    cat "$folder/printed"
    echo "FAIL: exit code $ended instead of $code, or without '$text': $*" >&2
    exit 1
  fi
  echo "ok: exit code $code, '$text': $*"
}

expect 0 "$folder/venv/lib" python -c 'import tpcompile; print(tpcompile.__file__)'
expect 0 'PASS' tpcompile gate --device cpu --nproc 2 --mode C
expect 0 '# rank-dependent branch' tpcompile explain rank-branch
expect 1 'rank-dependent constant' tpcompile gate --device cpu --nproc 2 --mode C --fault get_rank_constant --set compile.backend=aot_eager
expect 1 'scale == 1 / 2' torchrun --nproc-per-node 2 captured.py
expect 0 'PASS' tpcompile diagnose jobs/training
expect 1 'order of collectives differs' tpcompile diagnose jobs/order
expect 1 '1 failed, 1 passed' pytest -q test_on_ranks.py
expect 0 '/tpcompile/docs/gate.md$' tpcompile docs gate

tpcompile gate --device cpu --nproc 2 --mode C --set compile.backend=aot_eager --run-dir run -q
export PATH="$folder/reader/bin:$PATH"
expect 1 'No module named' python -c 'import torch'
expect 0 'torch not installed' tpcompile version
expect 0 'PASS' tpcompile diagnose jobs/training
expect 1 'order of collectives differs' tpcompile diagnose jobs/order
expect 0 'PASS' tpcompile compare run
expect 0 '/tpcompile/docs/gate.md$' tpcompile docs gate
expect 0 '^0$' python -c 'import tpcompile; print(int(tpcompile.Verdict.model_validate_json(open("run/verdict.json").read()).exit_code))'
expect 4 'needs torch' tpcompile gate
