#!/bin/sh
# Builds .venv from pyproject.toml and constraints.txt. Called by `make setup`, which knows when that is needed.
# Says one line per thing it does; pip's own notes go to .venv/setup.log and are shown only when it fails.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=.venv

say() { echo "setup: $*"; }
fail() { say "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no $python here; on Debian: apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1), 3.11 or newer is needed (PYTHON=... chooses another)"

# Debian ships the venv module without what it needs to put pip into the environment.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "$python cannot make an environment: installing the system package $package"
        if ! out=$(apt-get update -q 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -qy "$package" 2>&1); then
            echo "$out" >&2
            fail "apt-get could not install $package"
        fi
    else
        fail "$python cannot make an environment: the system package $package is missing (as root: apt-get install $package)"
    fi
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
fi

say "installing torch and gradcomm[server,otel,dev] into $venv (a few minutes the first time)"
# torch by its exact version: an unpinned one may resolve to a build with gigabytes of accelerator libraries.
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    -c constraints.txt "torch==$(sed -n 's/^torch==//p' constraints.txt)" -e '.[server,otel,dev]' >"$venv/setup.log" 2>&1; then
    tail -n 40 "$venv/setup.log" >&2
    fail "pip failed; the whole log is $venv/setup.log"
fi
say "done"
