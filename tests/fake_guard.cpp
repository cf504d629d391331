// What a CPU build of torch lacks to index tensors that say they are on a GPU: a guard that notes the current device.
#include <c10/core/impl/FakeGuardImpl.h>

static c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
