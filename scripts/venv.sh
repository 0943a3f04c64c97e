# Sourced by gate.sh, test.sh and clients.sh: make a virtual environment right, or find in well under a second that it is.
#
#   make_venv DIR TORCH_SPEC GROUP    GROUP is "run" (the package), "test" (and what tests import), "dev" (and lint) or
#                                     "clients" (the frameworks of tests/clients)
#
# PYTHON            interpreter that makes the environment (default python3)
# TPCOMPILE_TORCH   requirement for torch, e.g. "torch==2.12.0" (default: torch 2.13.0, or on a machine with GPUs
#                   the torch that the interpreter already has, if it is in range)
# TPCOMPILE_VENV    folder of the environment, instead of the default one

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
DEFAULT_TORCH="torch==2.13.0"
TORCH_RANGE="torch>=2.11,<2.14"

fail_environment() {
  echo "error: $*" >&2
  exit 4
}

# The first Python from 3.12 on, whose sys.monitoring shows which lines were executed; python3 where there is none.
python_with_monitoring() {
  local candidate
  for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 python3.13; do
    if "$candidate" -c 'import ensurepip' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo python3
}

require_cxx() {
  local name
  for name in ${CXX:-g++ c++ clang++}; do
    if command -v "$name" >/dev/null; then return; fi
  done
  fail_environment "no C++ compiler: ${CXX:-g++, c++ and clang++} not found; torch.compile needs one, install it or set CXX"
}

num_gpus() {
  { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
}

# Does PYTHON have a distribution that satisfies the requirement? Reads metadata only, torch is not imported.
has_torch() {
  "$1" - "$2" >/dev/null 2>&1 <<'PY'
import sys
from importlib.metadata import version
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
sys.exit(version("torch") not in Requirement(sys.argv[1]).specifier)
PY
}

has_modules() {
  local python="$1"
  shift
  "$python" -c 'import sys; from importlib.util import find_spec; sys.exit(any(find_spec(m) is None for m in sys.argv[1:]))' "$@"
}

create_venv() {
  local venv="$1" spec="$2" base="$3"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail_environment "$("$base" -V 2>&1): 3.11 or newer is needed; set PYTHON"
  if [ "$(num_gpus)" != 0 ] && has_torch "$base" "$spec"; then
    "$base" -m venv --clear --without-pip --system-site-packages "$venv" || fail_environment "$base cannot make a venv in $venv"
    # When the interpreter lives in a venv itself, its packages are not the system's: name them.
    "$base" -c 'import site, sysconfig; print(*{*site.getsitepackages(), sysconfig.get_path("platlib")}, sep="\n")' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_parent.pth"
  else
    "$base" -m venv --clear "$venv" || fail_environment "$base cannot make a venv in $venv; is the venv module installed?"
  fi
}

# The source tree on the path and a `tpcompile` command, without pip: for machines that have all packages, no network.
link_source() {
  local venv="$1"
  echo "$ROOT" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_tpcompile.pth"
  printf '#!%s\nfrom tpcompile.cli import main\n\nmain()\n' "$venv/bin/python" >"$venv/bin/tpcompile"
  chmod +x "$venv/bin/tpcompile"
}

install_packages() {
  local venv="$1" spec="$2" group="$3"
  local python="$venv/bin/python" modules="pydantic loguru typer rich yaml psutil"
  if [ "$group" != run ]; then modules="$modules pytest pytest_timeout hypothesis"; fi
  # shellcheck disable=SC2086
  if [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_parent.pth" ] &&
    [ "$group" != dev ] && [ "$group" != clients ] && has_torch "$python" "$spec" && has_modules "$python" $modules; then
    link_source "$venv"
    return
  fi
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
  "$python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))' 2>/dev/null ||
    "$python" -m pip install --quiet --no-compile --upgrade "pip>=25.1"
  # torch first and then pinned, so that nothing below can bring a different one.
  has_torch "$python" "$spec" || "$python" -m pip install --quiet --no-compile "$spec"
  "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch").split("+")[0])' >"$venv/constraints.txt"
  local groups=()
  if [ "$group" != run ]; then groups=(--group "$ROOT/pyproject.toml:$group"); fi
  "$python" -m pip install --quiet --no-compile --constraint "$venv/constraints.txt" "${groups[@]}" --editable "$ROOT"
}

make_venv() {
  local venv="${TPCOMPILE_VENV:-$1}" spec="${TPCOMPILE_TORCH:-$2}" group="$3" base="${PYTHON:-python3}" stamp
  require_cxx
  command -v "$base" >/dev/null || fail_environment "no $base; install Python 3.11 or newer or set PYTHON"
  local found="$base"
  if [ -x "$venv/bin/python" ]; then found="$venv/bin/python"; fi
  if [ -z "${TPCOMPILE_TORCH:-}" ] && [ "$2" = "$DEFAULT_TORCH" ] && [ "$(num_gpus)" != 0 ] && has_torch "$found" "$TORCH_RANGE"; then
    spec="$TORCH_RANGE"
  fi
  if [ ! -x "$venv/bin/python" ] || { [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -V)" != "$("$venv/bin/python" -V)" ]; }; then
    echo "making $venv (a minute or two, once)" >&2
    create_venv "$venv" "$spec" "$base"
  fi
  VENV_PYTHON="$venv/bin/python"
  stamp="$({ cat "$ROOT/pyproject.toml"; echo "$ROOT $spec"; "$VENV_PYTHON" -V; } | cksum)"
  # "dev" holds what "test" needs, and "test" what "run" needs.
  local file
  for file in "$group" dev $([ "$group" = run ] && echo test); do
    if [ "$(cat "$venv/tpcompile-$file.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  done
  echo "installing into $venv" >&2
  install_packages "$venv" "$spec" "$group" || fail_environment "the packages of $venv could not be installed (see above)"
  echo "$stamp" >"$venv/tpcompile-$group.stamp"
}
