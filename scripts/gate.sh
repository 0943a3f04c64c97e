#!/usr/bin/env bash
# Virtual environment, install, then the gate: on all GPUs if there are any, else two gloo ranks on CPU.
# Arguments go to `tpcompile gate`; its defaults are mode C and preset wan14b on GPUs, cpu_smoke on CPU.
#
#   scripts/gate.sh
#   scripts/gate.sh --nproc 8 --preset wan14b_8 --mode all --train
set -euo pipefail

# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
make_venv "$ROOT/.venv" "$DEFAULT_TORCH" run
exec "$VENV_PYTHON" -m tpcompile gate "$@"
