// What the CUDA kernels share: types, the result of a row, the banned tokens, the noise, reductions over a warp.
// Compiled by NVRTC, which has no standard headers, and by g++ in the tests, behind tests/cuda_shim.h.
#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long address;

#define INF __int_as_float(0x7f800000)

constexpr int WARP = 32;
constexpr int MAX_WARPS = 8;  // of a block
constexpr int MAX_BANNED = 32;

struct bf16 {
    u16 bits;
};

// Token ids relative to the slice; ids outside it are ignored.
struct Banned {
    int num;
    int ids[MAX_BANNED];
};

__device__ inline bool is_banned(int token, const Banned& banned) {
    for (int i = 0; i < banned.num; i++)
        if (banned.ids[i] == token) return true;
    return false;
}

// The logits of one row over a part of the vocabulary, reduced. `score` orders the allowed tokens: the logit
// itself, or logit / temperature + noise when drawing. The sum runs over banned tokens too.
struct Row {
    float score, logit;
    float second;  // the second largest score; of greedy rows only
    int token;     // within the slice; -1: no allowed token with a finite logit
    float top;     // largest logit, banned or not
    double sum;    // sum of exp(logit - top); NaN where a logit is NaN or +inf
};

__device__ inline Row empty_row() { return {-INF, -INF, -INF, -1, -INF, 0.0}; }

// Of any two parts, in any order. A tie goes to the lower id.
__device__ inline void merge(Row& a, const Row& b) {
    a.second = fmaxf(fminf(a.score, b.score), fmaxf(a.second, b.second));
    if (b.score > a.score || (b.score == a.score && u32(b.token) < u32(a.token))) {
        a.score = b.score;
        a.logit = b.logit;
        a.token = b.token;
    }
    const float top = fmaxf(a.top, b.top);
    const float ref = top > -INF ? top : 0.0f;
    a.sum = a.sum * expf(a.top - ref) + b.sum * expf(b.top - ref);
    a.top = top;
}

template <class T>
__device__ inline T from_lane(T value, int distance) {
    return __shfl_xor_sync(0xffffffffu, value, distance);
}

// Every lane gets the whole warp's row.
__device__ inline void merge_warp(Row& row) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const Row other = {from_lane(row.score, distance),  from_lane(row.logit, distance),
                           from_lane(row.second, distance), from_lane(row.token, distance),
                           from_lane(row.top, distance),    from_lane(row.sum, distance)};
        merge(row, other);
    }
}

// lowbias32 by C. Wellons (hash prospector): a bijection of 32 bits, bias 0.17.
__device__ inline u32 mix32(u32 x) {
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
    u32 key0, key1;

    __device__ static Noise of(float temperature, i64 seed, i64 position, i64 step) {
        Noise noise = {temperature, 0x243f6a88u, 0x85a308d3u};
        const u32 words[] = {u32(seed), u32(seed >> 32), u32(position), u32(step)};
        for (u32 word : words) {
            noise.key0 = mix32(noise.key0 ^ word);
            noise.key1 = mix32(noise.key1 ^ word);
        }
        return noise;
    }

    // 23 bits for a token.
    __device__ u32 bits(u32 token) const { return mix32(mix32(token ^ key0) + key1) >> 9; }

    // logit / temperature + Gumbel noise, in double and rounded once: the value that reference.py defines.
    __device__ float score(float logit, u32 token) const {
        const double uniform = (bits(token) + 0.5) * 0x1p-23;
        return float(double(logit) / double(temperature) - log(-log(uniform)));
    }

    // The same in float: fast, and off by less than `slack`.
    __device__ float rough_score(float logit, u32 token) const {
        const float uniform = (float(bits(token)) + 0.5f) * 0x1p-23f;
        return logit / temperature - logf(-logf(uniform));
    }

    __device__ static float slack(float score) { return 1e-4f + 1e-6f * fabsf(score); }
};
