// What Python calls: cuts attention into tasks, and runs a team of OpenMP threads (torch's own pool).
#include <cpuid.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "api.h"

#ifndef INSTRUCTION_SET
#error "0: avx2, 1: avx512, 2: avx512_bf16, 3: amx"
#endif

extern "C" const Kernels kernels;

namespace {

// Whether there are tiles, and the system lets this process use them.
bool has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
    constexpr int request_permission = 0x1023, tile_data = 18;
    return (d & tiles) == tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

template <class F> void run_team(int threads, F f) {
    Team team;
    memset(&team, 0, sizeof team);
    std::vector<uint64_t> ranges(size_t(threads) * RANGE_STRIDE, 0);
    team.ranges = ranges.data();
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        team.size = omp_get_num_threads();  // which may be fewer than were asked for
        f(&team, omp_get_thread_num());
    }
}

// Cuts the queries of one sequence range into tasks, and finds what decoding sequences share.
struct TaskBuilder {
    const CacheShape& cache;
    const int32_t *starts, *counts, *tables;
    const int num_sequences, num_decodes, table_width, window, per_head, threads;
    int tile_blocks, tile_keys, rows_per_task;
    std::vector<AttentionTask> first, second, merges;
    std::vector<int32_t> row_token, row_position;
    int32_t partials = 0, max_partials;

    int last_tile_of(int position) const { return position / tile_keys + 1; }
    int first_tile_of(int position) const { return window > 0 ? std::max(0, position - window + 1) / tile_keys : 0; }

    const int32_t* table(int sequence) const { return tables + int64_t(sequence) * table_width; }

    bool same_tile(int a, int b, int tile) const {
        return !memcmp(table(a) + tile * tile_blocks, table(b) + tile * tile_blocks, tile_blocks * 4);
    }

    // Whole tiles that sequence i has behind it: only those can be shared as they are.
    int whole_tiles(int i) const { return (starts[i] + 1) / tile_keys; }

    // Finds groups among decoding sequences [begin, end) of `order`, which agree in their first `tile` tiles.
    // Taking n sequences together over t tiles saves reading (n - 1) t tiles: a node of the prefix tree becomes one
    // group, or is cut into its branches, whatever saves more. Returns the saving.
    long share(const std::vector<int>& order, int begin, int end, int tile, std::vector<std::array<int, 3>>& groups) {
        if (end - begin < 2) return 0;
        int common = tile, fewest = whole_tiles(order[begin]);
        for (int i = begin + 1; i < end; i++) fewest = std::min(fewest, whole_tiles(order[i]));
        auto agree = [&](int t) {
            for (int i = begin + 1; i < end; i++)
                if (!same_tile(order[begin], order[i], t)) return false;
            return true;
        };
        while (common < fewest && agree(common)) common++;
        const long together = long(end - begin - 1) * common;
        std::vector<std::array<int, 3>> branches;
        long apart = 0;
        for (int i = begin; i < end;) {
            int j = i + 1;
            const bool reaches = whole_tiles(order[i]) > common;
            while (j < end && reaches && whole_tiles(order[j]) > common && same_tile(order[i], order[j], common)) j++;
            if (j - i < end - begin) apart += share(order, i, j, common + 1 > tile ? common : tile, branches);
            i = j;
        }
        if (together == 0 && apart == 0) return 0;
        if (together >= apart)
            groups.push_back({begin, end, common});
        else
            groups.insert(groups.end(), branches.begin(), branches.end());
        return std::max(together, apart);
    }

    void add_rows(int token, int position) { row_token.push_back(token), row_position.push_back(position); }

    // One run of rows of one sequence, from tile `from` on; `begins` as in AttentionTask.
    void finish_rows(int first_row, int rows, int sequence, int from, int to, bool begins, bool split, int piece) {
        for (int h = 0; h < cache.kv_heads; h++) {
            AttentionTask task{h, first_row, rows, sequence, from, to, begins, 1, -1};
            if (!split) {
                (begins ? first : second).push_back(task);
                continue;
            }
            task.partial = partials;
            merges.push_back(task);
            for (int t = from; t < to; t += piece) {
                AttentionTask part = task;
                part.first_tile = t, part.last_tile = std::min(to, t + piece);
                part.partial = task.partial + (t - from) * rows * per_head;
                first.push_back(part);
            }
            partials += (to - from) * rows * per_head;
        }
    }

    void build() {
        tile_blocks = std::max(1, TILE_KEYS / cache.block_size);
        tile_keys = tile_blocks * cache.block_size;
        rows_per_task = std::max(1, ATTENTION_ROWS / per_head);
        std::vector<int> shared(num_decodes, 0);
        if (window == 0 && num_decodes > 1) share_prefixes(shared);
        // With few rows and long contexts the tiles of one row are spread over the threads.
        long total = 0;
        for (int i = 0; i < num_sequences; i++)
            total += long(last_tile_of(starts[i] + counts[i] - 1)) * ((counts[i] + rows_per_task - 1) / rows_per_task);
        const long share_of_thread = std::max(1L, total * cache.kv_heads / (4L * threads));
        for (int i = 0, token = 0; i < num_sequences; i++) {
            for (int at = 0; at < counts[i]; at += rows_per_task) {
                const int rows = std::min(rows_per_task, counts[i] - at), from_position = starts[i] + at;
                const int to = last_tile_of(from_position + rows - 1);
                const int from = i < num_decodes && shared[i] ? shared[i] : first_tile_of(from_position);
                const int row = int(row_token.size());
                for (int r = 0; r < rows; r++) add_rows(token + at + r, from_position + r);
                const bool begins = !(i < num_decodes && shared[i]);
                const bool split = begins && threads > 1 && to - from > 4 && to - from > 2 * share_of_thread &&
                                   partials + long(to - from) * rows * per_head * cache.kv_heads <= max_partials;
                if (begins || to > from)
                    finish_rows(row, rows, i, from, to, begins, split, int(std::max(2L, share_of_thread)));
                else
                    finish_rows(row, rows, i, from, from, false, false, 0);
            }
            token += counts[i];
        }
        auto cost = [&](const AttentionTask& t) { return long(t.last_tile - t.first_tile) * (4 + t.num_rows * per_head); };
        auto longer = [&](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); };
        std::stable_sort(first.begin(), first.end(), longer);
        std::stable_sort(second.begin(), second.end(), longer);
    }

    void share_prefixes(std::vector<int>& shared) {
        std::vector<int> order;
        for (int i = 0; i < num_decodes; i++)
            if (whole_tiles(i) > 0) order.push_back(i);
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            const int blocks = std::min(whole_tiles(a), whole_tiles(b)) * tile_blocks;
            const int* end = table(a) + blocks;
            auto [x, y] = std::mismatch(table(a), end, table(b));
            if (x != end) return *x < *y;
            if (whole_tiles(a) != whole_tiles(b)) return whole_tiles(a) < whole_tiles(b);
            return a < b;
        });
        std::vector<std::array<int, 3>> groups;
        for (int i = 0; i < int(order.size());) {  // roots: sequences with the same first tile
            int j = i + 1;
            while (j < int(order.size()) && same_tile(order[i], order[j], 0)) j++;
            share(order, i, j, 0, groups);
            i = j;
        }
        for (auto& [begin, end, tiles] : groups) {
            for (int at = begin; at < end; at += rows_per_task) {
                const int rows = std::min(rows_per_task, end - at), row = int(row_token.size());
                for (int r = 0; r < rows; r++) {
                    shared[order[at + r]] = tiles;
                    add_rows(order[at + r], starts[order[at + r]]);  // a decoding sequence's token has its index
                }
                // The last row's position bounds what is read; all are past these tiles.
                for (int h = 0; h < cache.kv_heads; h++)
                    first.push_back({h, row, rows, order[at], 0, tiles, 1, 0, -1});
            }
        }
    }
};

}  // namespace

extern "C" {

// 1 where this processor has the instruction set of these kernels.
int tm_supported() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool dots = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    const bool has[] = {avx2, avx512, dots, dots && has_amx()};
    return has[INSTRUCTION_SET];
}

int tm_panel() { return kernels.panel; }

int64_t tm_abi() {
    return sizeof(Layer) + 1000 * sizeof(Workspace) + 1000000 * sizeof(AttentionGroup) + 1000000000 * sizeof(Experts);
}

void tm_pack(int kind, int n, int k, const float* rows, uint32_t* packed, float* scale, int32_t* offset,
             int64_t offset_stride) {
    kernels.pack(kind, n, k, rows, packed, scale, offset, offset_stride);
}

void tm_pack_codes(int kind, int padded, int k, const uint8_t* codes, int64_t stride, const int32_t* rows,
                   uint32_t* packed, int32_t* offset) {
    kernels.pack_codes(kind, padded, k, codes, stride, rows, packed, offset);
}

int tm_pack_low_rank(int kind, int padded, int rank, const float* from, const int32_t* rows, PanelRanks* ranks, void* b) {
    return kernels.pack_low_rank(kind, padded, rank, from, rows, ranks, b);
}

struct GroupInput {
    const int32_t *starts, *counts, *tables;
    const int64_t* slots;
    int32_t num_sequences, num_decodes, table_width, window;
};

struct Plan {
    std::vector<AttentionGroup> groups;
    std::vector<TaskBuilder> builders;
};

// The tasks of a step, for all layers. Arrays of `inputs` must live as long as the plan.
Plan* tm_plan(const CacheShape* cache, int heads, int threads, int max_partials, int num_groups, const GroupInput* inputs) {
    Plan* plan = new Plan;
    plan->builders.reserve(num_groups);
    for (int g = 0; g < num_groups; g++) {
        const GroupInput& in = inputs[g];
        plan->builders.push_back(TaskBuilder{*cache, in.starts, in.counts, in.tables, in.num_sequences, in.num_decodes,
                                             in.table_width, in.window, heads / cache->kv_heads, threads});
        TaskBuilder& b = plan->builders.back();
        b.max_partials = max_partials;
        b.build();
        plan->groups.push_back({in.tables, in.slots, in.table_width, in.window, int32_t(b.first.size()),
                                int32_t(b.second.size()), int32_t(b.merges.size()), int32_t(b.row_token.size()),
                                b.first.data(), b.second.data(), b.merges.data(), b.row_token.data(),
                                b.row_position.data()});
    }
    return plan;
}

const AttentionGroup* tm_plan_groups(const Plan* plan) { return plan->groups.data(); }

// Decoding sequences whose first tiles are computed together with others'.
int tm_plan_shared_rows(const Plan* plan, int group) {
    int rows = 0;
    for (const AttentionTask& task : plan->builders[group].first)
        if (task.kv_head == 0 && !task.ends) rows += task.num_rows;
    return rows;
}

void tm_plan_free(Plan* plan) { delete plan; }

void tm_forward(int threads, const DecoderShape* shape, const Layer* layers, const void* embedding,
                const float* norm, const Step* step, const Workspace* space) {
    run_team(threads, [&](Team* team, int m) { kernels.forward(team, m, shape, layers, embedding, norm, step, space); });
}

void tm_linear(int threads, int activations, const Linear* w, const void* x, int64_t rows, float* y,
               const Workspace* space) {
    run_team(threads, [&](Team* team, int m) { kernels.linear(team, m, activations, w, x, rows, y, space); });
}

void tm_experts(int threads, int activations, int hidden, int gate, const Experts* of, const void* x,
                int64_t rows, float* y, const Workspace* space) {
    run_team(threads,
             [&](Team* team, int m) { kernels.experts(team, m, activations, hidden, gate, of, x, rows, y, space); });
}

void tm_argmax(int threads, int activations, const Linear* w, const void* x, int64_t rows,
               int64_t* best, uint8_t* finite, const Workspace* space) {
    run_team(threads, [&](Team* team, int m) { kernels.argmax(team, m, activations, w, x, rows, best, finite, space); });
}

void tm_attend(int threads, const CacheShape* cache, int activations, int heads, float scale,
               const Layer* layer, const AttentionGroup* group, int tokens, const void* q, const void* k, const void* v,
               void* out, const Workspace* space) {
    run_team(threads, [&](Team* team, int m) {
        kernels.attend(team, m, cache, activations, heads, scale, layer, group, tokens, q, k, v, out, space);
    });
}

void tm_scan(int threads, int activations, const Recurrence* r, const StateScan* s) {
    run_team(threads, [&](Team* team, int m) { kernels.scan(team, m, activations, r, s); });
}

void tm_heads(int threads, int activations, int count, const Linear* w, const void* x, int64_t lda, int64_t head_words,
              int64_t rows, float* y, const Workspace* space) {
    run_team(threads, [&](Team* team, int m) {
        kernels.heads(team, m, activations, count, w, x, lda, head_words, rows, y, space);
    });
}

void tm_gated_norm(int threads, int activations, const GatedNorm* norm, float* x, const void* z,
                   int64_t z_stride, int64_t rows, void* y) {
    run_team(threads, [&](Team* team, int m) { kernels.gated_norm(team, m, activations, norm, x, z, z_stride, rows, y); });
}

}  // extern "C"
