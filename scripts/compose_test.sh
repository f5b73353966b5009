#!/usr/bin/env bash
# Build the images, run deploy/compose.yaml with the tiny model for a few steps, look at it from outside, take it down.
#
# With a container engine and compose v2 at hand these are used. Without, as root on Debian 12, an engine is installed
# and run in a network namespace of its own, so that the machine's network stays as it is; the base images are then made
# from Debian packages, and pip gets its wheels from this machine, since nothing in the namespace reaches outside.
#
# Variables: COMPOSE_TEST_DIR (default build; a folder paceline-compose is made in it and removed again, about 8 GB),
# COMPOSE_TEST_STEPS (default 3), COMPOSE_TEST_KEEP=1 (nothing is taken down, and the next run goes on from there).
set -euo pipefail
cd "$(dirname "$0")/.."

SERVICES="coordinator dashboard engine gateway reward rollout router trainer"
STEPS=${COMPOSE_TEST_STEPS:-3}
NETNS=paceline-compose
DIR=${COMPOSE_TEST_DIR:-build}/paceline-compose
mkdir -p "$DIR"
DIR=$(cd "$DIR" && pwd)
INSIDE=""
# The name in the run file.
RUN_ID=sort4
WHEEL_SERVER=""
export PACELINE_PROJECT=$DIR/project PACELINE_RUN_FILE=examples/sort4/run.toml
# Long enough not to end in the middle of the test.
export PACELINE_OVERRIDES="run.steps=2000 data.epochs=50 ${PACELINE_OVERRIDES:-}"

say() { printf '\n== %s\n' "$*"; }
compose() { docker compose -f deploy/compose.yaml "$@"; }

clean_up() {
    code=$?
    trap - EXIT
    [ $code -eq 0 ] || { compose ps -a; compose logs --tail 30; } || true
    [ "${COMPOSE_TEST_KEEP:-}" != 1 ] || exit $code
    compose down -v --timeout 20 > /dev/null 2>&1 || true
    [ -z "$WHEEL_SERVER" ] || kill "$WHEEL_SERVER" || true
    # The files of an engine that did not stop are left alone.
    if [ -z "$INSIDE" ] || stop_engine; then rm -rf "$DIR"; else code=1; fi
    exit $code
}

stop_engine() {
    say "stopping the engine"
    if [ -f "$DIR/engine.pid" ]; then
        local engine
        engine=$(cat "$DIR/engine.pid")
        kill "$engine" && wait_for 60 "the end of the engine" gone "$engine" || return 1
    fi
    ip netns del $NETNS
    # The engine leaves the mount of its own network namespace.
    if mountpoint -q "$DIR/exec/netns/default"; then umount "$DIR/exec/netns/default"; fi
}

gone() { ! kill -0 "$1"; }

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
    if docker info > /dev/null 2>&1; then
        echo "it still runs"
        return
    fi
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
    if [ ! -f "$DIR/base.tar" ]; then
        mmdebstrap --quiet --variant=minbase --dpkgopt='path-exclude=/usr/share/doc/*' \
            --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
            --include=python3,python3-venv,python-is-python3,ca-certificates,redis-server \
            bookworm "$DIR/base.part.tar" "$MIRROR"
        mv "$DIR/base.part.tar" "$DIR/base.tar"
    fi
    docker import "$DIR/base.tar" python:3.11-slim
    docker tag python:3.11-slim redis:7
}

collect_wheels() {
    say "collecting wheels"
    # The last two: what builds the package, and what redis needs on a Python before 3.11.3.
    # The images have the Python of Debian 12.
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the wheels must be for Python 3.11")'
    [ -d "$DIR/wheels" ] || .venv/bin/python -m pip wheel -q --disable-pip-version-check -w "$DIR/wheels.part" \
        -c constraints.txt ".[${SERVICES// /,}]" 'hatchling>=1.27,<2' async-timeout
    [ -d "$DIR/wheels" ] || mv "$DIR/wheels.part" "$DIR/wheels"
    $INSIDE .venv/bin/python -m http.server 8765 --bind 127.0.0.1 --directory "$DIR/wheels" > "$DIR/wheels.log" 2>&1 &
    WHEEL_SERVER=$!
}

# build_images [ARGUMENT...]: with further arguments of docker compose
build_images() {
    say "building the images"
    local began=$SECONDS
    compose "$@" --progress plain build > "$DIR/build.log" 2>&1 || { tail -n 40 "$DIR/build.log" >&2; return 1; }
    echo "built in $((SECONDS - began)) s"
    docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -E '^(paceline/|python:3.11-slim|redis:7 )'
}

# In the network namespace only its loopback reaches anything: the wheels.
build_images_inside() {
    local service
    echo "services:" > "$DIR/network.yaml"
    for service in $SERVICES; do echo "  $service: {build: {network: host}}" >> "$DIR/network.yaml"; done
    PACELINE_PIP_OPTIONS="--no-index --find-links http://127.0.0.1:8765/" build_images -f "$DIR/network.yaml"
    kill "$WHEEL_SERVER"
    WHEEL_SERVER=""
}

# The services run as a user of their own, who must be able to read the project whatever this user's umask was.
make_project() {
    mkdir -p "$DIR/project/examples" "$DIR/project/tests/assets"
    cp -R examples/sort4 "$DIR/project/examples/"
    cp -R tests/assets/sort4 "$DIR/project/tests/assets/"
    chmod -R a+rX "$DIR/project"
}

# probe [--more STEPS]: what scripts/compose_probe.py says of the run, from inside
probe() {
    compose exec -T coordinator python - run --run-id "$RUN_ID" --metrics /var/lib/paceline/run/metrics.jsonl "$@" \
        < scripts/compose_probe.py
}

check_health() {
    local unhealthy
    unhealthy=$(compose ps -a --format '{{.Service}} {{.Health}}' | grep -v ' healthy$' || true)
    [ -z "$unhealthy" ] || { echo "not healthy: $unhealthy" >&2; return 1; }
    [ "$(compose ps -q | wc -l)" -eq 9 ] || { echo "not nine containers" >&2; return 1; }
}

check_images() {
    local service
    for service in $SERVICES; do
        # Only the trainer and the engine may carry torch.
        case $service in trainer | engine) continue ;; esac
        if compose exec -T "$service" python -c 'import torch' 2> /dev/null; then
            echo "torch in $service" >&2
            return 1
        fi
    done
}

check_run() {
    say "waiting for $STEPS steps"
    probe --more "$STEPS"
    $INSIDE python3 scripts/compose_probe.py http http://127.0.0.1:8000 http://127.0.0.1:8080
    check_health
    check_images
    compose ps --format 'table {{.Service}}\t{{.Status}}'
}

# A container that `docker kill` stopped is held to be stopped on purpose; one whose process dies comes back by itself.
check_deaths() {
    local service before
    for service in trainer redis; do
        say "docker compose kill $service, and up again"
        compose kill -s KILL $service
        compose ps -a --format '{{.Service}} {{.Status}}' $service
        compose up --wait --wait-timeout 120 --no-build $service
        probe --more "$STEPS"
    done
    for service in engine rollout trainer; do
        say "killing the process of $service; its restart policy brings it back"
        before=$(restarts $service)
        kill_process $service
        wait_for 60 "a restart of $service" restarted $service "$before"
        probe --more "$STEPS"
    done
    wait_for 60 "health" check_health
}

restarts() { docker inspect --format '{{.RestartCount}}' "$(compose ps -aq "$1")"; }

restarted() { [ "$(restarts "$1")" -gt "$2" ]; }

# From inside, as the engine may be on another machine. The first process, an init, cannot be killed from there.
# shellcheck disable=SC2016 # for the shell in the container
kill_process() {
    compose exec -T "$1" sh -c 'kill -KILL $(cat /proc/1/task/1/children)' || true
}

take_down() {
    say "taking everything down"
    compose down -v --timeout 20
    [ -z "$(docker ps -aq --filter label=com.docker.compose.project=paceline)" ]
    [ -z "$(docker volume ls -q --filter label=com.docker.compose.project=paceline)" ]
}

trap clean_up EXIT
if docker info > /dev/null 2>&1 && docker compose version > /dev/null 2>&1; then
    build_images
else
    install_engine
    start_engine
    make_base_images
    collect_wheels
    build_images_inside
fi
make_project
say "starting everything"
began=$SECONDS
compose up --wait --wait-timeout 300 --no-build
echo "up and healthy in $((SECONDS - began)) s"
check_run
check_deaths
take_down
say "passed"
