// A CUDA device that computes nothing: enough for tensors of torch's FakeTensorMode, with autograd, where there is no GPU.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {
namespace {

struct NoGpuHooks : public CUDAHooksInterface {
  explicit NoGpuHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

// Before torch is loaded: the hooks of a torch that was built for CUDA do not replace preferred ones.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, NoGpuHooks);

} // namespace
} // namespace at

// After torch is loaded: it registers a guard of its own where it was built for CUDA.
extern "C" void use_no_gpu() {
  static c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
