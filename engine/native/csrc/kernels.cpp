// The kernels of one instruction set, which the compiler's flags choose.
#include "decoder.h"
#include "recurrence.h"

extern "C" __attribute__((visibility("hidden"))) const Kernels kernels;
const Kernels kernels = {PANEL, VL, pack, pack_codes, pack_low_rank, forward, linear, experts, argmax, attend, scan, heads, gated_norm};
