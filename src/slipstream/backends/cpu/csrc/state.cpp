// A KV cache as bytes and back, so that a conversation can outlive its process. The bytes hold what a pass could still
// read, per layer and head, and do not depend on the capacity of the cache they came from.
#include <algorithm>

#include "drafter.h"

namespace {

struct Header {
    char magic[8];
    int32_t length, high, layers, reserved;
};
constexpr char MAGIC[8] = {'s', 'l', 'i', 'p', 'k', 'v', '0', '1'};

// Slots worth keeping: those ever written, in whole blocks of sixteen keys.
int kept_slots(const LayerCache& cache, int high) { return std::min(cache.slots, (high + 15) / 16 * 16); }

template <class Copy> size_t each_part(const Model& model, const Cache& cache, int high, size_t at, Copy copy) {
    for (size_t i = 0; i < model.layers.size(); i++) {
        const LayerCache& layer = cache.layers[i];
        const int dim = model.layers[i].shape.head_dim;
        const size_t bytes = (size_t)kept_slots(layer, high) * dim * 2;
        for (int head = 0; head < model.layers[i].shape.kv_heads; head++)
            for (uint16_t* part : {layer.k, layer.v}) {
                copy((uint8_t*)(part + (size_t)head * layer.slots * dim), at, bytes);
                at += bytes;
            }
    }
    return at;
}

}  // namespace

size_t cache_state_bytes(const Model& model, const Cache& cache) {
    return each_part(model, cache, cache.high(), sizeof(Header), [](uint8_t*, size_t, size_t) {});
}

void cache_export(const Model& model, const Cache& cache, uint8_t* out) {
    Header header{{}, cache.length, cache.high(), (int32_t)model.layers.size(), 0};
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    memcpy(out, &header, sizeof header);
    each_part(model, cache, cache.high(), sizeof(Header), [&](uint8_t* part, size_t at, size_t n) { memcpy(out + at, part, n); });
}

bool cache_import(const Model& model, Cache& cache, const uint8_t* data, size_t n) {
    Header header;
    if (n < sizeof header) return false;
    memcpy(&header, data, sizeof header);
    const bool sound = !memcmp(header.magic, MAGIC, sizeof MAGIC) && header.layers == (int32_t)model.layers.size() &&
                       0 <= header.length && header.length <= header.high && header.high <= cache.capacity;
    if (!sound || each_part(model, cache, header.high, sizeof header, [](uint8_t*, size_t, size_t) {}) != n) return false;
    each_part(model, cache, header.high, sizeof header, [&](uint8_t* part, size_t at, size_t bytes) { memcpy(part, data + at, bytes); });
    cache.rewind(0);
    cache.advanced(header.high);
    cache.rewind(header.length);
    if (cache.draft) cache.draft->restart(header.length);
    return true;
}
