#define OPENER cot_open_nvml
#define EXPORTS "nvml/nvml_exports.inc"
#include "exports.h"
