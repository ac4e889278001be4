// A whole step of a decoder: every layer, in one call, on a team of threads. Between two products all that touches a
// token's row (norm, rotation, quantizing) is one pass; results leave the products through their epilogues.
#pragma once

#include "attention.h"
#include "experts.h"
#include "low_rank.h"

namespace {

// Of x less its mean where it is centred. y may be x. bias: or null.
inline void norm_row(const float* x, const float* weight, int n, float eps, bool centred, float* y,
                     const float* bias = nullptr) {
    if (centred) {
        vf total = zero();
        for (int i = 0; i < n; i += VL) total = add(total, n - i >= VL ? load(x + i) : load_first(x + i, n - i));
        const float mean = sum(total) / n;
        for (int i = 0; i < n; i++) y[i] = x[i] - mean;
        x = y;
    }
    vf squares = zero();
    for (int i = 0; i < n; i += VL) {
        const vf v = n - i >= VL ? load(x + i) : load_first(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const vf inverse = set1(1.0f / sqrtf(sum(squares) / n + eps));
    for (int i = 0; i < n; i += VL) {
        if (n - i >= VL) {
            const vf v = mul(mul(load(x + i), inverse), load(weight + i));
            store(y + i, bias ? add(v, load(bias + i)) : v);
        } else {
            const vf v = mul(mul(load_first(x + i, n - i), inverse), load_first(weight + i, n - i));
            store_first(y + i, bias ? add(v, load_first(bias + i, n - i)) : v, n - i);
        }
    }
}

// One head: its first half against its second. turns: the cosines [half], then the sines.
inline void rotate_head(float* head, const float* turns, int half) {
    const float* sine = turns + half;
    int i = 0;
    for (; half - i >= VL; i += VL) {
        const vf a = load(head + i), b = load(head + half + i), c = load(turns + i), s = load(sine + i);
        store(head + i, sub(mul(a, c), mul(b, s)));
        store(head + half + i, fma(b, c, mul(a, s)));
    }
    for (; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * turns[i] - b * sine[i];
        head[i + half] = b * turns[i] + a * sine[i];
    }
}

struct Decoder {
    const DecoderShape& shape;
    const Step& step;
    const Workspace& space;
    int tokens;  // rows at hand: the step's, and in the last layer only those that are wanted
    int kept = 0;  // states that are kept already
    bool only_wanted = false;
    bool streams = false;  // see `has_short_runs`

    float* line(const Member& me) const { return (float*)(space.thread_space + me.index * space.thread_bytes); }

    void embed(Member& me, const void* embedding) const {
        const int64_t stride = space.hidden_stride;
        me.share_rows(tokens, 16, [&](int first, int last) {
            for (int t = first; t < last; t++) {
                float* x = space.residual + t * stride;
                const int64_t at = step.token_ids[t] * shape.hidden;
                if (shape.table) {
                    unpack_row(*shape.table, step.token_ids[t], x);
                    if (shape.activations == KIND_BF16)
                        for (int i = 0; i < shape.hidden; i++) x[i] = from_bf16(to_bf16(x[i]));
                } else if (shape.activations == KIND_F32)
                    read_operand(KIND_F32, (const float*)embedding + at, shape.hidden, x);
                else
                    read_operand(KIND_BF16, (const uint16_t*)embedding + at, shape.hidden, x);
                if (shape.embedding_scale != 1.0f) {
                    for (int i = 0; i < shape.hidden; i++) x[i] *= shape.embedding_scale;
                    // transformers scales the embedding in its own precision
                    if (shape.activations == KIND_BF16)
                        for (int i = 0; i < shape.hidden; i++) x[i] = from_bf16(to_bf16(x[i]));
                }
            }
        });
    }

    // Which of the kept states is the one before this layer; -1: none.
    int state_before(int layer) { return kept < step.num_states && step.state_layers[kept] == layer ? kept++ : -1; }

    // residual += norm(update) where `update_norm` is given; then `norm` of it (itself where `weight` is null) as the
    // operand of `next`, or into `hidden`, or without both, for experts, into `update` in the activations' kind. What is
    // normed is kept as a token's state number `state`. `late`: the update joins only then.
    void norm(Member& me, const float* update_norm, const float* weight, const Linear* next, void* hidden,
              int state = -1, bool late = false) const {
        float* y = line(me);
        const int n = shape.hidden;
        const auto bias = [&](const float* of) { return shape.layer_norm == 2 ? of + n : nullptr; };
        me.share_rows(tokens, 8, [&](int first, int last) {
            for (int t = first; t < last; t++) {
                float* x = space.residual + t * space.hidden_stride;
                const float* update = space.update + t * space.hidden_stride;
                if (update_norm) {
                    norm_row(update, update_norm, n, shape.eps, shape.layer_norm, y, bias(update_norm));
                    for (int i = 0; i < n; i++) x[i] += y[i] * shape.residual_scale;
                }
                if (state >= 0) {
                    const int64_t at = (int64_t(t) * step.num_states + state) * n;
                    if (shape.activations == KIND_F32)
                        __builtin_memcpy((float*)step.states + at, x, n * 4);
                    else
                        for (int i = 0; i < n; i++) ((uint16_t*)step.states)[at + i] = to_bf16(x[i]);
                }
                if (weight)
                    norm_row(x, weight, n, shape.eps, shape.layer_norm, y, bias(weight));
                else
                    __builtin_memcpy(y, x, n * 4);
                if (late)
                    for (int i = 0; i < n; i++) x[i] += update[i] * shape.residual_scale;
                if (next) {
                    write_operand(operand_kind(shape.activations, *next), in_order(*next, y, y + n + VL), n,
                                  space.input + t * space.input_words, space.row_scale + t * space.scale_stride);
                    if (step.adapters && !is_plain_operand(*next))
                        write_operand(shape.activations, y, n, space.plain + t * space.plain_words, nullptr);
                    continue;
                }
                if (!hidden) {
                    float* to = space.update + t * space.hidden_stride;
                    for (int i = 0; i < n; i++) to[i] = shape.activations == KIND_F32 ? y[i] : from_bf16(to_bf16(y[i]));
                    continue;
                }
                // Only behind the last layer are the tokens those that are wanted.
                const int64_t row = step.num_wanted < 0 ? t : step.wanted[t];
                if (shape.activations == KIND_F32)
                    __builtin_memcpy((float*)hidden + row * n, y, n * 4);
                else
                    for (int i = 0; i < n; i++) ((uint16_t*)hidden)[row * n + i] = to_bf16(y[i]);
            }
        });
    }

    static bool is_plain_operand(const Linear& w) { return w.kind != KIND_I8 && !w.order; }

    int place(int token) const { return step.adapters[only_wanted ? step.wanted[token] : token]; }

    // The first token from `token` on that begins a run of neighbours with one adapter.
    int run_from(int token) const {
        while (token > 0 && token < tokens && place(token) == place(token - 1)) token++;
        return token;
    }

    // Whether each adapter's B is read in one pass, before its product: panels that come to it by themselves read it a
    // kilobyte at a time, and pay for that in steps of few tokens an adapter. There must be runs for all threads.
    bool has_short_runs(int threads) const {
        if (!step.adapters || tokens > STREAMED_ROWS) return false;
        int runs = 0;
        for (int t = 0; t < tokens; t = run_from(t + 1)) runs += place(t) >= 0;
        return runs >= 2 * threads && tokens < 8 * runs;
    }

    // Calls f(begin, end, low) for each run of neighbours among these tokens with one adapter that changes the product.
    template <class F> void for_changes(const Layer& layer, Product product, int first, int last, F f) const {
        if (!step.adapters || !layer.adapters) return;
        for (int begin = first, end; begin < last; begin = end) {
            const int of_run = place(begin);
            for (end = begin + 1; end < last && place(end) == of_run;) end++;
            if (of_run < 0) continue;
            const LowRank& low = layer.adapters[int64_t(of_run) * NUM_PRODUCTS + product];
            if (low.a.n) f(begin, end, low);
        }
    }

    // A x of each token with its adapter, neighbours with the same one together, and where `streams`, B (A x) of w's panels
    // too. x: rows in the activations' kind.
    void shrink(Member& me, const Layer& layer, Product product, const Linear& w, const u32* x, int64_t lda) const {
        if (!step.adapters || !layer.adapters) return;
        me.share_rows(tokens, streams ? 1 : 8, [&](int first, int last) {
            if (streams) first = run_from(first), last = run_from(last);
            for_changes(layer, product, first, last, [&](int begin, int end, const LowRank& low) {
                float* to = space.low_rank + begin * space.low_rank_stride;
                panel_task(*me.team, shape.activations, low.a, 0, (low.a.n + PANEL - 1) / PANEL, x + begin * lda, lda, nullptr,
                           0, end - begin, (uint8_t*)line(me), nullptr, [](int, int) { return nullptr; },
                           [&](int from, int count, int panel, const float* c) {
                               store_panel(low.a, panel, count, c, to + from * space.low_rank_stride,
                                           space.low_rank_stride);
                           });
                for (int p = 0; streams && p < (w.n + PANEL - 1) / PANEL; p++)
                    expand(low, p, begin, end, space.delta + begin * space.delta_stride + p * PANEL, space.delta_stride,
                           false);
            });
        });
        me.book(PART_ADAPTERS);
    }

    // As `shrink`, of normed rows: `input`, or `plain` where that is the operand of w in another form.
    void shrink_normed(Member& me, const Layer& layer, Product product, const Linear& w) const {
        const bool plain = is_plain_operand(w);
        shrink(me, layer, product, w, plain ? space.input : space.plain, plain ? space.input_words : space.plain_words);
    }

    void expand(const LowRank& low, int panel, int begin, int end, float* c, int64_t ldc, bool adds) const {
        (shape.activations == KIND_F32 ? expand_panel<float> : expand_panel<uint16_t>)(
            low, panel, end - begin, space.low_rank + begin * space.low_rank_stride, space.low_rank_stride, c, ldc, adds);
    }

    // Adds B (A x) to one panel of a product, c [count][PANEL], of the tokens from `first` on.
    void add_changes(const Layer& layer, Product product, int first, int count, int panel, float* c) const {
        for_changes(layer, product, first, first + count, [&](int begin, int end, const LowRank& low) {
            float* to = c + (begin - first) * PANEL;
            if (!streams) return expand(low, panel, begin, end, to, PANEL, true);
            const float* from = space.delta + begin * space.delta_stride + panel * PANEL;
            for (int t = begin; t < end; t++, to += PANEL, from += space.delta_stride)
                for (int v = 0; v < PANEL; v += VL) store(to + v, add(load(to + v), load(from + v)));
        });
    }

    void qkv(Member& me, const Layer& layer) const {
        shrink_normed(me, layer, PRODUCT_QKV, layer.qkv);
        const AttentionGroup& group = step.groups[layer.group];
        const int panels = (layer.qkv.n + PANEL - 1) / PANEL;
        for_panels(me, shape.activations, layer.qkv, space.input, space.input_words, space.row_scale, space.scale_stride, tokens,
                   (uint8_t*)line(me),
                   [&](int row, int panel) { return space.qkv + row * space.qkv_stride + panel * PANEL; },
                   [&](int first, int count, int panel, float* c) {
                       add_changes(layer, PRODUCT_QKV, first, count, panel, c);
                       // Where some of these tokens will be kept is fetched after each panel: a decoding token's slot is
                       // cold, and scattered over its block.
                       for (int r = panel; r < count; r += panels) {
                           const int t = first + r;
                           if (t == 0 || group.slots[t] != group.slots[t - 1] + 1) fetch_slot(shape.cache, layer, group.slots[t]);
                       }
                       for (int r = 0; r < count; r++) {
                           float* to = space.qkv + (first + r) * space.qkv_stride + panel * PANEL;
                           store(to, load(c + r * PANEL));
                           store(to + VL, load(c + r * PANEL + VL));
                       }
                   });
    }

    // Heads are normed and rotated; keys and values go to the cache, queries to their buffer.
    void rotate(Member& me, const Layer& layer) const {
        const CacheShape& cache = shape.cache;
        const int dim = cache.head_dim, half = dim / 2, heads = shape.heads, rotated = heads + cache.kv_heads;
        const AttentionGroup& group = step.groups[layer.group];
        const float *rotation = step.rotations[layer.rope], *factors = step.query_factors[layer.rope];
        me.share_rows(tokens, 4, [&](int first, int last) {
            for (int t = first; t < last; t++) {
                float* x = space.qkv + t * space.qkv_stride;
                const float* cosine = rotation + (step.positions ? step.positions[t] : t) * dim;
                const bool centred = shape.layer_norm, joint = layer.qk_norm && shape.joint_qk_norm;
                if (joint) {
                    norm_row(x, layer.qk_norm, heads * dim, shape.eps, centred, x);
                    norm_row(x + heads * dim, layer.qk_norm + heads * dim, cache.kv_heads * dim, shape.eps, centred,
                             x + heads * dim);
                }
                for (int h = 0; h < rotated; h++) {
                    float* head = x + h * dim;
                    const bool late = shape.late_qk_norm, norms = layer.qk_norm && !joint;
                    if (norms && !late) norm_row(head, layer.qk_norm + h * dim, dim, shape.eps, centred, head);
                    rotate_head(head, cosine, half);
                    if (norms && late) norm_row(head, layer.qk_norm + h * dim, dim, shape.eps, centred, head);
                    if (h < heads) {
                        if (factors)
                            for (int i = 0; i < dim; i++) head[i] *= factors[t];
                        const int64_t to = (int64_t(t) * heads + h) * dim;
                        write_operand(shape.activations, head, dim,
                                      shape.activations == KIND_F32 ? space.query + to
                                                                    : (u32*)((uint16_t*)space.query + to), nullptr);
                    }
                }
                store_token(cache, layer, group.slots[t], x + heads * dim, x + rotated * dim);
            }
        });
    }

    bool any_wanted(const AttentionGroup& group, const AttentionTask& task) const {
        for (int r = task.first_row; r < task.first_row + task.num_rows; r++) {
            int from = 0, to = step.num_wanted;
            while (from < to) {
                const int middle = (from + to) / 2;
                step.wanted[middle] < group.row_token[r] ? from = middle + 1 : to = middle;
            }
            if (from < step.num_wanted && step.wanted[from] == group.row_token[r]) return true;
        }
        return false;
    }

    // Of the last layer only rows that are wanted go on: they move together, in place.
    void keep_wanted(Member& me) {
        const int64_t element = shape.activations == KIND_F32 ? 4 : 2;
        me.share(1, [&](int) {
            uint8_t* attended = (uint8_t*)space.attended;
            for (int i = 0; i < step.num_wanted; i++) {
                const int64_t from = step.wanted[i];
                if (from == i) continue;
                __builtin_memcpy(space.residual + i * space.hidden_stride, space.residual + from * space.hidden_stride,
                                 space.hidden_stride * 4);
                __builtin_memcpy(attended + i * space.attended_stride * element,
                                 attended + from * space.attended_stride * element, space.attended_stride * element);
            }
        });
        tokens = step.num_wanted;
        only_wanted = true;
    }

    void attend(Member& me, const Layer& layer, bool only_wanted) const {
        const AttentionGroup& group = step.groups[layer.group];
        const Attention attention{shape.cache, layer, group, shape.activations, shape.heads,
                                  shape.heads / shape.cache.kv_heads, shape.attention_scale, TileShape(shape.cache),
                                  space.query, space.attended, space.attended_stride, space.state, space.partial};
        attend_layer(me, attention, space,
                     [&](const AttentionTask& task) { return !only_wanted || any_wanted(group, task); });
    }

    // x: rows in the activations' kind. The product joins the residual, or waits in `update` to be normed.
    void project(Member& me, const Layer& layer, Product product, const u32* x, int64_t stride, bool joins) const {
        const Linear& w = product == PRODUCT_OUTPUT ? layer.output : layer.down;
        const int64_t words = shape.activations == KIND_F32 ? stride : stride / 2;
        shrink(me, layer, product, w, x, words);
        int64_t lda;
        const u32* a = as_operand(me, shape.activations, w, x, words, tokens, space, &lda);
        for_panels(me, shape.activations, w, a, lda, space.row_scale, space.scale_stride, tokens, (uint8_t*)line(me),
                   [&](int row, int panel) {
                       return (joins ? space.residual : space.update) + row * space.hidden_stride + panel * PANEL;
                   },
                   [&](int first, int count, int panel, float* c) {
                       add_changes(layer, product, first, count, panel, c);
                       float* to = (joins ? space.residual : space.update) + first * space.hidden_stride + panel * PANEL;
                       for (int r = 0; r < count; r++, to += space.hidden_stride)
                           for (int v = 0; v < PANEL; v += VL) {
                               const vf y = load(c + r * PANEL + v);
                               store(to + v, joins ? fma(y, set1(shape.residual_scale), load(to + v)) : y);
                           }
                   });
    }

    void experts(Member& me, const Layer& layer) const {
        const ExpertLayer of{shape.activations, shape.hidden, shape.gate, *layer.experts, space, tokens};
        of.compute(me, !layer.down_norm, shape.residual_scale);
    }

    // Gate and up lie side by side in a panel, so a row of the result is finished where it is computed; or there is up only.
    void gate_up(Member& me, const Layer& layer) const {
        shrink_normed(me, layer, PRODUCT_GATE_UP, layer.gate_up);
        for_panels(me, shape.activations, layer.gate_up, space.input, space.input_words, space.row_scale, space.scale_stride, tokens,
                   (uint8_t*)line(me),
                   [&](int row, int panel) {
                       const int64_t at = row * space.gated_stride + panel * inner_width(shape.gate);
                       return (const uint8_t*)space.gated + at * (shape.activations == KIND_F32 ? 4 : 2);
                   },
                   [&](int first, int count, int panel, float* c) {
                       add_changes(layer, PRODUCT_GATE_UP, first, count, panel, c);
                       for (int r = 0; r < count; r++)
                           write_inner(shape.activations, shape.gate, c + r * PANEL, space.gated,
                                       (first + r) * space.gated_stride + panel * inner_width(shape.gate));
                   });
    }
};

void forward(Team* team, int32_t member, const DecoderShape* shape, const Layer* layers, const void* embedding,
             const float* norm, const Step* step, const Workspace* space) {
    Member me(team, member, space->spent);
    Decoder decoder{*shape, *step, *space, step->tokens};
    decoder.streams = decoder.has_short_runs(team->size);
    decoder.embed(me, embedding);
    const float* update_norm = nullptr;
    for (int i = 0; i < shape->num_layers; i++) {
        const Layer& layer = layers[i];
        decoder.norm(me, update_norm, layer.input_norm, &layer.qkv, nullptr, decoder.state_before(i));
        me.book(PART_NORM);
        decoder.qkv(me, layer);
        me.book(PART_PRODUCT);
        decoder.rotate(me, layer);
        me.book(PART_ROTATE);
        const bool only_wanted = i == shape->num_layers - 1 && step->num_wanted >= 0;
        decoder.attend(me, layer, only_wanted);
        if (only_wanted) decoder.keep_wanted(me);
        me.book(PART_ATTENTION);
        if (decoder.tokens == 0) return;  // a step that only fills the cache
        // Where attention and MLP are parallel, the MLP's input is the state without what attention adds.
        const bool waits = layer.output_norm || shape->parallel;
        decoder.project(me, layer, PRODUCT_OUTPUT, space->attended, space->attended_stride, !waits);
        me.book(PART_PRODUCT);
        decoder.norm(me, layer.output_norm, layer.mlp_norm, layer.experts ? nullptr : &layer.gate_up, nullptr, -1,
                     shape->parallel);
        me.book(PART_NORM);
        if (layer.experts) {
            decoder.experts(me, layer);
        } else {
            decoder.gate_up(me, layer);
            me.book(PART_PRODUCT);
            decoder.project(me, layer, PRODUCT_DOWN, space->gated, space->gated_stride, !layer.down_norm);
            me.book(PART_PRODUCT);
        }
        update_norm = layer.down_norm;
    }
    decoder.norm(me, update_norm, norm, nullptr, step->hidden, decoder.state_before(shape->num_layers));
    me.book(PART_NORM);
}

// Attention alone, for models whose layers are computed elsewhere. q [tokens][heads][head_dim], k likewise with kv_heads;
// v [tokens][kv_heads][value_dim], out likewise with heads. All in the activations' kind. Without k nothing is stored.
void attend(Team* team, int32_t member, const CacheShape* cache, int32_t activations, int32_t heads, float scale,
            const Layer* layer, const AttentionGroup* group, int32_t tokens, const void* q, const void* k,
            const void* v, void* out, const Workspace* space) {
    Member me(team, member, nullptr);
    const int64_t width = int64_t(cache->kv_heads) * cache->head_dim;
    const int64_t value_width = int64_t(cache->kv_heads) * cache->value_dim;
    float* line = (float*)(space->thread_space + member * space->thread_bytes);
    const int element = activations == KIND_F32 ? 4 : 2;
    if (k) me.share_rows(tokens, 4, [&](int first, int last) {
        for (int t = first; t < last; t++) {
            read_operand(activations, (const uint8_t*)k + t * width * element, int(width), line);
            read_operand(activations, (const uint8_t*)v + t * value_width * element, int(value_width), line + width);
            store_token(*cache, *layer, group->slots[t], line, line + width);
        }
    });
    const Attention attention{*cache, *layer, *group, activations, heads, heads / cache->kv_heads, scale,
                              TileShape(*cache), (const u32*)q, out, int64_t(heads) * cache->value_dim, space->state,
                              space->partial};
    attend_layer(me, attention, *space, [](const AttentionTask&) { return true; });
}

}  // namespace
