"""Language models behind one endpoint: programs with OpenAI's API, started, evicted and brought back on demand."""

from cotenant.core.extras import require

require("serve", "orjson", "httptools")
