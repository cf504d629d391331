// The C interface: choice of the instruction set, threads, and the hand-over of results.
// Knows nothing about Python and torch: plain pointers in, plain arrays out.
#include "kernels.h"

#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

namespace dlmserve {

#if defined(__x86_64__)
namespace avx512 {
#define ISA __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
constexpr int VECTOR_BYTES = 64;
#include "lanes.inc"
#include "head.inc"
#include "rows.inc"
constexpr Variant variant = {packed_size, pack_hidden, head_range, logits_range};
#undef ISA
#undef INLINE
}  // namespace avx512

namespace avx2 {
#define ISA __attribute__((target("avx2,fma")))
constexpr int VECTOR_BYTES = 32;
#include "lanes.inc"
#include "head.inc"
#include "rows.inc"
constexpr Variant variant = {packed_size, pack_hidden, head_range, logits_range};
#undef ISA
#undef INLINE
}  // namespace avx2
#endif

namespace baseline {
#define ISA
constexpr int VECTOR_BYTES = 16;
#include "lanes.inc"
#include "head.inc"
#include "rows.inc"
constexpr Variant variant = {packed_size, pack_hidden, head_range, logits_range};
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

static const Variant& variant() {
#if defined(__x86_64__)
    if (isa_bits == 512) return avx512::variant;
    if (isa_bits == 256) return avx2::variant;
#endif
    return baseline::variant;
}

// Splits [0, vocab) over at most num_threads threads and merges their rows in the order of the vocabulary.
// work(v0, v1, rows) reduces a range. A thread that cannot be started is done without.
template <class Work>
static std::vector<RowState> split(int64_t vocab, int64_t num_rows, int64_t num_threads, Work work) {
    constexpr int64_t grain = 48;  // a tile of the head
    num_threads = std::max<int64_t>(1, std::min(num_threads, vocab / grain));
    const int64_t range = (vocab + num_threads * grain - 1) / (num_threads * grain) * grain;
    std::vector<RowState> rows(num_threads * num_rows);
    std::vector<std::thread> threads;
    threads.reserve(num_threads);
    const auto part = [&](int64_t t) {
        const int64_t v0 = std::min(vocab, t * range), v1 = std::min(vocab, v0 + range);
        work(v0, v1, rows.data() + t * num_rows);
    };
    for (int64_t t = 1; t < num_threads; t++) {
        try {
            threads.emplace_back(part, t);
        } catch (const std::system_error&) {
            part(t);
        }
    }
    part(0);
    for (std::thread& thread : threads) thread.join();
    for (int64_t i = num_rows; i < num_threads * num_rows; i++) merge(rows[i % num_rows], rows[i]);
    return rows;
}

// A thread costs tens of microseconds: each gets at least `least` units of work.
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
    Buffer<float> packed(isa.packed_size(num_rows, dim));
    isa.pack_hidden(hidden, num_rows, dim, packed.get());
    const Head head = {hidden, packed.get(), num_rows, dim, weight, is_bf16 != 0, bias, {banned, num_banned}};
    const double work = double(vocab) * dim * std::max<int64_t>(num_rows, 8);
    const auto rows = split(vocab, num_rows, worthwhile(num_threads, work, 1e7),
                            [&](int64_t v0, int64_t v1, RowState* out) { isa.head(head, v0, v1, out); });
    write(rows, num_rows, token_offset, {logit, token, lse});
}

EXPORT void dlmserve_logit_rows(const float* data, int64_t num_rows, int64_t stride, int64_t vocab,
                                int64_t token_offset, const int64_t* banned, int64_t num_banned,
                                int num_threads, float* logit, int64_t* token, float* lse) {
    const Variant& isa = variant();
    const Logits logits = {data, num_rows, stride, {banned, num_banned}, nullptr, 0};
    const auto rows = split(vocab, num_rows, worthwhile(num_threads, double(vocab) * num_rows, 3e5),
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
    const auto rows = split(vocab, num_rows, worthwhile(num_threads, double(vocab) * num_rows, 1e5),
                            [&](int64_t v0, int64_t v1, RowState* out) { isa.logits(logits, v0, v1, out); });
    write(rows, num_rows, token_offset, {logit, token, lse});
    for (int64_t m = 0; m < num_rows; m++) score[m] = rows[m].score;
}
