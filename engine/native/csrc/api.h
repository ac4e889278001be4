// What crosses between Python (ctypes), the driver (driver.cpp) and the kernels of one instruction set (kernels.cpp).
// Plain structs, fixed layout: engine/native/structs.py mirrors them field by field.
#pragma once

#include <stdint.h>

extern "C" {

// Element kinds. Of activations and caches: F32, BF16; of caches also I8. Of weights: any.
enum Kind : int32_t { KIND_F32 = 0, KIND_BF16 = 1, KIND_I8 = 2, KIND_W8 = 3, KIND_Q4 = 4, KIND_Q8 = 5, KIND_E4M3 = 6 };

// How the factors of a group are kept; two levels: int8 or uint8 times a float16 for `per` groups.
enum FactorForm : int32_t { FACTOR_NONE, FACTOR_F16, FACTOR_BF16, FACTOR_F32, FACTOR_TWO_I8, FACTOR_TWO_U8 };

struct Factors {
    int32_t form, per;
    const void* values;     // [panels][groups][panel]
    const uint16_t* steps;  // two levels: [panels][ceil(groups / per)][panel]
};

// y = x W^T + bias with W packed in panels of `panel` columns: [ceil(n / panel)][kw][panel] words.
// KIND_I8: x is quantized by row. The others below are small weights, unpacked to the activations' bf16 or f32 (small.h):
// KIND_W8: int8, scaled when it is multiplied. KIND_Q4, Q8, E4M3: scale * code + low, rounded to the activations' kind,
// with a scale and low for each `group` columns of k.
struct Linear {
    int32_t kind, n, k, kw;
    const uint32_t* packed;
    const float* scale;     // [n padded to panels], KIND_I8 and KIND_W8
    const int32_t* offset;  // KIND_I8: [groups][n padded], -128 * sum of the group's weights of the column
    const float* bias;      // or null, padded likewise
    Factors scales, lows;
    const int32_t* order;   // or null; [k]: column j multiplies element order[j] of x
    int32_t group, unused;
};

// The plain ones are of MLPs without a gate: their inner values are the activation of up.
enum Gate : int32_t { GATE_SILU, GATE_GELU_TANH, GATE_CLAMPED_SWIGLU, PLAIN_SILU, PLAIN_GELU_TANH, PLAIN_RELU2 };

enum Scoring : int32_t { SCORE_SOFTMAX, SCORE_SIGMOID };

// A layer's experts; see experts.h. Each is an MLP; gate and up are interleaved as in Layer::gate_up.
struct Experts {
    int32_t num_experts, top_k;
    int32_t scoring, renormalize;      // renormalize: a token's factors add up to 1, before `scale`
    int32_t num_groups, top_groups;    // only experts of a token's best groups are chosen; fewer than all, or no matter
    int32_t shared, shared_gate;       // 1: there is one more expert, for all tokens; its factor is a sigmoid
    float scale;                       // of the factors
    int32_t scales_inputs;             // 1: the factors are those of what the experts read, not of their results
    int32_t group_scores;              // 1 or 2: a group is ranked by the sum of so many of its best scores
    int32_t routed;                    // 1: the workspace has the rows' experts and factors already; none is shared
    const Linear *gate_up, *down;      // [num_experts + shared]; those that are chosen have one shape
    Linear router;                     // KIND_F32, a column for each expert, and one for the shared one's gate
    const float* correction;           // or null; [num_experts], added to the scores for choosing only
    int64_t* counts;                   // or null; [num_experts], rows so far
};

// Rows that one expert multiplies together.
struct ExpertRun {
    int32_t expert, first_row, rows;
};

struct RunList {
    int32_t num_runs, num_routed;  // those of a shared expert are the last
    ExpertRun runs[];
};

// A layer's products that adapters change.
enum Product : int32_t { PRODUCT_QKV, PRODUCT_OUTPUT, PRODUCT_GATE_UP, PRODUCT_DOWN, NUM_PRODUCTS };

// Columns of B that a panel's results need: from `first` on for its first half of columns, from `second` on for the other.
struct PanelRanks {
    int32_t first, second, count;
    int32_t before;  // columns that are stored for the panels before
};

// What an adapter adds to a product: B A x. Columns of B that are zero in half a panel are not stored, as far as the other
// half allows.
struct LowRank {
    Linear a;                 // in the activations' kind; n 0: nothing is added
    const void* b;            // in the activations' kind; of each panel [count][panel]
    const PanelRanks* ranks;  // of each panel
};

struct Layer {
    Linear qkv, output, gate_up, down;  // the last two without experts
    const Experts* experts;             // or null
    const float *input_norm, *mlp_norm, *qk_norm, *output_norm, *down_norm;  // null: there is none
    uint32_t *keys, *values;         // the layer's cache, see CacheShape
    float *key_scales, *value_scales;  // I8 caches: [num_blocks][kv_heads][columns]
    const float* sinks;  // or null; [heads], scores that join a softmax without a value
    const LowRank* adapters;  // or null: there are no places; [places][NUM_PRODUCTS]
    int32_t group, rope;
};

// A layer's cache, all word arrays:
//   keys   [num_blocks][kv_heads][head_dim / P][columns], a word holds P consecutive dimensions of one key
//   values [num_blocks][kv_heads][columns / P][value_stride], a word holds one dimension of P consecutive keys
// so both products read them as they lie. I8 caches hold four dimensions of a key (P = 4), as bytes with 128 added, and
// values as pairs (P = 2) of signed bytes, in half words.
struct CacheShape {
    // columns, value_stride: block_size and value_dim padded to 16.
    int32_t kind, block_size, columns, kv_heads, head_dim, value_dim, value_stride;
};

struct DecoderShape {
    int32_t activations;  // KIND_F32 or KIND_BF16
    int32_t num_layers, hidden, intermediate, heads, gate;  // gate: a Gate
    int32_t layer_norm;     // 1: norms subtract the mean; 2: and have biases behind their weights, but for those of q and k
    int32_t parallel;       // attention and MLP read the same state
    int32_t joint_qk_norm;  // all heads of q are normed as one row, and those of k; else each head
    int32_t late_qk_norm;   // heads are normed when they are rotated, not before
    float eps, attention_scale, embedding_scale, residual_scale;
    CacheShape cache;
    const Linear* table;  // the embedding where it is kept as a small weight, or null
};

// Consecutive query rows of one KV head over a range of key tiles.
struct AttentionTask {
    int32_t kv_head, first_row, num_rows;  // rows: of `AttentionGroup.row_*`
    int32_t table_row;                     // whose blocks are read
    int32_t first_tile, last_tile;         // [first, last)
    int32_t begins;    // 1: starts from nothing, 0: goes on from the rows' stored states
    int32_t ends;      // 1: writes the output, 0: stores the rows' states
    int32_t partial;   // >= 0: stores each tile's result by itself, from this slot on; -1: merges as it goes
};

// One cache group's share of a step.
struct AttentionGroup {
    const int32_t* tables;  // [num_sequences][table_width]
    const int64_t* slots;   // [tokens], block * block_size + offset
    int32_t table_width, window;  // window 0: none
    int32_t num_first, num_second, num_merges, num_rows;
    const AttentionTask *first, *second, *merges;  // each list can run in any order; lists one after the other
    const int32_t *row_token, *row_position;       // [num_rows]
};

struct Step {
    int32_t tokens, num_groups;
    const int64_t* token_ids;
    const AttentionGroup* groups;
    const int64_t* positions;       // of the tokens: their rows of `rotations`; null: those are in the tokens' order
    const float* const* rotations;  // per rope kind rows of [head_dim]: cosines, then sines, of half a head
    const float* const* query_factors;  // per rope kind [tokens], of rotated queries; or null: 1
    void* hidden;                   // out: [tokens][hidden] in the activations' kind, after the last norm
    const int32_t* wanted;          // tokens, ascending, whose row of `hidden` is wanted; others are left as they are
    int32_t num_wanted;             // -1: all
    int32_t num_states;             // layers, ascending, before which each token's state is kept
    const int32_t* state_layers;    // [num_states]; num_layers: behind the last one
    void* states;                   // out: [tokens][num_states][hidden] in the activations' kind
    const int32_t* adapters;        // or null: no token has one; [tokens], places; -1: none
};

// Buffers of a decoder, made once for `max_tokens`; strides are in elements of the named type.
struct Workspace {
    int64_t hidden_stride, qkv_stride, attended_stride, gated_stride, input_words, scale_stride;
    float *residual, *update, *qkv, *row_scale, *state, *partial;
    uint32_t *input, *attended, *gated, *query;
    uint8_t* thread_space;  // [threads][thread_bytes]
    int64_t thread_bytes;
    // Of layers with experts; rows: tokens * (top_k + shared).
    int64_t logits_stride;
    float *logits, *factors, *expert_scale, *expert_output;  // [tokens], [rows], [rows], [rows][hidden_stride]
    uint32_t *expert_input, *expert_gated;                   // [rows][input_words], [rows]
    int32_t *chosen, *sorted, *expert_starts;                // [rows], [rows], [num_experts + shared + 1]
    RunList* runs;
    // With adapters: A x, [tokens][low_rank_stride], and normed rows in the activations' kind, [tokens][plain_words], for
    // products whose operand is another.
    int64_t low_rank_stride, delta_stride, plain_words;
    float *low_rank, *delta;  // delta: B (A x), [STREAMED_ROWS][delta_stride]
    uint32_t* plain;
    int64_t* spent;  // or null: nanoseconds that the first thread spent in each Part, waiting for others included
};

// A layer with states (recurrence.h). Heads of values share those of keys, neighbours each.
struct Recurrence {
    int32_t key_heads, value_heads, key_dim, value_dim, kernel_size, channels;
    int32_t query_at, key_at, value_at;  // their first channels
    int32_t unit;                        // q and k of a token are normed to 1, and q divided by sqrt(key_dim)
    int32_t corrects;                    // what the matrix holds for a key is subtracted from the value
    int32_t rates;                       // 1: rates are made apart from step sizes; else they are these
    float least_step, most_step;
    const float* decay_scale;            // [value_heads], of a step of 1: the decay's logarithm
    const float* conv;                   // [kernel_size][channels]
    const float *bias, *skip;            // or null; [channels] of the convolution; [value_heads], factors of the values
};

// Its part of a step; see Segments in engine/states.py.
struct StateScan {
    int64_t segments;
    const int64_t *first, *count, *read, *write;
    const void* x;       // [tokens][channels] in the activations' kind
    const float* gates;  // [tokens][value_heads]: step sizes before their softplus; rates before their sigmoid precede
    void* inputs;        // [slots][kernel_size - 1][channels] in the activations' kind
    float* matrices;     // [slots][value_heads][key_dim][value_dim]
    void* history;       // room: [segments][kernel_size - 1][channels] in the activations' kind
    float* out;          // [tokens][value_heads][value_dim]
    uint8_t* thread_space;  // [threads][thread_bytes]
    int64_t thread_bytes;
};

// RMSNorm of groups of neighbouring features, and the gate silu(z) of each feature.
struct GatedNorm {
    int32_t features, group, gates_first;  // gates_first: what is normed is gated already; else the gate comes behind
    float eps;
    const float* weight;  // [features]
};

enum Part : int32_t { PART_NORM, PART_PRODUCT, PART_ROTATE, PART_ATTENTION, PART_QUANTIZE, PART_HEAD, PART_ROUTE, PART_ADAPTERS, NUM_PARTS };

struct Team {
    int32_t size, arrived, epoch;
    int32_t next[4];
    uint64_t* ranges;  // [size], RANGE_STRIDE apart: what of each member's share is left, see Member::share
};

struct Kernels {
    int32_t panel, lanes;
    void (*pack)(int32_t kind, int32_t n, int32_t k, const float* rows, uint32_t* packed, float* scale, int32_t* offset,
                 int64_t offset_stride);
    void (*pack_codes)(int32_t kind, int32_t padded, int32_t k, const uint8_t* codes, int64_t stride, const int32_t* rows,
                       uint32_t* packed, int32_t* offset);
    int32_t (*pack_low_rank)(int32_t kind, int32_t padded, int32_t rank, const float* from, const int32_t* rows,
                             PanelRanks* ranks, void* b);
    void (*forward)(Team*, int32_t member, const DecoderShape*, const Layer*, const void* embedding, const float* norm,
                    const Step*, const Workspace*);
    void (*linear)(Team*, int32_t member, int32_t activations, const Linear*, const void* x, int64_t rows, float* y,
                   const Workspace*);
    void (*experts)(Team*, int32_t member, int32_t activations, int32_t hidden, int32_t gate, const Experts*, const void* x,
                    int64_t rows, float* y, const Workspace*);
    void (*argmax)(Team*, int32_t member, int32_t activations, const Linear*, const void* x, int64_t rows,
                   int64_t* best, uint8_t* finite, const Workspace*);
    void (*attend)(Team*, int32_t member, const CacheShape*, int32_t activations, int32_t heads, float scale,
                   const Layer*, const AttentionGroup*, int32_t tokens, const void* q, const void* k, const void* v,
                   void* out, const Workspace*);
    void (*scan)(Team*, int32_t member, int32_t activations, const Recurrence*, const StateScan*);
    void (*heads)(Team*, int32_t member, int32_t activations, int32_t count, const Linear*, const void* x, int64_t lda,
                  int64_t head_words, int64_t rows, float* y, const Workspace*);
    void (*gated_norm)(Team*, int32_t member, int32_t activations, const GatedNorm*, float* x, const void* z,
                       int64_t z_stride, int64_t rows, void* y);
};

}  // extern "C"

// A quantized row has a scale for each so many of its elements: one outlier then costs its group precision, not the row.
constexpr int QUANT_GROUP = 192;

constexpr int RANGE_STRIDE = 16;      // two cache lines, which processors fetch together
constexpr int ROW_BLOCK = 128;        // rows of a product that share a pass over a weight panel
constexpr int UNPACKED_ROWS = 240;    // rows for which a panel of small weights is unpacked once
constexpr int STREAMED_ROWS = 128;    // tokens of a step whose B (A x) may be computed before their products
constexpr int TILE_KEYS = 256;        // keys whose scores are held at once
constexpr int STATE_TOKENS = 32;      // of a segment, convolved together
constexpr int ATTENTION_ROWS = 60;    // query rows (tokens x heads of one KV head) of an attention task
