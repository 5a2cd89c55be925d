#define OPENER cot_open_driver
#define EXPORTS "shim/driver_exports.inc"
#include "exports.h"
