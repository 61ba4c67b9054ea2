#!/bin/bash
# Whether a service is ready:  healthy HOST:PORT   of its OCTAVO_METRICS_LISTEN; exits 0 when it is.
#
# A container's check runs every few seconds, for each service. In Python with a gRPC client it took 0.4 s of a core;
# this takes a few milliseconds, in the shell that every image has.

host=${1%:*} port=${1##*:}
exec 3<>"/dev/tcp/$host/$port" || exit 1
printf 'GET /health HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$1" >&3
read -r -t 5 _ status _ <&3
[ "$status" = 200 ]
