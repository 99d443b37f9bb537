#include "drafter.h"

#include <algorithm>

Drafter::Drafter(const Model& target, const DrafterShape& s, std::vector<int32_t> given_taps, std::vector<int32_t> given_tokens,
                 std::vector<Layer> given)
    : Model(s.draft_vocab, s.hidden, s.eps, false, std::move(given), target.threads, target.kernels, MAX_BLOCK),
      shape(s), taps(std::move(given_taps)), tokens(std::move(given_tokens)) {
    fused.resize(MAX_BLOCK, s.taps * target.hidden);
    logits.resize((size_t)s.rows * s.draft_vocab);
    states.resize((size_t)s.rows * s.rank);
    best.resize((size_t)s.rows * s.candidates);
    bias.resize((size_t)s.draft_vocab * s.rank);
}

Matrix* Drafter::own_matrix(const char* name) {
    auto is = [&](const char* s) { return !strcmp(name, s); };
    return is("fuse") ? &fuse : is("markov.prev") ? &prev : is("markov.state") ? &state : is("markov.out") ? &out : nullptr;
}

std::vector<float>* Drafter::own_vector(const char* name) {
    auto is = [&](const char* s) { return !strcmp(name, s); };
    return is("tap_norm") ? &tap_norm : is("context_norm") ? &context_norm : is("mask_embedding") ? &mask : is("confidence.y") ? &confidence_y
         : is("confidence.m") ? &confidence_m : is("confidence.p") ? &confidence_p : is("confidence.b") ? &confidence_b : nullptr;
}

int Drafter::tap_of(int layer) const {
    const auto at = std::find(taps.begin(), taps.end(), layer);
    return at == taps.end() ? -1 : (int)(at - taps.begin());
}

DraftState::DraftState(const Drafter& drafter, int capacity)
    // A block's own keys lie behind the text. No ring: a rewind may go back anywhere.
    : cache(drafter, capacity + MAX_BLOCK, false), width((int)drafter.tap_norm.size()) {
    taps.resize((size_t)CHUNK * width);
}

void DraftState::rewind(int to) {
    if (to < cache.length) cache.rewind(to);
    pending = std::min(pending, to - cache.length);
    first = std::min(first, to);
}

void DraftState::restart(int length, int from) {
    cache.rewind(0);
    cache.advanced(length);
    pending = 0;
    first = from;
}
