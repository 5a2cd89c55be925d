"""What runs inside a training job: the loop, checkpoints, the lease. Standard library only; torch where it is there."""
