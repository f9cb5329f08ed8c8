#!/bin/sh
# Slurm's Epilog: the job's daemon on this node ends, and nothing of it is left.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
conf=${GRADCOMM_CONF:-/etc/gradcomm/slurm.conf}
# a shell that cannot read it would fail, and Slurm take the node out of service
[ -r "$conf" ] || { echo "gradcomm: cannot read $conf" >&2; exit 0; }
. "$conf"
"$GRADCOMM_PREFIX/bin/python" "$GRADCOMM_PREFIX/share/slurm/job_daemon.py" stop
exit 0
