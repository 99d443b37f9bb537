#define SLIP_COMPACT  // arrays, not registers: unrolling would only cost
#define SLIP_ISA portable
#include "simd_portable.h"
#include "draft.h"

const Kernels* kernels_portable() { return &portable::kernels; }
