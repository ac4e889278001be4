// The kernels of one instruction set. Compiled once for each, with -DKERNELS=kernels_NAME and that set's flags.
#include "decoder.h"
#include "recurrence.h"

extern "C" __attribute__((visibility("hidden"))) const Kernels KERNELS;
const Kernels KERNELS = {PANEL, VL, pack, pack_codes, forward, linear, experts, argmax, attend, scan, gated_norm};
