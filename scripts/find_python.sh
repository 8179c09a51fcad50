#!/bin/sh
# Prints the path of a Python >= 3.12 that can make virtual environments; exits 1 with advice if there is none.
# Looks at $PYTHON (when set, nothing else), then at PATH, then at the versions that only pyenv knows.

usable() { # a pyenv shim may exist for a version that isn't active, and Debian splits ensurepip off
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if usable "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    echo "error: PYTHON=$PYTHON isn't a Python >= 3.12 with venv and ensurepip" >&2
    exit 1
fi

for name in python3.14 python3.13 python3.12 python3; do
    if usable "$name"; then
        command -v "$name"
        exit 0
    fi
done

for version in $(ls "${PYENV_ROOT:-$HOME/.pyenv}/versions" 2>/dev/null | sort -Vr); do
    candidate="${PYENV_ROOT:-$HOME/.pyenv}/versions/$version/bin/python"
    if usable "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done

cat >&2 <<MESSAGE
error: no Python >= 3.12 with venv was found.
  looked for: python3.14, python3.13, python3.12, python3 on PATH; ${PYENV_ROOT:-$HOME/.pyenv}/versions/*
  install one (Debian and Ubuntu: apt-get install python3 python3-venv; pyenv: pyenv install 3.13)
  or name one: make PYTHON=/path/to/python3.12 ...
MESSAGE
exit 1
