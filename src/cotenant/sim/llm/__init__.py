"""Language models in virtual time: token traces, batches per iteration, parts of GPUs, models that come and go."""

from cotenant.core.extras import require

require("sim", "numpy")
