#include "sample.h"

#include <algorithm>

namespace {

// Philox4x32-10 (Salmon et al. 2011): counter (block, 0, position), key the seed; word i % 4 belongs to token i.
struct Noise {
    uint64_t seed, position;
    uint32_t block = ~0u, words[4] = {};

    uint32_t word(uint32_t token) {
        if (token / 4 != block) fill(block = token / 4);
        return words[token % 4];
    }

    void fill(uint32_t counter) {
        uint32_t c[4] = {counter, 0, (uint32_t)position, (uint32_t)(position >> 32)};
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            const uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
            const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
            memcpy(c, next, sizeof c);
        }
        memcpy(words, c, sizeof c);
    }
};

double gumbel(uint32_t word) { return -log(-log1p(-((word + 0.5) * 0x1p-32))); }

struct Best {
    double score = -INFINITY;
    int token = -1;
    void offer(int t, double s) {
        if (s > score || (s == score && t < token)) score = s, token = t;
    }
};

struct Candidate { float logit; int token; };

bool before(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.token < b.token; }

// The kept tokens in order (logit descending, id ascending).
std::vector<Candidate> filter(const Kernels& kernels, const float* logits, int vocab, float top, double temperature, int top_k,
                              double top_p, double min_p) {
    std::vector<Candidate> kept;
    const bool mass_needed = top_p < 1;
    const double whole = mass_needed && !top_k ? kernels.exp_sum(logits, vocab, top, (float)(1 / temperature)) : 0;
    // Widen the part of the vocabulary that is sorted until it surely holds every token the filters keep.
    for (double reach = 12;; reach *= 4) {
        const double floor = top - reach * temperature;
        kept.clear();
        for (int i = 0; i < vocab; i++)
            if (logits[i] >= floor) kept.push_back({logits[i], i});
        const bool all = (int)kept.size() == vocab || reach > 1e6;
        if (top_k && !all && (int)kept.size() < top_k) continue;
        std::sort(kept.begin(), kept.end(), before);
        if (top_k && (int)kept.size() > top_k) kept.resize(top_k);
        if (!mass_needed) {
            if (!top_k && min_p > 0 && !all && exp(-reach) > min_p) continue;
            break;
        }
        double total = whole, mass = 0;
        if (top_k) {
            total = 0;
            for (const Candidate& c : kept) total += exp(((double)c.logit - top) / temperature);
        }
        size_t n = 0;
        while (n < kept.size() && (n == 0 || mass < top_p * total)) mass += exp(((double)kept[n++].logit - top) / temperature);
        if (!top_k && !all && mass < top_p * total) continue;
        kept.resize(n);
        break;
    }
    if (min_p > 0) {
        size_t n = 1;
        while (n < kept.size() && exp(((double)kept[n].logit - top) / temperature) >= min_p) n++;
        kept.resize(std::min(n, kept.size()));
    }
    return kept;
}

}  // namespace

double gumbel_noise(uint64_t seed, uint64_t position, int32_t token) { return gumbel(Noise{seed, position}.word((uint32_t)token)); }

int sample_token(const Kernels& kernels, const float* logits, int vocab, double temperature, int top_k, double top_p, double min_p,
                 uint64_t seed, uint64_t position) {
    const int first = kernels.argmax(logits, vocab);
    if (temperature == 0) return first;
    const float top = logits[first];
    Noise noise{seed, position};
    Best best;
    if (top_k > 0 || top_p < 1 || min_p > 0) {
        for (const Candidate& c : filter(kernels, logits, vocab, top, temperature, top_k, top_p, min_p))
            best.offer(c.token, c.logit / temperature + gumbel(noise.word((uint32_t)c.token)));
        return best.token;
    }
    const double of_first = gumbel(noise.word((uint32_t)first));
    best.offer(first, top / temperature + of_first);
    std::vector<int32_t> others(vocab);
    const int n = kernels.contenders(logits, vocab, temperature, top, of_first, seed, position, others.data());
    for (int i = 0; i < n; i++) best.offer(others[i], logits[others[i]] / temperature + gumbel(noise.word((uint32_t)others[i])));
    return best.token;
}
