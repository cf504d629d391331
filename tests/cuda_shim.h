// Runs CUDA kernels on the CPU, for tests: each CUDA thread of a block is a fibre, and blocks run one after another.
//
// A fibre runs until a barrier, and a warp as far as it can; `Order` says who goes first. So a missing barrier shows
// in one order or another. Shared memory is filled with NaN before each block. Knows the subset of CUDA that csrc/*.cu uses, and
// nothing of memory models: what a fence is for cannot be tested here.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __global__ inline  // as are all others: variables of one section must agree in that
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static __attribute__((section("shared_memory")))
// Barriers are numbered in the order of the source text.
#define __syncthreads() emulator::sync_block(__COUNTER__)

struct uint3 {
    unsigned x, y, z;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
static uint3 threadIdx, blockIdx, blockDim, gridDim;

extern char __start_shared_memory[], __stop_shared_memory[];

namespace emulator {

enum Order { FORWARD, REVERSED, RANDOM };

constexpr size_t STACK_BYTES = 64 << 10;

struct Barrier {
    int expected = 0, arrived = 0, round = 0;

    void release_if_complete() {
        if (expected == 0 || arrived < expected) return;
        arrived = 0;
        round++;
    }
};

struct Fibre {
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool done = true;
};

static std::vector<std::unique_ptr<Fibre>> fibres;
static ucontext_t creator;
static jmp_buf scheduler;
static int current;  // the fibre that runs
static bool moved;   // whether a fibre got anywhere in this pass over its warp
static std::function<void()> body;
static Barrier block;
static std::vector<Barrier> warps;
static std::vector<uint64_t> lanes;  // what each thread hands over in a shuffle
static int skipped_barrier = -1;

// setjmp and longjmp switch without a system call, unlike swapcontext, which only brings a fibre to its stack.
inline void yield() {
    if (!_setjmp(fibres[current]->at)) _longjmp(scheduler, 1);
}

inline void resume(int fibre) {
    current = fibre;
    threadIdx = {unsigned(fibre), 0, 0};
    if (!_setjmp(scheduler)) _longjmp(fibres[fibre]->at, 1);
}

inline void wait(Barrier& barrier) {
    const int round = barrier.round;
    moved = true;
    barrier.arrived++;
    barrier.release_if_complete();
    while (barrier.round == round) yield();
    moved = true;
}

// A thread that has returned no longer counts.
inline void leave(Barrier& barrier) {
    barrier.expected--;
    barrier.release_if_complete();
}

inline void live() {
    Fibre& self = *fibres.back();
    if (!_setjmp(self.at)) swapcontext(&self.start, &creator);
    for (;;) {
        body();
        self.done = moved = true;
        leave(block);
        leave(warps[current / 32]);
        yield();
    }
}

inline void add_fibre() {
    fibres.push_back(std::make_unique<Fibre>());
    Fibre& fibre = *fibres.back();
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = fibre.stack.get();
    fibre.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fibre.start, live, 0);
    swapcontext(&creator, &fibre.start);
}

class Sequence {
  public:
    Sequence(int length, Order order, unsigned seed) : order_(order), random_(seed) {
        for (int i = 0; i < length; i++) items_.push_back(order == REVERSED ? length - 1 - i : i);
    }
    const std::vector<int>& next() {
        if (order_ == RANDOM) std::shuffle(items_.begin(), items_.end(), random_);
        return items_;
    }

  private:
    std::vector<int> items_;
    Order order_;
    std::mt19937 random_;
};

// Lets the threads of a warp run until all have returned or wait for other warps. Whether any got anywhere.
inline bool run_warp(int first, int num_threads, Sequence& lanes) {
    bool ever_moved = false;
    do {
        moved = false;
        for (int lane : lanes.next())
            if (first + lane < num_threads && !fibres[first + lane]->done) resume(first + lane);
        ever_moved |= moved;
    } while (moved);
    return ever_moved;
}

// False: the threads wait for each other for ever.
inline bool run_block(int num_threads, Sequence& warp_order, Sequence& lane_order) {
    std::fill(__start_shared_memory, __stop_shared_memory, char(0xff));
    block = {num_threads};
    warps.assign((num_threads + 31) / 32, Barrier{});
    for (int i = 0; i < num_threads; i++) {
        warps[i / 32].expected++;
        fibres[i]->done = false;
    }
    for (bool ever_moved = true; ever_moved;) {
        ever_moved = false;
        for (int warp : warp_order.next()) ever_moved |= run_warp(32 * warp, num_threads, lane_order);
    }
    return std::all_of(fibres.begin(), fibres.begin() + num_threads, [](const auto& fibre) { return fibre->done; });
}

inline bool launch(uint3 grid, int num_threads, Order order, unsigned seed, std::function<void()> kernel) {
    while (int(fibres.size()) < num_threads) add_fibre();
    body = kernel;
    gridDim = grid;
    blockDim = {unsigned(num_threads), 1, 1};
    lanes.assign(num_threads, 0);
    Sequence block_order(grid.x * grid.y, order, seed), warp_order((num_threads + 31) / 32, order, seed);
    Sequence lane_order(32, order, seed);
    for (int i : block_order.next()) {
        blockIdx = {i % grid.x, i / grid.x, 0};
        if (run_block(num_threads, warp_order, lane_order)) continue;
        fibres.clear();  // they hang in the middle of a kernel
        return false;
    }
    return true;
}

inline void sync_block(int barrier) {
    if (barrier != skipped_barrier) wait(block);
}

}  // namespace emulator

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    using namespace emulator;
    static_assert(sizeof(T) <= sizeof(uint64_t), "a register or two");
    const int self = current, other = self ^ distance;
    memcpy(&lanes[self], &value, sizeof(T));
    wait(warps[self / 32]);
    memcpy(&value, &lanes[other], sizeof(T));
    wait(warps[self / 32]);
    return value;
}

inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

template <class T>
T atomicAdd(T* at, T value) {
    const T before = *at;
    *at += value;
    return before;
}

template <class T>
T atomicMin(T* at, T value) {
    const T before = *at;
    *at = std::min(before, value);
    return before;
}
