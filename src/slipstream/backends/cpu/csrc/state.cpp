// A KV cache as bytes and back, so that a conversation can outlive its process. The bytes hold what a pass could still
// read, per layer and head, and do not depend on the capacity of the cache they came from. Those of a drafter follow.
#include <algorithm>
#include <utility>

#include "drafter.h"

namespace {

struct Header {
    char magic[8];
    int32_t length, high, layers, draft_layers, draft_first, reserved;
};
constexpr char MAGIC[8] = {'s', 'l', 'i', 'p', 'k', 'v', '0', '2'};

// Slots worth keeping: those ever written, in whole blocks of sixteen keys.
int kept_slots(const LayerCache& cache, int high) { return std::min(cache.slots, (high + 15) / 16 * 16); }

template <class Copy> size_t each_layer(const std::vector<Layer>& layers, const Cache& cache, int high, size_t at, Copy copy) {
    for (size_t i = 0; i < layers.size(); i++) {
        const LayerCache& layer = cache.layers[i];
        const LayerShape& shape = layers[i].shape;
        for (int head = 0; head < shape.kv_heads; head++)
            for (const auto& [part, dim] : {std::pair(layer.k, shape.head_dim), std::pair(layer.v, shape.value_dim)}) {
                const size_t bytes = (size_t)kept_slots(layer, high) * dim * 2;
                copy((uint8_t*)(part + (size_t)head * layer.slots * dim), at, bytes);
                at += bytes;
            }
    }
    return at;
}

template <class Copy> size_t each_part(const Model& model, const Cache& cache, const Header& header, Copy copy) {
    size_t at = each_layer(model.layers, cache, header.high, sizeof(Header), copy);
    if (header.draft_layers) at = each_layer(model.drafter->layers, cache.draft->cache, header.length, at, copy);
    return at;
}

Header header_of(const Model& model, const Cache& cache) {
    Header header{{}, cache.length, cache.high(), (int32_t)model.layers.size(), 0, 0, 0};
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    if (cache.draft) header.draft_layers = (int32_t)model.drafter->layers.size(), header.draft_first = cache.draft->first;
    return header;
}

}  // namespace

size_t cache_state_bytes(const Model& model, const Cache& cache) {
    return each_part(model, cache, header_of(model, cache), [](uint8_t*, size_t, size_t) {});
}

void cache_export(Model& model, Cache& cache, uint8_t* out) {
    if (cache.draft) model.kernels->catch_up(model, cache);
    const Header header = header_of(model, cache);
    memcpy(out, &header, sizeof header);
    each_part(model, cache, header, [&](uint8_t* part, size_t at, size_t n) { memcpy(out + at, part, n); });
}

bool cache_import(const Model& model, Cache& cache, const uint8_t* data, size_t n) {
    Header header;
    if (n < sizeof header) return false;
    memcpy(&header, data, sizeof header);
    const int drafter = cache.draft ? (int)model.drafter->layers.size() : 0;
    const bool sound = !memcmp(header.magic, MAGIC, sizeof MAGIC) && header.layers == (int32_t)model.layers.size() &&
                       0 <= header.length && header.length <= header.high && header.high <= cache.capacity &&
                       (header.draft_layers == 0 || header.draft_layers == drafter) && 0 <= header.draft_first &&
                       header.draft_first <= header.length;
    if (!sound || each_part(model, cache, header, [](uint8_t*, size_t, size_t) {}) != n) return false;
    each_part(model, cache, header, [&](uint8_t* part, size_t at, size_t bytes) { memcpy(part, data + at, bytes); });
    cache.rewind(0);
    cache.advanced(header.high);
    cache.rewind(header.length);
    if (cache.draft) cache.draft->restart(header.length, header.draft_layers ? header.draft_first : header.length);
    return true;
}
