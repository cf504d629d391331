// The kernels of dlmserve/kernels/csrc/*.cu as functions of the CPU, launched by name with the arguments that
// cuLaunchKernel takes: one pointer to each.
#include "cuda_shim.h"

#include "rows.cu"
#include "unmask.cu"

#include <utility>

constexpr int NUM_BARRIERS = __COUNTER__;

using Kernel = std::function<void(void** arguments)>;

template <class... Arguments, size_t... I>
static Kernel unpacking(void (*kernel)(Arguments...), std::index_sequence<I...>) {
    return [kernel](void** arguments) { kernel(*(Arguments*)arguments[I]...); };
}

template <class... Arguments>
static Kernel launchable(void (*kernel)(Arguments...)) {
    return unpacking(kernel, std::index_sequence_for<Arguments...>{});
}

static const std::pair<const char*, Kernel> kernels[] = {
    {"best_rows_f32", launchable(best_rows_f32)},   {"best_rows_bf16", launchable(best_rows_bf16)},
    {"draw_rows_f32", launchable(draw_rows_f32)},   {"draw_rows_bf16", launchable(draw_rows_bf16)},
    {"merge_rows", launchable(merge_rows)},         {"select_rows", launchable(select_rows)},
    {"unmask_step", launchable(unmask_step)},
};

extern "C" int num_barriers() { return NUM_BARRIERS; }

// From now on threads run through this barrier without waiting; -1: through none.
extern "C" void skip_barrier(int barrier) { emulator::skipped_barrier = barrier; }

// Null, or what went wrong.
extern "C" const char* launch(const char* name, unsigned grid_x, unsigned grid_y, int block, void** arguments,
                              int order, unsigned seed) {
    for (const auto& [own_name, kernel] : kernels) {
        if (strcmp(name, own_name)) continue;
        const auto run = [&kernel = kernel, arguments] { kernel(arguments); };
        const bool ended = emulator::launch({grid_x, grid_y, 1}, block, emulator::Order(order), seed, run);
        return ended ? nullptr : "deadlock: some threads wait at a barrier that others never reach";
    }
    return "no such kernel";
}
