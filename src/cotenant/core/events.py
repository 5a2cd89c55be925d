"""Kinds of events in a record, and their reasons. Compiled kernels write these numbers."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What happened to a job."""

    ARRIVE = 0  #: became known to the scheduler
    START = 1  #: got its share for the first time
    RESUME = 2  #: got a share again after waiting
    MOVE = 3  #: kept running on other GPUs
    RESIZE = 4  #: kept its GPUs; CPU or memory changed
    PREEMPT = 5  #: lost its share, unfinished
    FINISH = 6  #: all work done; its share is free
    WAIT = 7  #: was considered and did not get a share
    PROFILE = 8  #: began to be measured (partition policies)
    REPARTITION = 9  #: its GPU changes its partition
    REJECT = 10  #: will never run on this cluster


class Reason(IntEnum):
    """Why it happened."""

    NONE = 0
    GPUS_FULL = 1  #: every GPU is held by jobs earlier in the order
    GANG_TOO_LARGE_NOW = 2  #: some GPUs are free, fewer than the gang needs
    NO_CPU_OR_MEMORY = 3  #: GPUs are free, but no node with free GPUs has enough free CPU or memory
    NO_GPU_OF_MODEL = 4  #: free GPUs are not of a model it accepts
    IN_ORDER = 5  #: was next in the ordering
    RESERVED = 6  #: waited longer than the reservation time and went first
    GAVE_WAY = 7  #: returned CPU and memory above its proportional share, for other jobs
    GOT_IDEAL = 8  #: CPU and memory for its ideal speed became free
    REPLACED = 9  #: all jobs were placed again in this round
    OUTRANKED = 10  #: jobs earlier in the order took its GPUs
    DONE = 11
    NEW_LAYOUT = 12  #: its GPU got another MIG layout
    MEASURED = 13  #: its GPU was switched to MPS to measure the jobs on it
    BELOW_FLOOR = 14  #: no free slice there satisfies its QoS minimum
    FAILED = 15  #: its processes failed
    LOST = 16  #: its node, or the process that ran it there, was lost
    CANCELLED = 17  #: its user cancelled it
    TAKEN_DOWN = 18  #: the fleet was taken down; the job continues when it is started again
    KILLED = 19  #: it did not end within its grace time: work since its last checkpoint is lost
    NOT_CHOSEN = 20  #: the policy gave the GPUs to other jobs that benefit more
    OTHER_SPEED = 21  #: its own progress, or the other job on its GPU, changed its speed
