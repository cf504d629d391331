// From the ranks' rows to the canvas: combines them, applies each request's rule, writes tokens, reduces statistics.
// One block per request, one launch per batch. Rules, ties and formats are those of reference.py and step.py.
#include "device.cuh"

enum Rule { THRESHOLD, QUOTA, FACTOR, ALL, AT_LEAST };
enum Plane { SCORE, LOGIT, LSE, TOKEN, NUM_PLANES };
constexpr int NUM_STATISTICS = 5;

struct Requests {
    const i64 *offsets, *rule;
    const double* value;
    i64 num_rows;
};

// One array element per row.
struct Scratch {
    float* ranked;  // the confidences of each request from the highest to the lowest
    int* rank;
};

struct Span {
    i64 begin;
    int length;
    bool makes_sense;
};

__device__ inline Span span_of(const Requests& requests) {
    const i64 begin = requests.offsets[blockIdx.x], end = requests.offsets[blockIdx.x + 1];
    const i64 rule = requests.rule[blockIdx.x];
    const bool makes_sense = 0 <= begin && begin <= end && end <= requests.num_rows && THRESHOLD <= rule;
    return {begin, makes_sense ? int(end - begin) : 0, makes_sense};
}

// Falling confidence, then rising row; NaN comes after every number.
__device__ inline bool goes_before(float a, int row_a, float b, int row_b) {
    if (a != a || b != b) return a == a || (b != b && row_a < row_b);
    return a > b || (a == b && row_a < row_b);
}

__device__ inline void rank_rows(const float* confidence, int length, float* ranked, int* rank) {
    for (int row = threadIdx.x; row < length; row += blockDim.x) {
        int before = 0;
        for (int other = 0; other < length; other++)
            before += goes_before(confidence[other], other, confidence[row], row);
        rank[row] = before;
        ranked[before] = confidence[row];
    }
}

// The confidence that the row of a rank must reach. Rounded to float, as torch does when it compares a float
// tensor with a number.
__device__ inline float bound(i64 rule, double value, int rank) {
    return float(rule == FACTOR ? 1.0 - value / double(rank + 2) : value);
}

// How many of a request's rows, from the most confident on, are unmasked; collective over the block, which must
// have written `confidence` before a barrier. Leaves the rows' ranks behind.
__device__ inline int num_unmasked(const float* confidence, int length, i64 rule, double value, float* ranked,
                                   int* rank) {
    __shared__ int first_below;
    if (threadIdx.x == 0) first_below = length;
    rank_rows(confidence, length, ranked, rank);
    __syncthreads();
    if (rule == ALL) return length;
    if (rule == QUOTA) return value >= length ? length : value >= 1 ? int(value) : 1;
    for (int n = 1 + threadIdx.x; n < length; n += blockDim.x)
        if (!(ranked[n] >= bound(rule, value, n))) atomicMin(&first_below, n);
    __syncthreads();
    if (rule >= AT_LEAST && first_below < rule - AT_LEAST) return rule - AT_LEAST < length ? int(rule - AT_LEAST) : length;
    return rule == FACTOR && first_below == length - 1 ? length : first_below;
}

// Token, its logit's probability, over the slices of all ranks; parts [tp, NUM_PLANES, num_rows].
__device__ inline void combine(const float* parts, int tp_degree, i64 num_rows, i64 row, i64& token,
                               float& confidence) {
    const auto at = [&](int slice, Plane plane) { return parts[(slice * NUM_PLANES + plane) * num_rows + row]; };
    int winner = 0;
    float top = -INF, sum = 0.0f;
    for (int slice = 0; slice < tp_degree; slice++) {
        if (at(slice, SCORE) > at(winner, SCORE)) winner = slice;
        top = fmaxf(top, at(slice, LSE));
    }
    const float ref = top > -INF ? top : 0.0f;
    for (int slice = 0; slice < tp_degree; slice++) sum += expf(at(slice, LSE) - ref);  // NaN for NaN
    token = i64(at(winner, TOKEN));
    confidence = expf(at(winner, LOGIT) - (ref + logf(sum)));
}

// numpy's linear quantile of values that fall.
__device__ inline float quantile(const float* ranked, int length, float share) {
    const float place = share * float(length - 1);
    const int below = int(place);
    const float low = ranked[length - 1 - below];
    const float high = ranked[below + 1 < length ? length - 2 - below : 0];
    return low + (place - float(below)) * (high - low);
}

// By the first warp: lowest, lower quartile, median, mean, upper quartile. NaN where a confidence is, or none.
__device__ inline void write_statistics(const float* ranked, int length, float* statistics) {
    double sum = 0.0;
    for (int n = threadIdx.x; n < length; n += WARP) sum += ranked[n];
    for (int distance = WARP / 2; distance > 0; distance /= 2) sum += from_lane(sum, distance);
    if (threadIdx.x > 0) return;
    const float mean = float(sum / length);  // 0 / 0 without rows
    const bool are_numbers = mean == mean;
    statistics[0] = are_numbers ? ranked[length - 1] : mean;
    statistics[1] = are_numbers ? quantile(ranked, length, 0.25f) : mean;
    statistics[2] = are_numbers ? quantile(ranked, length, 0.5f) : mean;
    statistics[3] = mean;
    statistics[4] = are_numbers ? quantile(ranked, length, 0.75f) : mean;
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS * WARP)
    select_rows(const float* confidence, const __grid_constant__ Requests requests,
                const __grid_constant__ Scratch scratch, bool* unmask) {
    const Span span = span_of(requests);
    if (span.length == 0) return;
    int* rank = scratch.rank + span.begin;
    const int num = num_unmasked(confidence + span.begin, span.length, requests.rule[blockIdx.x],
                                 requests.value[blockIdx.x], scratch.ranked + span.begin, rank);
    for (int row = threadIdx.x; row < span.length; row += blockDim.x) unmask[span.begin + row] = rank[row] < num;
}

struct Outcome {
    i64* token;
    float *confidence, *statistics;
    int* num_left;
    bool* unmask;
};

extern "C" __global__ void __launch_bounds__(MAX_WARPS * WARP)
    unmask_step(const float* parts, int tp_degree, const __grid_constant__ Requests requests, const i64* position,
                i64* canvas, const __grid_constant__ Scratch scratch, const __grid_constant__ Outcome out) {
    const Span span = span_of(requests);
    float *confidence = out.confidence + span.begin, *ranked = scratch.ranked + span.begin;
    i64* token = out.token + span.begin;
    int* rank = scratch.rank + span.begin;
    __shared__ int num_left;
    if (threadIdx.x == 0) num_left = span.length;
    for (int row = threadIdx.x; row < span.length; row += blockDim.x)
        combine(parts, tp_degree, requests.num_rows, span.begin + row, token[row], confidence[row]);
    __syncthreads();
    const int num = num_unmasked(confidence, span.length, requests.rule[blockIdx.x], requests.value[blockIdx.x],
                                 ranked, rank);
    for (int row = threadIdx.x; row < span.length; row += blockDim.x) {
        const bool unmask = rank[row] < num && token[row] >= 0;
        out.unmask[span.begin + row] = unmask;
        if (!unmask) continue;
        canvas[position[span.begin + row]] = token[row];
        atomicAdd(&num_left, -1);
    }
    __syncthreads();
    if (threadIdx.x < WARP) write_statistics(ranked, span.length, out.statistics + NUM_STATISTICS * blockIdx.x);
    if (threadIdx.x == 0) out.num_left[blockIdx.x] = span.makes_sense ? num_left : -1;
}
