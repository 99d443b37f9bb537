// The C ABI that backend.py binds with ctypes. Shapes were checked there; what can still fail is memory, told by null or -1.
#include <stdlib.h>

#include <algorithm>
#include <new>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "drafter.h"
#include "sample.h"

const Kernels* kernels_portable();
#if defined(SLIP_X86)
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
#elif defined(SLIP_ARM64)
const Kernels* kernels_neon();
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

static std::vector<const Kernels*> supported() {  // best first
    std::vector<const Kernels*> found;
#if defined(SLIP_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        found.push_back(kernels_avx512());
    if (avx2) found.push_back(kernels_avx2());
#elif defined(SLIP_ARM64)
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
#endif
        found.push_back(kernels_neon());
#endif
    found.push_back(kernels_portable());
    return found;
}

#define API extern "C" __attribute__((visibility("default")))

// The i-th instruction set this machine runs, best first; null past the last.
API const char* slip_isa(int i) {
    static const auto found = supported();
    return i >= 0 && i < (int)found.size() ? found[i]->name : nullptr;
}

API Model* slip_model_new(int vocab, int hidden, float eps, int tied, int n_layers, const LayerShape* shapes, const float* const* inv_freq,
                          int threads, int isa) try {
    std::vector<Layer> layers(n_layers);
    for (int i = 0; i < n_layers; i++) {
        layers[i].shape = shapes[i];
        layers[i].inv_freq.assign(inv_freq[i], inv_freq[i] + shapes[i].rotary_pairs);
    }
    return new Model(vocab, hidden, eps, tied != 0, std::move(layers), std::make_shared<Pool>(threads), supported().at(isa));
} catch (...) { return nullptr; }

// A drafter of `target`, which owns it; its tensors are loaded as a model's, then slip_drafter_ready.
API Model* slip_drafter_new(Model* target, const DrafterShape* shape, const int32_t* taps, const int32_t* tokens, int n_layers,
                            const LayerShape* shapes, const float* inv_freq) try {
    std::vector<Layer> layers(n_layers);
    for (int i = 0; i < n_layers; i++) {
        layers[i].shape = shapes[i];
        layers[i].inv_freq.assign(inv_freq, inv_freq + shapes[i].rotary_pairs);
    }
    target->drafter = std::make_unique<Drafter>(*target, *shape, std::vector<int32_t>(taps, taps + shape->taps),
                                                std::vector<int32_t>(tokens, tokens + shape->draft_vocab), std::move(layers));
    return target->drafter.get();
} catch (...) { return nullptr; }

API int slip_drafter_ready(Model* target) try {
#ifdef __GLIBC__
    malloc_trim(0);  // what reading the weights left on the heap
#endif
    target->kernels->take_head(*target->drafter, *target);
    return 0;
} catch (...) { return -1; }

API void slip_drafter_free(Model* target) { target->drafter.reset(); }

// scores and candidates: (rows, candidates) each, or null.
API int slip_draft(Model* m, Cache* c, int anchor, double temperature, uint64_t seed, int32_t* tokens, float* confidence, float* scores,
                   int32_t* candidates) try {
    std::lock_guard<std::mutex> lock(m->busy);
    m->kernels->draft(*m, *c, {anchor, temperature, seed, tokens, confidence, scores, candidates});
    return 0;
} catch (...) { return -1; }

API void slip_model_free(Model* m) { delete m; }

constexpr int OWN = -2;

// Of "experts.3.up" the expert, of "shared_up" and "up" what every row takes; `name` is left at "up". Else null.
static Gated* gated_named(Layer& l, const char*& name) {
    if (!strncmp(name, "experts.", 8)) {
        char* end;
        const long e = strtol(name + 8, &end, 10);
        if (e < 0 || e >= (long)l.experts.size() || *end != '.') return nullptr;
        name = end + 1;
        return &l.experts[e];
    }
    const char* rest = strncmp(name, "shared_", 7) ? name : name + 7;
    if (strcmp(rest, "gate") && strcmp(rest, "up") && strcmp(rest, "down")) return nullptr;
    name = rest;
    return &l.every;
}

// Names follow models/spec.py; layer is -1 for tensors outside layers, -2 for those that only a drafter has.
static Matrix* matrix_named(Model& m, int layer, const char* name) {
    auto is = [&](const char* s) { return !strcmp(name, s); };
    if (layer == OWN) return static_cast<Drafter&>(m).own_matrix(name);
    if (layer < 0) return is("embed") ? &m.embed : is("head") ? &m.head : nullptr;
    Layer& l = m.layers[layer];
    if (Gated* w = gated_named(l, name)) return is("gate") ? &w->gate : is("up") ? &w->up : is("down") ? &w->down : nullptr;
    return is("q") ? &l.q : is("k") ? &l.k : is("v") ? &l.v : is("o") ? &l.o : is("router") ? &l.router : nullptr;
}

static std::vector<float>* vector_named(Model& m, int layer, const char* name) {
    auto is = [&](const char* s) { return !strcmp(name, s); };
    if (layer == OWN) return static_cast<Drafter&>(m).own_vector(name);
    if (layer < 0) return is("final_norm") ? &m.final_norm : nullptr;
    Layer& l = m.layers[layer];
    if (Gated* w = gated_named(l, name))
        return is("gate_bias") ? &w->gate_bias : is("up_bias") ? &w->up_bias : is("down_bias") ? &w->down_bias : nullptr;
    return is("attention_norm") ? &l.attention_norm : is("ffn_norm") ? &l.ffn_norm : is("q_bias") ? &l.q_bias : is("k_bias") ? &l.k_bias
         : is("v_bias") ? &l.v_bias : is("q_norm") ? &l.q_norm : is("k_norm") ? &l.k_norm
         : is("o_bias") ? &l.o_bias : is("sinks") ? &l.sinks : is("router_bias") ? &l.router_bias : is("correction") ? &l.correction : nullptr;
}

API int slip_vector(Model* m, int layer, const char* name, const float* values, int n) try {
    std::vector<float>* to = vector_named(*m, layer, name);
    if (!to) return -1;
    to->assign(values, values + n);
    return 0;
} catch (...) { return -1; }

// Sets aside memory for a matrix; its rows follow through slip_matrix_rows.
API int slip_matrix(Model* m, int layer, const char* name, int format, int rows, int cols) try {
    Matrix* to = matrix_named(*m, layer, name);
    if (!to || format < 0 || format >= FORMATS) return -1;
    *to = matrix_shape((Format)format, rows, cols);
    to->data = m->place(to->bytes());
    return 0;
} catch (...) { return -1; }

API int slip_matrix_rows(Model* m, int layer, const char* name, int row0, int n, const uint8_t* raw) {
    Matrix* to = matrix_named(*m, layer, name);
    if (!to || row0 % 16 || row0 + n > to->rows) return -1;
    matrix_pack(*to, row0, n, raw);
    return 0;
}

// One row dequantised, for tests and for reading embeddings.
API int slip_matrix_row(Model* m, int layer, const char* name, int row, float* out) {
    Matrix* from = matrix_named(*m, layer, name);
    if (!from || row < 0 || row >= from->rows) return -1;
    matrix_row(*from, row, out);
    return 0;
}

API Cache* slip_cache_new(Model* m, int capacity) try { return new Cache(*m, capacity); } catch (...) { return nullptr; }
API void slip_cache_free(Cache* c) { delete c; }
API int slip_cache_length(const Cache* c) { return c->length; }
API int slip_cache_can_rewind(const Cache* c, int to) { return c->can_rewind(to); }
API void slip_cache_rewind(Cache* c, int to) { c->rewind(to); }

API size_t slip_cache_state_bytes(const Model* m, const Cache* c) { return cache_state_bytes(*m, *c); }
API void slip_cache_export(Model* m, Cache* c, uint8_t* out) {
    std::lock_guard<std::mutex> lock(m->busy);
    cache_export(*m, *c, out);
}
API int slip_cache_import(const Model* m, Cache* c, const uint8_t* data, size_t n) { return cache_import(*m, *c, data, n) ? 0 : -1; }

API int slip_prefill(Model* m, Cache* c, const int32_t* tokens, int n) try {
    std::lock_guard<std::mutex> lock(m->busy);
    for (int at = 0; at < n; at += CHUNK) m->kernels->pass(*m, *c, tokens + at, std::min(CHUNK, n - at), nullptr);
    return 0;
} catch (...) { return -1; }

API int slip_verify(Model* m, Cache* c, const int32_t* tokens, int rows, float* logits) try {
    std::lock_guard<std::mutex> lock(m->busy);
    m->kernels->pass(*m, *c, tokens, rows, logits);
    return 0;
} catch (...) { return -1; }

API int slip_sample(const Model* m, const float* logits, int vocab, double temperature, int top_k, double top_p, double min_p, uint64_t seed,
                    uint64_t position) try {
    return sample_token(*m->kernels, logits, vocab, temperature, top_k, top_p, min_p, seed, position);
} catch (...) { return -1; }
