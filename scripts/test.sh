#!/usr/bin/env bash
# Virtual environment, install, lint, types, import rules, tests. Arguments go to pytest.
#
#   scripts/test.sh                                  everything
#   scripts/test.sh tests/evidence -k guards         all lint, some tests
#   scripts/test.sh --torch 2.11 tests/evidence      tests only, with another torch in a venv of its own
set -euo pipefail

# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"

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
  "$bin/mypy"
  "$bin/lint-imports" --no-logo
fi

"$VENV_PYTHON" -c 'import platform
from importlib.metadata import version
print("python", platform.python_version(), *(f"{n} {version(n)}" for n in ("torch", "triton", "pydantic", "pytest")))'
"$VENV_PYTHON" -m pytest "$@"
