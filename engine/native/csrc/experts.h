// A layer's experts: each token goes through the few that its router chooses. Rows are sorted by expert, so that the
// weights of one that is chosen are read once for all its rows; the results of a token are added in the order of its
// choices, so that they do not depend on the tokens beside it. A shared expert is one more, which all tokens choose last.
#pragma once

#include "linear.h"

namespace {

constexpr float LOG2E = 1.44269504088896341f;

// x [n] -> sigmoid(x), in place.
inline void sigmoids(float* x, int n) {
    for (int i = 0; i < n; i += VL) {
        const int count = n - i < VL ? n - i : VL;
        const vf power = exp2_f(min(set1(126.0f), mul(load_first(x + i, count), set1(-LOG2E))));
        store_first(x + i, div(set1(1.0f), add(set1(1.0f), power)), count);
    }
}

// x [n] -> softmax(x), in place.
inline void softmax(float* x, int n) {
    float most = x[0], total = 0;
    for (int i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int i = 0; i < n; i += VL) {
        const int count = n - i < VL ? n - i : VL;
        store_first(x + i, exp2_f(mul(sub(load_first(x + i, count), set1(most)), set1(LOG2E))), count);
    }
    for (int i = 0; i < n; i++) total += x[i];
    for (int i = 0; i < n; i++) x[i] /= total;
}

// The indices of the k largest of x [n], the largest first, of equals the lower index; `values`: those. k <= n. NaN is
// never larger, so with NaN the indices are some, but still different ones.
inline void largest(const float* x, int n, int k, int32_t* indices, float* values) {
    for (int i = 0; i < n; i++) {
        int at = i < k ? i : k;
        if (at == k && !(x[i] > values[k - 1])) continue;
        if (at == k) at--;
        for (; at > 0 && x[i] > values[at - 1]; at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
        values[at] = x[i], indices[at] = i;
    }
}

struct ExpertLayer {
    const int32_t activations;  // KIND_F32 or KIND_BF16
    const int32_t hidden;
    const int32_t gate;
    const Experts& experts;
    const Workspace& space;
    const int tokens;

    // What a token has: its chosen experts, then the shared one.
    int ranks() const { return experts.top_k + experts.shared; }
    uint8_t* scratch(const Member& me) const { return space.thread_space + me.index * space.thread_bytes; }

    // From the rows in space.update (float32, rounded to the activations' kind) to their experts' weighted sum, which takes
    // their place, or joins the residual by `share`.
    void compute(Member& me, bool joins, float share) const {
        route(me);
        gather(me);
        me.book(PART_ROUTE);
        gate_up(me);
        down(me);
        me.book(PART_PRODUCT);
        combine(me, joins, share);
        me.book(PART_ROUTE);
    }

    void route(Member& me) const {
        if (!experts.routed) for_panels(me, KIND_F32, experts.router, (const u32*)space.update, space.hidden_stride, nullptr, 0, tokens, scratch(me),
                   [&](int row, int panel) { return space.logits + row * space.logits_stride + panel * PANEL; },
                   [&](int first, int count, int panel, const float* c) {
                       float* to = space.logits + first * space.logits_stride + panel * PANEL;
                       for (int r = 0; r < count; r++, to += space.logits_stride)
                           store(to, load(c + r * PANEL)), store(to + VL, load(c + r * PANEL + VL));
                   });
        constexpr int few = 8;  // are sooner chosen for by one thread than waited for
        const bool chooses = !experts.routed;
        if (chooses && tokens > few)
            me.share_rows(tokens, few, [&](int first, int last) {
                for (int t = first; t < last; t++) choose(t, (float*)scratch(me));
            });
        me.share(1, [&](int) {
            for (int t = 0; chooses && t < tokens && tokens <= few; t++) choose(t, (float*)scratch(me));
            sort();
        });
    }

    // Logits of a token -> its experts and the factors of their results. `line`: room for 4 [num_experts].
    void choose(int t, float* line) const {
        const int n = experts.num_experts, k = experts.top_k;
        float* scores = space.logits + t * space.logits_stride;
        int32_t* chosen = space.chosen + t * ranks();
        float* factors = space.factors + t * ranks();
        if (experts.shared) {
            chosen[k] = n;
            factors[k] = 1.0f;
            if (experts.shared_gate) sigmoids(scores + n, 1), factors[k] = scores[n];
        }
        experts.scoring == SCORE_SIGMOID ? sigmoids(scores, n) : softmax(scores, n);
        for (int i = 0; i < n; i++) line[i] = scores[i] + (experts.correction ? experts.correction[i] : 0.0f);
        if (experts.top_groups < experts.num_groups) keep_groups(line, line + n);
        largest(line, n, k, chosen, factors);
        float total = 0;
        for (int r = 0; r < k; r++) total += factors[r] = scores[chosen[r]];
        for (int r = 0; r < k; r++)
            factors[r] = (experts.renormalize ? factors[r] / (total + 1e-20f) : factors[r]) * experts.scale;
    }

    // Only the best groups of experts can be chosen from: each is ranked by the sum of its best one or two.
    void keep_groups(float* choice, float* line) const {
        const int groups = experts.num_groups, size = experts.num_experts / groups, kept = experts.top_groups;
        float *sums = line, *best = line + groups;
        int32_t* indices = (int32_t*)(best + groups);
        for (int g = 0; g < groups; g++) {
            largest(choice + g * size, size, experts.group_scores, indices, best);
            sums[g] = experts.group_scores < 2 ? best[0] : best[0] + best[1];
        }
        largest(sums, groups, kept, indices, best);
        for (int g = 0; g < groups; g++) {
            bool keeps = false;
            for (int i = 0; i < kept; i++) keeps |= indices[i] == g;
            for (int i = g * size; !keeps && i < (g + 1) * size; i++) choice[i] = -INFINITY;
        }
    }

    // Sorts the rows (token * ranks + rank) by expert, stable, and cuts each expert's into runs.
    void sort() const {
        const int count = experts.num_experts + experts.shared, rows = tokens * ranks();
        int32_t* starts = space.expert_starts;  // [count + 1]
        for (int e = 0; e <= count; e++) starts[e] = 0;
        for (int i = 0; i < rows; i++) starts[space.chosen[i] + 1]++;
        if (experts.counts)
            for (int e = 0; e < experts.num_experts; e++) experts.counts[e] += starts[e + 1];
        for (int e = 0; e < count; e++) starts[e + 1] += starts[e];
        RunList& list = *space.runs;
        list.num_runs = list.num_routed = 0;
        for (int e = 0; e < count; e++) {
            const int first = starts[e], mine = starts[e + 1] - first, parts = (mine + UNPACKED_ROWS - 1) / UNPACKED_ROWS;
            for (int part = 0; part < parts; part++) {
                const int from = int(int64_t(mine) * part / parts), to = int(int64_t(mine) * (part + 1) / parts);
                list.runs[list.num_runs++] = ExpertRun{e, first + from, to - from};
            }
            if (e < experts.num_experts) list.num_routed = list.num_runs;
        }
        for (int i = 0; i < rows; i++) space.sorted[starts[space.chosen[i]]++] = i;
    }

    // The rows in their experts' order, each as the operand of its expert.
    void gather(Member& me) const {
        me.share_rows(tokens * ranks(), 4, [&](int first, int last) {
            for (int at = first; at < last; at++) {
                const int row = space.sorted[at];
                const Linear& w = experts.gate_up[space.chosen[row]];
                const float* x = in_order(w, space.update + row / ranks() * space.hidden_stride, (float*)scratch(me));
                if (experts.scales_inputs && row % ranks() < experts.top_k) {
                    float* line = (float*)scratch(me);
                    for (int i = 0; i < w.k; i++) line[i] = x[i] * space.factors[row];
                    x = line;
                    space.factors[row] = 1.0f;
                }
                write_operand(operand_kind(activations, w), x, w.k, space.expert_input + at * space.input_words, space.expert_scale + at * space.scale_stride);
            }
        });
    }

    // Two panels at a time: a run of few rows of small weights takes them together.
    static int tasks_of(const Linear& w) { return ((w.n + PANEL - 1) / PANEL + 1) / 2; }

    // Calls finish(run, first_row, rows, panel, c) for all runs and panels of the experts' `weights`.
    // operand(run): its first row, in words of `lda`. target(run, row, panel): as in `for_panels`.
    template <class A, class T, class F>
    void for_runs(Member& me, const Linear* weights, A operand, T target, F finish) const {
        const RunList& list = *space.runs;
        const int routed = list.num_routed ? tasks_of(weights[0]) : 1;
        const int shared = experts.shared ? tasks_of(weights[experts.num_experts]) : 1;
        const int of_routed = list.num_routed * routed;
        me.share(of_routed + (list.num_runs - list.num_routed) * shared, [&](int task) {
            const bool is_routed = task < of_routed;
            const int number = is_routed ? task / routed : list.num_routed + (task - of_routed) / shared;
            const ExpertRun& run = list.runs[number];
            const Linear& w = weights[run.expert];
            const int panel = 2 * (is_routed ? task % routed : (task - of_routed) % shared);
            const int panels = (w.n + PANEL - 1) / PANEL, count = panels - panel < 2 ? 1 : 2;
            const u32* ahead = panel + count < panels         ? panel_at(w, panel + count)
                               : number + 1 < list.num_runs ? panel_at(weights[list.runs[number + 1].expert], 0)
                                                            : nullptr;
            int64_t lda;
            const u32* x = operand(run, w, &lda);
            panel_task(*me.team, activations, w, panel, count, x, lda, space.expert_scale + run.first_row * space.scale_stride,
                       space.scale_stride, run.rows, scratch(me), ahead,
                       [&](int row, int p) { return target(run, row, p); },
                       [&](int first, int rows, int p, const float* c) { finish(run, first, rows, p, c); });
        });
    }

    // Elements of a gated row: whole vectors.
    int64_t gated_stride(int expert) const {
        return int64_t((experts.gate_up[expert].n + PANEL - 1) / PANEL) * inner_width(gate);
    }

    // The first gated row of a run; rows of the shared expert are the last ones, and of another width.
    uint8_t* gated(const ExpertRun& run, int row) const {
        const int64_t routed = int64_t(tokens) * experts.top_k, at = run.first_row + row, stride = gated_stride(run.expert);
        const int64_t element = run.expert < experts.num_experts
                                    ? at * stride
                                    : routed * gated_stride(0) + (at - routed) * stride;
        return (uint8_t*)space.expert_gated + element * (activations == KIND_F32 ? 4 : 2);
    }

    void gate_up(Member& me) const {
        for_runs(me, experts.gate_up,
                 [&](const ExpertRun& run, const Linear&, int64_t* lda) {
                     *lda = space.input_words;
                     return space.expert_input + run.first_row * space.input_words;
                 },
                 [&](const ExpertRun& run, int row, int panel) {
                     return gated(run, row) + panel * inner_width(gate) * (activations == KIND_F32 ? 4 : 2);
                 },
                 [&](const ExpertRun& run, int first, int rows, int panel, const float* c) {
                     for (int r = 0; r < rows; r++)
                         write_inner(activations, gate, c + r * PANEL, gated(run, first + r), panel * inner_width(gate));
                 });
    }

    // Gated rows that an expert multiplies in another form or order than they lie in.
    void convert(Member& me) const {
        const RunList& list = *space.runs;
        bool any = false;
        for (int i = 0; i < list.num_runs; i++) any |= converts(experts.down[list.runs[i].expert]);
        if (!any) return;
        me.share(list.num_runs, [&](int number) {
            const ExpertRun& run = list.runs[number];
            const Linear& w = experts.down[run.expert];
            float* line = (float*)scratch(me);
            for (int r = 0; converts(w) && r < run.rows; r++) {
                const int64_t at = run.first_row + r;
                read_operand(activations, gated(run, r), w.k, line);
                write_operand(operand_kind(activations, w), in_order(w, line, line + w.k + VL), w.k,
                              space.expert_input + at * space.input_words, space.expert_scale + at * space.scale_stride);
            }
        });
        me.book(PART_QUANTIZE);
    }

    static bool converts(const Linear& w) { return w.kind == KIND_I8 || w.order; }

    // Results are stored by token and rank.
    void down(Member& me) const {
        convert(me);
        const auto row_of = [&](const ExpertRun& run, int row) {
            return space.expert_output + space.sorted[run.first_row + row] * space.hidden_stride;
        };
        for_runs(me, experts.down,
                 [&](const ExpertRun& run, const Linear& w, int64_t* lda) -> const u32* {
                     *lda = converts(w) ? space.input_words : gated_stride(run.expert) / (activations == KIND_F32 ? 1 : 2);
                     return converts(w) ? space.expert_input + run.first_row * space.input_words : (const u32*)gated(run, 0);
                 },
                 [&](const ExpertRun& run, int row, int panel) { return row_of(run, row) + panel * PANEL; },
                 [&](const ExpertRun& run, int first, int rows, int panel, const float* c) {
                     for (int r = 0; r < rows; r++) {
                         float* to = row_of(run, first + r) + panel * PANEL;
                         store(to, load(c + r * PANEL)), store(to + VL, load(c + r * PANEL + VL));
                     }
                 });
    }

    void combine(Member& me, bool joins, float share) const {
        me.share_rows(tokens, 4, [&](int first, int last) {
            for (int t = first; t < last; t++) {
                const float* results = space.expert_output + int64_t(t) * ranks() * space.hidden_stride;
                float* to = (joins ? space.residual : space.update) + t * space.hidden_stride;
                for (int i = 0; i < hidden; i += VL) {
                    vf total = zero();
                    for (int r = 0; r < ranks(); r++) {
                        const vf factor = set1(space.factors[t * ranks() + r]);
                        const vf y = load(results + r * space.hidden_stride + i);
                        total = r ? fma(factor, y, total) : mul(factor, y);
                    }
                    store(to + i, joins ? fma(total, set1(share), load(to + i)) : total);
                }
            }
        });
    }
};

// Experts by themselves: y float32 [rows][hidden].
void experts(Team* team, int32_t member, int32_t activations, int32_t hidden, int32_t gate, const Experts* of,
             const void* x, int64_t rows, float* y, const Workspace* space) {
    Member me(team, member, space->spent);
    const int element = activations == KIND_F32 ? 4 : 2;
    me.share_rows(int(rows), 4, [&](int first, int last) {
        for (int64_t r = first; r < last; r++)
            read_operand(activations, (const uint8_t*)x + r * hidden * element, hidden, space->update + r * space->hidden_stride);
    });
    ExpertLayer{activations, hidden, gate, *of, *space, int(rows)}.compute(me, false, 1.0f);
    me.share_rows(int(rows), 4, [&](int first, int last) {
        for (int64_t r = first; r < last; r++) __builtin_memcpy(y + r * hidden, space->update + r * space->hidden_stride, hidden * 4);
    });
}

}  // namespace
