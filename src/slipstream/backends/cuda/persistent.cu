// One pass over a dense model's weights as one kernel: a block a multiprocessor, resident from embedding to logits.
//
// Weights. Each block owns whole tiles of 16 output features. They are packed on the host into one stream a block, in
// the order it consumes them, as the 512-byte operand fragments of mma.m16n8k16. A producer warp copies the stream
// into a ring in shared memory (bulk copies completing on mbarriers) and never waits for the other blocks: memory
// keeps streaming while activations travel.
//
// Activations. Every value is published once a pass into its own place in an arena that holds the sentinel 0xFFFF, a
// bf16 NaN that no conversion makes; a reader polls the value itself, so there is no barrier and no fence. Two arenas
// alternate by pass: while one is used the other is reset, and the kernel boundary orders the two.
//
// Rows. Tiles, the order of every sum and the splits of attention are fixed by the model and by absolute positions,
// never by how many rows ride along: a row has the same bits in any company. NT tiles of 8 rows are compiled in.
//
// Sizes come as macros: GRID LAYERS HIDDEN HEADS KV_HEADS HD INNER VOCAB NT OWNED CHUNK SMEM EPS SCALE BIAS.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Layer {
    const float* attention_norm;
    const float* ffn_norm;
    const u16* bias;
    const float* cos_sin;
    u64 window;
};

struct Args {
    const char* stream;       // all blocks' fragments
    const u64* stream_begin;  // (GRID,) byte where a block's begin
    const int* stream_blocks; // (GRID, 2) ring blocks without and with the head
    const int* tasks;         // tile numbers of qkv, gate/up and head, by block and stage
    const int* stage_begin;   // (GRID, 2 * LAYERS + 2) into tasks
    const int* owned;         // (GRID, OWNED + 1) how many tiles of the residual stream, then their numbers
    const Layer* layers;
    const u16* embed;
    const float* final_norm;
    const int* row_tokens;
    const int* state;
    u16* keys;    // (LAYERS, KV_HEADS, positions, HD)
    u16* values;  // (LAYERS, KV_HEADS, HD, positions)
    float* logits;
    char* arena;  // (2, LAYERS, layer_bytes)
    int* epoch;   // pass number, blocks done, then (rows, splits) dirty in each arena
    u64 positions, layer_bytes, max_splits, want_logits;
};

constexpr int WARPS = 8, THREADS = WARPS * 32, ROWS = 16, BLOCK_BYTES = 16384, SPLIT = 256;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * HD, ATT = HEADS * HD, GROUP = HEADS / KV_HEADS, V_SLOTS = 24;
constexpr int X_ROWS = NT * 8;
__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int pitch(int k) { return k * 2 + (k * 2 % 64 ? 64 : 32); }  // odd multiple of 32 bytes: no bank conflicts
constexpr int X_BYTES = max_of(X_ROWS * pitch(max_of(max_of(HIDDEN, ATT), CHUNK)), WARPS * 16 * (HD + 4) * 4);
constexpr int RED_FLOATS = WARPS * NT * 128;
constexpr int SS_FLOATS = X_ROWS * (HIDDEN / 8), H_FLOATS = OWNED * X_ROWS * 16;
constexpr int FIXED = X_BYTES + (2 * RED_FLOATS + H_FLOATS + SS_FLOATS + ROWS) * 4;
constexpr int SLOTS = (SMEM - FIXED) / (BLOCK_BYTES + 16);  // of the ring: all the shared memory that is left
constexpr int SMEM_X = SLOTS * BLOCK_BYTES, SMEM_RED = SMEM_X + X_BYTES, SMEM_H = SMEM_RED + 2 * RED_FLOATS * 4;
constexpr int SMEM_SS = SMEM_H + H_FLOATS * 4, SMEM_RSTD = SMEM_SS + SS_FLOATS * 4, SMEM_BARS = SMEM_RSTD + ROWS * 4;
static_assert(SLOTS >= 2, "activations leave no room for weights in shared memory");
static_assert(HIDDEN % 16 == 0 && INNER % CHUNK == 0 && CHUNK % 16 == 0 && VOCAB % 16 == 0 && HD % 32 == 0);

// ---- memory and synchronisation primitives

__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void block_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void bar_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nw: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra d;\nbra w;\nd:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, u32 bar, u64 policy) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(BLOCK_BYTES) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            dst),
        "l"(src), "r"(BLOCK_BYTES), "r"(bar), "l"(policy)
        : "memory");
}
__device__ __forceinline__ uint4 poll_load16(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint2 poll_load8(const void* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 poll_load4(const void* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void publish2(void* p, u16 v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
__device__ __forceinline__ void publish4(void* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ bool unset(u32 v) { return (v & 0xFFFF) == 0xFFFF || v >= 0xFFFF0000u; }
__device__ __forceinline__ bool unset(uint4 v) { return unset(v.x) || unset(v.y) || unset(v.z) || unset(v.w); }

struct Spin {  // a value that never comes is a bug or a lost block: fail loudly
    u32 n = 0;
    __device__ __forceinline__ void again() {
        if (++n > (1u << 24)) __trap();
    }
};

// ---- numbers

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- one layer's places in an arena

struct Places {
    char *qkv, *v, *parts, *lse, *mid, *inner, *out;
    __device__ Places(char* base, u64 max_splits) {
        qkv = base;                       // (ROWS, QKV)
        v = qkv + ROWS * QKV * 2;         // (KV_HEADS * HD, V_SLOTS) from position start rounded down to 4
        mid = v + KV_HEADS * HD * V_SLOTS * 2;  // (ROWS, HIDDEN) the stream after attention
        inner = mid + ROWS * HIDDEN * 2;  // (ROWS, INNER)
        out = inner + ROWS * INNER * 2;   // (ROWS, HIDDEN) the stream after the feed-forward
        parts = out + ROWS * HIDDEN * 2;  // (splits, ROWS, ATT)
        lse = parts + max_splits * (ROWS * ATT * 2);  // (splits, ROWS, HEADS) float, base 2
    }
};

// ---- the consumers' view of the weight stream

struct Stream {
    char* smem;
    u32 bars;
    u32 fragment = 0;  // of the block's stream, where the current tile begins
    int block = -1, slot = -1;
    u32 phase = 0;
    __device__ __forceinline__ void reach(int wanted) {
        while (block < wanted) {
            if (block >= 0) {
                __syncwarp();
                if ((threadIdx.x & 31) == 0) bar_arrive(bars + SLOTS * 8 + slot * 8);
            }
            ++block;
            if (++slot == SLOTS) slot = 0, phase ^= 1;
            bar_wait(bars + slot * 8, phase);
        }
    }
    // Adds a tile's products with `frags` k-steps of x; this warp takes every eighth.
    __device__ __forceinline__ void multiply(float (&acc)[NT][4], const char* x, int x_pitch, int frags) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll 4
        for (int f = warp; f < frags; f += WARPS) {
            const u32 at = fragment + f;
            reach(at >> 5);
            const uint4 a = *(const uint4*)(smem + slot * BLOCK_BYTES + (at & 31) * 512 + lane * 16);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const uint2 b = *(const uint2*)(x + (n * 8 + g) * x_pitch + f * 32 + c * 8);
                mma(acc[n], a.x, a.y, a.z, a.w, b.x, b.y);
            }
        }
        fragment += frags;
    }
};

struct Block {
    const Args& a;
    char* smem;
    Stream stream;
    int start, rows, red = 0;
    __device__ Block(const Args& args, char* shared) : a(args), smem(shared) {}
    __device__ float* rstd() { return (float*)(smem + SMEM_RSTD); }
    __device__ float* residual(int owned) { return (float*)(smem + SMEM_H) + owned * X_ROWS * 16; }

    // ---- activations into shared memory

    // x = row * norm for every row; the sum of squares of each 8 values goes aside for `finish_norm`.
    template <class Source>
    __device__ __forceinline__ void load_normed(const float* norm, Source source) {
        constexpr int CHUNKS = HIDDEN / 8;
        float* squares = (float*)(smem + SMEM_SS);
        for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, k = i % CHUNKS * 8;
            const float4 n0 = __ldg((const float4*)(norm + k)), n1 = __ldg((const float4*)(norm + k + 4));
            const uint4 v = source(row, k);
            const float h[8] = {low(v.x), high(v.x), low(v.y), high(v.y), low(v.z), high(v.z), low(v.w), high(v.w)};
            float s = 0;
#pragma unroll
            for (int e = 0; e < 8; ++e) s += h[e] * h[e];
            squares[i] = s;
            *(uint4*)(smem + SMEM_X + row * pitch(HIDDEN) + k * 2) =
                make_uint4(pack(h[0] * n0.x, h[1] * n0.y), pack(h[2] * n0.z, h[3] * n0.w),
                           pack(h[4] * n1.x, h[5] * n1.y), pack(h[6] * n1.z, h[7] * n1.w));
        }
    }
    __device__ __forceinline__ void load_stream(const char* from, const float* norm) {
        load_normed(norm, [&](int row, int k) { return wait16(from + (row * HIDDEN + k) * 2); });
    }
    __device__ __forceinline__ uint4 wait16(const void* p) {
        Spin spin;
        uint4 v = poll_load16(p);
        while (unset(v)) spin.again(), v = poll_load16(p);
        return v;
    }
    __device__ __forceinline__ void finish_norm() {
        constexpr int CHUNKS = HIDDEN / 8;
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        for (int row = warp; row < rows; row += WARPS) {
            const float* squares = (const float*)(smem + SMEM_SS) + row * CHUNKS;
            float s = 0;
            for (int i = lane; i < CHUNKS; i += 32) s += squares[i];
#pragma unroll
            for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
            if (lane == 0) rstd()[row] = rsqrtf(s / HIDDEN + EPS);
        }
    }
    __device__ __forceinline__ void load_inner(const Places& p, int k0) {
        constexpr int CHUNKS = CHUNK / 8;
#pragma unroll 4
        for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, k = i % CHUNKS * 8;
            *(uint4*)(smem + SMEM_X + row * pitch(CHUNK) + k * 2) = wait16(p.inner + (row * INNER + k0 + k) * 2);
        }
    }
    // Attention's parts merged in order of position, weighted by their share of the softmax sum.
    __device__ __forceinline__ void load_merged(const Places& p, int first, int last) {
        constexpr int CHUNKS = ATT / 8;
        for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, k = i % CHUNKS * 8;
            float top = -1e30f, total = 0, acc[8] = {};
            for (int s0 = first; s0 < last; s0 += 4) {
                uint4 v[4];
                u32 l[4];
                auto fetch = [&](int j) {
                    const int at = (s0 + j) * ROWS + row;
                    v[j] = poll_load16(p.parts + ((u64)at * ATT + k) * 2);
                    l[j] = poll_load4(p.lse + (at * HEADS + k / HD) * 4);
                };
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (s0 + j < last) fetch(j);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (s0 + j >= last) continue;
                    Spin spin;
                    while (unset(v[j]) || l[j] == 0xFFFFFFFFu) spin.again(), fetch(j);
                    const float m = __uint_as_float(l[j]), next = fmaxf(top, m);
                    const float fade = exp2_fast(top - next), share = exp2_fast(m - next);
                    const float o[8] = {low(v[j].x), high(v[j].x), low(v[j].y), high(v[j].y),
                                        low(v[j].z), high(v[j].z), low(v[j].w), high(v[j].w)};
                    total = total * fade + share;
#pragma unroll
                    for (int e = 0; e < 8; ++e) acc[e] = acc[e] * fade + share * o[e];
                    top = next;
                }
            }
            const float scale = 1.f / total;
            *(uint4*)(smem + SMEM_X + row * pitch(ATT) + k * 2) =
                make_uint4(pack(acc[0] * scale, acc[1] * scale), pack(acc[2] * scale, acc[3] * scale),
                           pack(acc[4] * scale, acc[5] * scale), pack(acc[6] * scale, acc[7] * scale));
        }
    }

    // ---- matrix products

    // Leaves this warp's share of a tile in shared memory; after the barrier warp n < NT sums the eight of row tile n.
    __device__ __forceinline__ void put(float (&acc)[NT][4]) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
        for (int n = 0; n < NT; ++n)
            *(float4*)(smem + SMEM_RED + (red * RED_FLOATS + ((warp * NT + n) * 32 + lane) * 4) * 4) =
                make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    }
    __device__ __forceinline__ float4 sum() {
        const int n = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const float4* at = (const float4*)(smem + SMEM_RED + red * RED_FLOATS * 4) + n * 32 + lane;
        float4 part[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) part[w] = at[w * NT * 32];
        float4 s = part[0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) s.x += part[w].x, s.y += part[w].y, s.z += part[w].z, s.w += part[w].w;
        return s;
    }

    // Tiles `tasks[begin, end)` of a matrix whose input is whole in shared memory. `emit(tile, sums)` runs in warps
    // n < NT: sums are (feature g, rows 2c and 2c + 1), then (feature g + 8, the same) of row tile n.
    template <int K, class Prepare, class Load, class Emit>
    __device__ __forceinline__ void product(const int* tasks, int count, bool normed, Prepare prepare, Load load,
                                            Emit emit) {
        if (count == 0) return;
        const bool emits = threadIdx.x < NT * 32;
        int tile = __ldg(tasks);
        if (emits) prepare(tile);
        load();
        block_sync();
        for (int i = 0; i < count; ++i) {
            float acc[NT][4] = {};
            stream.multiply(acc, smem + SMEM_X, pitch(K), K / 16);
            put(acc);
            if (normed && i == 0) finish_norm();
            block_sync();
            if (emits) emit(tile, sum());
            red ^= 1;
            if (i + 1 < count) {
                tile = __ldg(tasks + i + 1);
                if (emits) prepare(tile);
            }
        }
    }

    // ---- stages

    __device__ __forceinline__ void qkv(int l, const Layer& w, const Places& p, const char* from, const int* tasks,
                                        int count) {
        const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
        const int r0 = (threadIdx.x >> 5) * 8 + 2 * c;
        float cos0 = 1, sin0 = 0, cos1 = 1, sin1 = 0;
        auto prepare = [&](int tile) {
            const float* at = w.cos_sin + (u64)(start + r0) * HD + tile % (HD / 16) * 8 + g;
            cos0 = __ldg(at), sin0 = __ldg(at + HD / 2), cos1 = __ldg(at + HD), sin1 = __ldg(at + HD + HD / 2);
        };
        auto load = [&] {
            if (l)
                load_stream(from, w.attention_norm);
            else
                load_normed(w.attention_norm, [&](int row, int k) {
                    return __ldg((const uint4*)(a.embed + (u64)a.row_tokens[row] * HIDDEN + k));
                });
        };
        auto emit = [&](int tile, float4 s) {
            const int head = tile / (HD / 16), j = tile % (HD / 16) * 8 + g;
            const float n0 = rstd()[r0], n1 = rstd()[r0 + 1];
            float a0 = s.x * n0, a1 = s.y * n1, b0 = s.z * n0, b1 = s.w * n1;
            if (BIAS) {
                const float ba = low(w.bias[head * HD + j]), bb = low(w.bias[head * HD + HD / 2 + j]);
                a0 += ba, a1 += ba, b0 += bb, b1 += bb;
            }
            if (head < HEADS + KV_HEADS) {
                float t = a0 * cos0 - b0 * sin0;
                b0 = b0 * cos0 + a0 * sin0, a0 = t;
                t = a1 * cos1 - b1 * sin1;
                b1 = b1 * cos1 + a1 * sin1, a1 = t;
            }
            const u32 v0 = pack(a0, b0), v1 = pack(a1, b1);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = r0 + r;
                const u16 va = (u16)(r ? v1 : v0), vb = (u16)((r ? v1 : v0) >> 16);
                if (row >= rows) break;
                if (head < HEADS + KV_HEADS) {
                    char* at = p.qkv + (row * QKV + head * HD + j) * 2;
                    publish2(at, va), publish2(at + HD, vb);
                    if (head >= HEADS) {
                        u16* k = a.keys + ((u64)(l * KV_HEADS + head - HEADS) * a.positions + start + row) * HD + j;
                        k[0] = va, k[HD / 2] = vb;
                    }
                } else {
                    const int dim = (head - HEADS - KV_HEADS) * HD + j;
                    char* at = p.v + (dim * V_SLOTS + (start & 3) + row) * 2;
                    publish2(at, va), publish2(at + HD / 2 * V_SLOTS * 2, vb);
                    u16* v = a.values + (u64)(l * KV_HEADS * HD + dim) * a.positions + start + row;
                    v[0] = va, v[HD / 2 * a.positions] = vb;
                }
            }
        };
        product<HIDDEN>(tasks, count, true, prepare, load, emit);
    }

    __device__ __forceinline__ void gate_up(const Layer& w, const Places& p, const int* tasks, int count) {
        const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
        const int r0 = (threadIdx.x >> 5) * 8 + 2 * c;
        auto emit = [&](int tile, float4 s) {
            const float n0 = rstd()[r0], n1 = rstd()[r0 + 1];
            const float g0 = s.x * n0, g1 = s.y * n1;
            const u32 v = pack(g0 / (1 + __expf(-g0)) * (s.z * n0), g1 / (1 + __expf(-g1)) * (s.w * n1));
            char* at = p.inner + (r0 * INNER + tile * 8 + g) * 2;
            if (r0 < rows) publish2(at, (u16)v);
            if (r0 + 1 < rows) publish2(at + INNER * 2, (u16)(v >> 16));
        };
        product<HIDDEN>(tasks, count, true, [](int) {}, [&] { load_stream(p.mid, w.ffn_norm); }, emit);
    }

    // Adds sums to an owned tile of the residual stream and publishes it.
    __device__ __forceinline__ void add(int owned, int tile, float4 s, char* to) {
        const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
        const int r0 = (threadIdx.x >> 5) * 8 + 2 * c;
        float2* h = (float2*)(residual(owned) + r0 * 16 + 2 * g);
        float2 h0 = h[0], h1 = h[8];
        h0.x += s.x, h0.y += s.z, h1.x += s.y, h1.y += s.w;
        h[0] = h0, h[8] = h1;
        char* at = to + (r0 * HIDDEN + tile * 16 + 2 * g) * 2;
        if (r0 < rows) publish4(at, pack(h0.x, h0.y));
        if (r0 + 1 < rows) publish4(at + HIDDEN * 2, pack(h1.x, h1.y));
    }

    __device__ __forceinline__ void output(const Places& p, const int* owned, int count, int first, int last) {
        int i = 0;
        product<ATT>(owned, count, false, [](int) {}, [&] { load_merged(p, first, last); },
                     [&](int tile, float4 s) { add(i++, tile, s, p.mid); });
    }

    __device__ __forceinline__ void down(const Places& p, const int* owned, int count) {
        if (count == 0) return;
        float acc[OWNED][NT][4] = {};
        for (int k0 = 0; k0 < INNER; k0 += CHUNK) {
            if (k0) block_sync();
            load_inner(p, k0);
            block_sync();
#pragma unroll
            for (int i = 0; i < OWNED; ++i)
                if (i < count) stream.multiply(acc[i], smem + SMEM_X, pitch(CHUNK), CHUNK / 16);
        }
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            if (i >= count) break;
            put(acc[i]);
            block_sync();
            if (threadIdx.x < NT * 32) add(i, __ldg(owned + i), sum(), p.out);
            red ^= 1;
        }
    }

    __device__ __forceinline__ void head(const char* from, const int* tasks, int count) {
        const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
        const int r0 = (threadIdx.x >> 5) * 8 + 2 * c;
        auto emit = [&](int tile, float4 s) {
            const float n0 = rstd()[r0], n1 = rstd()[r0 + 1];
            float* at = a.logits + (u64)r0 * VOCAB + tile * 16 + 2 * g;
            if (r0 < rows) *(float2*)at = make_float2(s.x * n0, s.z * n0);
            if (r0 + 1 < rows) *(float2*)(at + VOCAB) = make_float2(s.y * n1, s.w * n1);
        };
        stream.fragment = (stream.fragment + 31) & ~31u;
        product<HIDDEN>(tasks, count, true, [](int) {}, [&] { load_stream(from, a.final_norm); }, emit);
    }

    // ---- attention: a task is SPLIT positions of one KV head, a warp's share 32 of them in registers

    __device__ __forceinline__ void attention(int l, const Places& p, int window, int first, int last) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
        constexpr int STEPS = HD / 16, TILES = HD / 8, PITCH = HD + 4;
        const int tasks = KV_HEADS * (last - first), end = start + rows;
        for (int task = GRID - 1 - blockIdx.x; task < tasks; task += GRID) {
            const int kv = task % KV_HEADS, split = first + task / KV_HEADS, base = split * SPLIT + warp * 32;
            const u16* keys = a.keys + (u64)(l * KV_HEADS + kv) * a.positions * HD;
            const u16* values = a.values + (u64)(l * KV_HEADS + kv) * HD * a.positions;
            // Column n of score tile t is this position: a thread's columns then make its operand of the second product
            // and its four values of V lie side by side.
            auto position = [&](int t, int n) { return base + 16 * (t >> 1) + 4 * (n >> 1) + 2 * (t & 1) + (n & 1); };
            u32 k[4][STEPS][2];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int at = position(t, g);
                const char* new_key = p.qkv + ((at - start) * QKV + (HEADS + kv) * HD + c * (HD / 4)) * 2;
#pragma unroll
                for (int s = 0; s < STEPS; s += 2) {
                    uint4 v = make_uint4(0, 0, 0, 0);
                    if (at < start)
                        v = *(const uint4*)(keys + (u64)at * HD + c * (HD / 4) + s * 4);
                    else if (at < end)
                        v = wait16(new_key + s * 8);
                    k[t][s][0] = v.x, k[t][s][1] = v.y, k[t][s + 1][0] = v.z, k[t][s + 1][1] = v.w;
                }
            }
            u32 v[2][TILES][2];
            auto load_values = [&] {
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int n = 0; n < TILES; ++n) {
                        const uint2 x = value(values, p.v + (kv * HD + n * 8 + g) * V_SLOTS * 2, n * 8 + g,
                                              base + 16 * j + 4 * c, end);
                        v[j][n][0] = x.x, v[j][n][1] = x.y;
                    }
            };
            if (HD <= 64) load_values();
            for (int m0 = 0; m0 < rows * GROUP; m0 += 16) {
                const int i0 = m0 + g, i1 = i0 + 8;  // (row, query head of the group), row-major
                const bool there0 = i0 < rows * GROUP, there1 = i1 < rows * GROUP;
                const char* q0 = p.qkv + (i0 / GROUP * QKV + (kv * GROUP + i0 % GROUP) * HD + c * (HD / 4)) * 2;
                const char* q1 = p.qkv + (i1 / GROUP * QKV + (kv * GROUP + i1 % GROUP) * HD + c * (HD / 4)) * 2;
                float score[4][4] = {};
#pragma unroll
                for (int s = 0; s < STEPS; s += 2) {
                    const uint4 zero = make_uint4(0, 0, 0, 0);
                    const uint4 x = there0 ? wait16(q0 + s * 8) : zero, y = there1 ? wait16(q1 + s * 8) : zero;
#pragma unroll
                    for (int t = 0; t < 4; ++t) {
                        mma(score[t], x.x, y.x, x.y, y.y, k[t][s][0], k[t][s][1]);
                        mma(score[t], x.z, y.z, x.w, y.w, k[t][s + 1][0], k[t][s + 1][1]);
                    }
                }
                if (HD > 64 && m0 == 0) load_values();
                const int p0 = start + i0 / GROUP, p1 = start + i1 / GROUP;
                float top0 = -1e30f, top1 = -1e30f, sum0 = 0, sum1 = 0;
#pragma unroll
                for (int t = 0; t < 4; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int at = position(t, 2 * c + e);
                        float &x = score[t][e], &y = score[t][2 + e];
                        x = at <= p0 && at > p0 - window ? x * (SCALE * 1.4426950408889634f) : -1e30f;
                        y = at <= p1 && at > p1 - window ? y * (SCALE * 1.4426950408889634f) : -1e30f;
                        top0 = fmaxf(top0, x), top1 = fmaxf(top1, y);
                    }
#pragma unroll
                for (int d = 1; d < 4; d <<= 1) {
                    top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, d));
                    top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, d));
                }
#pragma unroll
                for (int t = 0; t < 4; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float &x = score[t][e], &y = score[t][2 + e];
                        x = x > -1e29f ? exp2_fast(x - top0) : 0, y = y > -1e29f ? exp2_fast(y - top1) : 0;
                        sum0 += x, sum1 += y;
                    }
#pragma unroll
                for (int d = 1; d < 4; d <<= 1) {
                    sum0 += __shfl_xor_sync(~0u, sum0, d);
                    sum1 += __shfl_xor_sync(~0u, sum1, d);
                }
                float* scratch = (float*)(smem + SMEM_X) + (warp * 16 + g) * PITCH;
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    float o[4] = {};
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        mma(o, pack(score[2 * j][0], score[2 * j][1]), pack(score[2 * j][2], score[2 * j][3]),
                            pack(score[2 * j + 1][0], score[2 * j + 1][1]),
                            pack(score[2 * j + 1][2], score[2 * j + 1][3]), v[j][n][0], v[j][n][1]);
                    *(float2*)(scratch + n * 8 + 2 * c) = make_float2(o[0], o[1]);
                    *(float2*)(scratch + 8 * PITCH + n * 8 + 2 * c) = make_float2(o[2], o[3]);
                }
                if (c == 0) {
                    *(float2*)(scratch + HD) = make_float2(top0, sum0);
                    *(float2*)(scratch + 8 * PITCH + HD) = make_float2(top1, sum1);
                }
                block_sync();
                join(p, kv, split, m0);
                block_sync();
            }
        }
    }

    // Four positions of one row of V^T, from `at`: cached ones, ones published in this pass, zero past the end.
    __device__ __forceinline__ uint2 value(const u16* values, const char* fresh, int dim, int at, int end) {
        uint2 old = make_uint2(0, 0);
        if (at < start) old = *(const uint2*)(values + (u64)dim * a.positions + at);
        if (at + 4 <= start || at >= end) return old;
        const char* from = fresh + (at - (start & ~3)) * 2;
        Spin spin;
        while (true) {
            const uint2 now = poll_load8(from);
            bool ready = true;
            u32 out[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 o = (e & 2 ? old.y : old.x) >> (16 * (e & 1)) & 0xFFFF;
                const u32 n = (e & 2 ? now.y : now.x) >> (16 * (e & 1)) & 0xFFFF;
                const bool mine = at + e >= start && at + e < end;
                ready &= !mine || n != 0xFFFF;
                out[e >> 1] |= (at + e < start ? o : mine ? n : 0) << (16 * (e & 1));
            }
            if (ready) return make_uint2(out[0], out[1]);
            spin.again();
        }
    }

    // The warps' shares of a split become one part: 16 threads a row.
    __device__ __forceinline__ void join(const Places& p, int kv, int split, int m0) {
        constexpr int PITCH = HD + 4, EACH = HD / 16;
        const int r = threadIdx.x >> 4, d = (threadIdx.x & 15) * EACH, i = m0 + r;
        const float* scratch = (const float*)(smem + SMEM_X) + r * PITCH;
        float top = -1e30f, total = 0, o[EACH] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, scratch[w * 16 * PITCH + HD]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float* x = scratch + w * 16 * PITCH;
            const float share = exp2_fast(x[HD] - top);
            total += share * x[HD + 1];
#pragma unroll
            for (int e = 0; e < EACH; ++e) o[e] += share * x[d + e];
        }
        if (i >= rows * GROUP) return;
        const float scale = total > 0 ? 1.f / total : 0.f;
        const int at = split * ROWS + i / GROUP, head = kv * GROUP + i % GROUP;
        char* to = p.parts + ((u64)at * ATT + head * HD + d) * 2;
#pragma unroll
        for (int e = 0; e < EACH; e += 2) publish4(to + e * 2, pack(o[e] * scale, o[e + 1] * scale));
        if ((threadIdx.x & 15) == 0)
            publish4(p.lse + (at * HEADS + head) * 4, __float_as_uint(total > 0 ? top + log2f(total) : -1e30f));
    }

    // ---- housekeeping

    __device__ __forceinline__ void fill(char* at, u64 bytes) {
        for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < bytes / 16; i += GRID * THREADS)
            ((uint4*)at)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    // Back to the sentinel where the last pass over this arena wrote.
    __device__ __forceinline__ void reset(const Places& p, int dirty_rows, int dirty_splits) {
        if (dirty_rows == 0) return;
        fill(p.qkv, (u64)dirty_rows * QKV * 2);
        fill(p.v, KV_HEADS * HD * V_SLOTS * 2);
        fill(p.mid, (u64)dirty_rows * HIDDEN * 2);
        fill(p.inner, (u64)dirty_rows * INNER * 2);
        fill(p.out, (u64)dirty_rows * HIDDEN * 2);
        for (int s = 0; s < dirty_splits; ++s) fill(p.parts + (u64)s * ROWS * ATT * 2, (u64)dirty_rows * ATT * 2);
        fill(p.lse, (u64)dirty_splits * ROWS * HEADS * 4);
    }

    __device__ __forceinline__ void run() {
        start = a.state[0];
        const int epoch = a.epoch[0], side = epoch & 1;
        const int dirty_rows = a.epoch[2 + (side ^ 1) * 2], dirty_splits = a.epoch[3 + (side ^ 1) * 2];
        const int* owned = a.owned + blockIdx.x * (OWNED + 1);
        const int owns = owned[0];
        ++owned;
        const int* begin = a.stage_begin + blockIdx.x * (2 * LAYERS + 2);
        for (int i = threadIdx.x; i < owns * X_ROWS * 16; i += THREADS) {
            const int tile = owned[i / (X_ROWS * 16)], row = i / 16 % X_ROWS;
            ((float*)(smem + SMEM_H))[i] =
                row < rows ? low(a.embed[(u64)a.row_tokens[row] * HIDDEN + tile * 16 + i % 16]) : 0;
        }
        const int last = (start + rows + SPLIT - 1) / SPLIT;
        const char* from = nullptr;
        for (int l = 0; l < LAYERS; ++l) {
            const Layer& w = a.layers[l];
            const Places p(a.arena + (u64)(side * LAYERS + l) * a.layer_bytes, a.max_splits);
            const int window = (int)w.window, first = max(0, start - window + 1) / SPLIT;
            qkv(l, w, p, from, a.tasks + begin[2 * l], begin[2 * l + 1] - begin[2 * l]);
            attention(l, p, window, first, last);
            reset(Places(a.arena + (u64)((side ^ 1) * LAYERS + l) * a.layer_bytes, a.max_splits), dirty_rows,
                  dirty_splits);
            output(p, owned, owns, first, last);
            gate_up(w, p, a.tasks + begin[2 * l + 1], begin[2 * l + 2] - begin[2 * l + 1]);
            down(p, owned, owns);
            from = p.out;
        }
        if (a.want_logits)
            head(from, a.tasks + begin[2 * LAYERS], begin[2 * LAYERS + 1] - begin[2 * LAYERS]);
        block_sync();
        if (threadIdx.x == 0 && atomicAdd(a.epoch + 1, 1) == GRID - 1) {
            a.epoch[1] = 0, a.epoch[0] = epoch + 1;
            a.epoch[2 + side * 2] = rows, a.epoch[3 + side * 2] = last;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) model_pass(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    const u32 bars = smem_addr(smem + SMEM_BARS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) bar_init(bars + i * 8, 1), bar_init(bars + (SLOTS + i) * 8, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x != THREADS) return;
        const char* src = a.stream + a.stream_begin[blockIdx.x];
        const int blocks = a.stream_blocks[blockIdx.x * 2 + (a.want_logits ? 1 : 0)];
        u64 policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        const int ahead = min(blocks, SLOTS);
        for (int i = 0; i < ahead; ++i)
            bulk_copy(smem_addr(smem) + i * BLOCK_BYTES, src + (u64)i * BLOCK_BYTES, bars + i * 8, policy);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        if (*(volatile const int*)(a.state + 1) == 0) {
            for (int i = 0; i < ahead; ++i) bar_wait(bars + i * 8, 0);
            return;
        }
        int slot = 0;
        u32 phase = 0;
        for (int i = ahead; i < blocks; ++i) {
            bar_wait(bars + (SLOTS + slot) * 8, phase);
            bulk_copy(smem_addr(smem) + slot * BLOCK_BYTES, src + (u64)i * BLOCK_BYTES, bars + slot * 8, policy);
            if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
        return;
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Block block(a, smem);
    block.rows = a.state[1];
    if (block.rows == 0) return;
    block.stream.smem = smem;
    block.stream.bars = bars;
    block.run();
}
