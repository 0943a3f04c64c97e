#!/usr/bin/env bash
# The site of the documentation, in an environment of its own without torch: site/index.html. A warning is an error.
#
#   scripts/docs.sh                build it
#   scripts/docs.sh serve          show it while you write, on http://127.0.0.1:8000
#
# PYTHON   interpreter that makes the environment, 3.11 or newer (default python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-docs
stamp="$(cksum <pyproject.toml)"
if [ "$(cat "$venv/docs.stamp" 2>/dev/null)" != "$stamp" ]; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
  "$venv/bin/python" -m pip install --quiet --group docs
  echo "$stamp" >"$venv/docs.stamp"
fi

# An advertisement on every build.
export NO_MKDOCS_2_WARNING=1
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/mkdocs" "${@:-build}" --strict
