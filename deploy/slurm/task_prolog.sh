#!/bin/sh
# Slurm's TaskProlog: what is printed becomes the environment of the job's tasks. What they have set themselves stays.
folder=/run/gradcomm/slurm/$SLURM_JOB_ID.$SLURMD_NODENAME
[ -n "${GC_NODE_SOCKET:-}" ] || echo "export GC_NODE_SOCKET=$folder/daemon.sock"
[ -n "${GC_NODE_ADMIN:-}" ] || echo "export GC_NODE_ADMIN=unix:$folder/admin.sock"
[ -n "${GC_JOB:-}" ] || echo "export GC_JOB=slurm-$SLURM_JOB_ID"
