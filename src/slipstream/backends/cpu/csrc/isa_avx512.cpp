#define SLIP_ISA avx512
#include "simd_avx512.h"
#include "draft.h"

const Kernels* kernels_avx512() { return &avx512::kernels; }
