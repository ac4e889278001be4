// A team runs one function on every thread; its members meet at barriers and share out tasks bit by bit, because a
// thread whose core is taken away for a moment must not be waited for with a fixed half of the work.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <time.h>

#include "api.h"
#include "tiles.h"

namespace {

struct Member {
    Team* team;
    int index;
    int phase;
    uint32_t turn = 0;
    int64_t* spent;
    int64_t since;

    Member(Team* team, int index, int64_t* spent) : team(team), index(index), phase(0), spent(index ? nullptr : spent) {
        since = this->spent ? now() : 0;
    }
    ~Member() { release_tiles(); }

    static int64_t now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
    }

    // Books the time since the last call to a part.
    void book(Part part) {
        if (!spent) return;
        const int64_t t = now();
        spent[part] += t - since;
        since = t;
    }

    void barrier() {
        int epoch = __atomic_load_n(&team->epoch, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->size) {
            __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
            // Nobody is in the phase after next yet.
            __atomic_store_n(&team->next[(phase + 2) & 3], 0, __ATOMIC_RELAXED);
            __atomic_store_n(&team->epoch, epoch + 1, __ATOMIC_RELEASE);
        } else {
            for (int spins = 0; __atomic_load_n(&team->epoch, __ATOMIC_ACQUIRE) == epoch; spins++) {
                if (spins < 2000)
                    _mm_pause();
                else
                    sched_yield();
            }
        }
        phase++;
    }

    // Calls f(task) for each task below n and waits for all of them. A member begins with its own share of them, the same
    // one whenever n is, so that it finds in its caches what it wrote there before; then it helps the others, from their
    // ends. Shares are handed out in ever smaller runs of neighbours, by whoever comes first.
    template <class F> void share(int n, F f) {
        turn++;
        const int size = team->size;
        if (size == 1) {
            for (int i = 0; i < n; i++) f(i);
            return;
        }
        for (int v = 0; v < size; v++) {
            const int whose = index + v < size ? index + v : index + v - size;
            uint64_t* range = team->ranges + whose * RANGE_STRIDE;
            for (;;) {
                uint64_t held = __atomic_load_n(range, __ATOMIC_RELAXED);
                // What an earlier turn has left says that nobody has begun with this share yet.
                const bool begun = uint32_t(held >> 48) == (turn & 0xffff);
                const int begin = begun ? int(held >> 24 & 0xffffff) : int(int64_t(n) * whose / size);
                const int end = begun ? int(held & 0xffffff) : int(int64_t(n) * (whose + 1) / size);
                if (begin >= end) break;
                const int take = (end - begin + 2 * size - 1) / (2 * size);
                const int first = v == 0 ? begin : end - take;
                const uint64_t left = uint64_t(turn & 0xffff) << 48 | uint64_t(v == 0 ? begin + take : begin) << 24 |
                                      uint64_t(v == 0 ? end : end - take);
                if (!__atomic_compare_exchange_n(range, &held, left, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
                for (int i = first; i < first + take; i++) f(i);
            }
        }
        barrier();
    }

    // The same in the tasks' order for all together, with f(task, next): a thread's next task (-1: none) is taken before it starts on one, so that it can
    // fetch what that will read.
    template <class F> void share_ahead(int n, F f) {
        int* next = &team->next[phase & 3];
        if (n > 0) {
            int task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            while (task < n) {
                const int following = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
                f(task, following < n ? following : -1);
                task = following;
            }
        }
        barrier();
    }

    // As `share` over a range of rows, cut into pieces of at least `least` rows.
    template <class F> void share_rows(int rows, int least, F f) {
        int pieces = (rows + least - 1) / least;
        if (pieces > 4 * team->size) pieces = 4 * team->size;
        share(pieces, [&](int i) { f(int(int64_t(rows) * i / pieces), int(int64_t(rows) * (i + 1) / pieces)); });
    }
};

}  // namespace
