// The sampling rule of engine/sampling.py, native: token(p) = argmax(filtered(logit) / T + Gumbel(seed, p)).
#pragma once
#include "model.h"

// The noise of one token at one position.
double gumbel_noise(uint64_t seed, uint64_t position, int32_t token);

// temperature > 0 or 0 for greedy; top_k 0, top_p 1 and min_p 0 are off. Ties go to the lowest id.
int sample_token(const Kernels& kernels, const float* logits, int vocab, double temperature, int top_k, double top_p, double min_p,
                 uint64_t seed, uint64_t position);
