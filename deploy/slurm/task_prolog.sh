#!/bin/sh
# Slurm's TaskProlog: what is printed becomes the environment of the job's tasks.
folder=/run/gradcomm/slurm/$SLURM_JOB_ID.$SLURMD_NODENAME
echo "export GC_NODE_SOCKET=$folder/daemon.sock"
echo "export GC_NODE_ADMIN=unix:$folder/admin.sock"
echo "export GC_JOB=slurm-$SLURM_JOB_ID"
