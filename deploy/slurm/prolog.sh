#!/bin/sh
# Slurm's Prolog: a daemon for the job on this node, as the job's user. Also see gradcomm.conf, task_prolog.sh, epilog.sh.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
conf=${GRADCOMM_CONF:-/etc/gradcomm/slurm.conf}
# a shell that cannot read it would fail, and Slurm take the node out of service
[ -r "$conf" ] || { echo "gradcomm: cannot read $conf" >&2; exit 0; }
set -a
. "$conf"
GRADCOMM_NODES=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-$SLURM_NODELIST}")
set +a
"$GRADCOMM_PREFIX/bin/python" "$GRADCOMM_PREFIX/share/slurm/job_daemon.py" start
exit 0
