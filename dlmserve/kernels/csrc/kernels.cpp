// The C interface: choice of the instruction set, threads, and the hand-over of results.
// Knows nothing about Python and torch: plain pointers in, plain arrays out.
#include "kernels.h"

#include <cstdlib>
#include <vector>

#include "threads.h"

namespace dlmserve {

#if defined(__x86_64__)
namespace avx512 {
#define ISA __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
constexpr int VECTOR_BYTES = 64;
#include "lanes.inc"
#include "gemm.inc"
#include "head.inc"
#include "linear.inc"
#include "pointwise.inc"
#include "rows.inc"
constexpr Variant variant = {packed_size,  pack,       DOT_ROWS,   head_range,  TILE_B,
                             linear_range, norm_range, gate_range, logits_range};
#undef ISA
#undef INLINE
}  // namespace avx512

namespace avx2 {
#define ISA __attribute__((target("avx2,fma")))
constexpr int VECTOR_BYTES = 32;
#include "lanes.inc"
#include "gemm.inc"
#include "head.inc"
#include "linear.inc"
#include "pointwise.inc"
#include "rows.inc"
constexpr Variant variant = {packed_size,  pack,       DOT_ROWS,   head_range,  TILE_B,
                             linear_range, norm_range, gate_range, logits_range};
#undef ISA
#undef INLINE
}  // namespace avx2
#endif

namespace baseline {
#define ISA
constexpr int VECTOR_BYTES = 16;
#include "lanes.inc"
#include "gemm.inc"
#include "head.inc"
#include "linear.inc"
#include "pointwise.inc"
#include "rows.inc"
constexpr Variant variant = {packed_size,  pack,       DOT_ROWS,   head_range,  TILE_B,
                             linear_range, norm_range, gate_range, logits_range};
#undef ISA
#undef INLINE
}  // namespace baseline

static int widest_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 256;
#endif
    return 128;
}

static int choose_isa(int cap) {
    const int widest = std::min(widest_isa(), cap);
    return widest >= 512 ? 512 : widest >= 256 ? 256 : 128;
}

static int isa_bits = [] {
    const char* cap = std::getenv("DLMSERVE_ISA");
    return choose_isa(cap && std::atoi(cap) > 0 ? std::atoi(cap) : 512);
}();

static const Variant& variant(int bits) {
#if defined(__x86_64__)
    if (bits == 512) return avx512::variant;
    if (bits == 256) return avx2::variant;
#endif
    return baseline::variant;
}

static const Variant& variant() { return variant(isa_bits); }

// Splits [0, n) into at most num_threads ranges, bounded by multiples of `grain`: work(part, begin, end).
// Returns how many.
template <class Work>
static int64_t split(int64_t n, int64_t grain, int64_t num_threads, Work work) {
    const int64_t num_grains = (n + grain - 1) / grain;
    const int64_t num_parts = std::max<int64_t>(1, std::min(num_threads, num_grains));
    pool().run(num_parts, [&](int64_t part) {
        const auto bound = [&](int64_t i) { return std::min(n, num_grains * i / num_parts * grain); };
        work(part, bound(part), bound(part + 1));
    });
    return num_parts;
}

// Reduces the vocabulary range by range, then merges in the order of the vocabulary. work(v0, v1, rows).
template <class Work>
static std::vector<RowState> reduce(int64_t vocab, int64_t num_rows, int64_t num_threads, Work work) {
    constexpr int64_t grain = 48;  // a tile of the head
    std::vector<RowState> rows(std::max<int64_t>(1, num_threads) * num_rows);
    const int64_t num_parts = split(vocab, grain, num_threads, [&](int64_t part, int64_t v0, int64_t v1) {
        work(v0, v1, rows.data() + part * num_rows);
    });
    for (int64_t i = num_rows; i < num_parts * num_rows; i++) merge(rows[i % num_rows], rows[i]);
    return rows;
}

// Waking a thread costs microseconds: each gets at least `least` units of work.
static int64_t worthwhile(int num_threads, double work, double least) {
    return std::min<int64_t>(num_threads, int64_t(work / least));
}

struct Out {
    float* logit;
    int64_t* token;
    float* lse;
};

static void write(const std::vector<RowState>& rows, int64_t num_rows, int64_t token_offset, Out out) {
    for (int64_t m = 0; m < num_rows; m++) {
        out.logit[m] = rows[m].logit;
        out.token[m] = rows[m].id < 0 ? -1 : rows[m].id + token_offset;
        out.lse[m] = float(rows[m].top + std::log(rows[m].sum));
    }
}

}  // namespace dlmserve

using namespace dlmserve;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int dlmserve_isa_bits() { return isa_bits; }

// Caps the vector width, for tests; not safe while another thread is in a kernel. Returns the width now used.
EXPORT int dlmserve_cap_isa(int bits) { return isa_bits = choose_isa(bits); }

EXPORT void dlmserve_head_rows(const float* hidden, int64_t num_rows, int64_t dim, const void* weight,
                               int is_bf16, int64_t vocab, const float* bias, int64_t token_offset,
                               const int64_t* banned, int64_t num_banned, int num_threads, float* logit,
                               int64_t* token, float* lse) {
    const Variant& isa = variant();
    const bool packs = num_rows > isa.unpacked_rows;
    Buffer<float> packed(packs ? isa.packed_size(num_rows, dim) : 0);
    if (packs) isa.pack(hidden, num_rows, dim, packed.get());
    const Head head = {hidden, packed.get(), num_rows, dim, weight, is_bf16 != 0, bias, {banned, num_banned}};
    const double work = double(vocab) * dim * std::max<int64_t>(num_rows, 8);
    const auto rows = reduce(vocab, num_rows, worthwhile(num_threads, work, 1e7),
                            [&](int64_t v0, int64_t v1, RowState* out) { isa.head(head, v0, v1, out); });
    write(rows, num_rows, token_offset, {logit, token, lse});
}

EXPORT void dlmserve_logit_rows(const float* data, int64_t num_rows, int64_t stride, int64_t vocab,
                                int64_t token_offset, const int64_t* banned, int64_t num_banned,
                                int num_threads, float* logit, int64_t* token, float* lse) {
    const Variant& isa = variant();
    const Logits logits = {data, num_rows, stride, {banned, num_banned}, nullptr, 0};
    const auto rows = reduce(vocab, num_rows, worthwhile(num_threads, double(vocab) * num_rows, 3e5),
                            [&](int64_t v0, int64_t v1, RowState* out) { isa.logits(logits, v0, v1, out); });
    write(rows, num_rows, token_offset, {logit, token, lse});
}

EXPORT void dlmserve_sample_rows(const float* data, int64_t num_rows, int64_t stride, int64_t vocab,
                                 const float* temperature, const int64_t* seed, const int64_t* position,
                                 const int64_t* step, int64_t token_offset, const int64_t* banned,
                                 int64_t num_banned, int num_threads, float* score, float* logit,
                                 int64_t* token, float* lse) {
    const Variant& isa = variant();
    std::vector<Noise> noise;
    for (int64_t m = 0; m < num_rows; m++) noise.emplace_back(temperature[m], seed[m], position[m], step[m]);
    const Banned ids = {banned, num_banned};
    const Logits logits = {data, num_rows, stride, ids, noise.data(), uint32_t(token_offset)};
    const auto rows = reduce(vocab, num_rows, worthwhile(num_threads, double(vocab) * num_rows, 1e5),
                            [&](int64_t v0, int64_t v1, RowState* out) { isa.logits(logits, v0, v1, out); });
    write(rows, num_rows, token_offset, {logit, token, lse});
    for (int64_t m = 0; m < num_rows; m++) score[m] = rows[m].score;
}

EXPORT int64_t dlmserve_packed_size(int64_t num_out, int64_t dim, int bits) {
    return variant(bits).packed_size(num_out, dim);
}

// The layout is that of the vector width `bits`, which dlmserve_linear must be given too.
EXPORT void dlmserve_pack(const float* weight, int64_t num_out, int64_t dim, int bits, float* packed) {
    variant(bits).pack(weight, num_out, dim, packed);
}

EXPORT void dlmserve_linear(const float* x, int64_t num_rows, int64_t dim, const float* packed, int bits,
                            int64_t num_out, const float* bias, int num_threads, float* y) {
    const Variant& isa = variant(bits);
    const Product product = {x, num_rows, dim, packed, num_out, bias, y};
    split(num_out, isa.linear_grain, worthwhile(num_threads, double(num_out) * dim * num_rows, 1e6),
          [&](int64_t, int64_t n0, int64_t n1) { isa.linear(product, n0, n1); });
}

EXPORT void dlmserve_norm(const float* x, int64_t num_rows, int64_t dim, const float* weight, float eps,
                          int num_threads, float* y) {
    const Norm norm = {x, num_rows, dim, weight, eps, y};
    split(num_rows, 1, worthwhile(num_threads, double(num_rows) * dim, 3e4),
          [&](int64_t, int64_t m0, int64_t m1) { variant().norm(norm, m0, m1); });
}

EXPORT void dlmserve_gate(const float* x, int64_t num_rows, int64_t dim, int num_threads, float* y) {
    const Gate gate = {x, num_rows, dim, y};
    split(num_rows, 1, worthwhile(num_threads, double(num_rows) * dim, 1e4),
          [&](int64_t, int64_t m0, int64_t m1) { variant().gate(gate, m0, m1); });
}
