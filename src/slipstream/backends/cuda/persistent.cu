// One pass over a dense model's weights as one kernel: a block a multiprocessor, resident from embedding to logits.
//
// Weights. Each block owns whole tiles of 16 output features. They are packed on the host into one stream a block, in
// the order it consumes them, as the 512-byte operand fragments of mma.m16n8k16. A producer warp copies the stream
// into a ring in shared memory (bulk copies completing on mbarriers) and never waits for the other blocks: memory
// keeps streaming while activations travel.
//
// Activations. Every value is published once a pass into its own place in an arena full of ones, a NaN that no
// arithmetic makes; a reader polls the value itself, so there is no barrier and no fence. Two arenas alternate by pass:
// while one is used the other is reset, and the kernel boundary orders the two.
//
// Numbers. Operands of the tensor cores have 16 bits: fp16 where HALF, eight times finer than bf16, else bf16. The
// residual stream travels in fp32; sums are fp32.
//
// Rows. Tiles, the order of every sum and the splits of attention are fixed by the model and by absolute positions,
// never by how many rows ride along: a row has the same bits in any company. NT tiles of 8 rows are compiled in.
//
// Sizes come as macros: GRID LAYERS HIDDEN HEADS KV_HEADS HD INNER VOCAB NT OWNED CHUNK SMEM EPS SCALE BIAS HALF.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Layer {
    const float* attention_norm;  // then its inverse, HIDDEN each
    const float* ffn_norm;        // likewise
    const u16* bias;
    const float* cos_sin;
    float* tap;  // null, or (ROWS, HIDDEN): where the residual stream after this layer is left
    u64 window;
};

struct Args {
    const char* stream;       // all blocks' fragments
    const u64* stream_begin;  // (GRID,) byte where a block's begin
    const int* tasks;         // tile numbers of qkv, gate/up and head, by block and stage
    const int* stage_begin;   // (GRID, 2 * LAYERS + 2) into tasks
    const int* owned;         // (GRID, OWNED + 1) how many tiles of the residual stream, then their numbers
    const Layer* layers;
    const u16* embed;
    const float* final_norm;  // likewise
    const int* row_tokens;
    const int* state;
    u16* keys;    // (LAYERS, KV_HEADS, positions, HD)
    u16* values;  // (LAYERS, KV_HEADS, HD, positions)
    float* logits;
    char* arena;  // (2, LAYERS, layer_bytes)
    int* epoch;   // pass number, blocks done, then (rows, splits) dirty in each arena
    u64* profile;  // null, or (GRID, LAYERS, STAMPS) clocks, then the head's (GRID, 2)
    u64 positions, layer_bytes, want_logits;
};

constexpr int WARPS = 8, THREADS = WARPS * 32, ROWS = 16, SPLIT = 256;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * HD, ATT = HEADS * HD, GROUP = HEADS / KV_HEADS, V_SLOTS = 24;
constexpr int X_ROWS = NT * 8, STAMPS = 16;
#define BOTH __host__ __device__ constexpr
BOTH int max_of(int a, int b) { return a > b ? a : b; }
BOTH int pitch(int k) { return k * 2 + (k * 2 % 64 ? 64 : 32); }  // odd multiple of 32 bytes: no bank conflicts
BOTH int piece(int k) {  // columns of a tile copied at once: the largest divisor up to 576
    int c = 576;
    while (k % c) c -= 16;
    return c;
}
constexpr int SLOT_BYTES = max_of(max_of(piece(HIDDEN), piece(ATT)), piece(INNER)) * 32;
constexpr int X_BYTES = max_of(X_ROWS * pitch(max_of(max_of(HIDDEN, ATT), CHUNK)), WARPS * 16 * (HD + 4) * 4);
constexpr int RED_FLOATS = WARPS * NT * 128;
constexpr int SS_FLOATS = X_ROWS * (HIDDEN / 8), H_FLOATS = OWNED * X_ROWS * 16;
constexpr int REDS = 2;  // pairs of tiles whose partial sums may wait to be summed
constexpr int FIXED = X_BYTES + (2 * REDS * RED_FLOATS + H_FLOATS + SS_FLOATS + ROWS) * 4;
constexpr int PIECES = CHUNK / piece(INNER), TOGETHER = PIECES % 3 == 0 ? 3 : PIECES % 2 == 0 ? 2 : 1;
constexpr int SLOTS = (SMEM - FIXED) / (SLOT_BYTES + 16);  // of the ring: all the shared memory that is left
constexpr int SMEM_X = SLOTS * SLOT_BYTES, SMEM_RED = SMEM_X + X_BYTES, SMEM_H = SMEM_RED + 2 * REDS * RED_FLOATS * 4;
constexpr int SMEM_SS = SMEM_H + H_FLOATS * 4, SMEM_RSTD = SMEM_SS + SS_FLOATS * 4, SMEM_BARS = SMEM_RSTD + ROWS * 4;
// An arena's layer: a record a row (qkv, x after attention, inner activations, x after the feed-forward; x is the
// stream times the next norm's weights), new values transposed, then attention's parts, a record (ATT halves, HEADS
// float) a split and row.
constexpr int AT_MID = QKV * 2, AT_INNER = AT_MID + HIDDEN * 2, AT_OUT = AT_INNER + INNER * 2;
constexpr int ROW_BYTES = AT_OUT + HIDDEN * 2, V_BYTES = KV_HEADS * HD * V_SLOTS * 2;
constexpr int PART_BYTES = ATT * 2 + (HEADS * 4 + 15) / 16 * 16;
constexpr int AT_V = ROWS * ROW_BYTES, AT_PARTS = AT_V + V_BYTES;
static_assert(OWNED <= REDS && SLOTS >= max_of(TOGETHER, 2), "activations leave no room for weights in shared memory");
static_assert(HIDDEN % 16 == 0 && INNER % CHUNK == 0 && CHUNK % piece(INNER) == 0 && VOCAB % 16 == 0 && HD % 32 == 0);

// ---- memory and synchronisation primitives

// The thread's number, read anew where it is used: else the compiler computes every stage's addresses once, before the
// loop over layers, and spills them.
__device__ __forceinline__ int thread() {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}
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
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, int bytes, u32 bar, u64 policy) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(policy)
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
// Whether any 16-bit half seen so far is the sentinel, kept as the halves' running maximum.
struct Seen {
    u32 most = 0;
    __device__ __forceinline__ void add(u32 v) { asm("max.u16x2 %0, %0, %1;" : "+r"(most) : "r"(v)); }
    __device__ __forceinline__ void add(uint4 v) { add(v.x), add(v.y), add(v.z), add(v.w); }
    __device__ __forceinline__ bool all() const { return (most & 0xFFFF) != 0xFFFF && most < 0xFFFF0000u; }
};

// Asks for a batch of values until all have come. One that never does is a bug or a lost block: fail loudly.
template <class Load>
__device__ __forceinline__ void until(Load load) {
    for (u32 n = 0; !load(); ++n)
        if (n > (1u << 24)) __trap();
}

// ---- numbers

#if HALF
#define OPERAND "f16"
__device__ __forceinline__ float low(u32 v) {
    float x;
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, a;\n}" : "=f"(x) : "r"(v));
    return x;
}
__device__ __forceinline__ float high(u32 v) {
    float x;
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, b;\n}" : "=f"(x) : "r"(v));
    return x;
}
#else
#define OPERAND "bf16"
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
#endif
__device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 v;
    asm("cvt.rn." OPERAND "x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- the consumers' view of the weight stream

struct Stream {
    u32 bars;
    u32 phase = 0;
    int slot = 0;
    // A warp takes every eighth k-step of a piece.
    static BOTH int most(int steps) { return (steps + WARPS - 1) / WARPS; }
    template <int STEPS>
    __device__ __forceinline__ void load_x(uint2 (&v)[most(STEPS)][NT], const char* x, int x_pitch) {
        const int warp = thread() >> 5, lane = thread() & 31;
        const char* b = x + (lane >> 2) * x_pitch + (lane & 3) * 8 + warp * 32;
#pragma unroll
        for (int i = 0; i < most(STEPS); ++i)
#pragma unroll
            for (int n = 0; n < NT; ++n) v[i][n] = *(const uint2*)(b + n * 8 * x_pitch + i * WARPS * 32);
    }
    template <int STEPS>
    __device__ __forceinline__ void load_weights(uint4 (&w)[most(STEPS)], const char* smem, int ahead) {
        const int warp = thread() >> 5, lane = thread() & 31, wraps = slot + ahead >= SLOTS;
        const int at = slot + ahead - (wraps ? SLOTS : 0);
        const char* from = smem + at * SLOT_BYTES + warp * 512 + lane * 16;
        bar_wait(bars + at * 8, phase ^ wraps);
#pragma unroll
        for (int i = 0; i < most(STEPS); ++i)
            if ((i + 1) * WARPS <= STEPS || warp + i * WARPS < STEPS) w[i] = *(const uint4*)(from + i * WARPS * 512);
    }
    // Adds products of a piece to four chains of sums, `first` the chain of the first step, so that no product waits
    // for the one before.
    template <int STEPS, int CHAINS>
    __device__ __forceinline__ void add(float (&acc)[CHAINS][NT][4], const uint4 (&w)[most(STEPS)],
                                        const uint2 (&v)[most(STEPS)][NT], int first) {
        const int warp = thread() >> 5;
#pragma unroll
        for (int i = 0; i < most(STEPS); ++i)
            if ((i + 1) * WARPS <= STEPS || warp + i * WARPS < STEPS)
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    mma(acc[(first + i) % CHAINS][n], w[i].x, w[i].y, w[i].z, w[i].w, v[i][n].x, v[i][n].y);
    }
    __device__ __forceinline__ void release(int count) {
        __syncwarp();
        for (int i = 0; i < count; ++i) {
            if ((thread() & 31) == 0) bar_arrive(bars + (SLOTS + slot) * 8);
            if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
    }
    // One piece of a tile, or of two tiles, with the same piece of x.
    template <int STEPS>
    __device__ __forceinline__ void multiply(float (&acc)[2][2][NT][4], bool two, const char* smem, const char* x,
                                             int x_pitch) {
        uint4 w0[most(STEPS)] = {}, w1[most(STEPS)] = {};
        uint2 v[most(STEPS)][NT];
        load_x<STEPS>(v, x, x_pitch);
        load_weights<STEPS>(w0, smem, 0);
        if (two) load_weights<STEPS>(w1, smem, 1);
        add<STEPS>(acc[0], w0, v, 0);
        if (two) add<STEPS>(acc[1], w1, v, 0);
        release(1 + two);
    }
    // N pieces of one tile with as many of x, side by side.
    template <int STEPS, int N>
    __device__ __forceinline__ void multiply_row(float (&acc)[4][NT][4], const char* smem, const char* x, int x_pitch) {
        uint4 w[N][most(STEPS)] = {};
        uint2 v[N][most(STEPS)][NT];
#pragma unroll
        for (int s = 0; s < N; ++s) load_x<STEPS>(v[s], x + s * STEPS * 32, x_pitch);
#pragma unroll
        for (int s = 0; s < N; ++s) load_weights<STEPS>(w[s], smem, s);
#pragma unroll
        for (int s = 0; s < N; ++s) add<STEPS>(acc, w[s], v[s], s * most(STEPS));
        release(N);
    }
};

struct Block {
    const Args& a;
    char* smem;
    Stream stream;
    int start, rows, red = 0;
    u64* clock_at;
    __device__ Block(const Args& args, char* shared) : a(args), smem(shared) {}
    __device__ float* rstd() { return (float*)(smem + SMEM_RSTD); }
    __device__ float* residual(int owned) { return (float*)(smem + SMEM_H) + owned * X_ROWS * 16; }

    // Marks the clock at a step of a layer, for the benchmark's table of stages.
    __device__ __forceinline__ void stamp() {
        if (a.profile && thread() == 0) *clock_at = clock64();
        ++clock_at;
    }

    __device__ __forceinline__ void stamp_at(int l, int i) {
        if (a.profile && thread() == 0) a.profile[((u64)blockIdx.x * LAYERS + l) * STAMPS + i] = clock64();
    }

    // ---- activations into shared memory

    // Warps share the rows evenly: of row tile n, a row has 8, 4, 2 or 1 of them. `batch(row, chunk, first,
    // shift)` runs for every BATCH of a thread's chunks: chunk + (j << shift) below CHUNKS; where even first +
    // (j << shift) is not, no thread has a j-th, and the code is skipped.
    template <int CHUNKS, int BATCH, class Batch>
    __device__ __forceinline__ void share_rows(Batch batch) {
#pragma unroll 1
        for (int n = 0; n < (NT == 1 ? 1 : (rows + 7) / 8); ++n) {
            const int left = rows - n * 8, shift = left > 4 ? 5 : left > 2 ? 6 : left > 1 ? 7 : 8;
            const int row = n * 8 + (thread() >> shift), at = thread() & ((1 << shift) - 1);
#pragma unroll 1
            for (int first = 0; first < CHUNKS; first += BATCH << shift)
                batch(row, row < rows ? first + at : CHUNKS, first, shift);
        }
    }
    // x of every row, the stream times the norm's weights: polled at `from`, or where that is null made of the embedding.
    // The sum of squares of the stream, 8 values each, goes aside for `finish_norm`.
    __device__ __forceinline__ void load_normed(const float* norm, const char* from) {
        constexpr int CHUNKS = HIDDEN / 8, BATCH = 3;
        float* squares = (float*)(smem + SMEM_SS);
        const float* inverse = norm + HIDDEN;
        share_rows<CHUNKS, BATCH>([&](int row, int chunk, int first, int shift) {
            float4 n[BATCH][2] = {};
            uint4 v[BATCH] = {};
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int k = chunk + (j << shift);
                if (first + (j << shift) >= CHUNKS || k >= CHUNKS) continue;
                n[j][0] = __ldg((const float4*)(inverse + k * 8)), n[j][1] = __ldg((const float4*)(inverse + k * 8 + 4));
            }
            if (from)
                until([&] {
                    Seen seen;
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const int k = chunk + (j << shift);
                        if (first + (j << shift) >= CHUNKS || k >= CHUNKS) continue;
                        v[j] = poll_load16(from + row * ROW_BYTES + k * 16);
                        seen.add(v[j]);
                    }
                    return seen.all();
                });
            else
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int k = chunk + (j << shift);
                    if (first + (j << shift) >= CHUNKS || k >= CHUNKS) continue;
                    const uint4 e = __ldg((const uint4*)(a.embed + (u64)a.row_tokens[row] * HIDDEN + k * 8));
                    const float4 n0 = __ldg((const float4*)(norm + k * 8)), n1 = __ldg((const float4*)(norm + k * 8 + 4));
                    v[j] = make_uint4(pack(low(e.x) * n0.x, high(e.x) * n0.y), pack(low(e.y) * n0.z, high(e.y) * n0.w),
                                      pack(low(e.z) * n1.x, high(e.z) * n1.y), pack(low(e.w) * n1.z, high(e.w) * n1.w));
                }
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int k = chunk + (j << shift);
                if (first + (j << shift) >= CHUNKS || k >= CHUNKS) continue;
                *(uint4*)(smem + SMEM_X + row * pitch(HIDDEN) + k * 16) = v[j];
                const float h[8] = {low(v[j].x) * n[j][0].x, high(v[j].x) * n[j][0].y, low(v[j].y) * n[j][0].z,
                                    high(v[j].y) * n[j][0].w, low(v[j].z) * n[j][1].x, high(v[j].z) * n[j][1].y,
                                    low(v[j].w) * n[j][1].z, high(v[j].w) * n[j][1].w};
                float s = 0;
#pragma unroll
                for (int e = 0; e < 8; ++e) s += h[e] * h[e];
                squares[row * CHUNKS + k] = s;
            }
        });
    }
    __device__ __forceinline__ void finish_norm() {
        constexpr int CHUNKS = HIDDEN / 8;
        const int warp = thread() >> 5, lane = thread() & 31;
        for (int row = WARPS - 1 - warp; row < rows; row += WARPS) {
            const float* squares = (const float*)(smem + SMEM_SS) + row * CHUNKS;
            float s = 0;
#pragma unroll
            for (int i = 0; i < (CHUNKS + 31) / 32; ++i)
                if (i * 32 + lane < CHUNKS) s += squares[i * 32 + lane];
#pragma unroll
            for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
            if (lane == 0) rstd()[row] = rsqrtf(s / HIDDEN + EPS);
        }
    }
    __device__ __forceinline__ void load_inner(const char* p, int k0) {
        constexpr int CHUNKS = CHUNK / 8, BATCH = NT == 1 ? 6 : 3;
        share_rows<CHUNKS, BATCH>([&](int row, int chunk, int first, int shift) {
            uint4 v[BATCH] = {};
            until([&] {
                Seen seen;
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int k = chunk + (j << shift);
                    if (first + (j << shift) >= CHUNKS || k >= CHUNKS) continue;
                    v[j] = poll_load16(p + row * ROW_BYTES + AT_INNER + (k0 + k * 8) * 2);
                    seen.add(v[j]);
                }
                return seen.all();
            });
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int k = chunk + (j << shift);
                if (first + (j << shift) >= CHUNKS || k >= CHUNKS) continue;
                *(uint4*)(smem + SMEM_X + row * pitch(CHUNK) + k * 16) = v[j];
            }
        });
    }
    // Attention's parts merged in order of position, weighted by their share of the softmax sum.
    __device__ __forceinline__ void load_merged(const char* p, int first, int last) {
        constexpr int CHUNKS = ATT / 8, BATCH = 3, PARTS = 3;
        constexpr u32 NONE = 0xF149F2CAu;  // -1e30f: a part that is not there has no share
        share_rows<CHUNKS, BATCH>([&](int row, int chunk, int begin, int shift) {
            float top[BATCH], sum[BATCH], acc[BATCH][8];
            // Groups of parts stand at absolute places, so that what a row's neighbours see does not regroup its sums.
#pragma unroll 1
            for (int s0 = first / PARTS * PARTS; s0 < last; s0 += PARTS) {
                uint4 v[BATCH][PARTS] = {};
                u32 l[BATCH][PARTS];
                until([&] {
                    Seen seen;
                    bool ready = true;
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) {
                        const int k = chunk + (b << shift);
                        if (begin + (b << shift) >= CHUNKS) continue;
                        const char* part = p + AT_PARTS + (u64)(s0 * ROWS + row) * PART_BYTES;
#pragma unroll
                        for (int j = 0; j < PARTS; ++j, part += ROWS * PART_BYTES) {
                            l[b][j] = NONE;
                            if (s0 + j < first || s0 + j >= last || k >= CHUNKS) continue;
                            v[b][j] = poll_load16(part + k * 16);
                            l[b][j] = poll_load4(part + ATT * 2 + k * 8 / HD * 4);
                            seen.add(v[b][j]);
                            ready &= l[b][j] != ~0u;
                        }
                    }
                    return ready && seen.all();
                });
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    if (begin + (b << shift) >= CHUNKS) continue;
                    if (s0 <= first) {
                        top[b] = -1e30f, sum[b] = 0;
#pragma unroll
                        for (int e = 0; e < 8; ++e) acc[b][e] = 0;
                    } else {
                        float next = top[b];
#pragma unroll
                        for (int j = 0; j < PARTS; ++j) next = fmaxf(next, __uint_as_float(l[b][j]));
                        const float fade = exp2_fast(top[b] - next);
                        sum[b] *= fade;
#pragma unroll
                        for (int e = 0; e < 8; ++e) acc[b][e] *= fade;
                    }
#pragma unroll
                    for (int j = 0; j < PARTS; ++j) top[b] = fmaxf(top[b], __uint_as_float(l[b][j]));
#pragma unroll
                    for (int j = 0; j < PARTS; ++j) {
                        const uint4 x = v[b][j];
                        const float share = exp2_fast(__uint_as_float(l[b][j]) - top[b]);
                        sum[b] += share;
                        acc[b][0] += share * low(x.x), acc[b][1] += share * high(x.x);
                        acc[b][2] += share * low(x.y), acc[b][3] += share * high(x.y);
                        acc[b][4] += share * low(x.z), acc[b][5] += share * high(x.z);
                        acc[b][6] += share * low(x.w), acc[b][7] += share * high(x.w);
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int k = chunk + (b << shift);
                if (begin + (b << shift) >= CHUNKS || k >= CHUNKS) continue;
                const float r = 1.f / sum[b];
                *(uint4*)(smem + SMEM_X + row * pitch(ATT) + k * 16) =
                    make_uint4(pack(acc[b][0] * r, acc[b][1] * r), pack(acc[b][2] * r, acc[b][3] * r),
                               pack(acc[b][4] * r, acc[b][5] * r), pack(acc[b][6] * r, acc[b][7] * r));
            }
        });
    }

    // ---- matrix products

    // Leaves this warp's share of a tile, the first or second of a pair, in shared memory; after the barrier a warp a
    // tile and row tile sums the eight.
    template <int CHAINS>
    __device__ __forceinline__ void put(float (&acc)[CHAINS][NT][4], int second) {
        const int warp = thread() >> 5, lane = thread() & 31;
#pragma unroll
        for (int c = 1; c < CHAINS; ++c)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[0][n][e] += acc[c][n][e];
#pragma unroll
        for (int n = 0; n < NT; ++n)
            *(float4*)(smem + SMEM_RED + (((red * 2 + second) * WARPS + warp) * NT + n) * 512 + lane * 16) =
                make_float4(acc[0][n][0], acc[0][n][1], acc[0][n][2], acc[0][n][3]);
    }
    __device__ __forceinline__ float4 sum(int unit) {
        const int lane = thread() & 31;
        const float4* at =
            (const float4*)(smem + SMEM_RED + ((red * 2 + unit / NT) * WARPS * NT + unit % NT) * 512) + lane;
        float4 part[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) part[w] = at[w * NT * 32];
        float4 s = part[0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) s.x += part[w].x, s.y += part[w].y, s.z += part[w].z, s.w += part[w].w;
        return s;
    }
    // Which unit (tile of a pair, row tile) of the block's i-th pair this warp sums and emits, or none: warps take
    // turns, so that the others go on with the next pair meanwhile.
    __device__ __forceinline__ int turn(int i, int units) {
        const int unit = ((thread() >> 5) + WARPS - i % REDS * 2 * NT) % WARPS;
        return unit < units ? unit : -1;
    }
    // After `put`: the emitting warps wait for the others, which only report.
    __device__ __forceinline__ void hand_over(bool emits) {
        if (emits)
            asm volatile("bar.sync %0, 256;" ::"r"(2 + red) : "memory");
        else
            asm volatile("bar.arrive %0, 256;" ::"r"(2 + red) : "memory");
    }

    // `count` tiles of a matrix whose input is whole in shared memory. `emit(tile, row tile, sums, i)` runs in one
    // warp a row tile; sums are (feature g, rows 2c and 2c + 1), then (feature g + 8, the same). `prepare` runs before.
    template <int K, class Prepare, class Load, class Emit>
    __device__ __forceinline__ void product(const int* tasks, int count, bool normed, Prepare prepare, Load load,
                                            Emit emit) {
        if (count == 0) return (void)(clock_at += 2);
        auto mine = [&](int i) { return turn(i / 2, i + 1 < count ? 2 * NT : i < count ? NT : 0); };
        auto of = [&](int i, int unit) { return __ldg(tasks + i + unit / NT); };
        int unit = mine(0), tile = unit >= 0 ? of(0, unit) : 0;
        if (unit >= 0) prepare(tile, unit % NT);
        block_sync();  // nobody reads the stage before this one from shared memory any more
        load();
        block_sync();
        stamp();
#pragma unroll 1
        for (int i = 0; i < count; i += 2) {
            const bool two = i + 1 < count;
            if (i && i % (2 * REDS) == 0) block_sync();  // partial sums of earlier pairs have been read
            float acc[2][2][NT][4] = {};
#pragma unroll 1
            for (int k = 0; k < K; k += piece(K))
                stream.multiply<piece(K) / 16>(acc, two, smem, smem + SMEM_X + k * 2, pitch(K));
            put(acc[0], 0);
            if (two) put(acc[1], 1);
            if (normed && i == 0) finish_norm();
            hand_over(unit >= 0);
            if (unit >= 0) emit(tile, unit % NT, sum(unit), i + unit / NT);
            red = (red + 1) % REDS;
            unit = mine(i + 2);
            if (unit >= 0) tile = of(i + 2, unit), prepare(tile, unit % NT);
        }
        stamp();
    }

    // ---- stages

    __device__ __forceinline__ void qkv(int l, const Layer& w, const char* p, const char* from, const int* tasks,
                                        int count) {
        const int lane = thread() & 31, g = lane >> 2, c = lane & 3;
        float cos0 = 1, sin0 = 0, cos1 = 1, sin1 = 0;
        uint2 old_a = {}, old_b = {};
        auto prepare = [&](int tile, int n) {
            const float* at = w.cos_sin + (u64)(start + n * 8 + 2 * c) * HD + tile % (HD / 16) * 8 + g;
            cos0 = __ldg(at), sin0 = __ldg(at + HD / 2), cos1 = __ldg(at + HD), sin1 = __ldg(at + HD + HD / 2);
            // The cached values that share a reader's word of four positions with this pass's first.
            const int dim = (tile / (HD / 16) - HEADS - KV_HEADS) * HD + tile % (HD / 16) * 8 + g;
            if (dim < 0 || n || c || (start & 3) == 0) return;
            const u16* v = a.values + (u64)(l * KV_HEADS * HD + dim) * a.positions + (start & ~3);
            old_a = *(const uint2*)v, old_b = *(const uint2*)(v + HD / 2 * a.positions);
        };
        auto emit = [&](int tile, int n, float4 s, int) {
            const int head = tile / (HD / 16), j = tile % (HD / 16) * 8 + g, r0 = n * 8 + 2 * c;
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
            u32 v0 = pack(a0, b0), v1 = pack(a1, b1);
            if (head < HEADS + KV_HEADS) {
                // Even features take row r0 and odd ones r0 + 1, each with its neighbour's value, so words are whole.
                const bool odd = g & 1;
                const u32 mine = odd ? v1 : v0, other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4);
                const u32 first = odd ? other : mine, second = odd ? mine : other;
                const u32 lows = __byte_perm(first, second, 0x5410), highs = __byte_perm(first, second, 0x7632);
                const int row = r0 + odd, even_j = j - odd;
                if (row >= rows) return;
                char* at = const_cast<char*>(p) + row * ROW_BYTES + (head * HD + even_j) * 2;
                publish4(at, lows), publish4(at + HD, highs);
                if (head >= HEADS) {
                    u16* k = a.keys + ((u64)(l * KV_HEADS + head - HEADS) * a.positions + start + row) * HD + even_j;
                    *(u32*)k = lows, *(u32*)(k + HD / 2) = highs;
                }
                return;
            }
            const int dim = (head - HEADS - KV_HEADS) * HD + j;
#pragma unroll
            for (int r = 0; r < 2; ++r, v0 = v1) {
                const int row = r0 + r;
                const u16 va = (u16)v0, vb = (u16)(v0 >> 16);
                if (row >= rows) return;
                char* at = const_cast<char*>(p) + AT_V + (dim * V_SLOTS + (start & 3) + row) * 2;
                u16* v = a.values + (u64)(l * KV_HEADS * HD + dim) * a.positions + start + row;
                publish2(at, va), publish2(at + HD / 2 * V_SLOTS * 2, vb);
#pragma unroll
                for (int e = 0; e < 3; ++e)
                    if (row == 0 && e < (start & 3)) {
                        char* to = at + (e - (start & 3)) * 2;
                        const u32 wa = e < 2 ? old_a.x : old_a.y, wb = e < 2 ? old_b.x : old_b.y;
                        publish2(to, (u16)(wa >> (e & 1) * 16));
                        publish2(to + HD / 2 * V_SLOTS * 2, (u16)(wb >> (e & 1) * 16));
                    }
                v[0] = va, v[HD / 2 * a.positions] = vb;
            }
        };
        product<HIDDEN>(tasks, count, true, prepare, [&] { load_normed(w.attention_norm, from); }, emit);
    }

    __device__ __forceinline__ void gate_up(const Layer& w, const char* p, const int* tasks, int count) {
        const int lane = thread() & 31, g = lane >> 2, c = lane & 3;
        auto emit = [&](int tile, int n, float4 s, int) {
            const int r0 = n * 8 + 2 * c;
            const float n0 = rstd()[r0], n1 = rstd()[r0 + 1];
            const float g0 = s.x * n0, g1 = s.y * n1;
            const u32 v = pack(g0 / (1 + __expf(-g0)) * (s.z * n0), g1 / (1 + __expf(-g1)) * (s.w * n1));
            char* at = const_cast<char*>(p) + r0 * ROW_BYTES + AT_INNER + (tile * 8 + g) * 2;
            if (r0 < rows) publish2(at, (u16)v);
            if (r0 + 1 < rows) publish2(at + ROW_BYTES, (u16)(v >> 16));
        };
        product<HIDDEN>(tasks, count, true, [](int, int) {}, [&] { load_normed(w.ffn_norm, p + AT_MID); }, emit);
    }

    // Adds sums to an owned tile of the residual stream and publishes it times the next norm's weights.
    __device__ __forceinline__ void add(int owned, int tile, int n, float4 s, float2 norm, const char* to, float* tap) {
        const int lane = thread() & 31, g = lane >> 2, c = lane & 3, r0 = n * 8 + 2 * c;
        float2* h = (float2*)(residual(owned) + r0 * 16 + 2 * g);
        float2 h0 = h[0], h1 = h[8];
        h0.x += s.x, h0.y += s.z, h1.x += s.y, h1.y += s.w;
        char* at = const_cast<char*>(to) + r0 * ROW_BYTES + (tile * 16 + 2 * g) * 2;
        if (r0 < rows) publish4(at, pack(h0.x * norm.x, h0.y * norm.y));
        if (r0 + 1 < rows) publish4(at + ROW_BYTES, pack(h1.x * norm.x, h1.y * norm.y));
        h[0] = h0, h[8] = h1;
        if (tap) {
            tap += r0 * HIDDEN + tile * 16 + 2 * g;
            if (r0 < rows) *(float2*)tap = h0;
            if (r0 + 1 < rows) *(float2*)(tap + HIDDEN) = h1;
        }
    }

    __device__ __forceinline__ float2 norm_of(const float* norm, int tile) {
        return __ldg((const float2*)(norm + tile * 16) + ((thread() & 31) >> 2));
    }

    __device__ __forceinline__ void output(const Layer& w, const char* p, const int* owned, int count, int first,
                                           int last) {
        float2 norm = {};
        product<ATT>(owned, count, false, [&](int tile, int) { norm = norm_of(w.ffn_norm, tile); },
                     [&] { load_merged(p, first, last); },
                     [&](int tile, int n, float4 s, int i) { add(i, tile, n, s, norm, p + AT_MID, nullptr); });
    }

    __device__ __forceinline__ void down(const Layer& w, const float* next, const char* p, const int* owned, int count) {
        if (count == 0) return (void)(clock_at += 2);
        float2 norm[OWNED] = {};
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (i < count) norm[i] = norm_of(next, __ldg(owned + i));
        float acc[OWNED][4][NT][4] = {};
        for (int k0 = 0; k0 < INNER; k0 += CHUNK) {
            block_sync();
            load_inner(p, k0);
            block_sync();
            if (k0 == 0) stamp();
#pragma unroll
            for (int i = 0; i < OWNED; ++i)
                if (i < count)
#pragma unroll 1
                    for (int k = 0; k < CHUNK; k += TOGETHER * piece(INNER))
                        stream.multiply_row<piece(INNER) / 16, TOGETHER>(acc[i], smem, smem + SMEM_X + k * 2,
                                                                         pitch(CHUNK));
        }
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            if (i >= count) continue;
            const int n = turn(i, NT);
            put(acc[i], 0);
            hand_over(n >= 0);
            if (n >= 0) add(i, __ldg(owned + i), n, sum(n), norm[i], p + AT_OUT, w.tap);
            red = (red + 1) % REDS;
        }
        stamp();
    }

    __device__ __forceinline__ void head(const char* from, const int* tasks, int count) {
        const int lane = thread() & 31, g = lane >> 2, c = lane & 3;
        auto emit = [&](int tile, int n, float4 s, int) {
            const int r0 = n * 8 + 2 * c;
            const float n0 = rstd()[r0], n1 = rstd()[r0 + 1];
            float* at = a.logits + (u64)r0 * VOCAB + tile * 16 + 2 * g;
            if (r0 < rows) *(float2*)at = make_float2(s.x * n0, s.z * n0);
            if (r0 + 1 < rows) *(float2*)(at + VOCAB) = make_float2(s.y * n1, s.w * n1);
        };
        product<HIDDEN>(tasks, count, true, [](int, int) {}, [&] { load_normed(a.final_norm, from); }, emit);
    }

    // ---- attention: a task is SPLIT positions of one KV head and 16 (row, query head) pairs on it; a warp's share is
    // 32 positions, in registers

    __device__ __forceinline__ void attention(int l, const char* p, int window, int first, int last) {
        const int warp = thread() >> 5, lane = thread() & 31, g = lane >> 2, c = lane & 3;
        constexpr int STEPS = HD / 16, TILES = HD / 8, PITCH = HD + 4;
        const int parts = KV_HEADS * (last - first), end = start + rows;
        const int tasks = parts * ((rows * GROUP + 15) / 16);
        for (int task = GRID - 1 - blockIdx.x; task < tasks; task += GRID) {
            const int kv = task % KV_HEADS, split = first + task % parts / KV_HEADS, base = split * SPLIT + warp * 32;
            const int m0 = task / parts * 16;
            const u16* keys = a.keys + (u64)(l * KV_HEADS + kv) * a.positions * HD;
            const u16* values = a.values + (u64)(l * KV_HEADS + kv) * HD * a.positions;
            block_sync();  // the scratch is where the stage before this one had its input
            // Column n of score tile t is this position: a thread's columns then make its operand of the second product
            // and its four values of V lie side by side.
            auto position = [&](int t, int n) { return base + 16 * (t >> 1) + 4 * (n >> 1) + 2 * (t & 1) + (n & 1); };
            // What the cache held before this pass comes at once; warps that meet new positions ask until all are there.
            const bool settled = base + 32 <= start;
            u32 k[4][STEPS][2], v[2][TILES][2];
            auto load_keys = [&] {
                Seen seen;
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const int at = position(t, g);
                    const char* from = at < start ? (const char*)(keys + (u64)at * HD)
                                                  : p + (at - start) * ROW_BYTES + (HEADS + kv) * HD * 2;
#pragma unroll
                    for (int s = 0; s < STEPS; s += 2) {
                        uint4 x = make_uint4(0, 0, 0, 0);
                        if (at < end) x = poll_load16(from + c * (HD / 2) + s * 8);
                        seen.add(x);
                        k[t][s][0] = x.x, k[t][s][1] = x.y, k[t][s + 1][0] = x.z, k[t][s + 1][1] = x.w;
                    }
                }
                return seen.all();
            };
            auto load_values = [&] {
                Seen seen;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int at = base + 16 * j + 4 * c, there = end - at;  // of four positions, a row of V^T
                    const bool old = at + 4 <= start;
                    const char* from = old ? (const char*)(values + (u64)g * a.positions + at)
                                           : p + AT_V + ((kv * HD + g) * V_SLOTS + at - (start & ~3)) * 2;
                    const u64 step = old ? a.positions * 16 : V_SLOTS * 16;
                    const u32 m0 = there >= 2 ? ~0u : there == 1 ? 0xFFFFu : 0, m1 = there >= 4 ? ~0u : there == 3 ? 0xFFFFu : 0;
#pragma unroll
                    for (int n = 0; n < TILES; ++n) {
                        uint2 x = make_uint2(0, 0);
                        if (there > 0) x = poll_load8(from + n * step);
                        v[j][n][0] = x.x & m0, v[j][n][1] = x.y & m1;
                        seen.add(v[j][n][0]), seen.add(v[j][n][1]);
                    }
                }
                return seen.all();
            };
            uint4 q[STEPS / 2][2];
            auto load_queries = [&](int m0) {
                Seen seen;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int i = m0 + g + 8 * h;  // (row, query head of the group), row-major
                    const char* from = p + i / GROUP * ROW_BYTES + ((kv * GROUP + i % GROUP) * HD + c * (HD / 4)) * 2;
#pragma unroll
                    for (int s = 0; s < STEPS / 2; ++s) {
                        q[s][h] = make_uint4(0, 0, 0, 0);
                        if (i < rows * GROUP) q[s][h] = poll_load16(from + s * 16);
                        seen.add(q[s][h]);
                    }
                }
                return seen.all();
            };
            if (settled) {
                load_keys();
                if (HD <= 64)
                    load_values();
                else  // no registers are left for them yet
                    for (int n = 0; n < 2 * TILES; ++n)
                        asm volatile("prefetch.global.L2 [%0];" ::"l"(values + (u64)(n / 2 * 8 + g) * a.positions + base +
                                                                      n % 2 * 16 + 4 * c));
                until([&] { return load_queries(m0); });
            } else {
                until([&] {
                    const bool k_ready = load_keys(), v_ready = HD > 64 || load_values();
                    return load_queries(m0) && k_ready && v_ready;
                });
            }
            stamp_at(l, 11);
            const int i0 = m0 + g, i1 = i0 + 8;
            float score[4][4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; s += 2) {
                const uint4 x = q[s / 2][0], y = q[s / 2][1];
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    mma(score[t], x.x, y.x, x.y, y.y, k[t][s][0], k[t][s][1]);
                    mma(score[t], x.z, y.z, x.w, y.w, k[t][s + 1][0], k[t][s + 1][1]);
                }
            }
            if (HD > 64) until([&] { return load_values() || settled; });
            const int p0 = start + i0 / GROUP, p1 = start + i1 / GROUP;
            if (!settled || base <= end - 1 - window)  // some row does not see all of these positions
#pragma unroll
                for (int t = 0; t < 4; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int at = position(t, 2 * c + e);
                        if (at > p0 || at <= p0 - window) score[t][e] = -1e30f;
                        if (at > p1 || at <= p1 - window) score[t][2 + e] = -1e30f;
                    }
            float top0 = -1e30f, top1 = -1e30f, sum0 = 0, sum1 = 0;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                top0 = fmaxf(top0, fmaxf(score[t][0], score[t][1]));
                top1 = fmaxf(top1, fmaxf(score[t][2], score[t][3]));
            }
#pragma unroll
            for (int d = 1; d < 4; d <<= 1) {
                top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, d));
                top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, d));
            }
            constexpr float LOG2 = SCALE * 1.4426950408889634f;
            const float less0 = top0 > -1e29f ? top0 * LOG2 : 0, less1 = top1 > -1e29f ? top1 * LOG2 : 0;
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &x = score[t][e], &y = score[t][2 + e];
                    x = exp2_fast(x * LOG2 - less0), y = exp2_fast(y * LOG2 - less1);
                    sum0 += x, sum1 += y;
                }
            top0 = top0 > -1e29f ? less0 : -1e30f, top1 = top1 > -1e29f ? less1 : -1e30f;
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
            stamp_at(l, 12);
            join(p, kv, split, m0);
            stamp_at(l, 13);
            block_sync();
        }
    }

    // The warps' shares of a split become one part: 16 threads a row.
    __device__ __forceinline__ void join(const char* p, int kv, int split, int m0) {
        constexpr int PITCH = HD + 4, EACH = HD / 16;
        const int r = thread() >> 4, d = (thread() & 15) * EACH, i = m0 + r;
        const float* scratch = (const float*)(smem + SMEM_X) + r * PITCH;
        float top = -1e30f, total = 0, o[EACH] = {};
        float2 ml[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) ml[w] = *(const float2*)(scratch + w * 16 * PITCH + HD);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, ml[w].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float share = exp2_fast(ml[w].x - top);
            total += share * ml[w].y;
#pragma unroll
            for (int e = 0; e < EACH; e += 2) {
                const float2 x = *(const float2*)(scratch + w * 16 * PITCH + d + e);
                o[e] += share * x.x, o[e + 1] += share * x.y;
            }
        }
        if (i >= rows * GROUP) return;
        const float scale = total > 0 ? 1.f / total : 0.f;
        const int head = kv * GROUP + i % GROUP;
        char* part = const_cast<char*>(p) + AT_PARTS + (u64)(split * ROWS + i / GROUP) * PART_BYTES;
        char* to = part + (head * HD + d) * 2;
#pragma unroll
        for (int e = 0; e < EACH; e += 2) publish4(to + e * 2, pack(o[e] * scale, o[e + 1] * scale));
        if ((thread() & 15) == 0)
            publish4(part + ATT * 2 + head * 4, __float_as_uint(total > 0 ? top + log2f(total) : -1e30f));
    }

    // ---- housekeeping

    // Back to the sentinel where the last pass over this arena wrote.
    __device__ __forceinline__ void reset(char* p, int dirty_rows, int dirty_splits) {
#pragma unroll 1
        for (int s = -2; s < dirty_splits; ++s) {
            char* at = p + (s == -2 ? 0 : s == -1 ? AT_V : AT_PARTS + (u64)s * ROWS * PART_BYTES);
            const int n = (s == -2 ? dirty_rows * ROW_BYTES : s == -1 ? V_BYTES : dirty_rows * PART_BYTES) / 16;
#pragma unroll 1
            for (int i = blockIdx.x * THREADS + thread(); i < n; i += GRID * THREADS)
                ((uint4*)at)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
        }
    }

    __device__ __forceinline__ void run() {
        start = a.state[0];
        const int epoch = a.epoch[0], side = epoch & 1;
        const int dirty_rows = a.epoch[2 + (side ^ 1) * 2], dirty_splits = a.epoch[3 + (side ^ 1) * 2];
        const int* owned = a.owned + blockIdx.x * (OWNED + 1);
        const int owns = owned[0];
        ++owned;
        const int* begin = a.stage_begin + blockIdx.x * (2 * LAYERS + 2);
        for (int i = thread(); i < owns * X_ROWS * 16; i += THREADS) {
            const int tile = owned[i / (X_ROWS * 16)], row = i / 16 % X_ROWS;
            ((float*)(smem + SMEM_H))[i] =
                row < rows ? low(a.embed[(u64)a.row_tokens[row] * HIDDEN + tile * 16 + i % 16]) : 0;
        }
        const int last = (start + rows + SPLIT - 1) / SPLIT;
        const char* from = nullptr;
        for (int l = 0; l < LAYERS; ++l) {
            const Layer& w = a.layers[l];
            const char* p = a.arena + (u64)(side * LAYERS + l) * a.layer_bytes;
            const int window = (int)w.window, first = max(0, start - window + 1) / SPLIT;
            clock_at = a.profile + ((u64)blockIdx.x * LAYERS + l) * STAMPS;
            stamp();
            qkv(l, w, p, from, a.tasks + begin[2 * l], begin[2 * l + 1] - begin[2 * l]);
            attention(l, p, window, first, last);
            stamp();
            if (dirty_rows) reset(a.arena + (u64)((side ^ 1) * LAYERS + l) * a.layer_bytes, dirty_rows, dirty_splits);
            output(w, p, owned, owns, first, last);
            gate_up(w, p, a.tasks + begin[2 * l + 1], begin[2 * l + 2] - begin[2 * l + 1]);
            down(w, l + 1 < LAYERS ? a.layers[l + 1].attention_norm : a.final_norm, p, owned, owns);
            from = p + AT_OUT;
            stamp();
        }
        clock_at = a.profile + (u64)GRID * LAYERS * STAMPS + blockIdx.x * 2;
        if (a.want_logits)
            head(from, a.tasks + begin[2 * LAYERS], begin[2 * LAYERS + 1] - begin[2 * LAYERS]);
        block_sync();
        if (thread() == 0 && atomicAdd(a.epoch + 1, 1) == GRID - 1) {
            a.epoch[1] = 0, a.epoch[0] = epoch + 1;
            a.epoch[2 + side * 2] = rows, a.epoch[3 + side * 2] = last;
        }
    }
};

__device__ __forceinline__ void drain(u32 bars, int slots = SLOTS) {  // no copy may outlive the block
    for (int i = 0; i < slots; ++i) bar_wait(bars + i * 8, 0);
}

// Copies the block's stream into the ring, as far ahead as it reaches; only weights, so it need not wait for the
// predecessor's end before it starts.
__device__ __forceinline__ void produce(const Args& a, u32 ring, u32 bars) {
    const char* src = a.stream + a.stream_begin[blockIdx.x];
    const int* begin = a.stage_begin + blockIdx.x * (2 * LAYERS + 2);
    const int owns = a.owned[blockIdx.x * (OWNED + 1)], parts = 4 * LAYERS + (a.want_logits ? 1 : 0);
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    int slot = 0, copied = 0;
    u32 phase = 1;
    for (int part = 0; part < parts; ++part) {
        const int l = part >> 2, stage = part & 3;  // qkv or the head, output, gate and up, down
        constexpr int H = piece(HIDDEN), A = piece(ATT), I = piece(INNER);
        const int bytes = (stage == 1 ? A : stage == 3 ? I : H) * 32, at = 2 * l + (stage == 2);
        const int pieces = stage == 1 ? ATT / A : stage == 3 ? INNER / I : HIDDEN / H;
        int n = (stage & 1 ? owns : begin[at + 1] - begin[at]) * pieces;
        for (; n; --n) {
            if (copied++ == SLOTS) {  // the ring is full; only now does it matter whether there is anything to do
                asm volatile("griddepcontrol.wait;" ::: "memory");
                if (*(volatile const int*)(a.state + 1) == 0) return drain(bars);
            }
            if (copied > SLOTS) bar_wait(bars + (SLOTS + slot) * 8, phase);
            bulk_copy(ring + slot * SLOT_BYTES, src, bytes, bars + slot * 8, policy);
            src += bytes;
            if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
    }
    if (copied <= SLOTS) drain(bars, copied);
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) model_pass(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char smem[];
    const u32 bars = smem_addr(smem + SMEM_BARS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) bar_init(bars + i * 8, 1), bar_init(bars + (SLOTS + i) * 8, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x >= THREADS) {  // a whole warpgroup, so that its registers go to the consumers
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == THREADS) produce(a, smem_addr(smem), bars);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        Block block(a, smem);
        block.rows = a.state[1];
        block.stream.bars = bars;
        if (block.rows) block.run();
    }
}
