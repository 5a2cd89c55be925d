#!/bin/sh
# For Epilog= in slurm.conf: releases the share of the job.
PATH=/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin COTENANT_DIR=/run/cotenant
[ -r /etc/cotenant/slurm.env ] && . /etc/cotenant/slurm.env
[ -e "$COTENANT_DIR/slurm-$SLURM_JOB_ID.job" ] || exit 0 # the job requested no share
PATH=${COTENANT_PATH:-$PATH}
export PATH COTENANT_DIR ${COTENANT_CACHE:+COTENANT_CACHE}
exec cotenant slurm epilog --dir "$COTENANT_DIR"
