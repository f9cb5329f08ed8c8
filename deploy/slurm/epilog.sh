#!/bin/sh
# Slurm's Epilog: the job's daemon on this node ends, and nothing of it is left.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
. "${GRADCOMM_CONF:-/etc/gradcomm/slurm.conf}"
"$GRADCOMM_PREFIX/bin/python" "$GRADCOMM_PREFIX/share/slurm/job_daemon.py" stop
exit 0
