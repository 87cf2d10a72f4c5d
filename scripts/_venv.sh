# shellcheck shell=sh
# Sourced by scripts/chat, scripts/serve and scripts/test: makes $root/.venv once and brings it up to date.
#
#   root=...                 the repository, set by the caller
#   venv_ready "dev,plot"    the extras that must be installed; "" for none
#
# What pip and venv print goes to .venv/install.log; where they fail, its end is shown.
# .venv/stamp is written last and lists what is installed: a checksum of everything that decides
# the contents, then the extras. Without a matching checksum .venv is made anew.

venv=${root:?}/.venv
log=$venv/install.log
say() { printf '%s\n' "dflash-chat: $*" >&2; }
fail() { say "$*"; exit 2; }

venv_ready() {
    checksum=$(venv_checksum)
    installed=$(sed -n 2p "$venv/stamp" 2>/dev/null) || installed=
    if [ -z "$checksum" ] || [ "$checksum" != "$(sed -n 1p "$venv/stamp" 2>/dev/null)" ]; then
        venv_create
        installed=
    elif venv_has_extras "$1"; then
        return
    fi
    venv_install "${installed:+$installed${1:+,}}$1" # what is installed stays
}

# Nothing when .venv has no Python that runs. The folder counts because a .venv cannot be moved.
venv_checksum() {
    python_version=$("$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null) || return 0
    { printf '%s\n' "$root" "$python_version"
        cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/_venv.sh"; } | cksum
}

venv_has_extras() {
    for extra in $(printf %s "$1" | tr , ' '); do
        case ",$installed," in *",$extra,"*) ;; *) return 1 ;; esac
    done
}

venv_create() {
    if [ -e "$venv" ] && [ ! -e "$venv/.dflash-chat" ]; then
        fail "$venv was not made by this script; move it away and try again."
    fi
    size=", 0.5 GB"
    rm -rf "$venv" # before the search, because its own Python may be the first on PATH
    python=$(venv_find_python) || exit 2
    say "making .venv with $("$python" -V), once; this takes a minute or two (log: $log)"
    mkdir "$venv" && : > "$venv/.dflash-chat" # whose it is, before there is anything to lose
    venv_run "$python" -m venv "$venv" || venv_failed "$python could not make $venv"
    # mypy cannot follow an editable install to a folder of another name, so it gets a link.
    mkdir "$venv/src"
    ln -s ../../app "$venv/src/dflash_chat"
}

venv_find_python() {
    lacking=
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
        "$candidate" -c 'import venv, ensurepip' 2>/dev/null && printf %s "$candidate" && return
        lacking=${lacking:-$candidate}
    done
    [ -z "$lacking" ] ||
        fail "$lacking lacks the venv or ensurepip module; install it (Debian and Ubuntu: the package python3-venv) and try again."
    fail "Python 3.10 or newer was not found on PATH; install it and try again."
}

venv_install() {
    extras=$1
    say "installing dflash-chat${extras:+ with its extras $extras}${size:-}"
    rm -f "$venv/stamp"
    # Older pips cannot install a pyproject.toml project as editable.
    if ! venv_pip 'pip>=23' || ! (cd "$root" && venv_pip -c constraints.txt -e ".${extras:+[$extras]}") ||
        ! venv_install_reference; then
        venv_failed "the installation failed; try again when its cause is gone"
    fi
    venv_show_types
    { venv_checksum; printf '%s\n' "$extras"; } > "$venv/stamp.new"
    mv "$venv/stamp.new" "$venv/stamp"
    say "installed"
}

# Type checkers cannot follow the import hook of an editable install; a path they can, and this one,
# which counts from the file that holds it, leads to dflash_mlx and kernels_metal.
venv_show_types() {
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' ../../../.. > "$site/dflash-chat-types.pth"
}

# The published DFlash, which tests compare drafters with, and mlx-vlm, whose models see. They need
# some modules of each and none of the packages that these ask for.
venv_install_reference() {
    case ",$extras," in
        *,dev,*) (cd "$root" && venv_pip --no-deps -c constraints.txt dflash mlx-vlm) ;;
    esac
}

venv_pip() {
    venv_run "$venv/bin/python" -m pip install --no-input --disable-pip-version-check "$@"
}

# A command whose output goes to the log, with a line a minute while it runs.
venv_run() {
    printf '\n%s\n' "$ $*" >> "$log"
    (minutes=0; while sleep 60 > /dev/null 2>&1; do
        minutes=$((minutes + 1)); say "still at it after $minutes min"; done) &
    clock=$!
    trap 'kill $clock; exit 130' INT TERM # which do not end what is in the background
    status=0
    "$@" >> "$log" 2>&1 < /dev/null || status=$?
    kill $clock
    trap - INT TERM
    return $status
}

venv_failed() {
    tail -n 8 "$log" >&2
    fail "$1 (all that was printed: $log)."
}
