#!/bin/bash
# @command@
# Read it, change it, and submit it: sbatch FILE. Options of sbatch override the lines below. A cluster that
# refuses the line for devices (Invalid generic resource) does not know them: remove it, or print with --no-gres.
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=USR1@@grace@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --chdir=@here@
@more@

@environment@
# The hosts meet on the first one of this job, at a port of the job's own.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))

newest() { ls -d @folder@/checkpoints/step_* 2>/dev/null | tail -n 1; }
before=$(newest)

# One task a host, which starts the ranks of its host. USR1 (--signal, above) reaches the tasks and not this
# script: all ranks save, and mm-train ends with 75. `exec` leaves no shell that the signal would end.
srun --cpu-bind=none bash -c 'exec "$@" --node-rank="$SLURM_NODEID"' node \
  @train@ \
  --nproc=@nproc@ --nnodes=@nodes@ --rdzv-endpoint="$host:$port" --rdzv-id="$SLURM_JOB_ID"
code=$? again=no

case $code in
  75 | 138) again=yes ;;                                     # saved and stopped on request; 138: before it began
  69 | 13[4-9]) [ "$(newest)" = "$before" ] || again=yes ;;  # a rank or host was lost, or a device failed; without
esac                                                         # a new checkpoint, the next try would fail too
if [ "$again" = yes ]; then
  echo "mm-train ended with $code: job $SLURM_JOB_ID waits in the queue again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
