#!/bin/sh
# Slurm's TaskProlog: what is printed becomes the environment of the job's tasks. A name that the script has given a
# step stays. Where the daemon is does not: tasks have that from the batch script, whose node has another one.
folder=/run/gradcomm/slurm/$SLURM_JOB_ID.$SLURMD_NODENAME
echo "export GC_NODE_SOCKET=$folder/daemon.sock"
echo "export GC_NODE_ADMIN=unix:$folder/admin.sock"
case ${GC_JOB:-} in
"" | slurm-[0-9]*) echo "export GC_JOB=slurm-$SLURM_JOB_ID" ;;
esac
