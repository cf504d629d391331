// Reduces rows of logits over one slice of the vocabulary: arg-max, second best, log-sum, or a Gumbel-max draw.
//
// The logits are read once, 16 bytes a load; nothing else is of any size. A block takes a stretch of one row, so
// that few rows still fill the device: `*_rows_*` leaves one Row for each (row, stretch), `merge_rows` joins them.
#include "device.cuh"

static_assert(sizeof(Row) == 32 && sizeof(Banned) == 132, "as cuda.py has it");

constexpr int VECTOR = 8;  // logits that a thread takes at a time

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __int_as_float(int(x.bits) << 16); }

__device__ inline void load(const float* from, float (&x)[VECTOR]) {
    const float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

__device__ inline void load(const bf16* from, float (&x)[VECTOR]) {
    const uint4 pairs = *(const uint4*)from;
    const u32 words[] = {pairs.x, pairs.y, pairs.z, pairs.w};
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __int_as_float(words[i] << 16);
        x[2 * i + 1] = __int_as_float(words[i] & 0xffff0000u);
    }
}

template <int N>
__device__ inline float largest(const float (&x)[N]) {
    float top = -INF;
    for (int i = 0; i < N; i++) top = fmaxf(top, x[i]);  // skips NaN
    return top;
}

template <int N>
__device__ inline void fold_sum(Row& row, const float (&x)[N], float largest) {
    if (largest > row.top) {
        row.sum *= expf(row.top - largest);
        row.top = largest;
    }
    const float ref = row.top > -INF ? row.top : 0.0f;
    float sum = 0.0f;
    for (int i = 0; i < N; i++) sum += expf(x[i] - ref);  // NaN for NaN and +inf
    row.sum += sum;
}

// Few logits exceed the second best so far: only for those the banned ids are looked at.
template <int N>
__device__ inline void fold_best(Row& row, const float (&x)[N], float largest, int first, const Banned& banned) {
    if (!(largest > row.second)) return;
    for (int i = 0; i < N; i++) {
        if (!(x[i] > row.second && x[i] < INF) || is_banned(first + i, banned)) continue;
        if (x[i] > row.score) {
            row.second = row.score;
            row.score = row.logit = x[i];
            row.token = first + i;
        } else {
            row.second = x[i];
        }
    }
}

// Few scores come near the best so far: only those are computed exactly.
template <int N>
__device__ inline void fold_draw(Row& row, const float (&x)[N], int first, const Banned& banned, const Noise& noise,
                                 u32 token_offset) {
#pragma unroll  // else x would lie in memory
    for (int i = 0; i < N; i++) {
        const u32 token = first + i + token_offset;
        if (!(x[i] < INF && noise.rough_score(x[i], token) > row.score - Noise::slack(row.score))) continue;
        if (is_banned(first + i, banned)) continue;
        const float score = noise.score(x[i], token);
        if (score > row.score) {
            row.score = score;
            row.logit = x[i];
            row.token = first + i;
        }
    }
}

struct Logits {
    const void* data;
    i64 stride;  // of rows, in elements
    int num_tokens;
    int stretch;  // tokens of a block, a multiple of VECTOR
    u32 token_offset;  // of the slice; the noise is keyed by the global token id
};

// One array element per row.
struct Keys {
    const float* temperature;
    const i64 *seed, *position, *step;
};

// Thread by thread, each over rising ids, so that the lowest id of a tie stays.
template <class T, class Fold>
__device__ inline void for_each_logit(const T* logits, int begin, int end, Fold fold) {
    const int unaligned = int((16 - address(logits + begin) % 16) % 16 / sizeof(T));
    const int aligned = begin + unaligned < end ? begin + unaligned : end;
    const int rest = aligned + (end - aligned) / VECTOR * VECTOR;
    const auto fold_one = [&](int token) {
        const float x[1] = {widen(logits[token])};
        fold(x, token);
    };
    for (int token = begin + threadIdx.x; token < aligned; token += blockDim.x) fold_one(token);
    for (int token = aligned + threadIdx.x * VECTOR; token < rest; token += blockDim.x * VECTOR) {
        float x[VECTOR];
        load(logits + token, x);
        fold(x, token);
    }
    for (int token = rest + threadIdx.x; token < end; token += blockDim.x) fold_one(token);
}

// The block's row in its first thread.
__device__ inline void merge_block(Row& row) {
    __shared__ Row warps[MAX_WARPS];
    merge_warp(row);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = row;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    row = threadIdx.x < blockDim.x / WARP ? warps[threadIdx.x] : empty_row();
    merge_warp(row);
}

// Block (m, s) leaves stretch s of row m in parts[s][m].
template <class T, bool DRAWS>
__device__ inline void reduce_rows(const Logits& logits, const Banned& banned, const Keys& keys, Row* parts) {
    const i64 m = blockIdx.x;
    const T* data = (const T*)logits.data + m * logits.stride;
    const int begin = blockIdx.y * logits.stretch;
    const int end = logits.num_tokens - begin < logits.stretch ? logits.num_tokens : begin + logits.stretch;
    Noise noise = {};
    if (DRAWS) noise = Noise::of(keys.temperature[m], keys.seed[m], keys.position[m], keys.step[m]);
    Row row = empty_row();
    for_each_logit(data, begin, end, [&](const auto& x, int first) {
        const float top = largest(x);
        fold_sum(row, x, top);
        if (DRAWS && noise.temperature > 0)
            fold_draw(row, x, first, banned, noise, logits.token_offset);
        else
            fold_best(row, x, top, first, banned);
    });
    merge_block(row);
    if (threadIdx.x == 0) parts[blockIdx.y * i64(gridDim.x) + m] = row;
}

#define ROWS_KERNEL(NAME, T, DRAWS)                                                              \
    extern "C" __global__ void __launch_bounds__(MAX_WARPS * WARP)                                \
        NAME(const __grid_constant__ Logits logits, const __grid_constant__ Banned banned,       \
             const __grid_constant__ Keys keys, Row* parts) {                                    \
        reduce_rows<T, DRAWS>(logits, banned, keys, parts);                                      \
    }

ROWS_KERNEL(best_rows_f32, float, false)
ROWS_KERNEL(best_rows_bf16, bf16, false)
ROWS_KERNEL(draw_rows_f32, float, true)
ROWS_KERNEL(draw_rows_bf16, bf16, true)

// Arrays of one element per row.
struct RowsOut {
    float *score, *logit, *second;
    i64* token;
    float* lse;
};

// A thread per row.
extern "C" __global__ void __launch_bounds__(MAX_WARPS * WARP)
    merge_rows(const Row* parts, int num_parts, i64 num_rows, i64 token_offset, const __grid_constant__ RowsOut out) {
    const i64 m = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (m >= num_rows) return;
    Row row = parts[m];
    for (int s = 1; s < num_parts; s++) merge(row, parts[s * num_rows + m]);
    out.score[m] = row.score;
    out.logit[m] = row.logit;
    out.second[m] = row.second;
    out.token[m] = row.token < 0 ? -1 : row.token + token_offset;
    out.lse[m] = float(row.top + log(row.sum));
}
