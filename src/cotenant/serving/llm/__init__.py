"""Language models behind one door: programs that speak OpenAI's API, started, evicted and brought back on demand."""

from cotenant.core.extras import require

require("serve", "orjson", "httptools")
