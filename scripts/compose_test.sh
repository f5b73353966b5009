#!/usr/bin/env bash
# Build the images, run deploy/compose.yaml with the tiny model for a few steps, look at it from outside, take it down.
#
# With a container engine and compose v2 at hand these are used. Without, as root on Debian 12, an engine is installed
# and run in a network namespace of its own, so that the machine's network stays as it is; the base images are then made
# from Debian packages, and pip gets its wheels from this machine, since nothing in the namespace reaches outside.
#
# Variables: COMPOSE_TEST_DIR (default build/compose), COMPOSE_TEST_STEPS (default 3), COMPOSE_TEST_KEEP=1 (no cleaning up).
set -euo pipefail
cd "$(dirname "$0")/.."

SERVICES="coordinator dashboard engine gateway reward rollout router trainer"
STEPS=${COMPOSE_TEST_STEPS:-3}
VERSION=${PACELINE_VERSION:-0.1.0}
NETNS=paceline-compose
mkdir -p "${COMPOSE_TEST_DIR:-build/compose}"
DIR=$(cd "${COMPOSE_TEST_DIR:-build/compose}" && pwd)
INSIDE=""
WHEEL_SERVER=""
export PACELINE_OVERRIDES="run.steps=500 ${PACELINE_OVERRIDES:-}"

say() { printf '\n== %s\n' "$*"; }
compose() { docker compose -f deploy/compose.yaml "$@"; }

clean_up() {
    code=$?
    trap - EXIT
    [ $code -eq 0 ] || { compose ps -a; compose logs --tail 30; } || true
    if [ "${COMPOSE_TEST_KEEP:-}" != 1 ]; then
        compose down -v --timeout 20 || true
        [ -z "$WHEEL_SERVER" ] || kill "$WHEEL_SERVER" || true
        if [ -n "$INSIDE" ] && [ -f "$DIR/engine.pid" ]; then
            engine=$(cat "$DIR/engine.pid")
            kill "$engine" || true
            tail --pid="$engine" -f /dev/null || true
            ip netns del $NETNS || true
        fi
    fi
    exit $code
}

install_engine() {
    [ "$(id -u)" = 0 ] || { echo "no container engine here, and installing one needs root" >&2; exit 1; }
    if ! command -v dockerd > /dev/null || ! command -v mmdebstrap > /dev/null; then
        say "installing a container engine"
        apt-get -qq update
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
            docker.io iptables iproute2 mmdebstrap > "$DIR/apt.log"
    fi
    # shellcheck disable=SC2016 # apt fills these in
    MIRROR=$(apt-get indextargets --format '$(SITE) $(RELEASE)' 'Created-By: Packages' | awk '$2 == "bookworm" {print $1; exit}')
    [ -n "$MIRROR" ] || { echo "no Debian 12 source among apt's; this script makes its images from one" >&2; exit 1; }
    export DOCKER_CONFIG=$DIR/config
    docker compose version > /dev/null 2>&1 || install_compose
}

# Debian 12 has compose v1 only. The package of Debian 13 runs here, and is unpacked without adding a source to the machine.
install_compose() {
    say "unpacking compose v2"
    local apt=$DIR/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$DOCKER_CONFIG/cli-plugins"
    touch "$apt/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR trixie main" > "$apt/sources.list"
    printf 'Dir::Etc::SourceList "%s";\nDir::Etc::SourceParts "-";\nDir::State::Lists "%s";\n' \
        "$apt/sources.list" "$apt/lists" > "$apt/apt.conf"
    printf 'Dir::State::status "%s";\nDir::Cache "%s";\nAPT::Sandbox::User "root";\n' \
        "$apt/status" "$apt/cache" >> "$apt/apt.conf"
    apt-get -qq -c "$apt/apt.conf" update
    (cd "$apt" && apt-get -qq -c apt.conf download docker-compose && dpkg-deb -x docker-compose_*.deb unpacked)
    ln -sf "$apt/unpacked/usr/libexec/docker/cli-plugins/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
    docker compose version
}

start_engine() {
    say "starting the engine in network namespace $NETNS"
    INSIDE="nsenter --net=/run/netns/$NETNS"
    ip netns list | grep -qw $NETNS || ip netns add $NETNS
    # Not `ip netns exec`: it mounts another /sys, in which the engine finds no control groups.
    $INSIDE ip link set lo up
    export DOCKER_HOST=unix://$DIR/docker.sock
    $INSIDE dockerd --data-root "$DIR/data" --exec-root "$DIR/exec" --pidfile "$DIR/engine.pid" -H "$DOCKER_HOST" \
        > "$DIR/engine.log" 2>&1 &
    wait_for 30 "the engine" docker info
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds
wait_for() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || { echo "waited in vain for $what: $*" >&2; return 1; }
        sleep 0.5
    done
}

make_base_images() {
    docker image inspect python:3.11-slim redis:7 > /dev/null 2>&1 && return
    say "making base images from Debian packages"
    [ -f "$DIR/base.tar" ] || mmdebstrap --quiet --variant=minbase \
        --include=python3,python3-venv,python3-pip,python-is-python3,ca-certificates,redis-server \
        bookworm "$DIR/base.tar" "$MIRROR"
    docker import "$DIR/base.tar" python:3.11-slim
    docker tag python:3.11-slim redis:7
}

collect_wheels() {
    say "collecting wheels"
    # The last two: what builds the package, and what redis needs on a Python before 3.11.3.
    [ -d "$DIR/wheels" ] || .venv/bin/python -m pip wheel -q --disable-pip-version-check -w "$DIR/wheels.part" \
        -c constraints.txt ".[${SERVICES// /,}]" 'hatchling>=1.27,<2' async-timeout
    [ -d "$DIR/wheels" ] || mv "$DIR/wheels.part" "$DIR/wheels"
    $INSIDE .venv/bin/python -m http.server 8765 --bind 127.0.0.1 --directory "$DIR/wheels" > "$DIR/wheels.log" 2>&1 &
    WHEEL_SERVER=$!
}

build_images() {
    for service in $SERVICES; do
        say "building paceline/$service"
        DOCKER_BUILDKIT=0 docker build -q --network host -f "deploy/docker/$service.Dockerfile" \
            --build-arg PIP_OPTIONS="--no-index --find-links http://127.0.0.1:8765/" -t "paceline/$service:$VERSION" .
    done
    docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' 'paceline/*'
}

has_steps() {
    [ "$(compose exec -T trainer cat /var/lib/paceline/run/metrics.jsonl | wc -l)" -ge "$STEPS" ]
}

answers() {
    $INSIDE python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).status)' "$1"
}

check_run() {
    say "waiting for step $STEPS"
    wait_for 240 "step $STEPS" has_steps
    compose exec -T trainer tail -n 1 /var/lib/paceline/run/metrics.jsonl
    answers http://127.0.0.1:8080/
    answers http://127.0.0.1:8000/v1/models
    unhealthy=$(compose ps --format '{{.Service}} {{.Health}}' | grep -v ' healthy$' || true)
    [ -z "$unhealthy" ] || { echo "not healthy: $unhealthy" >&2; return 1; }
    for service in coordinator router rollout reward gateway dashboard; do
        # Only the trainer and the engine may carry torch.
        ! compose exec -T $service python -c 'import torch' 2> /dev/null || { echo "torch in $service" >&2; return 1; }
    done
    compose ps
}

trap clean_up EXIT
if docker info > /dev/null 2>&1 && docker compose version > /dev/null 2>&1; then
    say "building with the engine that is here"
    compose build
else
    install_engine
    start_engine
    make_base_images
    collect_wheels
    build_images
fi
say "starting everything"
compose up --wait --wait-timeout 300 --no-build
check_run
say "passed"
