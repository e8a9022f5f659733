# setup.sh: sourced by run_small.sh and tests/run.sh. Makes the environment .venv once and puts it on the PATH.
#
# requirements.txt where there is an NVIDIA GPU, requirements-cpu.txt elsewhere; quick the second time (a stamp holds the
# checksum of what is installed). PYTHON=python3.12 chooses the interpreter, VENV=/path another place.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# make_env FOLDER REQUIREMENTS [PACKAGES TO REMOVE AFTERWARDS]
make_env() {
    local venv=$1 requirements=$2 stamp
    stamp="$venv/.installed-$(cat "$repo"/requirements*.txt "$requirements" | sha256sum | cut -c1-16)"
    if [ ! -e "$stamp" ]; then
        echo "setup: installing $(basename "$requirements") into $venv (some minutes, once)"
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "setup: Python 3.10 or newer is needed; set PYTHON=")'
        "${PYTHON:-python3}" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
        if [ $# -gt 2 ]; then "$venv/bin/python" -m pip uninstall --quiet --yes "${@:3}"; fi
        touch "$stamp"
    fi
    export PATH="$venv/bin:$PATH"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

if has_gpu; then requirements=$repo/requirements.txt; else requirements=$repo/requirements-cpu.txt; fi
