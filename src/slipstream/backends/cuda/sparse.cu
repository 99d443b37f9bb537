// The kernels of a round over a sparse model: matrix products that stream packed weights, and attention.
//
// Weights lie packed as operand fragments of mma.m16n8k16: a warp's lane copies the 16 bytes it will consume itself into
// a private queue in shared memory (cp.async), so that many stay in flight with no registers and no barriers. Features
// are the tensor core's rows, rows of the round its columns: a row's numbers never depend on its company.
//
// Activations are bf16 times 2^64, which keeps products with unpacked FP8 (times 2^-120) and FP4 (times 2^-126) normal.
// The norm's reciprocal root mean square is one factor a row, applied to the product; who writes the stream also writes
// what the next product reads, and the sum of squares of each 16 features.
//
// Every kernel is compiled alone: KIND chooses it, NT tiles of 8 rows, FORMAT 0 bf16, 1 FP8, 2 MXFP4, DEPTH the queue.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#ifndef FORMAT
#define FORMAT 0
#endif
#define DEV __device__ __forceinline__
constexpr int WARPS = (KIND == 2 && FORMAT ? 16 : 8) * (KIND == 2 || KIND == 3 ? 2 / NT : 1), THREADS = WARPS * 32, ROWS = 16, RUN_ROWS = 1;  // and slots of `state`
constexpr float LIFT = 18446744073709551616.f, UNLIFT = 1 / LIFT;
extern __shared__ __align__(1024) char shared[];

// ---- primitives

DEV void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
DEV void wait_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV uint4 load16(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEV void copy_weights(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
DEV void copy_activations(u32 dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
DEV void copy_word(u32 dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
DEV void copy_pair(u32 dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
DEV uint4 shared16(u32 p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
    return v;
}
DEV u32 shared4(u32 p) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
    return v;
}
DEV void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV u32 bf16_pair(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
DEV u16 bf16_bits(float x) { return (u16)bf16_pair(x, 0.f); }
DEV float bf16_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
DEV float warp_sum(float x) {
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}
DEV u32 float_key(float x) {  // order-preserving
    u32 u = __float_as_uint(x);
    return u >> 31 ? ~u : u | 0x80000000u;
}

// ---- the stream of weights: a stage is 32 columns (64 of MXFP4) of a tile of 16 features

constexpr int STEP = FORMAT == 2 ? 64 : 32;                   // columns a stage
constexpr int W_BYTES = FORMAT == 0 ? 1024 : 512;             // weights a stage
constexpr int X_PARTS = STEP / 32;
constexpr int S_BYTES = FORMAT == 2 ? 128 : FORMAT == 1 ? 256 : 0;
constexpr int X_PITCH = KIND == 2 ? 64 : 512;                 // from the first 32 columns of a stage to the next
constexpr int STAGE = W_BYTES + S_BYTES + (KIND == 2 ? 0 : 512 * X_PARTS * NT);
constexpr int UNROLL = FORMAT == 1 ? 4 : 1;                   // stages that share an FP8 scale
constexpr int QUEUE = DEPTH * STAGE;                          // a warp's
constexpr float EXPONENT = FORMAT == 0 ? UNLIFT : FORMAT == 1 ? 72057594037927936.f : 1.f;  // 2^56; MXFP4's is in its scales

struct Run {  // what a warp multiplies next: `stages` stages of a tile's weights by activations
    const char* w;     // this lane's
    const char* s;     // MXFP4: this lane's scale words; FP8: the tile's scales, a pair a 128 columns
    const u16* x[NT];  // this lane's row and columns; null where the row does not count
    int stages, first;
};

DEV void fetch_w(const Run& r, int i, u32 slot, bool scales) {
    int lane = threadIdx.x & 31;
    copy_weights(slot + lane * 16, r.w + (u64)i * W_BYTES);
    if (FORMAT == 0) copy_weights(slot + 512 + lane * 16, r.w + (u64)i * W_BYTES + 512);
    if (FORMAT == 1 && scales) copy_pair(slot + W_BYTES + lane * 8, r.s + (r.first + i) / 4 * 8);
    if (FORMAT == 2) copy_word(slot + W_BYTES + lane * 4, r.s + i * 32);
}
DEV void fetch_x(const Run& r, int i, u32 slot) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int t = 0; t < NT; t++)
        if (r.x[t])
#pragma unroll
            for (int p = 0; p < X_PARTS; p++)
                copy_activations(slot + W_BYTES + S_BYTES + (t * X_PARTS + p) * 512 + lane * 16, r.x[t] + i * STEP + p * 32);
}
// Four e2m1 pairs or two e4m3 pairs of a word, as bf16 pairs.
DEV void unpack4(u32 w, u32* a) {
    a[0] = w & 0x81C081C0;
    a[1] = w << 3 & 0x81C081C0;
    a[2] = w << 6 & 0x81C081C0;
    a[3] = (w << 1 & 0x80008000) | (w >> 5 & 0x01000100) | (w >> 4 & 0x00C000C0);
}
DEV void unpack8(u32 w, u32& high, u32& low) {
    high = (w >> 4 & 0x07F007F0) | (w & 0x80008000);
    low = (w << 4 & 0x07F007F0) | (w << 8 & 0x80008000);
}

struct Sums {
    float c[NT][4];  // features g, g and g + 8, g + 8; rows 2c and 2c + 1
    float part[NT][4];
    DEV void clear() {
        for (int t = 0; t < NT; t++)
            for (int i = 0; i < 4; i++) c[t][i] = part[t][i] = 0;
    }
};

// x_at: this lane's part of the activations, x_rows from 8 rows to the next. scaled: an FP8 scale's columns end here.
DEV void consume(u32 slot, u32 x_at, int x_rows, bool scaled, Sums& sums) {
    int lane = threadIdx.x & 31;
    uint4 w = shared16(slot + lane * 16);
    if (FORMAT == 0) {
        uint4 v = shared16(slot + 512 + lane * 16);
#pragma unroll
        for (int t = 0; t < NT; t++) {
            uint4 x = shared16(x_at + t * x_rows);
            mma(sums.c[t], w.x, w.y, w.z, w.w, x.x, x.y);
            mma(sums.c[t], v.x, v.y, v.z, v.w, x.z, x.w);
        }
    } else if (FORMAT == 1) {
        u32 a[8];  // of both products: rows g and g + 8, two halves
        unpack8(w.x, a[0], a[1]), unpack8(w.y, a[2], a[3]), unpack8(w.z, a[4], a[5]), unpack8(w.w, a[6], a[7]);
#pragma unroll
        for (int t = 0; t < NT; t++) {
            uint4 x = shared16(x_at + t * x_rows);
            mma(sums.part[t], a[0], a[1], a[2], a[3], x.x, x.y);
            mma(sums.part[t], a[4], a[5], a[6], a[7], x.z, x.w);
        }
        if (scaled) {
            float low = __uint_as_float(shared4(slot + W_BYTES + lane * 8));
            float high = __uint_as_float(shared4(slot + W_BYTES + lane * 8 + 4));
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sums.c[t][j] += sums.part[t][j] * (j < 2 ? low : high);
                    sums.part[t][j] = 0;
                }
        }
    } else {
        u32 s = shared4(slot + W_BYTES + lane * 4);  // row g: both groups; row g + 8: both groups
        u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int q = 0; q < 2; q++) {
            u32 a[4], b[4];
            unpack4(words[2 * q], a), unpack4(words[2 * q + 1], b);
            float low = __uint_as_float((s >> 8 * q & 0xFF) << 23), high = __uint_as_float((s >> (16 + 8 * q) & 0xFF) << 23);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                uint4 x = shared16(x_at + t * x_rows + q * X_PITCH);
                float d[4] = {};
                mma(d, a[0], a[1], a[2], a[3], x.x, x.y);
                mma(d, b[0], b[1], b[2], b[3], x.z, x.w);
                sums.c[t][0] += d[0] * low, sums.c[t][1] += d[1] * low;
                sums.c[t][2] += d[2] * high, sums.c[t][3] += d[3] * high;
            }
        }
    }
}

// ---- epilogues: the root mean square, and the residual stream

struct Stream {  // what a product adds to and what it leaves for the next one
    float* h;            // (ROWS, hidden)
    u16* x;              // (ROWS, hidden) bf16 of h * norm, lifted
    float* squares;      // (ROWS, hidden / 16)
    const float* norm;   // of the next product
};
// Reciprocal root mean square of each row, by warp: the sum of `tiles` sums in a fixed order.
DEV void row_scales(const float* squares, int tiles, float eps, int rows, float* rms) {
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (int r = WARPS - 1 - warp; r < rows; r += WARPS) {  // the first warps route meanwhile
        float total = 0;
        for (int i = lane; i < tiles; i += 32) total += squares[r * tiles + i];
        total = warp_sum(total);
        if (lane == 0) rms[r] = rsqrtf(total / (tiles * 16) + eps);
    }
}
struct Before {  // what a thread of add_to_stream adds to, loaded early; the norm's weight never changes
    float h, norm;
};
// add[row][feature of the tile] onto the stream; needs 16 * ROWS threads, ends with the tile's squares written.
DEV void add_to_stream(const Stream& to, Before before, int hidden, int tile, int rows, float* add) {
    int row = threadIdx.x / 16, f = threadIdx.x % 16, at = row * hidden + tile * 16 + f;
    float h = 0;
    if (row < rows) {
        h = before.h + add[row * 16 + f];
        to.h[at] = h;
        to.x[at] = bf16_bits(h * before.norm * LIFT);
    }
    float square = h * h;  // a half warp is a row
    for (int mask = 8; mask; mask >>= 1) square += __shfl_xor_sync(~0u, square, mask);
    if (row < rows && f == 0) to.squares[row * (hidden / 16) + tile] = square;
}

// ---- embedding

struct EmbedArgs {
    const int* tokens;
    const u16* table;
    const int* state;
    Stream to;
    u64 hidden;
};
#if KIND == 0
extern "C" __global__ void __launch_bounds__(256) embed(EmbedArgs a) {
    wait_predecessor();
    launch_dependents();  // not earlier: all later kernels read `state`, which the last round wrote, before they wait
    int rows = a.state[RUN_ROWS], hidden = a.hidden, f = threadIdx.x % 16;
    __shared__ float add[ROWS * 16];
    for (int tile = blockIdx.x; tile < hidden / 16; tile += gridDim.x) {
        int row = threadIdx.x / 16;
        if (row < rows) {
            add[threadIdx.x] = bf16_float(a.table[(u64)a.tokens[row] * hidden + tile * 16 + f]);
        }
        add_to_stream(a.to, {0, a.to.norm[tile * 16 + f]}, hidden, tile, rows, add);
    }
}
#endif

// ---- dense products: a block makes 8 / SPLITS tiles, each by SPLITS warps that share its columns

struct DenseArgs {
    const char* w;
    const char* scales;
    const float* bias;   // null or (features,)
    const u16* x;        // (ROWS, columns)
    const float* squares;  // of x, null where it is not normed
    float* out;          // (ROWS, features), or null: added to the stream
    const int* state;
    Stream to;
    u64 features, columns, tiles;
    float eps;
};
#if KIND == 1
#ifndef SPLITS
#define SPLITS 8
#endif
extern "C" __global__ void __launch_bounds__(256, 2) dense(DenseArgs a) {
    launch_dependents();
    constexpr int T = WARPS / SPLITS;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
    int tile = blockIdx.x * T + warp / SPLITS, s = warp % SPLITS, all = a.columns / STEP, columns = a.columns;
    constexpr int UNIT = FORMAT == 1 ? 4 : 1;
    Run r;
    r.first = all / UNIT * s / SPLITS * UNIT;
    r.stages = tile < (int)a.tiles ? all / UNIT * (s + 1) / SPLITS * UNIT - r.first : 0;
    r.w = a.w + ((u64)tile * all + r.first) * W_BYTES + lane * 16;
    if (FORMAT == 2) r.s = a.scales + ((u64)tile * all + r.first) * 32 + g * 4;
    if (FORMAT == 1) r.s = a.scales + (u64)tile * (all / 4) * 8;
    u32 queue = address(shared) + warp * QUEUE;
    for (int i = 0; i < DEPTH; i++)
        if (i < r.stages) fetch_w(r, i, queue + i * STAGE, i % 4 == 3);
    copy_commit();
    int rows = a.state[RUN_ROWS], feature0 = blockIdx.x * T * 16 + threadIdx.x % 16;
    Before before = {0, a.out ? 0 : a.to.norm[feature0]};
    float bias = a.bias && feature0 < (int)a.features ? a.bias[feature0] : 0;
    wait_predecessor();
    if (!a.out && threadIdx.x / 16 < rows) before.h = a.to.h[threadIdx.x / 16 * a.features + feature0];
    for (int t = 0; t < NT; t++)
        r.x[t] = t * 8 + g < rows ? a.x + (u64)(t * 8 + g) * columns + r.first * STEP + c * 8 : nullptr;
    for (int i = 0; i < DEPTH; i++) {
        if (i < r.stages) fetch_x(r, i, queue + i * STAGE);
        copy_commit();
    }
    __shared__ float rms[ROWS], add[ROWS * 16];
    if (a.squares) row_scales(a.squares, columns / 16, a.eps, rows, rms);
    Sums sums;
    sums.clear();
    int place = 0;
    for (int i = 0; i < r.stages; i++) {
        copy_wait<DEPTH - 1>();
        u32 slot = queue + place * STAGE;
        consume(slot, slot + W_BYTES + S_BYTES + lane * 16, 512 * X_PARTS, i % 4 == 3, sums);
        if (i + DEPTH < r.stages) {
            fetch_w(r, i + DEPTH, slot, (i + DEPTH) % 4 == 3);
            fetch_x(r, i + DEPTH, slot);
        }
        copy_commit();
        if (++place == DEPTH) place = 0;
    }
    copy_wait<0>();
    __syncthreads();  // the queues are read out: partial sums take their place
    float* part = (float*)shared;
    for (int t = 0; t < NT; t++)
        for (int j = 0; j < 4; j++) part[((warp * NT + t) * 4 + j) * 32 + lane] = sums.c[t][j];
    __syncthreads();
    for (int k = 0; k < T; k++) {
        int to_tile = blockIdx.x * T + k;
        if (to_tile >= (int)a.tiles) break;
        // thread (row, f): row = t * 8 + 2c + (j & 1), f = g + 8 * (j / 2)
        int row = threadIdx.x / 16, f = threadIdx.x % 16, t = row / 8;
        int j = (f / 8) * 2 + (row & 1), from = (f % 8) * 4 + (row % 8) / 2;
        float total = 0;
        if (t < NT)
            for (int q = 0; q < SPLITS; q++) total += part[(((k * SPLITS + q) * NT + t) * 4 + j) * 32 + from];
        int feature = to_tile * 16 + f;
        total *= EXPONENT;
        if (a.squares && row < rows) total *= rms[row];
        if (k > 0) {
            bias = a.bias && feature < (int)a.features ? a.bias[feature] : 0;
            if (!a.out) before = {row < rows ? a.to.h[row * a.features + feature] : 0, a.to.norm[feature]};
        }
        total += bias;
        if (a.out) {
            if (row < rows && feature < (int)a.features) a.out[(u64)row * a.features + feature] = total;
        } else {
            add[row * 16 + f] = total;
            add_to_stream(a.to, before, a.features, to_tile, rows, add);
        }
    }
}
#endif

// ---- experts

struct RouteArgs {
    const float* logits;      // (ROWS, experts)
    const float* correction;  // null or (experts,)
    float scale;
    int experts, top_k, always;  // always: experts of every row, numbered after the others
    int sigmoid, normalise, groups, top_groups;
};
constexpr int MAX_EXPERTS = 512, MAX_SLOTS = 16, MAX_ITEMS = 160;
struct Route {
    float weight[ROWS][MAX_SLOTS];
    short expert[ROWS][MAX_SLOTS], items[MAX_ITEMS];
    signed char slot[MAX_ITEMS][ROWS];  // which of a row's choices an item is, -1 none
    u32 used[MAX_EXPERTS / 32];
    int base[MAX_EXPERTS / 32 + 1];
    int count;
};

// The lane with the highest key, of equal ones the lowest expert; keys of one row lie over lanes, expert = 32 * j + lane.
template <int N> DEV int best_of(const u32* keys) {
    u32 mine = 0;
#pragma unroll
    for (int j = 0; j < N; j++) mine = max(mine, keys[j]);
    u32 top = __reduce_max_sync(~0u, mine), at = ~0u;
#pragma unroll
    for (int j = N - 1; j >= 0; j--)
        if (keys[j] == top) at = j * 32 + (threadIdx.x & 31);
    return __reduce_min_sync(~0u, at);
}

#ifndef EXPERTS
#define EXPERTS 1
#define GROUPS 1
#endif
constexpr int PER = EXPERTS > 32 ? (EXPERTS + 31) / 32 : 1;  // of a lane
DEV void choose(const RouteArgs& a, int row, Route& to) {
    int lane = threadIdx.x & 31;
    float score[PER], most = -1e30f, total = 0;
    u32 keys[PER];  // 0: not to be chosen
#pragma unroll
    for (int j = 0; j < PER; j++) {
        int e = j * 32 + lane;
        float l = e < EXPERTS ? a.logits[row * EXPERTS + e] : -1e30f;
        score[j] = a.sigmoid ? 1 / (1 + expf(-l)) : l;
        most = fmaxf(most, l);
        keys[j] = e < EXPERTS ? float_key(a.correction ? score[j] + a.correction[e] : score[j]) : 0;
    }
    for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    if (!a.sigmoid)
#pragma unroll
        for (int j = 0; j < PER; j++) score[j] = j * 32 + lane < EXPERTS ? expf(score[j] - most) : 0, total += score[j];
    if (GROUPS > 1) {
        int size = EXPERTS / GROUPS;
        u32 group_keys[1] = {0};
#pragma unroll 1
        for (int n = 0; n < GROUPS; n++) {
            u32 here[PER];
#pragma unroll
            for (int j = 0; j < PER; j++) here[j] = (j * 32 + lane) / size == n ? keys[j] : 0;
            float sum = 0;
            for (int k = 0; k < 2; k++) {
                int e = best_of<PER>(here);
                u32 key = 0;
#pragma unroll
                for (int j = 0; j < PER; j++)
                    if (j * 32 + lane == e) key = here[j], here[j] = 0;
                key = __reduce_max_sync(~0u, key);
                sum += __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key);
            }
            if (lane == n) group_keys[0] = float_key(sum);
        }
        u32 allowed = 0;
        for (int k = 0; k < a.top_groups; k++) {
            int n = best_of<1>(group_keys);
            allowed |= 1u << n;
            if (lane == n) group_keys[0] = 0;
        }
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (!(allowed >> (j * 32 + lane) / size % 32 & 1)) keys[j] = 0;
    }
    int at[PER];  // each lane sorts its experts, of equal ones the lower first; then heads compete
#pragma unroll
    for (int j = 0; j < PER; j++) at[j] = j * 32 + lane;
#pragma unroll
    for (int n = 0; n < PER; n++)
#pragma unroll
        for (int j = n % 2; j + 1 < PER; j += 2) {
            bool swap = keys[j + 1] > keys[j];
            u32 key = keys[j];
            int expert = at[j];
            float value = score[j];
            keys[j] = swap ? keys[j + 1] : key, keys[j + 1] = swap ? key : keys[j + 1];
            at[j] = swap ? at[j + 1] : expert, at[j + 1] = swap ? expert : at[j + 1];
            score[j] = swap ? score[j + 1] : value, score[j + 1] = swap ? value : score[j + 1];
        }
    float chosen = 0;
    int expert = 0;
#pragma unroll 1
    for (int k = 0; k < a.top_k; k++) {
        u32 top = __reduce_max_sync(~0u, keys[0]);
        int e = __reduce_min_sync(~0u, keys[0] == top ? at[0] : ~0u);
        float value = __shfl_sync(~0u, score[0], e % 32);
        if (lane == k) chosen = value, expert = e;
        if (lane == e % 32) {
#pragma unroll
            for (int j = 0; j + 1 < PER; j++) keys[j] = keys[j + 1], at[j] = at[j + 1], score[j] = score[j + 1];
            keys[PER - 1] = 0;
        }
    }
    float sum = a.normalise ? warp_sum(lane < a.top_k ? chosen : 0) : a.sigmoid ? 1 : warp_sum(total);
    if (lane < a.top_k) {
        to.weight[row][lane] = chosen / sum * a.scale;
        to.expert[row][lane] = expert;
        atomicOr(&to.used[expert / 32], 1u << expert % 32);
    } else if (lane < a.top_k + a.always) {
        to.weight[row][lane] = 1;
        to.expert[row][lane] = EXPERTS + lane - a.top_k;
    }
}

// Every block routes all rows anew: cheaper than a kernel of its own. Ends with the block in step.
DEV void route(const RouteArgs& a, int rows, Route& to) {
    if (threadIdx.x < MAX_EXPERTS / 32) to.used[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < MAX_ITEMS * ROWS / 4; i += THREADS) ((u32*)to.slot)[i] = ~0u;
    __syncthreads();
    for (int row = threadIdx.x / 32; row < rows; row += WARPS) {
        choose(a, row, to);
    }
    __syncthreads();
    constexpr int WORDS = (EXPERTS + 31) / 32;
    if (threadIdx.x < 32) {  // how many experts are used before each word
        int n = threadIdx.x < WORDS ? __popc(to.used[threadIdx.x]) : 0, sum = n;
        for (int d = 1; d < 32; d *= 2) {
            int below = __shfl_up_sync(~0u, sum, d);
            if ((int)threadIdx.x >= d) sum += below;
        }
        if (threadIdx.x <= WORDS) to.base[threadIdx.x] = sum - n;
    }
    __syncthreads();
    auto before = [&](int e) { return to.base[e / 32] + __popc(to.used[e / 32] & ((1u << e % 32) - 1)); };
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS)
        if (to.used[e / 32] >> e % 32 & 1) to.items[before(e)] = e;
    int routed = to.base[WORDS], slots = a.top_k + a.always;
    if ((int)threadIdx.x < a.always) to.items[routed + threadIdx.x] = EXPERTS + threadIdx.x;
    if (threadIdx.x == 0) to.count = routed + a.always;
    for (int i = threadIdx.x; i < rows * slots; i += THREADS) {
        int row = i / slots, k = i % slots, e = to.expert[row][k];
        to.slot[k < a.top_k ? before(e) : routed + k - a.top_k][row] = k;
    }
    __syncthreads();
}

struct ExpertArgs {
    const char* w;
    const char* scales;
    const float* bias;  // null or (experts, tiles * 16) in the order of the tiles' features
    const u16* x;       // up: (ROWS, columns); down: (ROWS, slots, columns)
    const float* squares;
    u16* out;           // up: (ROWS, slots, inner)
    const int* state;
    Stream to;          // down
    RouteArgs route;
    u64 columns, tiles; // tiles of one expert
    float eps, alpha, limit;
    int clamped;
};

#if KIND == 2
// Gate and up: feature g of a tile is gate's, g + 8 up's. Units of one tile of one expert are dealt to pairs of
// warps, which halve its columns; the activations lie in shared memory behind the queues.
extern "C" __global__ void __launch_bounds__(THREADS, 1) expert_up(ExpertArgs a) {
    __shared__ Route to;
    __shared__ float rms[ROWS];
    int rows = a.state[RUN_ROWS], columns = a.columns, pitch = columns * 2 + (columns % 64 ? 0 : 64);
    wait_predecessor();
    launch_dependents();  // not earlier: the down kernel reads the router's logits before it waits
    if (rows == 0) return;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * (columns / 8); i += THREADS) {
        int row = i / (columns / 8), k = i % (columns / 8);
        copy_weights(address(shared) + WARPS * QUEUE + row * pitch + k * 16, a.x + (u64)i * 8);
    }
    copy_commit();
    row_scales(a.squares, columns / 16, a.eps, rows, rms);
    route(a.route, rows, to);
    copy_wait<0>();
    __syncthreads();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
    int all = columns / STEP, tiles = a.tiles, units = to.count * tiles, slots = a.route.top_k + a.route.always;
    constexpr int PAIRS = WARPS / 2;
    int pair = warp % PAIRS, half = warp / PAIRS, middle = all / UNROLL / 2 * UNROLL;
    int begin = half ? middle : 0, stages = half ? all - middle : middle;
    int stride = gridDim.x * PAIRS, unit = pair * gridDim.x + blockIdx.x;
    u32 queue = address(shared) + warp * QUEUE;
    u32 x_at = address(shared) + WARPS * QUEUE + g * pitch + c * 16 + begin * STEP * 2;
    __shared__ float other[PAIRS][NT * 4 * 32];
    if (unit >= units) return;
    Run ahead;
    int left = 0, ahead_unit = unit - stride;
    auto fetch = [&](u32 slot, bool scales) {  // the next stage of the stream that is dealt to this warp
        if (left == 0) {
            ahead_unit += stride;
            if (ahead_unit < units) {
                u64 tile = (u64)to.items[ahead_unit / tiles] * tiles + ahead_unit % tiles;
                ahead.w = a.w + (tile * all + begin) * W_BYTES + lane * 16;
                if (FORMAT == 2) ahead.s = a.scales + (tile * all + begin) * 32 + g * 4;
                if (FORMAT == 1) ahead.s = a.scales + (tile * all + begin) / 4 * 8;
                ahead.first = 0;
                left = stages;
            }
        }
        if (left > 0) {
            fetch_w(ahead, 0, slot, scales);
            ahead.w += W_BYTES, left--;
            if (FORMAT == 2) ahead.s += 32;
            if (FORMAT == 1 && scales) ahead.s += 8;
        }
        copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) fetch(queue + i * STAGE, i % 4 == 3);
    u32 slot = queue;
    for (; unit < units; unit += stride) {
        Sums sums;
        sums.clear();
#pragma unroll 1
        for (int i = 0; i < stages; i += UNROLL) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                copy_wait<DEPTH - 1>();
                consume(slot + u * STAGE, x_at + (i + u) * STEP * 2, 8 * pitch, u == 3, sums);
                fetch(slot + u * STAGE, u == 3);
            }
            slot += UNROLL * STAGE;
            if (slot == queue + QUEUE) slot = queue;
        }
        if (half)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) other[pair][(t * 4 + j) * 32 + lane] = sums.c[t][j];
        asm volatile("bar.sync %0, 64;" ::"r"(pair) : "memory");
        if (!half)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums.c[t][j] += other[pair][(t * 4 + j) * 32 + lane];
        asm volatile("bar.sync %0, 64;" ::"r"(pair) : "memory");
        if (half) continue;
        int item = unit / tiles, f = unit % tiles * 8 + g, expert = to.items[item];
        float gate_bias = 0, up_bias = 0;
        if (a.bias) {
            const float* b = a.bias + ((u64)expert * tiles + unit % tiles) * 16 + g;
            gate_bias = b[0], up_bias = b[8];
        }
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int row = t * 8 + 2 * c + j, slot = row < rows ? to.slot[item][row] : -1;
                if (slot < 0) continue;
                float gate = sums.c[t][j] * EXPONENT * rms[row] + gate_bias;
                float up = sums.c[t][2 + j] * EXPONENT * rms[row] + up_bias, y;
                if (a.clamped) {
                    gate = fminf(gate, a.limit), up = fmaxf(-a.limit, fminf(up, a.limit));
                    y = gate / (1 + expf(-a.alpha * gate)) * (up + 1);
                } else {
                    y = gate / (1 + expf(-gate)) * up;
                }
                a.out[(u64)(row * slots + slot) * (tiles * 8) + f] = bf16_bits(y * LIFT);
            }
    }
}
#endif

#if KIND == 3
// Down: a block owns 16 features of the stream for all experts; its warps share them, SPLITS to an expert.
#ifndef SPLITS
#define SPLITS 1
#endif
extern "C" __global__ void __launch_bounds__(THREADS, 2) expert_down(ExpertArgs a) {
    launch_dependents();
    __shared__ Route to;
    __shared__ float add[ROWS * 16];
    int rows = a.state[RUN_ROWS];
    route(a.route, rows, to);  // the router ended before the up kernel let this one start
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, c = lane % 4, tile = blockIdx.x;
    int all = a.columns / STEP, slots = a.route.top_k + a.route.always, units = to.count * SPLITS;
    constexpr int UNIT = FORMAT == 1 ? 4 : 1;
    u32 queue = address(shared) + warp * QUEUE;
    float* part = (float*)(shared + WARPS * QUEUE);  // (SPLITS, rows * slots, 16)
    auto begin = [&](int unit) {
        Run r;
        int item = unit / SPLITS, s = unit % SPLITS;
        r.first = all / UNIT * s / SPLITS * UNIT;
        r.stages = all / UNIT * (s + 1) / SPLITS * UNIT - r.first;
        u64 at = ((u64)to.items[item] * a.tiles + tile) * all;
        r.w = a.w + (at + r.first) * W_BYTES + lane * 16;
        if (FORMAT == 2) r.s = a.scales + (at + r.first) * 32 + g * 4;
        if (FORMAT == 1) r.s = a.scales + at / 4 * 8;
        for (int t = 0; t < NT; t++) {
            int row = t * 8 + g, slot = row < rows ? to.slot[item][row] : -1;
            r.x[t] = slot < 0 ? nullptr : a.x + (u64)(row * slots + slot) * a.columns + r.first * STEP + c * 8;
        }
        return r;
    };
    int unit = warp, next_unit = warp, ahead = 0, filled = 0;
    Run next;
    if (unit < units) {
        next = begin(unit);
        filled = min(DEPTH, next.stages);
        for (int i = 0; i < filled; i++) fetch_w(next, i, queue + i * STAGE, i % 4 == 3);
    }
    copy_commit();
    int feature = tile * 16 + threadIdx.x % 16, hidden = a.tiles * 16;
    Before before = {0, a.to.norm[feature]};
    wait_predecessor();
    if ((int)threadIdx.x / 16 < rows) before.h = a.to.h[threadIdx.x / 16 * hidden + feature];
    auto fetch = [&](u32 slot, bool weights, bool scales) {
        if (next_unit < units) {
            if (weights) fetch_w(next, ahead, slot, scales);
            fetch_x(next, ahead, slot);
            if (++ahead == next.stages) {
                ahead = 0, next_unit += WARPS;
                if (next_unit < units) next = begin(next_unit);
            }
        }
        copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) fetch(queue + i * STAGE, i >= filled, i % 4 == 3);
    u32 slot = queue;
    for (; unit < units; unit += WARPS) {
        int stages = (all / UNIT * (unit % SPLITS + 1) / SPLITS - all / UNIT * (unit % SPLITS) / SPLITS) * UNIT;
        Sums sums;
        sums.clear();
#pragma unroll 1
        for (int i = 0; i < stages; i += UNROLL) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                copy_wait<DEPTH - 1>();
                u32 at = slot + u * STAGE;
                consume(at, at + W_BYTES + S_BYTES + lane * 16, 512 * X_PARTS, u == 3, sums);
                fetch(at, true, u == 3);
            }
            slot += UNROLL * STAGE;
            if (slot == queue + QUEUE) slot = queue;
        }
        int item = unit / SPLITS;
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int row = t * 8 + 2 * c + (j & 1), slot = row < rows ? to.slot[item][row] : -1;
                if (slot >= 0) part[((unit % SPLITS * rows + row) * slots + slot) * 16 + g + 8 * (j / 2)] = sums.c[t][j];
            }
    }
    __syncthreads();
    int row = threadIdx.x / 16, f = threadIdx.x % 16;
    float total = 0;
    if (row < rows)
#pragma unroll 4
        for (int k = 0; k < slots; k++) {
            float y = 0;
            for (int s = 0; s < SPLITS; s++) y += part[((s * rows + row) * slots + k) * 16 + f];
            y *= EXPONENT;
            if (a.bias) y += a.bias[((u64)to.expert[row][k] * a.tiles + tile) * 16 + f];
            total += y * to.weight[row][k];
        }
    if (row < ROWS) add[threadIdx.x] = total;
    add_to_stream(a.to, before, hidden, tile, rows, add);
}
#endif

// ---- attention: the keys of a KV head are read once for all rows and query heads on it

struct AttentionArgs {
    const float* qkv;     // (ROWS, features): q, k, v
    u16* keys;            // (kv_heads, slots, D)
    u16* values;          // (kv_heads, slots, DV)
    u16* out;             // (ROWS, heads * DV) lifted
    float* parts;         // (SPLITS, kv_heads, 16 * MAX_TILES, DV), then in the same order the tops and sums
    const float* q_norm;  // null or (D,)
    const float* k_norm;
    const float* cos_sin; // (positions, 2, half)
    const float* sinks;   // null or (heads,)
    const int* state;
    u64 slots, kv_heads, half, window;  // slots: positions kept; a position lies at its remainder
    float scale, value_scale, eps;
};
#if KIND == 4
// Blocks of 32 keys are dealt by absolute position to the 8 warps of each of SPLITS blocks, which are a cluster.
constexpr int PITCH = D * 2 + (D * 2 % 128 ? 0 : 64), MAX_TILES = (8 * NT * GROUP + 15) / 16;
constexpr int OWN = 64 * D > 64 * (DV + 8) ? 64 * D : 64 * (DV + 8);
constexpr int ACC = DV + 8;  // no bank conflicts; column n of product i is value 64 * (i / 8) + 8n + i % 8
constexpr int START = 0;
constexpr float LOG2E = 1.4426950408889634f;

// A row of D values on its way through the head's norm and rotation: all loads first, then the arithmetic. Element e
// turns with its partner at half the rotary width.
constexpr int EACH = D / 32;
struct Row {
    float v[EACH], partner[EACH], cos[EACH], sin[EACH];
    DEV static int partner_of(int e, int half) { return e < half ? e + half : e < 2 * half ? e - half : e; }
    DEV void load(const float* from, const AttentionArgs& a, int position) {
        int lane = threadIdx.x & 31, half = a.half;
        const float* angle = a.cos_sin + (u64)position * 2 * half;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int e = i * 32 + lane, at = e < half ? e : e - half;
            v[i] = from[e], partner[i] = from[partner_of(e, half)];
            cos[i] = e < 2 * half ? angle[at] : 1;
            sin[i] = e < 2 * half ? e < half ? -angle[half + at] : angle[half + at] : 0;
        }
    }
    DEV void finish(const float* norm, const AttentionArgs& a, u16* to) {
        int lane = threadIdx.x & 31, half = a.half;
        float square = 0, weight[EACH], weight_of_partner[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int e = i * 32 + lane;
            weight[i] = norm ? norm[e] : 1, weight_of_partner[i] = norm ? norm[partner_of(e, half)] : 1;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) square += v[i] * v[i];
        float rms = norm ? rsqrtf(warp_sum(square) / D + a.eps) : 1;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int e = i * 32 + lane;
            float x = v[i] * rms * weight[i], y = partner[i] * rms * weight_of_partner[i];
            to[e] = bf16_bits(x * cos[i] + y * sin[i]);
        }
    }
};

extern "C" __global__ void
#if SPLITS > 1
    __cluster_dims__(SPLITS, 1, 1)
#endif
    __maxnreg__(192) attention(AttentionArgs a) {
    launch_dependents();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
    int split = blockIdx.x % SPLITS, kv_heads = a.kv_heads, heads = kv_heads * GROUP;
    int kv = blockIdx.x / SPLITS % kv_heads, tile = blockIdx.x / SPLITS / kv_heads;  // of 16 (row, query head) pairs
    int rows = a.state[RUN_ROWS], start = a.state[START], queries = rows * GROUP;
    int features = heads * D + kv_heads * (D + DV), window = min(a.window, (u64)1 << 30);
    char* q_at = shared;                                                  // (16, PITCH)
    float* acc = (float*)(shared + 16 * PITCH);  // (WARPS, OWN / 4): a warp's keys, in the end its (16, ACC) sums
    float* top_at = acc + WARPS * OWN / 4;       // (WARPS, 16), then sums
    u32 block_at = address(acc) + warp * OWN + lane * 16;  // a warp's block of keys, lanes' own pieces
    u16* keys = a.keys + (u64)kv * a.slots * D;
    u16* values = a.values + (u64)kv * a.slots * DV;
    int last = (start + rows - 1) / 32, lowest = max(0, start - window + 1) / 32;
    int first = split * WARPS + warp;  // blocks of keys: this warp's are first + n * SPLITS * WARPS
    if (first < lowest) first += (lowest - first + SPLITS * WARPS - 1) / (SPLITS * WARPS) * (SPLITS * WARPS);
    auto fetch_keys = [&](int b) {
        const u16* key = keys + (u64)(b * 32 % (int)a.slots + 8 * (g / 2) + g % 2) * D + 8 * c;
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int j = 0; j < D / 32; j++) copy_weights(block_at + (t * (D / 32) + j) * 512, key + 2 * t * D + 32 * j);
        copy_commit();
    };
    uint4 v[DV / 64][8];  // of a block: keys 8c + i, values 8g.. of each 64
    auto load_values = [&](int b) {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int n = 0; n < DV / 64; n++)
                v[n][i] = load16(values + (u64)(b * 32 % (int)a.slots + 8 * c + i) * DV + 64 * n + 8 * g);
    };
    int held = -1;
    if (tile * 16 < queries && first <= last) {  // what earlier rounds wrote does not wait for this layer's queries
        fetch_keys(first);
        load_values(first);
        if (first * 32 + 31 < start) held = first;
    }
    wait_predecessor();
    if (tile * 16 >= queries) return;
    for (int r = warp; r < rows; r += WARPS) {  // every tile's block does: their writes are the same
        int position = start + r, slot = position % (int)a.slots;
        if (position / (32 * WARPS) % SPLITS != split) continue;
        const float* from = a.qkv + (u64)r * features + heads * D;
        Row key;
        key.load(from + kv * D, a, position);
        float value[DV / 32];
#pragma unroll
        for (int i = 0; i < DV / 32; i++) value[i] = from[kv_heads * D + kv * DV + i * 32 + lane];
        key.finish(a.k_norm, a, keys + (u64)slot * D);
#pragma unroll
        for (int i = 0; i < DV / 32; i++) values[(u64)slot * DV + i * 32 + lane] = bf16_bits(value[i] * a.value_scale);
    }
    Row row[16 / WARPS];
#pragma unroll
    for (int u = 0; u < 16 / WARPS; u++) {
        int q = tile * 16 + warp + u * WARPS;
        if (q < queries) row[u].load(a.qkv + (u64)(q / GROUP) * features + (kv * GROUP + q % GROUP) * D, a, start + q / GROUP);
    }
#pragma unroll
    for (int u = 0; u < 16 / WARPS; u++) {
        int q = warp + u * WARPS;
        u16* to = (u16*)(q_at + q * PITCH);
        if (tile * 16 + q < queries) row[u].finish(a.q_norm, a, to);
        else
            for (int e = lane; e < D; e += 32) to[e] = 0;
    }
    __syncthreads();
    float scale = a.scale * LOG2E;
    {
        float o[DV / 8][4], top[2] = {-1e30f, -1e30f}, sum[2] = {};
#pragma unroll
        for (int i = 0; i < DV / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
        int at[2] = {start + (tile * 16 + g) / GROUP, start + (tile * 16 + g + 8) / GROUP};
        for (int b = first; b <= last; b += SPLITS * WARPS) {
            if (held != b) load_values(b);
            if (held != b) {
                fetch_keys(b);
                held = b;
            }
            copy_wait<0>();
            float s[4][4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0;
#pragma unroll
                for (int j = 0; j < D / 32; j++) {
                    uint4 k = shared16(block_at + (t * (D / 32) + j) * 512);
                    uint4 low = *(const uint4*)(q_at + g * PITCH + 64 * j + 16 * c);
                    uint4 high = *(const uint4*)(q_at + (g + 8) * PITCH + 64 * j + 16 * c);
                    mma(s[t], low.x, high.x, low.y, high.y, k.x, k.y);
                    mma(s[t], low.z, high.z, low.w, high.w, k.z, k.w);
                }
            }
            float most[2] = {top[0], top[1]};
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int behind = at[j / 2] - (b * 32 + 8 * c + 2 * t + j % 2);
                    s[t][j] = behind >= 0 && behind < window ? s[t][j] * scale : -1e30f;
                    most[j / 2] = fmaxf(most[j / 2], s[t][j]);
                }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], 1));
                most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], 2));
                float fade = exp2f(top[j] - most[j]);
                top[j] = most[j], sum[j] *= fade;
#pragma unroll
                for (int i = 0; i < DV / 8; i++) o[i][2 * j] *= fade, o[i][2 * j + 1] *= fade;
            }
            u32 p[4][2];
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float x = s[t][2 * j] > -1e29f ? exp2f(s[t][2 * j] - top[j]) : 0;
                    float y = s[t][2 * j + 1] > -1e29f ? exp2f(s[t][2 * j + 1] - top[j]) : 0;
                    sum[j] += x + y;
                    p[t][j] = bf16_pair(x, y);
                }
#pragma unroll
            for (int n = 0; n < DV / 64; n++)
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int u = 0; u < 8; u++) {
                        auto word = [&](const uint4& x) { return u / 2 == 0 ? x.x : u / 2 == 1 ? x.y : u / 2 == 2 ? x.z : x.w; };
                        const uint4* k = &v[n][4 * m];
                        u32 order = u % 2 ? 0x7632 : 0x5410;
                        mma(o[n * 8 + u], p[2 * m][0], p[2 * m][1], p[2 * m + 1][0], p[2 * m + 1][1],
                            __byte_perm(word(k[0]), word(k[1]), order), __byte_perm(word(k[2]), word(k[3]), order));
                    }
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sum[j] += __shfl_xor_sync(~0u, sum[j], 1);
            sum[j] += __shfl_xor_sync(~0u, sum[j], 2);
            if (c == 0) top_at[warp * 16 + g + 8 * j] = top[j], top_at[WARPS * 16 + warp * 16 + g + 8 * j] = sum[j];
        }
#pragma unroll
        for (int i = 0; i < DV / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                *(float2*)&acc[warp * (OWN / 4) + (g + 8 * j) * ACC + i * 8 + 2 * c] = {o[i][2 * j], o[i][2 * j + 1]};
        __syncthreads();
        __shared__ float share[WARPS][16], merged[2][16];
        if (threadIdx.x < 128) {  // thread (q, w): eight neighbours are a query's warps
            int q = threadIdx.x / 8, w = threadIdx.x % 8;
            float mine = top_at[w * 16 + q], most = mine, part;
            for (int mask = 1; mask < 8; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
            share[w][q] = exp2f(mine - most);
            part = share[w][q] * top_at[WARPS * 16 + w * 16 + q];
            for (int mask = 1; mask < 8; mask *= 2) part += __shfl_xor_sync(~0u, part, mask);
            __syncwarp();
            if (w == 0) merged[0][q] = most, merged[1][q] = part;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * DV; i += 256) {
            int q = i / DV, at_e = i % DV, e = at_e / 64 * 64 + at_e % 8 * 8 + at_e / 8 % 8, query = tile * 16 + q, head = kv * GROUP + query % GROUP;
            if (query >= queries) continue;
            float most = merged[0][q], total = merged[1][q], y = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) y += share[w][q] * acc[w * (OWN / 4) + q * ACC + at_e];
            if (SPLITS == 1) {
                if (a.sinks) total += exp2f(a.sinks[head] * LOG2E - most);
                if (query < queries) a.out[(u64)(query / GROUP * heads + head) * DV + e] = bf16_bits(y / total * LIFT);
            } else {
                u64 part = ((u64)split * kv_heads + kv) * 16 * MAX_TILES + query, parts = (u64)SPLITS * kv_heads * 16 * MAX_TILES;
                a.parts[part * DV + e] = y;
                if (e == 0) a.parts[parts * DV + part] = most, a.parts[parts * DV + parts + part] = total;
            }
        }
    }
#if SPLITS > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    u64 parts = (u64)SPLITS * kv_heads * 16 * MAX_TILES, step = (u64)kv_heads * 16 * MAX_TILES;
    for (int i = split * 256 + threadIdx.x; i < min(16, queries - tile * 16) * DV; i += 256 * SPLITS) {
        int query = tile * 16 + i / DV, e = i % DV, head = kv * GROUP + query % GROUP;
        u64 part = (u64)kv * 16 * MAX_TILES + query;
        const float *tops = a.parts + parts * DV, *sums = tops + parts;
        float top[SPLITS], y[SPLITS], sum[SPLITS], most = -1e30f, total = 0, out = 0;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            top[s] = tops[part + s * step], sum[s] = sums[part + s * step], y[s] = a.parts[(part + s * step) * DV + e];
            most = fmaxf(most, top[s]);
        }
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            float share = exp2f(top[s] - most);
            total += share * sum[s], out += share * y[s];
        }
        if (a.sinks) total += exp2f(a.sinks[head] * LOG2E - most);
        a.out[(u64)(query / GROUP * heads + head) * DV + e] = bf16_bits(out / total * LIFT);
    }
#endif
}
#endif
