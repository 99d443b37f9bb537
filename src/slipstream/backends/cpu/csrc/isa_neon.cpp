#define SLIP_ISA neon
#include "simd_neon.h"
#include "draft.h"

const Kernels* kernels_neon() { return &neon::kernels; }
