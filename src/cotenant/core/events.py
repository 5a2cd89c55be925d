"""Kinds of events in a record, and their reasons. The numbers are fixed: the simulator's compiled code writes them."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Kind of an event: what happened to a job."""

    ARRIVE = 0  #: the job arrived at the scheduler
    START = 1  #: the job got its share (GPUs, CPU and memory) for the first time
    RESUME = 2  #: the job got a share again after waiting
    MOVE = 3  #: the job moved to other GPUs without waiting
    RESIZE = 4  #: the job kept its GPUs, but its CPU or memory changed
    PREEMPT = 5  #: the job lost its share before it was finished
    FINISH = 6  #: the job's work is done; its share (GPUs, CPU and memory) is free
    WAIT = 7  #: the scheduler considered the job, but the job did not get a share
    PROFILE = 8  #: a policy that partitions GPUs began to measure the job
    REPARTITION = 9  #: the GPU of the job changes its partition
    REJECT = 10  #: the job can never run on this cluster


class Reason(IntEnum):
    """Why an event happened to a job."""

    NONE = 0
    GPUS_FULL = 1  #: every GPU is held by jobs earlier in the policy's order
    GANG_TOO_LARGE_NOW = 2  #: some GPUs are free, but fewer than the job needs
    NO_CPU_OR_MEMORY = 3  #: GPUs are free, but no node with free GPUs has enough free CPU or memory
    NO_GPU_OF_MODEL = 4  #: GPUs are free, but not of a model that the job accepts
    IN_ORDER = 5  #: the job was next in the policy's order
    RESERVED = 6  #: the job had waited longer than the reservation time, so it went first
    GAVE_WAY = 7  #: the job returned CPU and memory above its proportional share, which other jobs needed
    GOT_IDEAL = 8  #: enough CPU and memory became free to give the job as much as it can use
    REPLACED = 9  #: all jobs were placed on the cluster again in this round
    OUTRANKED = 10  #: jobs earlier in the policy's order took the job's GPUs
    DONE = 11
    NEW_LAYOUT = 12  #: the job's GPU got another MIG layout
    MEASURED = 13  #: the job's GPU was switched to MPS to measure the jobs on it
    BELOW_FLOOR = 14  #: no free slice of the job's GPU satisfies the job's QoS minimum
    FAILED = 15  #: the job's processes failed
    LOST = 16  #: the job's node, or the process that ran the job there, was lost
    CANCELLED = 17  #: the user cancelled the job
    TAKEN_DOWN = 18  #: the fleet was taken down; the job continues when the fleet is started again
    KILLED = 19  #: the job did not end within its grace time, so it was killed: work since its last checkpoint is lost
    NOT_CHOSEN = 20  #: the policy gave the GPUs to other jobs that benefit more
    OTHER_SPEED = 21  #: the job's speed changed, because of its own progress or of another job on its GPU
    UNSAVED = 22  #: the job ended by the signal that asked it to stop, so its work since its last checkpoint is lost
