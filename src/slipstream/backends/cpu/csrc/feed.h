// The second half of a layer: what every row takes, be it a dense feed-forward or a shared expert, and the experts that a
// router chooses for each row (Shazeer et al. 2017; groups: DeepSeek-V3, arXiv:2412.19437). An expert that no row goes to is
// not read.
//
//     norm -> router scores | choose | gate and up of each expert and of what every row takes | quantise -> their downs + x
//
// A thread owns the same output channels of every expert, and adds experts to a row in ascending order, then what every row
// takes: no order depends on the company of a row.
#pragma once
#include "pass_base.h"

namespace SLIP_ISA {

class FeedPass : public PassBase {
protected:
    using PassBase::PassBase;

    void feed_forward(int t, const Layer& layer) {
        const Gated& every = layer.every;
        bool to_blocks = quantised(every.gate) || quantised(every.up) || quantised(layer.router);
        for (const Gated& expert : layer.experts) to_blocks |= quantised(expert.gate) || quantised(expert.up);
        const Rows in = normalise(t, layer.ffn_norm.data(), to_blocks);
        if (!layer.experts.empty()) {
            router(t, layer, in);
            meet();
            const Share mine = share(rows_, t, threads_);
            for (int r = mine.from; r < mine.to; r++) choose(layer, r);
            meet();
            sort_slots(t, layer.shape);
            experts_in(t, layer, in);
        }
        if (layer.shape.inner) gate_up(t, layer, in);
        meet();
        if (!layer.experts.empty()) experts_out(t, layer);
        if (layer.shape.inner) {
            Stage& gated = m_.scratch.threads[0].inner;
            add_product(t, every.down, finish(gated.f.data(), buffers(t).inner, rows_of(t), layer.shape.inner, quantised(every.down)));
        }
    }

private:
    static F activate(const LayerShape& a, F gate, F up) {
        if (!a.clamped) return f_mul(silu(gate), up);
        const F limit = f_set(a.limit);
        gate = f_min(gate, limit);
        up = f_min(f_max(up, f_sub(f_zero(), limit)), limit);
        const F sigmoid = f_div(f_set(1.f), f_add(f_set(1.f), exp_f(f_mul(f_set(-a.alpha), gate))));
        return f_mul(f_mul(gate, sigmoid), f_add(up, f_set(1.f)));
    }

    void gate_up(int t, const Layer& layer, const Rows& in) {
        Stage& gated = m_.scratch.threads[0].inner;
        const Gated& w = layer.every;
        const Share s = share(w.gate.groups, t, threads_);
        for (int g = s.from; g < s.to; g++)
            for (int r0 = 0; r0 < rows_; r0 += TILE) {
                const int n = rows_ - r0 < TILE ? rows_ - r0 : TILE;
                F gate[TILE], up[TILE];
                product(w.gate, g, in, r0, n, gate);
                product(w.up, g, in, r0, n, up);
                for (int r = 0; r < n; r++)
                    f_store(gated.f.data() + (size_t)(r0 + r) * gated.stride + g * 16, activate(layer.shape, gate[r], up[r]));
            }
    }

    float* logits_of(const Layer& layer, int row) { return m_.scratch.router.data() + (size_t)row * layer.router.groups * 16; }

    void router(int t, const Layer& layer, const Rows& in) {
        products(t, layer.router, in, [&](int r, int g, F y) { f_store(logits_of(layer, r) + g * 16, y); });
    }

    // The experts of one row and their weights; of equal scores the lower number.
    void choose(const Layer& layer, int row) {
        const LayerShape& a = layer.shape;
        const int n = a.experts;
        std::vector<double> score(n), rank(n);
        double top = -INFINITY, total = 0;
        for (int e = 0; e < n; e++) {
            score[e] = logits_of(layer, row)[e] + (layer.router_bias.empty() ? 0.f : layer.router_bias[e]);
            top = score[e] > top ? score[e] : top;
        }
        for (int e = 0; e < n; e++) total += score[e] = a.sigmoid ? 1 / (1 + exp(-score[e])) : exp(score[e] - top);
        for (int e = 0; e < n; e++) {
            if (!a.sigmoid) score[e] /= total;
            rank[e] = score[e] + (layer.correction.empty() ? 0.f : layer.correction[e]);
        }
        std::vector<bool> out(n);
        if (a.groups > 1) keep_groups(a, rank, out);
        int32_t* chosen = m_.scratch.chosen.data() + (size_t)row * a.top_k;
        float* weight = m_.scratch.weights.data() + (size_t)row * a.top_k;
        double sum = 0;
        for (int k = 0; k < a.top_k; k++) {
            chosen[k] = take_best(rank, out);
            sum += score[chosen[k]];
        }
        for (int k = 0; k < a.top_k; k++)
            weight[k] = (float)(score[chosen[k]] / (a.normalise ? (sum > 1e-20 ? sum : 1e-20) : 1.0) * a.routed_scale);
    }

    // The first of the largest that are not out, which is out from then on; NaN is the smallest. No number a checkpoint holds
    // makes a row choose the same expert twice.
    static int take_best(const std::vector<double>& rank, std::vector<bool>& out) {
        int best = -1;
        for (int e = 0; e < (int)rank.size(); e++)
            if (!out[e] && (best < 0 || rank[e] > rank[best] || (rank[best] != rank[best] && rank[e] == rank[e]))) best = e;
        out[best] = true;
        return best;
    }

    // Leaves only the groups with the highest sum of their two best.
    static void keep_groups(const LayerShape& a, const std::vector<double>& rank, std::vector<bool>& out) {
        const int size = a.experts / a.groups;
        std::vector<double> best(a.groups);
        for (int g = 0; g < a.groups; g++) {
            double first = -INFINITY, second = -INFINITY;
            for (int e = g * size; e < (g + 1) * size; e++) {
                if (rank[e] > first) second = first, first = rank[e];
                else if (rank[e] > second) second = rank[e];
            }
            best[g] = first + second;
        }
        std::vector<bool> kept(a.groups);
        for (int k = 0; k < a.top_groups; k++) take_best(best, kept);
        for (int e = 0; e < a.experts; e++) out[e] = !kept[e / size];
    }

    // Every thread sorts for itself: it costs less than another meeting.
    void sort_slots(int t, const LayerShape& a) {
        Routing& to = m_.scratch.threads[t].routing;
        const int slots = rows_ * a.top_k;
        to.count.assign(a.experts, 0);
        to.row.resize(slots);
        to.weight.resize(slots);
        to.expert.clear();
        to.start.clear();
        for (int i = 0; i < slots; i++) to.count[m_.scratch.chosen[i]]++;
        int at = 0;
        for (int e = 0; e < a.experts; e++) {
            const int n = to.count[e];
            if (n) to.expert.push_back(e), to.start.push_back(at);
            to.count[e] = at;
            at += n;
        }
        to.start.push_back(at);
        for (int i = 0; i < slots; i++) {
            const int slot = to.count[m_.scratch.chosen[i]]++;
            to.row[slot] = i / a.top_k;
            to.weight[slot] = m_.scratch.weights[i];
        }
    }

    void experts_in(int t, const Layer& layer, const Rows& in) {
        const Routing& routing = m_.scratch.threads[t].routing;
        Stage& slots = m_.scratch.slots;
        for (size_t i = 0; i < routing.expert.size(); i++) {
            const Gated& w = layer.experts[routing.expert[i]];
            const int from = routing.start[i], rows = routing.start[i + 1] - from;
            const bool alone = rows == 1;  // read where it lies
            const Rows mine = alone ? in : gather(t, in, routing.row.data() + from, rows, quantised(w.gate) || quantised(w.up));
            const Share s = share(w.gate.groups, t, threads_);
            for (int g = s.from; g < s.to; g++)
                for (int r0 = 0; r0 < rows; r0 += TILE) {
                    const int n = rows - r0 < TILE ? rows - r0 : TILE, at = alone ? routing.row[from] : r0;
                    F gate[TILE], up[TILE];
                    product(w.gate, g, mine, at, n, gate);
                    product(w.up, g, mine, at, n, up);
                    for (int r = 0; r < n; r++)
                        f_store(slots.f.data() + (size_t)(from + r0 + r) * slots.stride + g * 16,
                                activate(layer.shape, biased(gate[r], w.gate_bias, g), biased(up[r], w.up_bias, g)));
                }
        }
    }

    // The given rows of a stage side by side.
    Rows gather(int t, const Rows& in, const int* rows, int n, bool blocks) {
        Stage& to = m_.scratch.threads[t].gathered;
        const int width = in.stride / 32;
        for (int i = 0; i < n; i++) {
            memcpy(to.f.data() + (size_t)i * to.stride, in.f + (size_t)rows[i] * in.stride, in.stride * sizeof(float));
            if (!blocks) continue;
            const QBlock* a = in.tiles + (size_t)(rows[i] / TILE) * width;
            QBlock* b = to.tiles.data() + (size_t)(i / TILE) * width;
            for (int k = 0; k < width; k++) copy_row(a[k], rows[i] % TILE, b[k], i % TILE);
        }
        return {to.f.data(), to.tiles.data(), to.stride};
    }

    static void copy_row(const QBlock& from, int r, QBlock& to, int s) {
        memcpy(to.high[s], from.high[r], 32);
        memcpy(to.low[s], from.low[r], 32);
        to.scale[s] = from.scale[r];
        to.sum[s] = from.sum[r];
        to.minus[s] = from.minus[r];
        memcpy(to.minus_half[s], from.minus_half[r], sizeof to.minus_half[s]);
    }

    void experts_out(int t, const Layer& layer) {
        const Routing& routing = m_.scratch.threads[t].routing;
        Stage& slots = m_.scratch.slots;
        bool to_blocks = false;
        for (const Gated& expert : layer.experts) to_blocks |= quantised(expert.down);
        if (to_blocks) {
            const Share mine = share(rows_ * layer.shape.top_k, t, threads_);
            for (int i = mine.from; i < mine.to; i++)
                quantise(slots.f.data() + (size_t)i * slots.stride, layer.shape.expert_inner,
                         slots.tiles.data() + (size_t)(i / TILE) * (slots.stride / 32), i % TILE, coarse_);
            meet();
        }
        const Rows in{slots.f.data(), slots.tiles.data(), slots.stride};
        for (size_t i = 0; i < routing.expert.size(); i++) {
            const Gated& w = layer.experts[routing.expert[i]];
            const Share s = share(w.down.groups, t, threads_);
            for (int g = s.from; g < s.to; g++)
                for (int at = routing.start[i], end = routing.start[i + 1], n; at < end; at += n) {
                    n = TILE;
                    while (n > end - at || at % n) n /= 2;  // no piece leaves its tile
                    F acc[TILE];
                    product(w.down, g, in, at, n, acc);
                    for (int r = 0; r < n; r++) {
                        float* y = x(routing.row[at + r]) + g * 16;
                        f_store(y, f_fma(f_set(routing.weight[at + r]), biased(acc[r], w.down_bias, g), f_load(y)));
                    }
                }
        }
    }
};

}  // namespace SLIP_ISA
