#!/usr/bin/env bash
# Real frameworks as clients: an environment of their own, and tests/clients on 2 and 4 gloo ranks, a table at the end.
#
#   scripts/clients.sh                               everything
#   scripts/clients.sh -k lightning                  arguments go to pytest
#   scripts/clients.sh --clients-out FILE            the rows as JSON, too, over those of earlier calls
#
# PYTHON                     interpreter that makes the environment (default: python3.12 or python3.13, if there is one)
# TPCOMPILE_CLIENT_BACKEND   backend of torch.compile in the clients (default: aot_eager)
set -euo pipefail

# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"

# Flow is observed by sys.monitoring, which Python has from 3.12 on.
export PYTHON="${PYTHON:-$(python_with_monitoring)}"
make_venv "$ROOT/.venv-clients" "$DEFAULT_TORCH" clients

export TPCOMPILE_CLIENTS=1
exec "$VENV_PYTHON" -m pytest -v -p no:cacheprovider tests/clients "$@"
