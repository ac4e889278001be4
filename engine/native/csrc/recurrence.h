// Gated linear recurrences (engine/models/state_layers/recurrence.py): layers that keep a matrix for each head instead of keys
// and values. A token's part of a head is a decay of the matrix, a correction of it for the token's key, and its product with
// the token's query; columns of the matrix don't depend on each other. So a thread takes a head, and of it so many columns
// at a time as fit its first cache, and goes through the tokens: the pass that writes a token's matrix makes the next
// token's products, too.
#pragma once

#include "linear.h"

namespace {

constexpr int STATE_VECTORS = VL == 16 ? 4 : 2;  // what accumulates, and a correction, fit the registers
constexpr int STATE_COLUMNS = STATE_VECTORS * VL;

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// x / (1 + e^-x); NaN stays NaN.
inline vf silu_f(vf x) {
    const vf power = min(set1(126.0f), mul(x, set1(-1.4426950408889634f)));
    return div(x, add(set1(1.0f), exp2_f(power)));
}

inline float softplus_f(float x) { return x > 20.0f ? x : log1pf(__builtin_expf(x)); }

// Up to VL elements of a row in the activations' kind, zeros behind them.
inline vf load_some(bool bf16, const void* row, int64_t at, int n) {
    if (n >= VL) return bf16 ? load_bf16((const uint16_t*)row + at) : load((const float*)row + at);
    float some[VL] = {};
    for (int i = 0; i < n; i++) {
        const u32 bits = bf16 ? u32(((const uint16_t*)row)[at + i]) << 16 : ((const u32*)row)[at + i];
        __builtin_memcpy(some + i, &bits, 4);
    }
    return load(some);
}

inline void store_some(bool bf16, void* row, int64_t at, vf x, int n) {
    if (!bf16)
        n >= VL ? store((float*)row + at, x) : store_first((float*)row + at, x, n);
    else if (n >= VL)
        store_bf16((uint16_t*)row + at, x);
    else {
        float some[VL];
        store(some, x);
        for (int i = 0; i < n; i++) ((uint16_t*)row)[at + i] = to_bf16(some[i]);
    }
}

struct Scan {
    const Recurrence& r;
    const StateScan& s;
    const bool bf16;
    const int64_t before, row_bytes;  // inputs in front of a token; bytes of a token's inputs

    Scan(const Recurrence& r, const StateScan& s, int32_t activations)
        : r(r), s(s), bf16(activations == KIND_BF16), before(r.kernel_size - 1),
          row_bytes(int64_t(r.channels) * (activations == KIND_BF16 ? 2 : 4)) {}

    // The inputs of a segment's token, counted from its first; those before it are the stored ones.
    const uint8_t* inputs(int64_t segment, int64_t token) const {
        if (token < 0) return (const uint8_t*)s.history + (segment * before + before + token) * row_bytes;
        return (const uint8_t*)s.x + (s.first[segment] + token) * row_bytes;
    }

    // Reads the stored inputs of all segments, in order, and stores those behind them: channels first ... end - 1.
    void move_inputs(int64_t first, int64_t end) const {
        const int64_t size = bf16 ? 2 : 4, from = first * size, bytes = (end - first) * size;
        for (int64_t i = 0; i < s.segments; i++) {
            for (int64_t j = 0; j < before; j++) {
                uint8_t* to = (uint8_t*)s.history + (i * before + j) * row_bytes + from;
                const uint8_t* stored = (const uint8_t*)s.inputs + (s.read[i] * before + j) * row_bytes + from;
                if (s.read[i])
                    __builtin_memcpy(to, stored, bytes);
                else
                    __builtin_memset(to, 0, bytes);
            }
            if (!s.write[i]) continue;
            for (int64_t j = 0; j < before; j++)
                __builtin_memcpy((uint8_t*)s.inputs + (s.write[i] * before + j) * row_bytes + from,
                                 inputs(i, s.count[i] - before + j) + from, bytes);
        }
    }

    // Convolves `count` channels of a segment's tokens from ... from + n - 1, to rows of `stride`, zeros behind them.
    void convolve(int64_t segment, int64_t from, int n, int64_t channel, int count, float* to, int64_t stride) const {
        for (int t = 0; t < n; t++)
            for (int64_t c = 0; c < stride; c += VL) {
                const int some = count - c >= VL ? VL : count > c ? int(count - c) : 0;
                vf sum = r.bias && some ? load_first(r.bias + channel + c, some) : zero();
                for (int j = 0; j <= before && some; j++) {
                    const uint8_t* row = inputs(segment, from + t - before + j);
                    const float* taps = r.conv + int64_t(j) * r.channels + channel + c;
                    sum = fma(some == VL ? load(taps) : load_first(taps, some), load_some(bf16, row, channel + c, some), sum);
                }
                store(to + t * stride + c, silu_f(sum));
            }
    }

    // One or several tokens of one head for STATE_COLUMNS columns or fewer. The matrix is read from `source`, is held in
    // `room` [key_dim][STATE_COLUMNS] meanwhile, and goes to `target`, unless that is null.
    template <bool WHOLE>
    void columns(const float* source, int64_t source_stride, float* room, float* target, int64_t target_stride, int n,
                 const float* q, const float* k, int64_t key_stride, const float* v, int64_t value_stride,
                 const float* decay, const float* rate, const float* match, float skip, float* out, int64_t out_stride,
                 int count) const {
        auto some = [&](int vector) { return count - vector * VL >= VL ? VL : count > vector * VL ? count - vector * VL : 0; };
        auto get = [&](const float* p, int vector) {
            return WHOLE ? load(p + vector * VL) : some(vector) ? load_first(p + vector * VL, some(vector)) : zero();
        };
        auto put = [&](float* p, int vector, vf x) {
            if (WHOLE)
                store(p + vector * VL, x);
            else if (some(vector))
                store_first(p + vector * VL, x, some(vector));
        };
        vf held[STATE_VECTORS], kept[STATE_VECTORS];
        for (int j = 0; j < STATE_VECTORS; j++) held[j] = kept[j] = zero();
        for (int i = 0; i < r.key_dim; i++) {
            const vf key = set1(k[i]), query = set1(q[i]);
#pragma GCC unroll 4
            for (int j = 0; j < STATE_VECTORS; j++) {
                const vf x = source ? source == room ? load(room + i * STATE_COLUMNS + j * VL) : get(source + i * source_stride, j) : zero();
                store(room + i * STATE_COLUMNS + j * VL, x);
                held[j] = fma(key, x, held[j]), kept[j] = fma(query, x, kept[j]);
            }
        }
        for (int t = 0; t < n; t++) {
            const vf a = set1(decay[t]);
            vf correction[STATE_VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < STATE_VECTORS; j++) {
                const vf value = load(v + t * value_stride + j * VL);
                const vf wrong = r.corrects ? sub(value, mul(a, held[j])) : value;
                correction[j] = mul(set1(rate[t]), wrong);
                const vf y = fma(set1(match[t]), correction[j], mul(a, kept[j]));
                put(out + t * out_stride, j, fma(set1(skip), value, y));
                held[j] = kept[j] = zero();
            }
            const float* key = k + t * key_stride;
            if (t + 1 < n) {
                const float *next_key = key + key_stride, *next_query = q + (t + 1) * key_stride;
                for (int i = 0; i < r.key_dim; i++) {
                    const vf ki = set1(key[i]), nk = set1(next_key[i]), nq = set1(next_query[i]);
#pragma GCC unroll 4
                    for (int j = 0; j < STATE_VECTORS; j++) {
                        float* at = room + i * STATE_COLUMNS + j * VL;
                        const vf x = fma(ki, correction[j], mul(a, load(at)));
                        store(at, x);
                        held[j] = fma(nk, x, held[j]), kept[j] = fma(nq, x, kept[j]);
                    }
                }
            } else if (target) {
                for (int i = 0; i < r.key_dim; i++) {
                    const vf ki = set1(key[i]);
#pragma GCC unroll 4
                    for (int j = 0; j < STATE_VECTORS; j++) {
                        const vf x = fma(ki, correction[j], mul(a, load(room + i * STATE_COLUMNS + j * VL)));
                        if (target == room)
                            store(room + i * STATE_COLUMNS + j * VL, x);
                        else
                            put(target + i * target_stride, j, x);
                    }
                }
            }
        }
    }

    // All segments of one head, in order.
    void head(int h, uint8_t* space) const {
        const int64_t key_stride = padded(r.key_dim, VL), value_stride = padded(r.value_dim, STATE_COLUMNS);
        const int64_t size = int64_t(r.key_dim) * r.value_dim, out_stride = int64_t(r.value_heads) * r.value_dim;
        float* q = (float*)space;
        float* k = q + STATE_TOKENS * key_stride;
        float* v = k + STATE_TOKENS * key_stride;
        float* room = v + STATE_TOKENS * value_stride;  // [panels][key_dim][STATE_COLUMNS]
        const int key_head = h / (r.value_heads / r.key_heads);
        float decay[STATE_TOKENS], rate[STATE_TOKENS], match[STATE_TOKENS];
        for (int64_t i = 0; i < s.segments; i++) {
            const float* from = s.read[i] ? s.matrices + (s.read[i] * r.value_heads + h) * size : nullptr;
            float* to = s.write[i] ? s.matrices + (s.write[i] * r.value_heads + h) * size : nullptr;
            for (int64_t t = 0; t < s.count[i]; t += STATE_TOKENS) {
                const int n = s.count[i] - t < STATE_TOKENS ? int(s.count[i] - t) : STATE_TOKENS;
                const bool begins = t == 0, ends = t + n == s.count[i];
                convolve(i, t, n, r.query_at + int64_t(key_head) * r.key_dim, r.key_dim, q, key_stride);
                convolve(i, t, n, r.key_at + int64_t(key_head) * r.key_dim, r.key_dim, k, key_stride);
                convolve(i, t, n, r.value_at + int64_t(h) * r.value_dim, r.value_dim, v, value_stride);
                for (int j = 0; j < n; j++) {
                    make_gates(s.first[i] + t + j, h, rate + j, decay + j);
                    match[j] = prepare(q + j * key_stride, k + j * key_stride);
                }
                for (int64_t c = 0; c < r.value_dim; c += STATE_COLUMNS) {
                    float* own = room + c * r.key_dim;
                    const float* source = begins ? from ? from + c : nullptr : own;
                    float* target = ends ? to ? to + c : nullptr : own;
                    const int64_t at = (s.first[i] + t) * out_stride + int64_t(h) * r.value_dim + c;
                    const int count = int(r.value_dim - c < STATE_COLUMNS ? r.value_dim - c : STATE_COLUMNS);
                    const float skip = r.skip ? r.skip[h] : 0.0f;
                    auto run = count == STATE_COLUMNS ? &Scan::columns<true> : &Scan::columns<false>;
                    (this->*run)(source, r.value_dim, own, target, r.value_dim, n, q, k, key_stride, v + c, value_stride,
                                 decay, rate, match, skip, s.out + at, out_stride, count);
                }
            }
        }
    }

    // A token's rate and decay; NaN stays NaN.
    void make_gates(int64_t token, int h, float* rate, float* decay) const {
        const float* made = s.gates + token * (1 + r.rates) * r.value_heads + h;
        float step = softplus_f(made[r.rates * r.value_heads]);
        if (step < r.least_step) step = r.least_step;
        if (step > r.most_step) step = r.most_step;
        *rate = r.rates ? 1.0f / (1.0f + __builtin_expf(-made[0])) : step;
        *decay = __builtin_expf(step * r.decay_scale[h]);
    }

    // Norms a token's q and k, if they are to be; returns their product.
    float prepare(float* q, float* k) const {
        vf qq = zero(), kk = zero(), qk = zero();
        for (int c = 0; c < r.key_dim; c += VL) {  // zeros lie behind them
            const vf a = load(q + c), b = load(k + c);
            qq = fma(a, a, qq), kk = fma(b, b, kk), qk = fma(a, b, qk);
        }
        if (!r.unit) return sum(qk);
        const float q_scale = 1.0f / __builtin_sqrtf((sum(qq) + 1e-6f) * r.key_dim);
        const float k_scale = 1.0f / __builtin_sqrtf(sum(kk) + 1e-6f);
        for (int c = 0; c < r.key_dim; c += VL) {
            store(q + c, mul(load(q + c), set1(q_scale)));
            store(k + c, mul(load(k + c), set1(k_scale)));
        }
        return sum(qk) * q_scale * k_scale;
    }
};

void scan(Team* team, int32_t index, int32_t activations, const Recurrence* r, const StateScan* s) {
    Member me(team, index, nullptr);
    const Scan work(*r, *s, activations);
    const int64_t pieces = (r->channels + 63) / 64;  // of lines that no two threads share
    const int64_t first = pieces * index / team->size * 64, end = pieces * (index + 1) / team->size * 64;
    work.move_inputs(first, end < r->channels ? end : r->channels);
    me.barrier();
    me.share(r->value_heads, [&](int h) { work.head(h, s->thread_space + index * s->thread_bytes); });
}

// x: float32 [rows][features], overwritten. z: rows of z_stride elements, y: [rows][features], both in the activations' kind.
void gated_norm(Team* team, int32_t index, int32_t activations, const GatedNorm* norm, float* x, const void* z,
                int64_t z_stride, int64_t rows, void* y) {
    Member me(team, index, nullptr);
    const bool bf16 = activations == KIND_BF16;
    const int element = bf16 ? 2 : 4;
    me.share_rows(int(rows), 4, [&](int first, int last) {
        for (int64_t t = first; t < last; t++) {
            float* own = x + t * norm->features;
            const void* gates = (const uint8_t*)z + t * z_stride * element;
            void* to = (uint8_t*)y + t * norm->features * element;
            for (int begin = 0; begin < norm->features; begin += norm->group) {
                const int end = begin + norm->group;
                vf squares = zero();
                for (int i = begin; i < end; i += VL) {
                    const int n = end - i < VL ? end - i : VL;
                    vf v = load_first(own + i, n);
                    if (norm->gates_first) {
                        v = mul(v, silu_f(load_some(bf16, gates, i, n)));
                        store_first(own + i, v, n);
                    }
                    squares = fma(v, v, squares);
                }
                const vf inverse = set1(1.0f / __builtin_sqrtf(sum(squares) / norm->group + norm->eps));
                for (int i = begin; i < end; i += VL) {
                    const int n = end - i < VL ? end - i : VL;
                    vf v = mul(mul(load_first(own + i, n), inverse), load_first(norm->weight + i, n));
                    if (!norm->gates_first) v = mul(v, silu_f(load_some(bf16, gates, i, n)));
                    store_some(bf16, to, i, v, n);
                }
            }
        }
    });
}

}  // namespace
