// One pass: tokens in, their keys and values in the cache, and logits where asked. Per layer, with a meeting after each:
//
//     norm, quantise -> q k v heads, RoPE, cache write | attention by split | merge, quantise -> output projection + x
//     | norm, quantise -> silu(gate) * up | quantise -> down + x
//
// It knows nothing about sampling, drafts or sessions.
#pragma once
#include "feed.h"

namespace SLIP_ISA {

class Pass : public FeedPass {
public:
    // first: set for a block, whose rows all see the positions from there on and each other; a text's rows see what is before them.
    // coarse: activations of eight bits.
    Pass(Model& m, Cache& c, const int32_t* tokens, int rows, float* logits, int first = -1, bool coarse = false)
        : FeedPass(m, c, rows, coarse), tokens_(tokens), logits_(logits), first_(first) {}

    void run() {
        make_room();
        m_.scratch.reserve_partials(m_, base_, rows_);
        m_.pool.run([](void* pass, int thread) { static_cast<Pass*>(pass)->work(thread); }, this);
        if (c_.draft) c_.draft->pending += rows_;
        c_.advanced(base_ + rows_);
    }

protected:
    void work(int t) {
        embed(t);
        meet();
        layers(t);
        if (logits_) head(t, normalise(t, m_.final_norm.data(), quantised(m_.lm_head())));
    }

    void layers(int t) {
        for (size_t i = 0; i < m_.layers.size(); i++) {
            const Layer& layer = m_.layers[i];
            const bool last_without_logits = !logits_ && i + 1 == m_.layers.size() && tap_of(i) < 0;
            Rows in = normalise(t, layer.attention_norm.data(), quantised(layer.q) || quantised(layer.k) || quantised(layer.v));
            project_heads(t, i, in, last_without_logits);
            meet();
            if (last_without_logits) return;  // only its keys and values are needed
            attend(t, i);
            meet();
            add_product(t, layer.o, merge(t, i), layer.o_bias);
            meet();
            feed_forward(t, layer);
            meet();
            keep_tap(t, tap_of(i));
        }
    }

    int tap_of(size_t layer) const { return c_.draft ? m_.drafter->tap_of((int)layer) : -1; }

    void keep_tap(int t, int tap) {
        if (tap < 0) return;
        const Share s = share(rows_, t, threads_);
        for (int r = s.from; r < s.to; r++)
            memcpy(c_.draft->taps.data() + (size_t)(c_.draft->pending + r) * c_.draft->width + tap * m_.hidden, x(r), m_.hidden * sizeof(float));
    }

    void make_room();  // for the taps of this pass

    float* rope(const Layer& layer, int row) {
        return m_.scratch.rope.data() + ((size_t)layer.rope_table * CHUNK + row) * 2 * layer.shape.rotary_pairs;
    }

    void embed(int t) {
        const Share s = share(rows_, t, threads_);
        for (int r = s.from; r < s.to; r++) {
            matrix_row(m_.embed, tokens_[r], x(r));
            angles(r);
        }
    }

    void angles(int r) {
        for (size_t i = 0; i < m_.layers.size(); i++) {
            const Layer& layer = m_.layers[i];
            if (layer.rope_table != (int)i) continue;
            const int pairs = layer.shape.rotary_pairs;
            float* table = rope(layer, r);
            for (int j = 0; j < pairs; j++) {
                const double angle = (double)(base_ + r) * layer.inv_freq[j];
                table[j] = (float)cos(angle) * layer.shape.rope_scale;
                table[pairs + j] = (float)sin(angle) * layer.shape.rope_scale;
            }
        }
    }

    void project_heads(int t, size_t index, const Rows& in, bool only_kv) {
        const Layer& layer = m_.layers[index];
        const LayerShape& a = layer.shape;
        const int first = only_kv ? a.heads : 0;
        const Share s = share(a.heads + 2 * a.kv_heads - first, t, threads_);
        for (int i = s.from + first; i < s.to + first; i++) {
            if (i < a.heads) project_head(layer, layer.q, layer.q_bias, layer.q_norm, i, in, c_.layers[index], 0);
            else if (i < a.heads + a.kv_heads) project_head(layer, layer.k, layer.k_bias, layer.k_norm, i - a.heads, in, c_.layers[index], 1);
            else project_head(layer, layer.v, layer.v_bias, layer.no_norm, i - a.heads - a.kv_heads, in, c_.layers[index], 2);
        }
    }

    // kind: 0 a query head into scratch, 1 a key head and 2 a value head into the cache.
    void project_head(const Layer& layer, const Matrix& w, const std::vector<float>& bias, const std::vector<float>& norm, int head,
                      const Rows& in, LayerCache& cache, int kind) {
        const LayerShape& a = layer.shape;
        const int dim = kind == 2 ? a.value_dim : a.head_dim, per = dim / 16;
        alignas(64) float out[TILE][MAX_HEAD_DIM];
        for (int r0 = 0; r0 < rows_; r0 += TILE) {
            const int n = rows_ - r0 < TILE ? rows_ - r0 : TILE;
            for (int g = 0; g < per; g++) {
                F acc[TILE];
                product(w, head * per + g, in, r0, n, acc);
                for (int r = 0; r < n; r++) f_store(out[r] + g * 16, biased(acc[r], bias, head * per + g));
            }
            for (int r = 0; r < n; r++) {
                if (!norm.empty()) rms_norm(out[r], norm.data(), m_.eps, dim, out[r]);
                if (kind < 2) rotate(out[r], rope(layer, r0 + r), a.rotary_pairs);
                if (kind == 0) {
                    float* q = query(layer, r0 + r, head);
                    for (int d = 0; d < dim; d += 16) f_store(q + d, f_mul(f_load(out[r] + d), f_set(a.softmax_scale)));
                } else {
                    if (kind == 2 && a.value_scale != 1.f)
                        for (int d = 0; d < dim; d += 16) f_store(out[r] + d, f_mul(f_load(out[r] + d), f_set(a.value_scale)));
                    write_cache(cache, kind == 1, head, dim, base_ + r0 + r, out[r]);
                }
            }
        }
    }

    float* query(const Layer& layer, int row, int head) {
        return m_.scratch.q.data() + ((size_t)row * layer.shape.heads + head) * layer.shape.head_dim;
    }

    static void rotate(float* x, const float* table, int pairs) {
        for (int j = 0; j < pairs; j++) {
            const float c = table[j], s = table[pairs + j], u = x[j], v = x[j + pairs];
            x[j] = u * c - v * s;
            x[j + pairs] = v * c + u * s;
        }
    }

    static void write_cache(const LayerCache& cache, bool is_key, int head, int dim, int position, const float* from) {
        const int slot = position % cache.slots;
        uint16_t half[MAX_HEAD_DIM];
        const F limit = f_set(65504.f);
        for (int d = 0; d < dim; d += 16) f_store_f16(half + d, f_min(f_max(f_load(from + d), f_sub(f_zero(), limit)), limit));
        if (is_key) {
            uint16_t* to = cache.k + ((size_t)head * cache.slots + slot / 16 * 16) * dim + slot % 16;
            for (int d = 0; d < dim; d++) to[d * 16] = half[d];
        } else {
            memcpy(cache.v + ((size_t)head * cache.slots + slot) * dim, half, dim * 2);
        }
    }

    Span seen(const Layer& layer, int row) const {
        if (first_ < 0) return seen_by(base_ + row, layer.shape.window);
        const int from = seen_by(base_, layer.shape.window).lo;
        return {from > first_ ? from : first_, base_ + rows_};
    }

    int first_split(const Layer& layer) const { return seen_by(base_, layer.shape.window).lo / SPLIT; }
    int splits(const Layer& layer) const { return splits_of(layer, base_, rows_); }

    // Items are (split, KV head, tile of queries): enough of them to share even where there are few heads.
    void attend(int t, size_t index) {
        const Layer& layer = m_.layers[index];
        const LayerShape& a = layer.shape;
        const LayerCache& cache = c_.layers[index];
        const int group = a.heads / a.kv_heads, queries = rows_ * group, tiles = (queries + QUERIES - 1) / QUERIES;
        const int n_splits = splits(layer), s0 = first_split(layer);
        // In turn, not in shares: the last split is seldom full.
        for (int item = t; item < n_splits * a.kv_heads * tiles; item += threads_) {
            const int tile = item % tiles, head = item / tiles % a.kv_heads, split = item / tiles / a.kv_heads;
            const int start = (s0 + split) * SPLIT, slot = start % cache.slots;
            const int n = queries - tile * QUERIES < QUERIES ? queries - tile * QUERIES : QUERIES;
            const float* q[QUERIES];
            float *out[QUERIES], *top[QUERIES], *total[QUERIES];
            Span spans[QUERIES];
            for (int i = 0; i < n; i++) {
                const int row = (tile * QUERIES + i) / group, h = head * group + (tile * QUERIES + i) % group;
                const size_t at = ((size_t)row * a.heads + h) * n_splits + split;
                q[i] = query(layer, row, h);
                spans[i] = seen(layer, row);
                out[i] = m_.scratch.partial.data() + at * a.value_dim;
                top[i] = m_.scratch.split_max.data() + at;
                total[i] = m_.scratch.split_sum.data() + at;
            }
            const size_t at = (size_t)head * cache.slots + slot;
            attend_split(n, q, spans, cache.k + at * a.head_dim, cache.v + at * a.value_dim, a.head_dim, a.value_dim, start, m_.scratch.threads[t].scores.data(), out, top, total);
        }
    }

    Rows merge(int t, size_t index) {
        const Layer& layer = m_.layers[index];
        const LayerShape& a = layer.shape;
        const int n_splits = splits(layer);
        Stage& s = buffers(t).heads;
        const Share mine = rows_of(t);
        for (int r = mine.from; r < mine.to; r++)
            for (int h = 0; h < a.heads; h++) {
                const size_t at = ((size_t)r * a.heads + h) * n_splits;
                merge_splits(m_.scratch.partial.data() + at * a.value_dim, m_.scratch.split_max.data() + at, m_.scratch.split_sum.data() + at,
                             n_splits, a.value_dim, layer.sinks.empty() ? -INFINITY : layer.sinks[h],
                             s.f.data() + (size_t)r * s.stride + h * a.value_dim);
            }
        return finish(s.f.data(), s, mine, a.heads * a.value_dim, quantised(layer.o));
    }

    void head(int t, const Rows& in) {
        products(t, m_.lm_head(), in, [&](int r, int g, F y) {
            alignas(64) float out[16];
            f_store(out, y);
            const int left = m_.vocab - g * 16;
            memcpy(logits_ + (size_t)r * m_.vocab + g * 16, out, (left < 16 ? left : 16) * sizeof(float));
        });
    }

    const int32_t* tokens_;
    float* const logits_;
    const int first_;
};

static void pass(Model& m, Cache& c, const int32_t* tokens, int rows, float* logits) { Pass(m, c, tokens, rows, logits).run(); }

static int argmax(const float* x, int n) {  // the first of the largest; NaN never wins
    int best = 0;
    float top = -INFINITY;
    int i = 0;
    for (; i + 256 <= n; i += 256) {
        F m = f_load(x + i);
        for (int j = 16; j < 256; j += 16) m = f_max(m, f_load(x + i + j));
        if (f_top(m) > top)
            for (int j = 0; j < 256; j++)
                if (x[i + j] > top) top = x[i + j], best = i + j;
    }
    for (; i < n; i++)
        if (x[i] > top) top = x[i], best = i;
    return best;
}

static double exp_sum(const float* x, int n, float top, float scale) {
    double total = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        total += f_sum(exp_f(f_mul(f_sub(f_load(x + i), f_set(top)), f_set(scale))));
    for (; i < n; i++) total += exp((double)(x[i] - top) * scale);
    return total;
}

// Philox4x32-10 (Salmon et al. 2011) for the 64 tokens from `token` on, a multiple of 4: v = word / 2^32, rounded down.
static void noise64(uint64_t seed, uint64_t position, uint32_t token, float* v) {
    uint32_t c0[16], c1[16], c2[16], c3[16], k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (uint32_t i = 0; i < 16; i++) c0[i] = token / 4 + i, c1[i] = 0, c2[i] = (uint32_t)position, c3[i] = (uint32_t)(position >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int i = 0; i < 16; i++) {
            const uint64_t a = 0xD2511F53ull * c0[i], b = 0xCD9E8D57ull * c2[i];
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0, c1[i] = (uint32_t)b;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1, c3[i] = (uint32_t)a;
        }
    for (int i = 0; i < 16; i++) {
        v[i * 4] = (float)(int32_t)(c0[i] >> 9) * 0x1p-23f;
        v[i * 4 + 1] = (float)(int32_t)(c1[i] >> 9) * 0x1p-23f;
        v[i * 4 + 2] = (float)(int32_t)(c2[i] >> 9) * 0x1p-23f;
        v[i * 4 + 3] = (float)(int32_t)(c3[i] >> 9) * 0x1p-23f;
    }
}

// Noise of -log(-log1p(-v)) is at most -log(v), so a token is out where v > exp((logit - top) / temperature - noise). What is rounded here errs on
// the side of letting it in.
static int contenders(const float* logits, int vocab, double temperature, float top, double noise, uint64_t seed, uint64_t position, int32_t* out) {
    constexpr float ROOM = 1.001f, MOST = 22.9f;  // no noise of 32 bits is larger
    const F scale = f_set((float)(1 / temperature)), shift = f_set((float)-noise), highest = f_set(top);
    alignas(64) float v[64], bound[16];
    int n = 0;
    for (int i = 0; i < vocab; i += 64) {
        float here = -INFINITY;
        const int end = vocab - i < 64 ? vocab - i : 64;
        if (end == 64) here = f_top(f_max(f_max(f_load(logits + i), f_load(logits + i + 16)), f_max(f_load(logits + i + 32), f_load(logits + i + 48))));
        else for (int j = 0; j < end; j++) here = logits[i + j] > here ? logits[i + j] : here;
        if (((double)here - top) / temperature + MOST < noise) continue;
        noise64(seed, position, (uint32_t)i, v);
        int j = 0;
        for (; j + 16 <= end; j += 16) {
            const F limit = f_mul(exp_f(f_fma(f_sub(f_load(logits + i + j), highest), scale, shift)), f_set(ROOM));
            if (f_top(f_sub(limit, f_load(v + j))) < 0) continue;
            f_store(bound, limit);
            for (int k = 0; k < 16; k++)
                if (v[j + k] <= bound[k]) out[n++] = i + j + k;
        }
        for (; j < end; j++) out[n++] = i + j;
    }
    return n;
}

}  // namespace SLIP_ISA
