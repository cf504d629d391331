// What the instruction-set variants share: the result of a row, the banned tokens, the noise hash, and the
// table of entry points that each variant fills. Knows nothing about vectors, threads or Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>

namespace dlmserve {

constexpr float INF = std::numeric_limits<float>::infinity();

// The logits of one row over a range of the vocabulary, reduced. `score` orders the allowed tokens: the logit
// itself, or the logit / temperature + Gumbel noise when sampling. The sum runs over banned tokens too.
struct RowState {
    float score = -INF;
    float logit = -INF;
    int32_t id = -1;     // within the slice; -1: no allowed token with a finite logit
    float top = -INF;    // largest logit, banned or not
    double sum = 0;      // sum of exp(logit - top)
};

// `b` covers higher ids than `a`, so that a tie stays with the lower id.
inline void merge(RowState& a, const RowState& b) {
    if (b.score > a.score) {
        a.score = b.score;
        a.logit = b.logit;
        a.id = b.id;
    }
    const float top = std::max(a.top, b.top);
    const double ref = top > -INF ? top : 0;
    a.sum = a.sum * std::exp(a.top - ref) + b.sum * std::exp(b.top - ref);
    a.top = top;
}

// Sorted token ids, relative to the slice; ids outside it are ignored.
struct Banned {
    const int64_t* ids;
    int64_t num;
};

struct Run {
    int64_t end;
    bool allowed;
};

// The longest run of [begin, end) from `begin` on that is free of banned tokens, or one banned token.
inline Run next_run(int64_t begin, int64_t end, Banned banned) {
    const int64_t* last = banned.ids + banned.num;
    const int64_t* next = std::lower_bound(banned.ids, last, begin);
    if (next == last || *next >= end) return {end, true};
    if (*next == begin) return {begin + 1, false};
    return {*next, true};
}

// lowbias32 by C. Wellons (hash prospector): a bijection of 32 bits, bias 0.17.
inline uint32_t mix32(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

// Temperature of one row and the 64-bit key of its noise; see reference.py for the definition.
struct Noise {
    float temperature;
    uint32_t key0, key1;

    Noise(float temperature, int64_t seed, int64_t position, int64_t step)
        : temperature(temperature), key0(0x243f6a88u), key1(0x85a308d3u) {
        const uint32_t words[] = {uint32_t(seed), uint32_t(uint64_t(seed) >> 32), uint32_t(position),
                                  uint32_t(step)};
        for (uint32_t word : words) {
            key0 = mix32(key0 ^ word);
            key1 = mix32(key1 ^ word);
        }
    }

    // logit / temperature + Gumbel noise, in double and rounded once: the value that reference.py defines.
    float score(float logit, uint32_t token) const {
        const uint32_t bits = mix32(mix32(token ^ key0) + key1);
        const double uniform = ((bits >> 9) + 0.5) * 0x1p-23;
        return float(double(logit) / double(temperature) - std::log(-std::log(uniform)));
    }
};

struct Head {
    const float* hidden;    // [num_rows, dim]
    const float* packed;    // the same as `pack` leaves it; null where there are too few rows for that
    int64_t num_rows, dim;
    const void* weight;     // [V, dim], float or bf16
    bool is_bf16;
    const float* bias;      // [V] or null
    Banned banned;
};

struct Logits {
    const float* data;
    int64_t num_rows, stride;
    Banned banned;
    const Noise* noise;     // one per row, or null: greedy
    uint32_t token_offset;  // of the slice; the noise is keyed by the global token id
};

// y [num_rows, num_out] = x [num_rows, dim] W^T + bias.
struct Product {
    const float* x;
    int64_t num_rows, dim;
    const float* packed;  // W [num_out, dim] as `pack` leaves it
    int64_t num_out;
    const float* bias;    // [num_out] or null
    float* y;
};

// y [num_rows, dim] from x of the same shape.
struct Norm {
    const float* x;
    int64_t num_rows, dim;
    const float* weight;  // [dim]
    float eps;
    float* y;
};

// y [num_rows, dim] from x [num_rows, 2 dim].
struct Gate {
    const float* x;
    int64_t num_rows, dim;
    float* y;
};

// One instruction-set variant. head and logits reduce the vocabulary range [v0, v1) into out[num_rows]; linear
// fills the columns [n0, n1), n0 a multiple of `linear_grain`; norm and gate fill the rows [m0, m1).
struct Variant {
    int64_t (*packed_size)(int64_t num_rows, int64_t dim);
    void (*pack)(const float* rows, int64_t num_rows, int64_t dim, float* packed);
    int64_t unpacked_rows;  // the head takes up to this many rows as they are
    void (*head)(const Head&, int64_t v0, int64_t v1, RowState* out);
    int64_t linear_grain;
    void (*linear)(const Product&, int64_t n0, int64_t n1);
    void (*norm)(const Norm&, int64_t m0, int64_t m1);
    void (*gate)(const Gate&, int64_t m0, int64_t m1);
    void (*logits)(const Logits&, int64_t v0, int64_t v1, RowState* out);
};

// Scratch memory aligned to a cache line, not initialised.
template <class T>
class Buffer {
  public:
    explicit Buffer(int64_t n) : data_(static_cast<T*>(::operator new(sizeof(T) * n, align))) {}
    ~Buffer() { ::operator delete(data_, align); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    T* get() { return data_; }

  private:
    static constexpr std::align_val_t align{64};
    T* data_;
};

}  // namespace dlmserve
