// A model as the passes see it: layers of packed matrices, a KV cache per stream, scratch for one pass, and the threads.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <memory>
#include <mutex>
#include <vector>

#include "pool.h"
#include "weights.h"

constexpr int CHUNK = 64;       // rows a pass at most; a longer prefill is several passes
constexpr int SPLIT = 256;      // keys one attention partial covers: fixed by position, so that no row sees another's company
constexpr int SHARE_ROWS = 4;   // from so many rows on, threads share the row-wise work and meet once more
constexpr int MAX_HEAD_DIM = 256;

struct LayerShape {  // the C ABI's view of models/spec.py: Layer
    int32_t heads, kv_heads, head_dim, value_dim, window, rotary_pairs;
    int32_t inner;                                // of what every row takes: the feed-forward, or the shared expert; 0 is nothing
    int32_t experts, expert_inner, top_k, groups, top_groups;  // experts 0: none are routed
    int32_t sigmoid, normalise, clamped;          // scores by sigmoid, else softmax; chosen ones sum to 1; gpt-oss's activation
    float softmax_scale, rope_scale, value_scale, routed_scale, alpha, limit;
};

struct Gated {  // a gated feed-forward: down(activation(gate(x)) * up(x))
    Matrix gate, up, down;
    std::vector<float> gate_bias, up_bias, down_bias;
};

struct Layer {
    LayerShape shape;
    std::vector<float> inv_freq, attention_norm, ffn_norm, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, no_norm, sinks;
    Matrix q, k, v, o, router;
    std::vector<float> router_bias, correction;
    Gated every;                 // what every row takes
    std::vector<Gated> experts;  // what the router chooses from
    int rope_table = 0;          // the first layer that turns as this one does keeps the table
};

struct Span { int lo, hi; };  // key positions [lo, hi) one query sees

static inline Span seen_by(int position, int window) {
    return {window && position >= window ? position - window + 1 : 0, position + 1};
}

// How many splits the queries of `rows` rows from position `base` touch.
static inline int splits_of(const Layer& layer, int base, int rows) {
    return (base + rows - 1) / SPLIT + 1 - seen_by(base, layer.shape.window).lo / SPLIT;
}

// Zeroed memory that the system commits page by page, as it is first touched.
struct Lazy {
    explicit Lazy(size_t bytes, bool huge_pages = false);
    ~Lazy();
    Lazy(const Lazy&) = delete;
    uint8_t* data;
    size_t bytes;
};

struct LayerCache {
    // Keys lie as (kv_head, slot / 16, head_dim, 16): one vector is one dimension of sixteen keys. Values as (kv_head, slot, value_dim).
    uint16_t *k, *v;
    int slots;  // a multiple of SPLIT; position p lives in slot p % slots
};

struct Model;
struct Draft;
struct Drafter;
struct DraftState;

struct Cache {
    // ring: a layer with a window keeps no more than that needs; else every position keeps its slot.
    Cache(const Model& model, int capacity, bool ring = true);
    ~Cache();
    bool can_rewind(int to) const;
    int high() const { return high_; }

    int length = 0, capacity;
    std::vector<LayerCache> layers;
    std::unique_ptr<DraftState> draft;  // what a drafter of this model keeps for this text

    void advanced(int to) { length = to; high_ = to > high_ ? to : high_; }
    void rewind(int to);

private:
    std::vector<int> windows_;
    int high_ = 0;  // the longest this cache has been since its last restart
    std::unique_ptr<Lazy> memory_;
};

size_t cache_state_bytes(const Model& model, const Cache& cache);
void cache_export(Model& model, Cache& cache, uint8_t* out);
bool cache_import(const Model& model, Cache& cache, const uint8_t* data, size_t n);  // false: not bytes of such a cache

constexpr int TILE = 8;      // rows that share one load of the weights
constexpr int LOW_BITS = 8;

// Thirty-two columns of a tile of rows in sixteen bits: value = scale * (high * 2^LOW_BITS + low).
struct alignas(64) QBlock {
    int8_t high[TILE][32], low[TILE][32];
    float scale[TILE];
    float sum[TILE];                 // of the 32 values
    int32_t minus[TILE];             // -sum / scale, and of each half
    int32_t minus_half[TILE][2];
};

struct Stage {  // the input rows of one group of matrix products, in both forms
    void resize(int rows, int cols);
    std::vector<float> f;
    std::vector<QBlock> tiles;
    int stride = 0;
};

// Which rows go to which expert. A slot is one row in one expert; slots ascend by expert, then by row.
struct Routing {
    std::vector<int> expert, start;  // the distinct experts, ascending, and where the slots of each begin (one more at the end)
    std::vector<int> row, count;     // of a slot; of every expert, while sorting
    std::vector<float> weight;       // of a slot
};

struct Scratch {
    std::vector<float> x, q, rope, partial;
    std::vector<float> split_max, split_sum;
    std::vector<float> router, weights;  // (rows, experts) logits; (rows, top_k) of the chosen
    std::vector<int32_t> chosen;         // (rows, top_k)
    Stage slots;                         // (slots, expert_inner)
    struct PerThread {
        Stage hidden, heads, inner;
        Stage gathered;  // rows of one expert, side by side
        std::vector<float> scores;
        Routing routing;
    };
    std::vector<PerThread> threads;

    void reserve_partials(const Model& model, int base, int rows);
};

struct Kernels {  // one instruction set
    const char* name;
    void (*pass)(Model&, Cache&, const int32_t* tokens, int rows, float* logits);
    int (*argmax)(const float* x, int n);
    double (*exp_sum)(const float* x, int n, float top, float scale);  // sum of exp((x - top) * scale)
    // Tokens whose score, logit / temperature plus noise, may reach that of a token with the logit `top` and this noise, in
    // ascending order into out[vocab]: how many.
    int (*contenders)(const float* logits, int vocab, double temperature, float top, double noise, uint64_t seed, uint64_t position, int32_t* out);
    void (*take_head)(Drafter&, const Model& target);                  // what a drafter needs of its target's head
    void (*catch_up)(Model& target, Cache&);                           // the drafter's keys and values of all positions
    void (*draft)(Model& target, Cache&, const Draft&);
};

struct Model {
    int vocab, hidden;
    float eps;
    bool tied;
    std::vector<Layer> layers;
    std::vector<float> final_norm;
    Matrix embed, head;
    const Kernels* kernels;
    std::shared_ptr<Pool> threads;  // a drafter works on its target's
    Pool& pool;
    Scratch scratch;
    std::mutex busy;
    std::unique_ptr<Drafter> drafter;

    // rows: of the largest pass.
    Model(int vocab, int hidden, float eps, bool tied, std::vector<Layer> layers, std::shared_ptr<Pool> threads, const Kernels* kernels,
          int rows = CHUNK);
    ~Model();
    const Matrix& lm_head() const { return tied ? embed : head; }

    // Memory for one more matrix, right behind the last: a pass reads them in this order, in huge pages where there are any.
    uint8_t* place(size_t bytes);

private:
    std::vector<std::unique_ptr<Lazy>> arenas_;
    size_t arena_used_ = 0;
};
