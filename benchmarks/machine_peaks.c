/* What this machine can do at most: register peak of its multiply-accumulate instructions, and read bandwidth.
 *
 *     cc -O2 -pthread machine_peaks.c -o machine_peaks && ./machine_peaks SECONDS THREADS BYTES...
 *
 * Prints JSON. The loops are written as instructions, not left to the compiler, so what is counted is what runs: each
 * has more independent accumulators than latency x units needs, touches no memory, and its instructions per cycle are
 * printed, with the clock taken from a chain of dependent multiplications (3 cycles each on every x86-64 of the last
 * fifteen years; additions would not do, newer cores fold chains of them). All threads start together; a rate is the
 * best of several rounds. Registers above 15 are no clobbers: without -mavx512f the compiler does not know them. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS 5
#define XMM                                                                                                        \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
        "xmm14", "xmm15"
#define EACH12(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define EACH24(op) EACH12(op) op(12) op(13) op(14) op(15) op(16) op(17) op(18) op(19) op(20) op(21) op(22) op(23)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* -- kernels: n iterations of 24 or 12 instructions on registers */

#define ZERO_Z(i) "vpxord %%zmm" #i ", %%zmm" #i ", %%zmm" #i "\n\t"
#define ZERO_Y(i) "vpxor %%ymm" #i ", %%ymm" #i ", %%ymm" #i "\n\t"
#define FMA_Z(i) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #i "\n\t"
#define BF16_Z(i) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #i "\n\t"
#define VNNI_Z(i) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #i "\n\t"
#define FMA_Y(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n\t"
#define VNNI_Y(i) "%{vex%} vpdpbusd %%ymm14, %%ymm15, %%ymm" #i "\n\t"
#define MADD_Y(i)                                                                                                  \
    "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n\t vpmaddwd %%ymm13, %%ymm12, %%ymm12\n\t"                              \
    "vpaddd %%ymm12, %%ymm" #i ", %%ymm" #i "\n\t"

#define KERNEL_Z(name, op, value)                                                                                  \
    static void name(long n) {                                                                                     \
        const uint32_t x = value;                                                                                  \
        __asm__ volatile("vpbroadcastd %1, %%zmm30\n\t vmovdqa64 %%zmm30, %%zmm31\n\t" EACH24(ZERO_Z)              \
                         "1:\n\t" EACH24(op) "dec %0\n\t jnz 1b\n\t vzeroupper"                                    \
                         : "+r"(n) : "m"(x) : "cc", XMM);                                                          \
    }
#define KERNEL_Y(name, op, value)                                                                                  \
    static void name(long n) {                                                                                     \
        const uint32_t x = value, ones = 0x00010001;                                                               \
        __asm__ volatile("vpbroadcastd %1, %%ymm14\n\t vmovdqa %%ymm14, %%ymm15\n\t" EACH12(ZERO_Y)                \
                         "vpbroadcastd %2, %%ymm13\n\t"                                                            \
                         "1:\n\t" EACH12(op) "dec %0\n\t jnz 1b\n\t vzeroupper"                                    \
                         : "+r"(n) : "m"(x), "m"(ones) : "cc", XMM);                                               \
    }

KERNEL_Z(fma_512, FMA_Z, 0x3f800000)
KERNEL_Z(bf16_512, BF16_Z, 0x3f803f80)
KERNEL_Z(vnni_512, VNNI_Z, 0x01010101)
KERNEL_Y(fma_256, FMA_Y, 0x3f800000)
KERNEL_Y(vnni_256, VNNI_Y, 0x01010101)
KERNEL_Y(madd_256, MADD_Y, 0x01010101)

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16]; /* bytes */
    uint8_t rows[16];
};

static void load_tiles(void) {
    static struct tile_config config __attribute__((aligned(64)));
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.columns[i] = 64, config.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); /* all of it, and stores before it are not dropped */
}

/* Four tiles accumulate, two and two are multiplied. */
#define TILES(name, op)                                                                                            \
    static void name(long n) {                                                                                     \
        load_tiles();                                                                                              \
        __asm__ volatile("tilezero %%tmm0\n\t tilezero %%tmm1\n\t tilezero %%tmm2\n\t tilezero %%tmm3\n\t"         \
                         "tilezero %%tmm4\n\t tilezero %%tmm5\n\t tilezero %%tmm6\n\t tilezero %%tmm7\n\t"         \
                         "1:\n\t" op " %%tmm6, %%tmm4, %%tmm0\n\t" op " %%tmm7, %%tmm4, %%tmm1\n\t"                \
                         op " %%tmm6, %%tmm5, %%tmm2\n\t" op " %%tmm7, %%tmm5, %%tmm3\n\t"                         \
                         "dec %0\n\t jnz 1b\n\t tilerelease" : "+r"(n) : : "cc");                                  \
    }
TILES(amx_bf16, "tdpbf16ps")
TILES(amx_int8, "tdpbssd")

static void multiply_chain(long n) { /* 8 dependent multiplications an iteration */
    long x = 3;
    __asm__ volatile("1:\n\t imul %1, %1\n\t imul %1, %1\n\t imul %1, %1\n\t imul %1, %1\n\t imul %1, %1\n\t"
                     "imul %1, %1\n\t imul %1, %1\n\t imul %1, %1\n\t dec %0\n\t jnz 1b"
                     : "+r"(n), "+r"(x) : : "cc");
}

/* -- what the processor and the system allow */

static unsigned cpuid(unsigned leaf, unsigned sub, int reg) {
    unsigned r[4] = {0};
    __get_cpuid_count(leaf, sub, &r[0], &r[1], &r[2], &r[3]);
    return r[reg];
}
static unsigned saved_state(void) {
    unsigned low, high;
    if (!(cpuid(1, 0, 2) >> 27 & 1)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
static int avx2(void) { return (saved_state() & 6) == 6 && (cpuid(7, 0, 1) >> 5 & 1) && (cpuid(1, 0, 2) >> 12 & 1); }
static int avx512(void) { return (saved_state() & 0xe6) == 0xe6 && (cpuid(7, 0, 1) >> 16 & 1); }
static int avx512_bf16(void) { return avx512() && (cpuid(7, 1, 0) >> 5 & 1); }
static int avx512_vnni(void) { return avx512() && (cpuid(7, 0, 2) >> 11 & 1); }
static int avx_vnni(void) { return avx2() && (cpuid(7, 1, 0) >> 4 & 1); }
static int tiles(unsigned bit) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    if ((saved_state() & 0x60000) != 0x60000 || !(cpuid(7, 0, 3) >> bit & 1)) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
static int has_amx_bf16(void) { return tiles(22); }
static int has_amx_int8(void) { return tiles(25); }

/* A kernel: instructions an iteration, and multiplications and additions an instruction. */
struct kernel {
    const char *name, *dtype;
    void (*run)(long);
    int (*supported)(void);
    double instructions, operations;
};
static const struct kernel KERNELS[] = {
    {"amx_bf16", "bf16", amx_bf16, has_amx_bf16, 4, 16384}, {"amx_int8", "int8", amx_int8, has_amx_int8, 4, 32768},
    {"avx512_bf16", "bf16", bf16_512, avx512_bf16, 24, 64}, {"avx512_vnni", "int8", vnni_512, avx512_vnni, 24, 128},
    {"avx512_fma", "f32", fma_512, avx512, 24, 32},         {"avx_vnni", "int8", vnni_256, avx_vnni, 12, 64},
    {"avx2_fma", "f32", fma_256, avx2, 12, 16},             {"avx2_maddubs", "int8", madd_256, avx2, 36, 64.0 / 3},
};
static const struct kernel CHAIN = {"imul", "", multiply_chain, 0, 8, 1};

/* -- reading */

#define LOAD_Z(p, o, r) "vpxord " #o "(%" #p "), %%zmm" #r ", %%zmm" #r "\n\t"
#define LOAD_Y(p, o, r) "vpxor " #o "(%" #p "), %%ymm" #r ", %%ymm" #r "\n\t"

static void read_512(const char *a, const char *b, long lines) { /* two streams, 256 bytes of each an iteration */
    for (long i = 0; i < lines; i += 4, a += 256, b += 256)
        __asm__ volatile(LOAD_Z(0, 0, 0) LOAD_Z(0, 64, 1) LOAD_Z(0, 128, 2) LOAD_Z(0, 192, 3) LOAD_Z(1, 0, 4)
                         LOAD_Z(1, 64, 5) LOAD_Z(1, 128, 6) LOAD_Z(1, 192, 7) : : "r"(a), "r"(b) : XMM);
}
static void read_256(const char *a, const char *b, long lines) {
    for (long i = 0; i < lines; i += 2, a += 128, b += 128)
        __asm__ volatile(LOAD_Y(0, 0, 0) LOAD_Y(0, 32, 1) LOAD_Y(0, 64, 2) LOAD_Y(0, 96, 3) LOAD_Y(1, 0, 4)
                         LOAD_Y(1, 32, 5) LOAD_Y(1, 64, 6) LOAD_Y(1, 96, 7) : : "r"(a), "r"(b) : XMM);
}

/* -- threads */

struct task {
    const struct kernel *kernel; /* or, if NULL, read from data */
    const char *data;
    void (*pass)(const char *, const char *, long);
    long bytes, repeats;
    pthread_barrier_t *start;
    double begun, ended;
};

static void *work(void *argument) {
    struct task *t = argument;
    pthread_barrier_wait(t->start);
    t->begun = now();
    if (t->kernel) t->kernel->run(t->repeats);
    else
        for (long i = 0; i < t->repeats; i++) t->pass(t->data, t->data + t->bytes / 2, t->bytes / 128);
    t->ended = now();
    return NULL;
}

static double together(int threads, const struct kernel *kernel, const char *data, long bytes, long repeats) {
    pthread_t ids[threads];
    struct task tasks[threads];
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, threads);
    long share = bytes / threads / 512 * 512;
    void (*pass)(const char *, const char *, long) = avx512() ? read_512 : read_256; /* once: CPUID is slow in a VM */
    for (int i = 0; i < threads; i++) {
        tasks[i] = (struct task){kernel, data ? data + i * share : NULL, pass, share, repeats, &start, 0, 0};
        if (pthread_create(&ids[i], NULL, work, &tasks[i])) exit(3);
    }
    double begun = 1e300, ended = 0;
    for (int i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        if (tasks[i].begun < begun) begun = tasks[i].begun;
        if (tasks[i].ended > ended) ended = tasks[i].ended;
    }
    return ended - begun;
}

/* Repeats per second of all threads together, from rounds of about so many seconds. */
static double best_rate(int threads, const struct kernel *kernel, const char *data, long bytes, double seconds) {
    long repeats = 1;
    double took;
    while ((took = together(threads, kernel, data, bytes, repeats)) < seconds / 4) repeats *= took > 1e-3 ? 2 : 16;
    repeats = repeats * seconds / took + 1;
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double rate = repeats / together(threads, kernel, data, bytes, repeats);
        if (rate > best) best = rate;
    }
    return best;
}

int main(int count, char **values) {
    if (count < 3 || !avx2()) {
        fprintf(stderr, "machine_peaks SECONDS THREADS BYTES..., on an x86-64 processor with AVX2 and FMA\n");
        return 2;
    }
    double seconds = atof(values[1]);
    int threads = atoi(values[2]);
    double clock = 3 * CHAIN.instructions * best_rate(threads, &CHAIN, NULL, 0, seconds);
    printf("{\"threads\": %d, \"clock_hz\": %.0f, \"kernels\": [", threads, clock);
    const char *comma = "";
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++) {
        const struct kernel *k = &KERNELS[i];
        if (!k->supported()) continue;
        double instructions = k->instructions * best_rate(threads, k, NULL, 0, seconds);
        printf("%s{\"name\": \"%s\", \"dtype\": \"%s\", \"operations_per_second\": %.0f, \"instructions_per_cycle\": %.3f}",
               comma, k->name, k->dtype, threads * instructions * k->operations, instructions / clock);
        comma = ", ";
    }
    printf("], \"reads\": [");
    for (int i = 3; i < count; i++) {
        long bytes = atol(values[i]);
        long padded = (bytes + (2L << 20) - 1) & -(2L << 20);
        char *data = mmap(NULL, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) return 3;
        madvise(data, padded, MADV_HUGEPAGE);
        for (long at = 0; at < padded; at += 4096) data[at] = 1;
        long read = bytes / threads / 512 * 512 * threads;
        printf("%s{\"bytes\": %ld, \"bytes_per_second\": %.0f}", i > 3 ? ", " : "", read,
               read * best_rate(threads, NULL, data, bytes, seconds));
        munmap(data, padded);
    }
    printf("]}\n");
    return 0;
}
