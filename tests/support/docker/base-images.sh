#!/usr/bin/env bash
#
# Make stand-ins for the base images that deploy/ starts from, where no image registry can be asked: the same names,
# made of Debian 12 packages from the mirror that this machine's apt uses. Debian's python3 is 3.11, its redis 7.0.
#
#   usage: base-images.sh           (root, a Docker engine, mmdebstrap; with-engine.sh calls it for its own engine)
#
# An image is made again when this script or the wheels it takes along have changed.

set -euo pipefail

SUITE=bookworm
LABEL=octavo.stand-in
PYTHON=${PYTHON:-python3}
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt

say() { printf 'base-images: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

# --- what the images take over from this machine -------------------------------------------------------------------

# apt's sources of the suite, as apt resolved them.
sources() {
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    grep -E " $SUITE([-/]| )" | sort -u
}

# Wheels in the folders where this machine's pip looks first: a CPU build of torch, say.
wheels() {
  local folder
  "$PYTHON" -m pip config list 2>/dev/null | sed -n "s/^[^=]*find-links='\(.*\)'$/\1/p" | tr ' ' '\n' | sort -u |
    while read -r folder; do
      [[ ! -d $folder ]] || find "$folder" -maxdepth 1 -name '*.whl'
    done
}

# pip and Python in the image trust whom this machine trusts.
pip_settings() {
  printf '%s\n' '[global]' "cert = $CERTIFICATES" 'find-links = /opt/wheels' 'disable-pip-version-check = true' \
    'timeout = 180'
}

# --- making one ------------------------------------------------------------------------------------------------------

# image NAME PACKAGES [--change INSTRUCTION]...: from these packages and the files under $WORK/NAME.
image() {
  local name=$1 packages=$2 recipe; shift 2
  recipe=$( { cat "$0"; wheels; } | sha256sum | cut -c 1-16)
  [[ $(docker image inspect --format "{{index .Config.Labels \"$LABEL\"}}" "$name" 2>/dev/null) != "$recipe" ]] ||
    return 0
  say "making $name"
  files=$WORK/$name
  mkdir -p "$files"
  "files_of_${name%%:*}"
  local lines; lines=$(sources)
  [[ -n $lines ]] || { apt-get -qq update; lines=$(sources); }
  [[ -n $lines ]] || die "apt on this machine knows no $SUITE archive"
  # usr-is-merged stands in for usrmerge, which would bring in the whole of perl.
  printf '%s\n' "$lines" |
    mmdebstrap --quiet --variant=minbase --mode=root --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
      --include="usr-is-merged,$packages" --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io \
      --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
      --dpkgopt='path-exclude=/usr/share/locale/*' \
      --customize-hook="tar -C '$files' -c . | tar -C \"\$1\" -x --no-same-owner" \
      --customize-hook='chroot "$1" sh -e /finish && rm "$1/finish"' \
      --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/etc/hostname "$1"/etc/resolv.conf' \
      "$SUITE" - - 2>"$WORK/log" |
    docker import --change "LABEL $LABEL=$recipe" "$@" - "$name" >/dev/null ||
    { cat "$WORK/log" >&2; die "could not make $name"; }
  rm -r "$files"
}

# As in the official image: python and pip in /usr/local/bin, headers for C, and pip installs without being told that
# it may.
files_of_python() {
  mkdir -p "$files/etc/ssl/certs" "$files/opt/wheels"
  [[ ! -e $CERTIFICATES ]] || cp -L "$CERTIFICATES" "$files$CERTIFICATES"
  pip_settings > "$files/etc/pip.conf"
  wheels | while read -r wheel; do cp "$wheel" "$files/opt/wheels/"; done
  cat > "$files/finish" <<'FINISH'
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
for name in python python3 python3.11; do ln -s /usr/bin/python3.11 /usr/local/bin/$name; done
for name in pip pip3 pip3.11; do ln -s /usr/bin/pip3 /usr/local/bin/$name; done
FINISH
}

# As in the official image: flags alone mean redis-server, root is dropped, and other containers may connect.
files_of_redis() {
  mkdir -p "$files/usr/local/bin"
  cat > "$files/usr/local/bin/docker-entrypoint.sh" <<'ENTRY'
#!/bin/sh
set -e
case "$1" in -*) set -- redis-server "$@" ;; esac
if [ "$1" = redis-server ] && [ "$(id -u)" = 0 ]; then
  chown redis /data
  exec setpriv --reuid=redis --regid=redis --clear-groups -- "$@" --protected-mode no
fi
exec "$@"
ENTRY
  cat > "$files/finish" <<'FINISH'
chmod 755 /usr/local/bin/docker-entrypoint.sh
mkdir -p /data
FINISH
}

BIN=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
image python:3.11-slim-bookworm ca-certificates,netbase,tzdata,python3,python3-pip,python3-venv,libpython3-dev \
  --change "ENV PATH=$BIN LANG=C.UTF-8 PIP_CERT=$CERTIFICATES SSL_CERT_FILE=$CERTIFICATES" \
  --change "ENV REQUESTS_CA_BUNDLE=$CERTIFICATES" --change 'CMD ["python3"]'
image redis:7-alpine redis-server \
  --change "ENV PATH=$BIN" --change 'VOLUME /data' --change 'WORKDIR /data' --change 'EXPOSE 6379' \
  --change 'ENTRYPOINT ["docker-entrypoint.sh"]' --change 'CMD ["redis-server"]'
