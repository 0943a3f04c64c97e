#!/usr/bin/env bash
# Virtual environment, install, lint, types, import rules, tests. Arguments go to pytest.
#
#   scripts/test.sh                                  everything
#   scripts/test.sh --fast                           format, lint and what neither starts ranks nor compiles
#   scripts/test.sh tests/evidence -k guards         all lint, some tests
#   scripts/test.sh --torch 2.11 tests/evidence      tests only, with a different torch in a venv of its own
#
# TPCOMPILE_TEST_WORKERS   processes that run tests side by side (default: cores + 2, 24 at most; 0: no xdist)
set -euo pipefail

# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"

fast= types=
if [ "${1:-}" = --fast ]; then
  fast=1
  shift
fi

if [ "${1:-}" = --torch ]; then
  version="${2:?--torch needs a version, e.g. --torch 2.11}"
  shift 2
  case "$version" in *.*.*) exact="$version" ;; *) exact="$version.0" ;; esac
  make_venv "$ROOT/.venv-torch$version" "torch==$exact" test
else
  make_venv "$ROOT/.venv" "$DEFAULT_TORCH" dev
  bin="$(dirname "$VENV_PYTHON")"
  "$bin/ruff" format --check .
  "$bin/ruff" check .
  if [ -z "$fast" ]; then
    "$bin/lint-imports" --no-logo
    # Beside the tests: the first check of a checkout takes one core for half a minute.
    types_text="$(mktemp)"
    "$bin/mypy" >"$types_text" 2>&1 &
    types=$!
    trap 'kill "$types" 2>/dev/null || true; rm -f "$types_text"' EXIT
  fi
fi

"$VENV_PYTHON" -c 'import platform
from importlib.metadata import version
print("python", platform.python_version(), *(f"{n} {version(n)}" for n in ("torch", "triton", "pydantic", "pytest")))'

# Written once: the package and the tests, with their assertions rewritten, take seconds of every process otherwise.
unset PYTHONDONTWRITEBYTECODE
options=()
if [ -n "$fast" ]; then options+=(-m "not ranks and not slow"); fi
# Two more than cores: a test that waits for its ranks leaves a core idle.
default_workers="$("$VENV_PYTHON" -c 'import os; print(min(len(os.sched_getaffinity(0)) + 2, 24))')"
workers="${TPCOMPILE_TEST_WORKERS:-$default_workers}"
# A file stays on one worker: its tests share what its fixtures have compiled.
if has_modules "$VENV_PYTHON" xdist && [ "$workers" -gt 1 ]; then options+=(-n "$workers" --dist loadfile); fi
ended=0
"$VENV_PYTHON" -m pytest "${options[@]}" "$@" || ended=$?
if [ -n "$types" ]; then
  wait "$types" || ended=1
  cat "$types_text"
fi
exit "$ended"
