#define SLIP_ISA avx2
#include "simd_avx2.h"
#include "draft.h"

const Kernels* kernels_avx2() { return &avx2::kernels; }
