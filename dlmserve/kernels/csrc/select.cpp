// Which masked positions of each request are unmasked. Rules and ties are those of reference.select.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

enum Rule : int64_t { THRESHOLD, QUOTA, FACTOR, ALL, AT_LEAST };

// Falling confidence, then rising row; NaN comes after every number.
struct MoreConfident {
    const float* confidence;
    bool operator()(int64_t a, int64_t b) const {
        const float x = confidence[a], y = confidence[b];
        if (x != x || y != y) return x == x || (y != y && a < b);
        return x > y || (x == y && a < b);
    }
};

// The bound is rounded to float, as torch does when it compares a float tensor with a number.
void select_threshold(const float* confidence, int64_t n, double threshold, bool* unmask) {
    const float bound = float(threshold);
    int64_t best = 0;
    for (int64_t i = 0; i < n; i++) {
        unmask[i] = confidence[i] >= bound;
        if (MoreConfident{confidence}(i, best)) best = i;
    }
    unmask[best] = true;
}

// How many of the ranks pass Fast-dLLM's factor rule.
int64_t num_passing(const float* confidence, const std::vector<int64_t>& ranked, double factor) {
    const int64_t n = ranked.size();
    for (int64_t rank = 2; rank <= n; rank++) {
        const float bound = float(1.0 - factor / double(rank + 1));
        if (!(confidence[ranked[rank - 1]] >= bound)) return rank == n ? n : rank - 1;
    }
    return n;
}

// How many of the first `least` and of those with the threshold.
int64_t num_at_least(const float* confidence, int64_t n, int64_t least, double threshold) {
    const float bound = float(threshold);
    const int64_t num = std::count_if(confidence, confidence + n, [&](float c) { return c >= bound; });
    return std::max({num, std::min(least, n), int64_t(1)});
}

void select_ranked(const float* confidence, int64_t n, int64_t rule, double value,
                   std::vector<int64_t>& ranked, bool* unmask) {
    ranked.resize(n);
    std::iota(ranked.begin(), ranked.end(), 0);
    std::sort(ranked.begin(), ranked.end(), MoreConfident{confidence});
    const int64_t num = rule >= AT_LEAST     ? num_at_least(confidence, n, rule - AT_LEAST, value)
                        : rule == FACTOR     ? num_passing(confidence, ranked, value)
                        : value >= double(n) ? n
                        : value >= 1         ? int64_t(value)
                                             : 1;
    std::fill_n(unmask, n, false);
    for (int64_t i = 0; i < num; i++) unmask[ranked[i]] = true;
}

}  // namespace

// Returns -1, or the request whose offsets or rule make no sense.
extern "C" __attribute__((visibility("default"))) int64_t dlmserve_select(
    const float* confidence, int64_t num_rows, const int64_t* offsets, int64_t num_requests,
    const int64_t* rule, const double* value, bool* unmask) {
    std::vector<int64_t> ranked;
    if (offsets[0] != 0 || offsets[num_requests] != num_rows) return num_requests;
    for (int64_t r = 0; r < num_requests; r++) {
        const int64_t begin = offsets[r], n = offsets[r + 1] - begin;
        if (n < 0 || begin + n > num_rows || rule[r] < THRESHOLD) return r;
        if (n == 0) continue;
        if (rule[r] == ALL)
            std::fill_n(unmask + begin, n, true);
        else if (rule[r] == THRESHOLD)
            select_threshold(confidence + begin, n, value[r], unmask + begin);
        else
            select_ranked(confidence + begin, n, rule[r], value[r], ranked, unmask + begin);
    }
    return -1;
}
