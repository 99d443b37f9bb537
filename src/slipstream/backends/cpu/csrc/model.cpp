#include "drafter.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

Lazy::Lazy(size_t n, [[maybe_unused]] bool huge_pages) : bytes(n ? n : 1) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data = (uint8_t*)p;
#ifdef MADV_HUGEPAGE
    if (huge_pages) madvise(p, bytes, MADV_HUGEPAGE);  // only a wish: without them the pass is slower, not wrong
#endif
}

Lazy::~Lazy() { munmap(data, bytes); }

static int round_up(int n, int to) { return (n + to - 1) / to * to; }

Cache::Cache(const Model& model, int capacity, bool ring) : capacity(capacity) {
    size_t total = 0;
    auto slots_of = [&](const Layer& layer) {
        const int full = round_up(capacity, SPLIT);
        // A ring keeps the window, a whole pass written ahead of it, and what rejected drafts overwrite.
        return ring && layer.shape.window ? std::min(full, round_up(layer.shape.window + 2 * CHUNK, SPLIT)) : full;
    };
    for (const Layer& layer : model.layers)
        total += (size_t)slots_of(layer) * layer.shape.kv_heads * (layer.shape.head_dim + layer.shape.value_dim) * 2;
    memory_ = std::make_unique<Lazy>(total);
    uint8_t* at = memory_->data;
    for (const Layer& layer : model.layers) {
        const int slots = slots_of(layer);
        const size_t heads = (size_t)slots * layer.shape.kv_heads;
        layers.push_back({(uint16_t*)at, (uint16_t*)at + heads * layer.shape.head_dim, slots});
        windows_.push_back(slots < round_up(capacity, SPLIT) ? layer.shape.window : 0);
        at += heads * (layer.shape.head_dim + layer.shape.value_dim) * 2;
    }
    if (model.drafter) draft = std::make_unique<DraftState>(*model.drafter, capacity);
}

Cache::~Cache() = default;

void Cache::rewind(int to) {
    length = to;
    if (!to) high_ = 0;
    if (draft) draft->rewind(to);
}

bool Cache::can_rewind(int to) const {
    if (to < 0 || to > length) return false;
    if (to == 0) return true;
    for (size_t i = 0; i < layers.size(); i++)
        // The next query, at `to`, looks back to to - window + 1; slots of positions below high - slots are overwritten.
        if (windows_[i] && std::max(0, to - windows_[i] + 1) < high_ - layers[i].slots) return false;
    return true;
}

void Stage::resize(int rows, int cols) {
    stride = round_up(cols, 256);
    f.assign((size_t)rows * stride, 0.f);
    tiles.assign((size_t)(rows + TILE - 1) / TILE * stride / 32, {});
}

void Scratch::reserve_partials(const Model& model, int base, int rows) {
    size_t partials = 0, floats = 0;
    for (const Layer& layer : model.layers) {
        const size_t n = (size_t)rows * layer.shape.heads * splits_of(layer, base, rows);
        partials = std::max(partials, n);
        floats = std::max(floats, n * layer.shape.value_dim);
    }
    if (split_max.size() < partials) split_max.resize(partials), split_sum.resize(partials);
    if (partial.size() < floats) partial.resize(floats);
}

Model::Model(int vocab, int hidden, float eps, bool tied, std::vector<Layer> given, std::shared_ptr<Pool> shared, const Kernels* kernels,
             int most_rows)
    : vocab(vocab), hidden(hidden), eps(eps), tied(tied), layers(std::move(given)), kernels(kernels), threads(std::move(shared)), pool(*threads) {
    int queries = 0, heads = 0, inner = 0, pairs = 0, tables = 0, experts = 0, slots = 0, expert_inner = 0;
    for (size_t i = 0; i < layers.size(); i++) {
        Layer& layer = layers[i];
        while (layer.rope_table < (int)i && (layers[layer.rope_table].inv_freq != layer.inv_freq ||
                                             layers[layer.rope_table].shape.rope_scale != layer.shape.rope_scale)) layer.rope_table++;
        queries = std::max(queries, layer.shape.heads * layer.shape.head_dim);
        heads = std::max(heads, layer.shape.heads * layer.shape.value_dim);
        inner = std::max(inner, layer.shape.inner);
        pairs = std::max(pairs, layer.shape.rotary_pairs);
        tables = std::max(tables, layer.rope_table + 1);
        layer.experts.resize(layer.shape.experts);
        experts = std::max(experts, layer.shape.experts);
        slots = std::max(slots, layer.shape.top_k);
        expert_inner = std::max(expert_inner, layer.shape.expert_inner);
    }
    scratch.x.resize((size_t)most_rows * hidden);
    scratch.q.resize((size_t)most_rows * queries);
    scratch.rope.resize((size_t)tables * CHUNK * 2 * pairs);
    scratch.router.resize((size_t)most_rows * round_up(experts, 16));
    scratch.weights.resize((size_t)most_rows * slots);
    scratch.chosen.resize((size_t)most_rows * slots);
    scratch.slots.resize(most_rows * slots, expert_inner);
    scratch.threads.resize(pool.size());
    for (int t = 0; t < pool.size(); t++) {
        auto& own = scratch.threads[t];
        const int rows = t == 0 ? most_rows : SHARE_ROWS;  // thread 0's buffers are the shared ones
        own.hidden.resize(rows, hidden);
        own.heads.resize(rows, heads);
        own.inner.resize(rows, inner);
        if (experts) own.gathered.resize(most_rows, hidden);
        own.scores.resize(8 * SPLIT);
    }
}

Model::~Model() = default;

uint8_t* Model::place(size_t bytes) {
    constexpr size_t ARENA = (size_t)1 << 30, LINE = 64;
    if (arenas_.empty() || arena_used_ + bytes > arenas_.back()->bytes) {
        arenas_.push_back(std::make_unique<Lazy>(std::max(bytes, ARENA), true));
        arena_used_ = 0;
    }
    uint8_t* at = arenas_.back()->data + arena_used_;
    arena_used_ += (bytes + LINE - 1) / LINE * LINE;
    return at;
}
